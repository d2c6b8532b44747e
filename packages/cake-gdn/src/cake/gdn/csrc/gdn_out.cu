// Host entry of gdn_out.
#include "gdn_out.cuh"

#include <algorithm>

#include "cake/host.cuh"

namespace cake::gdn {

using namespace cake::host;

// `y`: what gdn_adj left, which becomes dv in place. `ctas`: how many persistent CTAs share the work; no value depends on it.
void gdn_out(TensorView q, TensorView k, TensorView v, TensorView grad, TensorView y, TensorView beta, TensorView plan,
             int64_t n, int64_t chunk_capacity, TensorView t, TensorView b, TensorView rq, TensorView rk,
             TensorView states, TensorView adjoints, bool states_edge, bool adjoints_edge, TensorView dq, TensorView dk,
             TensorView dbeta, TensorView dg, double scale, bool l2norm, int64_t ctas, int64_t stream) {
  DeviceGuard guard(q.device().device_id);
  const int64_t batch = q.size(0), tokens = q.size(1), heads = q.size(2), v_heads = v.size(2), total = batch * tokens;
  OutArgs args{};
  args.q = const_rows(q, "q", {batch, tokens, heads, kHeadDim});
  args.k = const_rows(k, "k", {batch, tokens, heads, kHeadDim});
  args.v = const_rows(v, "v", {batch, tokens, v_heads, kHeadDim});
  args.grad = const_rows(grad, "do", {batch, tokens, v_heads, kHeadDim});
  args.beta = scalars(beta, "beta", {batch, tokens, v_heads});
  args.plan = plan_of(plan, n, chunk_capacity, total, tokens);
  args.t = dense_bf16(t, "t", {v_heads, total, kChunk});
  args.b = dense_f32(b, "b", {v_heads, total});
  args.rq = dense_f32(rq, "rq", {heads, total});
  args.rk = dense_f32(rk, "rk", {heads, total});
  args.states = tape_images(states, "states", v_heads, chunk_capacity);
  args.adjoints = tape_images(adjoints, "adj_states", v_heads, chunk_capacity);
  args.states_edge = states_edge;
  args.adjoints_edge = adjoints_edge;
  args.results[kDq] = writable_rows(dq, "dq", {batch, tokens, heads, kHeadDim}).untyped();
  args.results[kDk] = writable_rows(dk, "dk", {batch, tokens, heads, kHeadDim}).untyped();
  args.results[kDv] = writable_rows(y, "y", {batch, tokens, v_heads, kHeadDim}).untyped();
  args.results[kDbeta] = scalar_rows(dbeta, "dbeta", {batch, tokens, v_heads});
  args.results[kDg] = scalar_rows(dg, "dg", {batch, tokens, v_heads});
  args.dbeta_bf16 = is_bfloat16(dbeta), args.dg_bf16 = is_bfloat16(dg);
  args.heads = static_cast<int>(heads);
  args.group = static_cast<int>(v_heads / heads);
  args.scale = static_cast<float>(scale);
  args.l2norm = l2norm;
  const int64_t grid = std::min(ctas, chunk_capacity * heads);
  launch("gdn_out", out_kernel, dim3(grid), kOutThreads, sizeof(OutShared), stream_of(stream), args);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gdn_out, gdn_out);

}  // namespace cake::gdn
