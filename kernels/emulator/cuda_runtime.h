// In place of CUDA's header: keywords, vector types, built-in variables, warp functions, and as much of the runtime as the
// host entries call.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulator.h"

// ---- keywords ----------------------------------------------------------------------------------------------------

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
// A CTA's own: CTAs run one after the other. The section lets the emulator find them all, to poison them.
#define __shared__ static __attribute__((section("cake_shared")))

// ---- vector types ------------------------------------------------------------------------------------------------

struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using cake::emulator::dim3;

// ---- what each thread sees ---------------------------------------------------------------------------------------

using cake::emulator::blockDim;
using cake::emulator::blockIdx;
using cake::emulator::gridDim;
using cake::emulator::threadIdx;

// A shared-memory address is the distance from the CTA's memory, modulo 2^32.
inline size_t __cvta_generic_to_shared(const void* p) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(p) - cake::emulator::shared_memory());
}

inline void __syncthreads() { cake::emulator::named_barrier(0, blockDim.x); }
inline void __syncwarp() { cake::emulator::sync_warp(); }

namespace cake::emulator {

template <typename To, typename From>
To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "both must be of the same size");
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

// The value of lane `source` of a warp, of the caller where `source` lies outside of its segment of `width` lanes.
template <typename T>
T shuffle(T value, int source, int width) {
  const int me = lane(), first = me & ~(width - 1);
  if (source < first || source >= first + width) source = me;
  return bits_as<T>(exchange(bits_as<uint32_t>(value), source));
}

}  // namespace cake::emulator

template <typename T>
T __shfl_sync(unsigned, T value, int source, int width = 32) {
  return cake::emulator::shuffle(value, (cake::emulator::lane() & ~(width - 1)) | (source & (width - 1)), width);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask, int width = 32) {
  return cake::emulator::shuffle(value, cake::emulator::lane() ^ mask, width);
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int delta, int width = 32) {
  return cake::emulator::shuffle(value, cake::emulator::lane() - delta, width);
}
template <typename T>
T __shfl_down_sync(unsigned, T value, int delta, int width = 32) {
  return cake::emulator::shuffle(value, cake::emulator::lane() + delta, width);
}
template <typename T, typename Of>
T reduced(T value, Of of) {
  for (int mask = 16; mask > 0; mask /= 2) value = of(value, __shfl_xor_sync(0xffffffffu, value, mask));
  return value;
}
inline int __reduce_add_sync(unsigned, int value) {
  return reduced(value, [](int a, int b) { return a + b; });
}
inline int __reduce_min_sync(unsigned, int value) {
  return reduced(value, [](int a, int b) { return b < a ? b : a; });
}
inline int __reduce_max_sync(unsigned, int value) {
  return reduced(value, [](int a, int b) { return b > a ? b : a; });
}
inline unsigned __ballot_sync(unsigned, bool predicate) { return cake::emulator::ballot(predicate); }
inline bool __all_sync(unsigned, bool predicate) { return cake::emulator::ballot(predicate) == 0xffffffffu; }

// ---- arithmetic --------------------------------------------------------------------------------------------------

using std::max;
using std::min;

inline float __uint_as_float(uint32_t x) { return cake::emulator::bits_as<float>(x); }
inline float __int_as_float(int x) { return cake::emulator::bits_as<float>(x); }
inline uint32_t __float_as_uint(float x) { return cake::emulator::bits_as<uint32_t>(x); }
inline int __float_as_int(float x) { return cake::emulator::bits_as<int>(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __log2f(float x) { return log2f(x); }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }

template <typename T>
T __ldg(const T* p) {
  return *p;
}

// ---- the runtime -------------------------------------------------------------------------------------------------

enum cudaError_t { cudaSuccess };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount };
using cudaStream_t = struct CUstream_st*;

inline const char* cudaGetErrorName(cudaError_t) { return "cudaSuccess"; }
inline const char* cudaGetErrorString(cudaError_t) { return "no error"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = cake::emulator::multiprocessors;
  return cudaSuccess;
}
