// What the host entries share: checks of what tvm-ffi hands over, views of it, the device, and launch errors.
// The only header here that knows tvm-ffi; kernels never include it.
#pragma once

#include <cuda_runtime.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include <initializer_list>
#include <new>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "seq.cuh"
#include "tile_map.cuh"

namespace cake::host {

using tvm::ffi::Optional;
using tvm::ffi::TensorView;

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess)
    TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorName(status) << ", " << cudaGetErrorString(status);
}

// Runs the enclosed launches on the device of a tensor.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != device) check_cuda(cudaSetDevice(device), "cudaSetDevice");
    device_ = device;
  }
  ~DeviceGuard() {
    if (previous_ != device_) cudaSetDevice(previous_);
  }

 private:
  int previous_ = 0, device_ = 0;
};

inline std::string shape_text(std::initializer_list<int64_t> shape) {
  std::string text = "[";
  for (int64_t n : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(n);
  return text + "]";
}

inline std::string shape_text(const TensorView& x) {
  std::string text = "[";
  for (int i = 0; i < x.ndim(); ++i) text += (i ? ", " : "") + std::to_string(x.size(i));
  return text + "]";
}

inline bool is_float32(const TensorView& x) { return x.dtype().code == kDLFloat && x.dtype().bits == 32; }
inline bool is_bfloat16(const TensorView& x) { return x.dtype().code == kDLBfloat && x.dtype().bits == 16; }
inline bool is_int32(const TensorView& x) { return x.dtype().code == kDLInt && x.dtype().bits == 32; }

inline void check_shape(const TensorView& x, const char* name, std::initializer_list<int64_t> shape) {
  bool same = x.ndim() == static_cast<int>(shape.size());
  for (int i = 0; same && i < x.ndim(); ++i) same = x.size(i) == shape.begin()[i];
  if (!same) TVM_FFI_THROW(ValueError) << name << " must be " << shape_text(shape) << ", got " << shape_text(x);
}

// A contiguous tensor of the given shape (rows of a larger first axis may follow).
template <typename T>
T* dense(const TensorView& x, const char* name, bool right_type, std::initializer_list<int64_t> shape) {
  if (!right_type) TVM_FFI_THROW(TypeError) << name << " has an unexpected dtype";
  check_shape(x, name, shape);
  int64_t stride = 1;
  for (int i = x.ndim() - 1; i >= 0; --i) {
    if (x.size(i) > 1 && x.stride(i) != stride)
      TVM_FFI_THROW(ValueError) << name << " must be contiguous, got stride " << x.stride(i) << " on axis " << i;
    stride *= x.size(i);
  }
  return static_cast<T*>(x.data_ptr());
}

inline float* dense_f32(const TensorView& x, const char* name, std::initializer_list<int64_t> shape) {
  return dense<float>(x, name, is_float32(x), shape);
}
inline __nv_bfloat16* dense_bf16(const TensorView& x, const char* name, std::initializer_list<int64_t> shape) {
  return dense<__nv_bfloat16>(x, name, is_bfloat16(x), shape);
}

template <typename T>
View<const T> as_const(const View<T>& x) {
  return {x.data, x.batch_stride, x.token_stride, x.head_stride};
}

// [B, T, heads, 128] bf16 whose rows can be copied 16 bytes at a time.
inline View<__nv_bfloat16> writable_rows(const TensorView& x, const char* name, std::initializer_list<int64_t> shape) {
  if (!is_bfloat16(x)) TVM_FFI_THROW(TypeError) << name << " must be bfloat16";
  check_shape(x, name, shape);
  const bool aligned = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0 && x.stride(0) % 8 == 0 &&
                       x.stride(1) % 8 == 0 && x.stride(2) % 8 == 0;
  if (x.stride(3) != 1 || !aligned)
    TVM_FFI_THROW(ValueError) << name << " must have contiguous channels and 16-byte aligned rows";
  return {static_cast<__nv_bfloat16*>(x.data_ptr()), x.stride(0), x.stride(1), x.stride(2)};
}
inline View<const __nv_bfloat16> const_rows(const TensorView& x, const char* name,
                                            std::initializer_list<int64_t> shape) {
  return as_const(writable_rows(x, name, shape));
}

// Where a stand-in for tensor number `i` lies: no tensor does, and no number that a launch takes is like it. A host entry may
// go half a TiB back and forth from there.
constexpr uint64_t kNowhere = 0xcafe;
inline uint64_t nowhere(uint64_t i) { return kNowhere << 48 | i << 40 | uint64_t{1} << 39; }
inline bool is_nowhere(uint64_t address) { return address >> 48 == kNowhere; }

// A function of the driver: libraries aren't linked against it.
template <typename Function>
Function* driver_function(const char* name) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
#if defined(CUDART_VERSION) && CUDART_VERSION < 12050
  check_cuda(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &result), name);
#else
  check_cuda(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &result), name);
#endif
  if (!function) TVM_FFI_THROW(RuntimeError) << "this driver has no " << name;
  return reinterpret_cast<Function*>(function);
}

// The driver's functions ask for a context, which the runtime makes current in a thread when it first needs one itself.
inline void make_context_current() {
  thread_local bool made = false;
  if (made) return;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaSetDevice(device), "cudaSetDevice");
  made = true;
}

inline void check_map(CUresult status, const char* what) {
  if (status != CUDA_SUCCESS) TVM_FFI_THROW(RuntimeError) << what << " failed with error " << int(status);
}

// Boxes of 64 tokens and 64 of the `channels` of a head.
template <typename T>
TileMap tile_map(const View<T>& x, int64_t batch, int64_t tokens, int64_t heads, int64_t channels = kHeadDim) {
  static auto* const encode = driver_function<decltype(cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  make_context_current();
  const int64_t sizes[4] = {channels, heads, tokens, batch};
  const int64_t strides[3] = {x.head_stride, x.token_stride, x.batch_stride};
  cuuint64_t dims[4], bytes[3];
  for (int i = 0; i < 4; ++i) dims[i] = sizes[i];
  // An axis of one has any stride, but one that the driver takes.
  for (int i = 0; i < 3; ++i) bytes[i] = sizes[i + 1] > 1 ? 2 * strides[i] : 16;
  const cuuint32_t box[4] = {64, 1, 64, 1}, steps[4] = {1, 1, 1, 1};
  TileMap made{{}, x.data};
  // The driver may refuse the address of a stand-in; `readdress` comes before it is used.
  void* data =
      is_nowhere(reinterpret_cast<uint64_t>(x.data)) ? reinterpret_cast<void*>(4096) : const_cast<void*>(made.data);
  check_map(encode(&made.map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, data, dims, bytes, box, steps,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
            "cuTensorMapEncodeTiled");
  return made;
}

// Tape images bf16 [slots, HV, 128, 128]. With boundaries on the host the slots may be fewer than `most`: the plan never
// names one past its own count.
inline __nv_bfloat16* tape_images(const TensorView& x, const char* name, int64_t v_heads, int64_t most) {
  if (x.ndim() == 4 && x.size(0) > most)
    TVM_FFI_THROW(ValueError) << name << " must have at most " << most << " slots, got " << x.size(0);
  return dense_bf16(x, name, {x.size(0), v_heads, 128, 128});
}

// [B, T, heads] fp32 or bf16, any strides.
inline View<void> scalar_rows(const TensorView& x, const char* name, std::initializer_list<int64_t> shape) {
  if (!is_float32(x) && !is_bfloat16(x)) TVM_FFI_THROW(TypeError) << name << " must be float32 or bfloat16";
  check_shape(x, name, shape);
  return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}
inline Scalars scalars(const TensorView& x, const char* name, std::initializer_list<int64_t> shape) {
  return {as_const(scalar_rows(x, name, shape)), is_bfloat16(x)};
}

// The tables that make_plan wrote: an int32 tensor of Plan::words(n, chunk_capacity, cut), and of the runs of `runs_of`
// sequences if they were cut on the device.
inline Plan plan_of(const TensorView& words, int64_t n, int64_t chunk_capacity, int64_t total, int64_t per_batch,
                    bool cut = false, int64_t runs_of = -1) {
  const int64_t need = Plan::words(n, chunk_capacity, cut) + (runs_of < 0 ? 0 : 2 * (runs_of + 1));
  if (!is_int32(words) || words.ndim() != 1 || words.size(0) < need)
    TVM_FFI_THROW(ValueError) << "plan must hold " << need << " int32, got " << shape_text(words);
  return {static_cast<int*>(words.data_ptr()), static_cast<int>(n), static_cast<int>(chunk_capacity),
          static_cast<int>(total), static_cast<int>(per_batch)};
}

inline cudaStream_t stream_of(int64_t handle) { return reinterpret_cast<cudaStream_t>(handle); }

template <typename Kernel, typename... Args>
void start(const char* name, Kernel kernel, dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
           const Args&... args) {
  kernel<<<grid, threads, shared_bytes, stream>>>(args...);
  check_cuda(cudaGetLastError(), name);
}

// Arguments of a launch as bytes.
constexpr size_t kBlockWords = 16;
struct alignas(8 * kBlockWords) Block {
  uint64_t words[kBlockWords];
};

// A launch that is kept, to be made again with other addresses in its arguments.
struct Launch {
  void (*run)(const Launch&, Block* arguments, cudaStream_t);
  const char* name;
  void (*kernel)();
  dim3 grid;
  int threads, shared_bytes;
  std::vector<Block> arguments;  // a tuple
};

// Arguments that hold more of an address than the address say what follows from a new one by a member `readdress`.
template <typename T>
auto readdress(T& x, int) -> decltype(x.readdress()) {
  x.readdress();
}
template <typename T>
void readdress(T&, long) {
  static_assert(alignof(T) < alignof(TileMap), "what holds a tensor map needs a member `readdress`");
}

template <typename Kernel, typename... Args>
Launch kept(const char* name, Kernel kernel, dim3 grid, int threads, int shared_bytes, const Args&... args) {
  using Packed = std::tuple<Args...>;
  static_assert((std::is_trivially_copyable_v<Args> && ...) && alignof(Packed) <= alignof(Block),
                "arguments must be bytes");
  const auto run = [](const Launch& x, Block* arguments, cudaStream_t stream) {
    const auto again = [&](Args&... args) {
      (readdress(args, 0), ...);
      start(x.name, reinterpret_cast<Kernel>(x.kernel), x.grid, x.threads, x.shared_bytes, stream, args...);
    };
    std::apply(again, *reinterpret_cast<Packed*>(arguments));
  };
  std::vector<Block> arguments((sizeof(Packed) + sizeof(Block) - 1) / sizeof(Block));
  new (arguments.data()) Packed(args...);
  return {run, name, reinterpret_cast<void (*)()>(kernel), grid, threads, shared_bytes, std::move(arguments)};
}

// Where a host entry leaves its launches in place of making them: a negative handle of a stream points there.
using Launches = std::vector<Launch>;
inline int64_t handle_of(Launches& launches) { return -reinterpret_cast<int64_t>(&launches); }

// Raises a kernel's dynamic shared memory limit, then launches it. Arguments hold addresses as they are, in whole words of 8
// bytes, so that a kept launch can be given others.
template <typename Kernel, typename... Args>
void launch(const char* name, Kernel kernel, dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
            const Args&... args) {
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes), name);
  const auto handle = reinterpret_cast<int64_t>(stream);
  if (handle < 0)
    reinterpret_cast<Launches*>(-handle)->push_back(kept(name, kernel, grid, threads, shared_bytes, args...));
  else start(name, kernel, grid, threads, shared_bytes, stream, args...);
}

}  // namespace cake::host

inline void cake::TileMap::readdress() {
  using namespace cake::host;
  static auto* const replace = driver_function<decltype(cuTensorMapReplaceAddress)>("cuTensorMapReplaceAddress");
  if (!data) return;
  make_context_current();
  check_map(replace(&map, const_cast<void*>(data)), "cuTensorMapReplaceAddress");
}
