// Arguments that the host entries of both walks check and fill alike, and the form that a call takes.
#pragma once

#include "cake/host.cuh"
#include "kda_walk.cuh"

namespace cake::kda {

using namespace cake::host;

constexpr int64_t kMostRowStride = 1 << 26;  // of rows that a walk writes: it counts them in 32 bits

// `x`: v or dO; `edge_in`, `inner`, `edge_out`, `states`, `out` as in WalkArgs. `n`: entries of the plan, which are segments of
// `sequences` sequences where `cut`, else the sequences.
inline WalkArgs walk_args(TensorView x, TensorView beta, TensorView plan, int64_t n, int64_t sequences, bool cut,
                          int64_t chunk_capacity, TensorView qg, TensorView kg, TensorView kr, TensorView p,
                          TensorView t, TensorView last, Optional<TensorView> edge_in, Optional<TensorView> inner,
                          Optional<TensorView> out, Optional<TensorView> edge_out, Optional<TensorView> states,
                          bool edge_slots) {
  if (!cut && sequences != n) TVM_FFI_THROW(ValueError) << "a plan of " << n << " sequences can't serve " << sequences;
  const int64_t batch = x.size(0), tokens = x.size(1), v_heads = x.size(2), total = batch * tokens;
  WalkArgs args{};
  args.x = const_rows(x, "v or do", {batch, tokens, v_heads, kHeadDim});
  args.beta = scalars(beta, "beta", {batch, tokens, v_heads});
  args.plan = plan_of(plan, n, chunk_capacity, total, tokens, cut);
  const std::initializer_list<int64_t> rows = {chunk_capacity, v_heads, kChunk, kHeadDim};
  const std::initializer_list<int64_t> squares = {chunk_capacity, v_heads, kChunk, kChunk};
  args.qg = dense_bf16(qg, "qg", rows);
  args.kg = dense_bf16(kg, "kg", rows);
  args.kr = dense_bf16(kr, "kr", rows);
  args.p = dense_bf16(p, "p", squares);
  args.t = dense_bf16(t, "t", squares);
  args.last = dense_f32(last, "last", {chunk_capacity, v_heads, kHeadDim});
  const std::initializer_list<int64_t> edge_shape = {sequences, v_heads, kHeadDim, kHeadDim};
  if (edge_in.has_value()) args.edge_in = dense_f32(edge_in.value(), "initial_state or dht", edge_shape);
  if (inner.has_value()) args.inner = dense_f32(inner.value(), "entering or leaving", {n, v_heads, kHeadDim, kHeadDim});
  if (edge_out.has_value()) args.edge_out = dense_f32(edge_out.value(), "final_state or dh0", edge_shape);
  if (out.has_value()) args.out = writable_rows(out.value(), "o or y", {batch, tokens, v_heads, kHeadDim});
  if (args.out.token_stride >= kMostRowStride)
    TVM_FFI_THROW(ValueError) << "o or y must have tokens less than " << kMostRowStride << " elements apart";
  if (states.has_value()) args.states = tape_images(states.value(), "states", v_heads, chunk_capacity);
  args.v_heads = static_cast<int>(v_heads);
  args.edge_slots = edge_slots;
  return args;
}

// Whether walks are few enough for every one to take two SMs, half the channels of V on each. The bits are the same either
// way.
inline bool in_halves(int64_t walks, int device) {
  int sms = 0;
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
  return 2 * walks <= sms;
}

// Launches one of two builds of `walks` walks.
template <typename Kernel, typename Args>
void launch_walk(const char* name, Kernel whole, Kernel halves, const Args& args, int64_t walks, int device,
                 int64_t stream) {
  const bool split = in_halves(walks, device);
  launch(name, split ? halves : whole, dim3(split ? 2 * walks : walks), split ? kWalkThreads<1> : kWalkThreads<2>,
         split ? sizeof(WalkShared<1>) : sizeof(WalkShared<2>), stream_of(stream), args);
}

}  // namespace cake::kda
