// gdn_scan: the forward walk over a sequence's chunks. Roles and shared memory: gdn_walk.cuh. Per chunk, transposed
// (rows are channels of V, columns are tokens; b, r, s as in gdn_prep):
//
//   U^T = S^T k^T                        O^T = S^T q^T                          A = bf16(S^T) from registers
//   W^T = beta (v^T - 2^b r_k U^T)       O^T = s 2^b r_q O^T
//   D^T = W^T T^T                        O^T += D^T P^T
//   S^T = 2^b_C S^T + (2^(b_C - b) r_k D^T) k
//
// bf16(S^T) before each chunk goes to the tape.
#pragma once

#include "gdn_walk.cuh"

namespace cake::gdn {

template <bool kOutput, bool kTape, bool kTransfer = false>
__device__ __forceinline__ void scan_states(WalkShared& s, const WalkArgs& args, const Walk& walk, int thread) {
  const int lane = thread & 31, warp = thread >> 5;
  const int channel0 = 16 * warp;  // the warp's first row of S^T

  float state[64];
  load_edge(state, edges_of<true, kTransfer>(args, walk).in, channel0, lane);

  RingState<kStages> at;
  RingState<kHelperStages> help_at;
  for (int i = 0; i < walk.chunks; ++i, at.advance(), help_at.advance()) {
    WalkStage& stage = s.stages[at.stage];
    const Factors& f = s.factors[help_at.stage];
    const uint32_t k = smem_addr(stage.k), x = smem_addr(stage.x);

    uint32_t a[8][4];
    to_frag(a, state);
    s.ring.wait_full(at);
    float u[32], o[32];
    pin(a);
    wgmma_fence();
    gemm_rs<Major::K, kChunk, 8>(u, a, k, false);
    wgmma_commit();
    if constexpr (kOutput) {
      gemm_rs<Major::K, kChunk, 8>(o, a, smem_addr(stage.q), false);
      wgmma_commit();
    }
    if constexpr (kTape) {
      const int64_t slot = state_slot(walk.sequence, i, args.edge_slots);
      if (slot >= 0)
        store_state(smem_addr(s.state), args.states + (slot * args.v_heads + walk.v_head) * kHeadDim * kHeadDim, a,
                    channel0, lane);
    }
    uint32_t v[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) ldmatrix_trans(v[j], frag_address_trans<kChunk>(x, channel0, j, lane));
    s.helped.wait_full(help_at);

    wgmma_wait<kOutput ? 1 : 0>();
    pin(u);
    uint32_t w[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int column = 16 * j + 8 * h + 2 * (lane & 3);
        const float2 fa = *reinterpret_cast<const float2*>(f.a + column);
        const float2 fb = *reinterpret_cast<const float2*>(f.b + column);
#pragma unroll
        for (int r = 2 * h; r < 2 * h + 2; ++r) {
          const int e = acc_index(j, r);
          w[j][r] = pack_bf16(fa.x * bf16_lo(v[j][r]) - fb.x * u[e], fa.y * bf16_hi(v[j][r]) - fb.y * u[e + 1]);
        }
      }
    float d[32];
    pin(w);
    wgmma_fence();
    gemm_rs<Major::K, kChunk, 4>(d, w, smem_addr(stage.t), false);
    wgmma_commit();
    wgmma_wait<0>();
    pin(d);
    if constexpr (kOutput) pin(o);

    // The state first: it is what the next chunk waits for.
    uint32_t update[4][4];
    to_frag_scaled(update, d, f.d, lane);
    const float decay = f.decay;
#pragma unroll
    for (int e = 0; e < 64; ++e) state[e] *= decay;
    uint32_t delta[4][4];
    if constexpr (kOutput) {
      to_frag(delta, d);
      scale_columns(o, f.c, lane);
      pin(delta);
    }
    pin(update);
    wgmma_fence();
    if constexpr (kOutput) {
      gemm_rs<Major::K, kChunk, 4>(o, delta, smem_addr(s.p[help_at.stage]), true);
      wgmma_commit();
    }
    gemm_rs<Major::MN, kChunk, 4>(state, update, k, true);
    wgmma_commit();
    if constexpr (kOutput) {
      wgmma_wait<1>();
      pin(o);
      uint32_t out[4][4];
      to_frag(out, o);
      leave_channels(x, out, channel0, lane);
      fence_proxy_async();  // TMA sends it on
    }
    wgmma_wait<0>();
    pin(state);
    s.ring.signal_empty(at, lane);
    s.helped.signal_empty(help_at, lane);
  }
  const Edges edges = edges_of<true, kTransfer>(args, walk);
  if (edges.out) store_edge(edges.out, state, channel0, lane);
  if (kTape && lane == 0) bulk_wait();  // shared memory must outlive the copies
}

template <bool kOutput, bool kTape>
static __global__ void __launch_bounds__(kWalkThreads, 1) scan_kernel(const __grid_constant__ WalkArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  WalkShared& s = *reinterpret_cast<WalkShared*>(raw);
  const Walk walk = walk_of(args.plan, args.v_heads, args.group, blockIdx.x);
  if (args.inner && unneeded(walk, args.plan.segment(walk.index))) return;
  walk_roles<WalkKind<true, kOutput, true, kOutput>>(s, args, walk,
                                                     [&] { scan_states<kOutput, kTape>(s, args, walk, threadIdx.x); });
}

}  // namespace cake::gdn
