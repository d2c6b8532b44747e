// Host entries of the plan tables, of betas that come as logits, and of gdn_prep.
#include "gdn_prep.cuh"

#include "cake/plan_host.cuh"
#include "cake/recording_host.cuh"
#include "cake/sigmoid_host.cuh"

namespace cake::gdn {

using namespace cake::host;

void gdn_prep(TensorView k, TensorView g, TensorView beta, TensorView plan, int64_t n, int64_t chunk_capacity,
              TensorView t, TensorView b, TensorView rk, bool l2norm, int64_t stream) {
  DeviceGuard guard(k.device().device_id);
  const int64_t batch = k.size(0), tokens = k.size(1), heads = k.size(2), v_heads = g.size(2);
  const int64_t total = batch * tokens;
  PrepArgs args{};
  args.k = const_rows(k, "k", {batch, tokens, heads, kHeadDim});
  args.g = scalars(g, "g", {batch, tokens, v_heads});
  args.beta = scalars(beta, "beta", {batch, tokens, v_heads});
  args.plan = plan_of(plan, n, chunk_capacity, total, tokens);
  args.t = dense_bf16(t, "t", {v_heads, total, kChunk});
  args.b = dense_f32(b, "b", {v_heads, total});
  args.rk = dense_f32(rk, "rk", {heads, total});
  args.heads = static_cast<int>(heads);
  args.group = static_cast<int>(v_heads / heads);
  args.l2norm = l2norm;
  // Heads first: rows of neighbouring heads are neighbours in memory.
  launch("gdn_prep", prep_kernel, dim3(chunk_capacity * heads), 32, sizeof(PrepShared), stream_of(stream), args);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gdn_plan, make_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gdn_cut_plan, make_cut_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gdn_chosen_plan, make_chosen_plan);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gdn_boundaries, copy_boundaries);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gdn_prep, gdn_prep);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gdn_sigmoid, make_sigmoid);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gdn_sigmoid_backward, make_sigmoid_backward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gdn_recording, record);

}  // namespace cake::gdn
