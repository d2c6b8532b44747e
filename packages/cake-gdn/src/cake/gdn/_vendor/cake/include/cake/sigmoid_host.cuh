// Host entries for betas that come as logits: beta = scale sigmoid(logits), and back. Each op exports them under its own name.
#pragma once

#include "host.cuh"

namespace cake::host {

constexpr int kSigmoidThreads = 256;

__device__ __forceinline__ float sigmoid_of(float x) { return 1.f / (1.f + expf(-x)); }

static __global__ void __launch_bounds__(kSigmoidThreads)
    sigmoid_kernel(const __grid_constant__ Scalars logits, int count, int tokens, int heads, float scale, float* beta) {
  const int i = blockIdx.x * kSigmoidThreads + threadIdx.x;
  if (i < count) beta[i] = scale * sigmoid_of(logits.at(i / heads, tokens, i % heads));
}

static __global__ void __launch_bounds__(kSigmoidThreads)
    sigmoid_backward_kernel(const float* d_beta, const __grid_constant__ Scalars logits, int count, int tokens,
                            int heads, float scale, const __grid_constant__ View<void> to, bool to_bf16) {
  const int i = blockIdx.x * kSigmoidThreads + threadIdx.x;
  if (i >= count) return;
  const float x = logits.at(i / heads, tokens, i % heads);
  // sigmoid(-x) rather than 1 - sigmoid(x), which loses its digits on the right.
  put_scalar(to, to_bf16, to.place(i / heads, tokens, i % heads), d_beta[i] * (scale * sigmoid_of(x) * sigmoid_of(-x)));
}

inline dim3 sigmoid_grid(int64_t count) {
  if (count >= int64_t{1} << 31) TVM_FFI_THROW(ValueError) << "logits must be less than 2^31, got " << count;
  return dim3((count + kSigmoidThreads - 1) / kSigmoidThreads);
}

// `logits` [B, T, HV] fp32 or bf16, of any strides; `beta` fp32, contiguous.
inline void make_sigmoid(TensorView logits, double scale, TensorView beta, int64_t stream) {
  DeviceGuard guard(logits.device().device_id);
  const int64_t batch = beta.size(0), tokens = beta.size(1), heads = beta.size(2), count = batch * tokens * heads;
  launch("sigmoid", sigmoid_kernel, sigmoid_grid(count), kSigmoidThreads, 0, stream_of(stream),
         scalars(logits, "logits", {batch, tokens, heads}), static_cast<int>(count), static_cast<int>(tokens),
         static_cast<int>(heads), static_cast<float>(scale), dense_f32(beta, "beta", {batch, tokens, heads}));
}

// `d_beta` fp32, contiguous; `d_logits` fp32 or bf16, of any strides.
inline void make_sigmoid_backward(TensorView d_beta, TensorView logits, double scale, TensorView d_logits,
                                  int64_t stream) {
  DeviceGuard guard(logits.device().device_id);
  const int64_t batch = d_beta.size(0), tokens = d_beta.size(1), heads = d_beta.size(2), count = batch * tokens * heads;
  const float* given = dense_f32(d_beta, "d_beta", {batch, tokens, heads});
  launch("sigmoid_backward", sigmoid_backward_kernel, sigmoid_grid(count), kSigmoidThreads, 0, stream_of(stream), given,
         scalars(logits, "logits", {batch, tokens, heads}), static_cast<int>(count), static_cast<int>(tokens),
         static_cast<int>(heads), static_cast<float>(scale), scalar_rows(d_logits, "d_logits", {batch, tokens, heads}),
         is_bfloat16(d_logits));
}

}  // namespace cake::host
