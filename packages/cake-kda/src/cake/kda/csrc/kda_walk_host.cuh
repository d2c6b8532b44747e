// Arguments that the host entries of both walks check and fill alike, and the form that a call takes.
#pragma once

#include "cake/host.cuh"
#include "kda_walk.cuh"

namespace cake::kda {

using namespace cake::host;

// `x`: v or dO; `edge_in`, `edge_out`, `states`, `out` as in WalkArgs.
inline WalkArgs walk_args(TensorView x, TensorView beta, TensorView plan, int64_t n, int64_t chunk_capacity,
                          TensorView qg, TensorView kg, TensorView kr, TensorView p, TensorView t, TensorView last,
                          Optional<TensorView> edge_in, Optional<TensorView> out, Optional<TensorView> edge_out,
                          Optional<TensorView> states, bool edge_slots) {
  const int64_t batch = x.size(0), tokens = x.size(1), v_heads = x.size(2), total = batch * tokens;
  WalkArgs args{};
  args.x = const_rows(x, "v or do", {batch, tokens, v_heads, kHeadDim});
  args.beta = scalars(beta, "beta", {batch, tokens, v_heads});
  args.plan = plan_of(plan, n, chunk_capacity, total, tokens);
  const std::initializer_list<int64_t> rows = {chunk_capacity, v_heads, kChunk, kHeadDim};
  const std::initializer_list<int64_t> squares = {chunk_capacity, v_heads, kChunk, kChunk};
  args.qg = dense_bf16(qg, "qg", rows);
  args.kg = dense_bf16(kg, "kg", rows);
  args.kr = dense_bf16(kr, "kr", rows);
  args.p = dense_bf16(p, "p", squares);
  args.t = dense_bf16(t, "t", squares);
  args.last = dense_f32(last, "last", {chunk_capacity, v_heads, kHeadDim});
  const std::initializer_list<int64_t> edge_shape = {n, v_heads, kHeadDim, kHeadDim};
  if (edge_in.has_value()) args.edge_in = dense_f32(edge_in.value(), "initial_state or dht", edge_shape);
  if (edge_out.has_value()) args.edge_out = dense_f32(edge_out.value(), "final_state or dh0", edge_shape);
  if (out.has_value()) args.out = dense_bf16(out.value(), "o or y", {batch, tokens, v_heads, kHeadDim});
  if (states.has_value()) args.states = tape_images(states.value(), "states", v_heads, chunk_capacity);
  args.v_heads = static_cast<int>(v_heads);
  args.edge_slots = edge_slots;
  return args;
}

// Whether the call's walks are few enough for every one to take two SMs, half the channels of V on each. The bits are the
// same either way.
inline bool in_halves(const WalkArgs& args, int device) {
  int sms = 0;
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return 2 * int64_t(args.plan.n) * args.v_heads <= sms;
}

// Launches one of two builds of a walk.
template <typename Kernel>
void launch_walk(const char* name, Kernel whole, Kernel halves, const WalkArgs& args, int device, int64_t stream) {
  const bool split = in_halves(args, device);
  const int walks = args.plan.n * args.v_heads;
  launch(name, split ? halves : whole, dim3(split ? 2 * walks : walks), split ? kWalkThreads<1> : kWalkThreads<2>,
         split ? sizeof(WalkShared<1>) : sizeof(WalkShared<2>), stream_of(stream), args);
}

}  // namespace cake::kda
