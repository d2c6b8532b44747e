// Host entries of the plan tables, of betas that come as logits, and of kda_prep.
#include "kda_prep.cuh"

#include "cake/plan_host.cuh"
#include "cake/recording_host.cuh"
#include "cake/sigmoid_host.cuh"
#include "kda_gate_host.cuh"

namespace cake::kda {

using namespace cake::host;

// `gate_kind`: 0 g is the log decay, 1 standard, 2 bounded.
void kda_prep(TensorView q, TensorView k, TensorView g, int64_t gate_kind, Optional<TensorView> a_log,
              Optional<TensorView> bias, double bound, TensorView beta, TensorView plan, int64_t n,
              int64_t chunk_capacity, TensorView qg, TensorView kg, TensorView kr, TensorView p, TensorView t,
              TensorView last, TensorView rq, TensorView rk, double scale, bool l2norm, int64_t stream) {
  DeviceGuard guard(q.device().device_id);
  const int64_t batch = q.size(0), tokens = q.size(1), heads = q.size(2), v_heads = g.size(2);
  const int64_t total = batch * tokens;
  PrepArgs args{};
  args.q = const_rows(q, "q", {batch, tokens, heads, kHeadDim});
  args.k = const_rows(k, "k", {batch, tokens, heads, kHeadDim});
  args.g = scalars(g, "g", {batch, tokens, v_heads, kHeadDim});
  if (g.stride(3) != 1) TVM_FFI_THROW(ValueError) << "g must have contiguous channels";
  args.beta = scalars(beta, "beta", {batch, tokens, v_heads});
  args.gate = gate_args(gate_kind, a_log, bias, bound, v_heads);
  args.plan = plan_of(plan, n, chunk_capacity, total, tokens);
  const std::initializer_list<int64_t> rows = {chunk_capacity, v_heads, kChunk, kHeadDim};
  const std::initializer_list<int64_t> squares = {chunk_capacity, v_heads, kChunk, kChunk};
  args.qg = dense_bf16(qg, "qg", rows);
  args.kg = dense_bf16(kg, "kg", rows);
  args.kr = dense_bf16(kr, "kr", rows);
  args.p = dense_bf16(p, "p", squares);
  args.t = dense_bf16(t, "t", squares);
  args.last = dense_f32(last, "last", {chunk_capacity, v_heads, kHeadDim});
  args.rq = dense_f32(rq, "rq", {heads, total});
  args.rk = dense_f32(rk, "rk", {heads, total});
  args.v_heads = static_cast<int>(v_heads);
  args.group = static_cast<int>(v_heads / heads);
  args.scale = static_cast<float>(scale);
  args.l2norm = l2norm;
  launch("kda_prep", prep_kernel, dim3(chunk_capacity * v_heads), kPrepThreads, sizeof(PrepShared), stream_of(stream),
         args);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_plan, make_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_cut_plan, make_cut_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_chosen_plan, make_chosen_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_boundaries, copy_boundaries);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_prep, kda_prep);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_sigmoid, make_sigmoid);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_sigmoid_backward, make_sigmoid_backward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_recording, record);

}  // namespace cake::kda
