// Arguments that the host entries of both walks check and fill alike.
#pragma once

#include "cake/host.cuh"
#include "gdn_walk.cuh"

namespace cake::gdn {

using namespace cake::host;

// `q`: none where no role loads it; `x`: v or dO; `edge_in`, `inner`, `edge_out`, `states`, `out` as in WalkArgs. `n`:
// entries of the plan, which are segments of `sequences` sequences where `cut`, else the sequences.
inline WalkArgs walk_args(Optional<TensorView> q, TensorView k, TensorView x, TensorView beta, TensorView plan,
                          int64_t n, int64_t sequences, bool cut, int64_t chunk_capacity, TensorView t, TensorView b,
                          TensorView rk, Optional<TensorView> edge_in, Optional<TensorView> inner,
                          Optional<TensorView> out, Optional<TensorView> edge_out, Optional<TensorView> states,
                          bool edge_slots, double scale, bool l2norm) {
  if (!cut && sequences != n) TVM_FFI_THROW(ValueError) << "a plan of " << n << " sequences can't serve " << sequences;
  const int64_t batch = k.size(0), tokens = k.size(1), heads = k.size(2), v_heads = x.size(2), total = batch * tokens;
  WalkArgs args{};
  if (q.has_value()) args.q = const_rows(q.value(), "q", {batch, tokens, heads, kHeadDim});
  args.k = const_rows(k, "k", {batch, tokens, heads, kHeadDim});
  args.x = const_rows(x, "v or do", {batch, tokens, v_heads, kHeadDim});
  args.beta = scalars(beta, "beta", {batch, tokens, v_heads});
  args.plan = plan_of(plan, n, chunk_capacity, total, tokens, cut);
  args.t = dense_bf16(t, "t", {v_heads, total, kChunk});
  args.b = dense_f32(b, "b", {v_heads, total});
  args.rk = dense_f32(rk, "rk", {heads, total});
  const std::initializer_list<int64_t> edge_shape = {sequences, v_heads, kHeadDim, kHeadDim};
  if (edge_in.has_value()) args.edge_in = dense_f32(edge_in.value(), "initial_state or dht", edge_shape);
  if (inner.has_value()) args.inner = dense_f32(inner.value(), "entering or leaving", {n, v_heads, kHeadDim, kHeadDim});
  if (edge_out.has_value()) args.edge_out = dense_f32(edge_out.value(), "final_state or dh0", edge_shape);
  if (out.has_value()) args.out = writable_rows(out.value(), "o or y", {batch, tokens, v_heads, kHeadDim});
  if (states.has_value()) args.states = tape_images(states.value(), "states", v_heads, chunk_capacity);
  if (args.q.data) args.q_tiles = tile_map(args.q, batch, tokens, heads);
  args.k_tiles = tile_map(args.k, batch, tokens, heads);
  args.x_tiles = tile_map(args.x, batch, tokens, v_heads);
  args.t_tiles = tile_map(View<const __nv_bfloat16>{args.t, 0, kChunk, total * kChunk}, 1, total, v_heads, kChunk);
  if (args.out.data) args.out_tiles = tile_map(args.out, batch, tokens, v_heads);
  args.v_heads = static_cast<int>(v_heads);
  args.group = static_cast<int>(v_heads / heads);
  args.scale = static_cast<float>(scale);
  args.edge_slots = edge_slots;
  args.l2norm = l2norm;
  return args;
}

}  // namespace cake::gdn
