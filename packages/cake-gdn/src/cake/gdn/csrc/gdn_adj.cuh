// gdn_adj: the adjoint walk, chunks in reverse. Roles and shared memory: gdn_walk.cuh. R = dL/dS. Per chunk, transposed:
//
//   dD^T = 2^(b_C - b) r_k (R^T k^T) + dO^T P
//   Y^T  = dD^T T                                                Z = m Y goes to memory: see gdn_beta.cuh
//   R^T  = 2^b_C R^T + (s 2^b r_q dO^T) q - (beta 2^b r_k Y^T) k
//
// bf16(R^T) as it leaves each chunk (before the update) goes to the tape.
#pragma once

#include "gdn_walk.cuh"

namespace cake::gdn {

template <bool kTransfer>
__device__ __forceinline__ void adj_states(WalkShared& s, const WalkArgs& args, const Walk& walk, int thread) {
  const int lane = thread & 31, warp = thread >> 5;
  const int channel0 = 16 * warp;  // the warp's first row of R^T

  float state[64];
  load_edge(state, edges_of<false, kTransfer>(args, walk).in, channel0, lane);

  RingState<kStages> at;
  RingState<kHelperStages> help_at;
  for (int i = 0; i < walk.chunks; ++i, at.advance(), help_at.advance()) {
    const int chunk = walk.chunk(i, false);
    WalkStage& stage = s.stages[at.stage];
    const Factors& f = s.factors[help_at.stage];
    const uint32_t k = smem_addr(stage.k), x = smem_addr(stage.x), t = smem_addr(stage.t);
    const uint32_t p = smem_addr(s.p[help_at.stage]);

    uint32_t a[8][4];
    to_frag(a, state);
    s.ring.wait_full(at);
    float e[32], dd[32];
    pin(a);
    wgmma_fence();
    gemm_rs<Major::K, kChunk, 8>(e, a, k, false);
    wgmma_commit();
    if constexpr (!kTransfer) {
      const int64_t slot = adjoint_slot(walk.sequence, chunk, chunk == walk.chunks - 1, args.edge_slots);
      if (slot >= 0)
        store_state(smem_addr(s.state), args.states + (slot * args.v_heads + walk.v_head) * kHeadDim * kHeadDim, a,
                    channel0, lane);
    }
    uint32_t grad[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) ldmatrix_trans(grad[j], frag_address_trans<kChunk>(x, channel0, j, lane));
    s.helped.wait_full(help_at);
    pin(grad);
    wgmma_fence();
    gemm_rs<Major::MN, kChunk, 4>(dd, grad, p, false);
    wgmma_commit();
    wgmma_wait<0>();
    pin(e);
    pin(dd);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
      const float2 fa = *reinterpret_cast<const float2*>(f.a + 8 * c + 2 * (lane & 3));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int n = 4 * c + 2 * h;
        dd[n] = fmaf(fa.x, e[n], dd[n]), dd[n + 1] = fmaf(fa.y, e[n + 1], dd[n + 1]);
      }
    }
    uint32_t w[4][4], scaled[4][4];
    to_frag(w, dd);
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 fb = *reinterpret_cast<const float2*>(f.b + 16 * j + 8 * h + 2 * (lane & 3));
#pragma unroll
        for (int r = 2 * h; r < 2 * h + 2; ++r)
          scaled[j][r] = pack_bf16(fb.x * bf16_lo(grad[j][r]), fb.y * bf16_hi(grad[j][r]));
      }
    const float decay = f.decay;
#pragma unroll
    for (int n = 0; n < 64; ++n) state[n] *= decay;

    float y[32];
    pin(w);
    pin(scaled);
    wgmma_fence();
    gemm_rs<Major::MN, kChunk, 4>(y, w, t, false);
    wgmma_commit();
    gemm_rs<Major::MN, kChunk, 4>(state, scaled, smem_addr(stage.q), true);
    wgmma_commit();
    wgmma_wait<1>();
    pin(y);
    uint32_t update[4][4], out[4][4];
    to_frag_scaled(update, y, f.c, lane);
    if constexpr (!kTransfer) to_frag_scaled(out, y, f.d, lane);
    pin(update);
    wgmma_fence();
    gemm_rs<Major::MN, kChunk, 4>(state, update, k, true);
    wgmma_commit();
    if constexpr (!kTransfer) {
      leave_channels(x, out, channel0, lane);
      fence_proxy_async();  // TMA sends it on
    }
    wgmma_wait<0>();
    pin(state);
    s.ring.signal_empty(at, lane);
    s.helped.signal_empty(help_at, lane);
  }
  const Edges edges = edges_of<false, kTransfer>(args, walk);
  if (edges.out) store_edge(edges.out, state, channel0, lane);
  if (!kTransfer && lane == 0) bulk_wait();  // shared memory must outlive the copies
}

template <bool kTransfer>
__device__ __forceinline__ void adj_walk(const WalkArgs& args, const Walk& walk) {
  extern __shared__ __align__(1024) uint8_t raw[];
  WalkShared& s = *reinterpret_cast<WalkShared*>(raw);
  walk_roles<WalkKind<false, true, true, !kTransfer>>(s, args, walk,
                                                      [&] { adj_states<kTransfer>(s, args, walk, threadIdx.x); });
}

static __global__ void __launch_bounds__(kWalkThreads, 1) adj_kernel(const __grid_constant__ WalkArgs args) {
  const Walk walk = walk_of(args.plan, args.v_heads, args.group, blockIdx.x);
  if (args.inner && unneeded(walk, args.plan.segment(walk.index))) return;
  adj_walk<false>(args, walk);
}

}  // namespace cake::gdn
