// In place of the driver's header: tensor maps of bf16 in four dimensions with a swizzle of 128 bytes, as the kernels use them.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda_runtime.h"

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE };

struct alignas(128) CUtensorMap {
  uint64_t opaque[16];
};

enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

namespace cake::emulator {

// What a map holds; strides in bytes.
struct TensorMap {
  uint8_t* data;
  uint64_t sizes[4], strides[3];
  uint32_t box[4];
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap), "it lies in one");

// Refuses what the driver refuses.
inline CUresult encode(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* data, const cuuint64_t* sizes,
                       const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave,
                       CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  TensorMap made{static_cast<uint8_t*>(data), {}, {}, {}};
  bool right = rank == 4 && reinterpret_cast<uintptr_t>(data) % 16 == 0 && box[0] * 2 == 128;
  for (int i = 0; i < 4; ++i) {
    right = right && sizes[i] > 0 && sizes[i] <= uint64_t{1} << 32 && box[i] > 0 && box[i] <= 256 && steps[i] == 1;
    made.sizes[i] = sizes[i], made.box[i] = box[i];
  }
  for (int i = 0; i < 3; ++i) {
    right = right && strides[i] % 16 == 0 && strides[i] < uint64_t{1} << 40;
    made.strides[i] = strides[i];
  }
  if (!right) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(map, &made, sizeof(made));
  return CUDA_SUCCESS;
}

inline CUresult replace_address(CUtensorMap* map, void* data) {
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(map, &data, sizeof(data));
  return CUDA_SUCCESS;
}

}  // namespace cake::emulator

CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
CUresult cuTensorMapReplaceAddress(CUtensorMap*, void*);

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess };
enum { cudaEnableDefault };

inline cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, int,
                                                    cudaDriverEntryPointQueryResult* result) {
  *result = cudaDriverEntryPointSuccess;
  *function = std::strcmp(name, "cuTensorMapEncodeTiled") == 0
                  ? reinterpret_cast<void*>(cake::emulator::encode)
                  : reinterpret_cast<void*>(cake::emulator::replace_address);
  return cudaSuccess;
}
