// kda_adj: the adjoint walk, chunks in reverse. Roles and shared memory: kda_walk.cuh. R = dL/dS. Per chunk, transposed:
//
//   dD^T = R^T Kr^T + dO^T P
//   Y^T  = dD^T T                                                Y goes to memory, dv = beta Y
//   R^T  = R^T diag(2^b_C) + dO^T Qg - (beta Y^T) Kg
//
// bf16(R^T) as it leaves each chunk (before the update) goes to the tape.
#pragma once

#include "kda_walk.cuh"

namespace cake::kda {

template <int kHalves, bool kTransfer>
__device__ __forceinline__ void adj_states(WalkShared<kHalves>& s, const WalkArgs& args, const KdaWalk& walk,
                                           int thread) {
  const int lane = thread & 31, warp = thread >> 5;
  const int channel0 = 16 * warp;  // the warp's first row of the CTA's part of R^T

  float state[64];
  load_edge(state, edges_of<false, kTransfer>(args, walk).in, walk.channel + channel0, lane);

  RingState<kStages> at;
  for (int i = 0; i < walk.chunks; ++i, at.advance()) {
    const int chunk = walk.chunk(i, false);
    auto& stage = s.stages[at.stage];
    const uint32_t x = smem_addr(stage.x);

    uint32_t a[8][4];
    to_frag(a, state);
    s.ring.wait_full(at);
    uint32_t grad[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) ldmatrix_trans(grad[j], frag_address_trans<kChunk>(x, channel0, j, lane));
    float dd[32];
    pin(a);
    pin(grad);
    wgmma_fence();
    gemm_rs<Major::K, kChunk, 8>(dd, a, smem_addr(stage.kr), false);
    gemm_rs<Major::MN, kChunk, 4>(dd, grad, smem_addr(stage.p), true);
    wgmma_commit();
    if constexpr (!kTransfer) {
      const int64_t slot = adjoint_slot(walk.sequence, chunk, chunk == walk.chunks - 1, args.edge_slots);
      if (slot >= 0)
        store_state<64 * kHalves>(smem_addr(s.state),
                                  args.states + (slot * args.v_heads + walk.v_head) * kHeadDim * kHeadDim, a, channel0,
                                  lane, walk.channel);
    }
    wgmma_wait<0>();
    pin(dd);
    uint32_t w[4][4];
    to_frag(w, dd);
    scale_columns(state, stage.last, lane);
    float y[32];
    pin(w);
    pin(state);
    wgmma_fence();
    gemm_rs<Major::MN, kChunk, 4>(y, w, smem_addr(stage.t), false);
    wgmma_commit();
    gemm_rs<Major::MN, kChunk, 4>(state, grad, smem_addr(stage.qg), true);
    wgmma_commit();
    wgmma_wait<1>();
    pin(y);
    uint32_t update[4][4], out[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 beta = *reinterpret_cast<const float2*>(stage.beta + 16 * j + 8 * h + 2 * (lane & 3));
#pragma unroll
        for (int r = 2 * h; r < 2 * h + 2; ++r) {
          const int e = acc_index(j, r);
          update[j][r] = pack_bf16(-beta.x * y[e], -beta.y * y[e + 1]);
        }
      }
    if constexpr (!kTransfer) to_frag(out, y);
    pin(update);
    wgmma_fence();
    gemm_rs<Major::MN, kChunk, 4>(state, update, smem_addr(stage.kg), true);
    wgmma_commit();
    if constexpr (!kTransfer) leave_channels(x, out, channel0, lane);
    wgmma_wait<0>();
    pin(state);
    s.ring.signal_empty(at, lane);
  }
  const Edges edges = edges_of<false, kTransfer>(args, walk);
  if (edges.out) store_edge(edges.out, state, walk.channel + channel0, lane);
  if (!kTransfer && lane == 0) bulk_wait();  // shared memory must outlive the copies
}

template <int kHalves, bool kTransfer>
__device__ __forceinline__ void adj_walk(const WalkArgs& args, const KdaWalk& walk) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& s = *reinterpret_cast<WalkShared<kHalves>*>(raw);
  walk_init(s);
  if (threadIdx.x >= kHalves * 128) {
    if constexpr (kHalves == 2) registers_shrink<kProducerRegisters>();
    produce<kHalves, false, !kTransfer>(s, args, walk, threadIdx.x % 128);
  } else {
    if constexpr (kHalves == 2) registers_grow<kStateRegisters>();
    adj_states<kHalves, kTransfer>(s, args, walk, threadIdx.x);
  }
}

template <int kHalves>
static __global__ void __launch_bounds__(kWalkThreads<kHalves>, 1) adj_kernel(const __grid_constant__ WalkArgs args) {
  const KdaWalk walk = kda_walk_of<kHalves>(args, blockIdx.x);
  if (args.inner && unneeded(walk, args.plan.segment(walk.index))) return;
  adj_walk<kHalves, false>(args, walk);
}

}  // namespace cake::kda
