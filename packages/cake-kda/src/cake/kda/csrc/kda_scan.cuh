// kda_scan: the forward walk over a sequence's chunks. Roles and shared memory: kda_walk.cuh. Per chunk, transposed (rows are
// channels of V, columns are tokens; Qg, Kg, Kr, P, T, b as in kda_prep):
//
//   U^T = S^T Kg^T                       O^T = S^T Qg^T                         A = bf16(S^T) from registers
//   W^T = beta (v^T - U^T)
//   D^T = W^T T^T                        O^T += D^T P^T
//   S^T = S^T diag(2^b_C) + D^T Kr
//
// bf16(S^T) before each chunk goes to the tape.
#pragma once

#include "kda_walk.cuh"

namespace cake::kda {

template <int kHalves, bool kOutput, bool kTape, bool kTransfer = false>
__device__ __forceinline__ void scan_states(WalkShared<kHalves>& s, const WalkArgs& args, const KdaWalk& walk,
                                            int thread) {
  const int lane = thread & 31, warp = thread >> 5;
  const int channel0 = 16 * warp;  // the warp's first row of the CTA's part of S^T

  float state[64];
  load_edge(state, edges_of<true, kTransfer>(args, walk).in, walk.channel + channel0, lane);

  RingState<kStages> at;
  for (int i = 0; i < walk.chunks; ++i, at.advance()) {
    auto& stage = s.stages[at.stage];
    const uint32_t x = smem_addr(stage.x);

    uint32_t a[8][4];
    to_frag(a, state);
    s.ring.wait_full(at);
    float u[32], o[32];
    pin(a);
    wgmma_fence();
    gemm_rs<Major::K, kChunk, 8>(u, a, smem_addr(stage.kg), false);
    wgmma_commit();
    if constexpr (kOutput) {
      gemm_rs<Major::K, kChunk, 8>(o, a, smem_addr(stage.qg), false);
      wgmma_commit();
    }
    if constexpr (kTape) {
      const int64_t slot = state_slot(walk.sequence, i, args.edge_slots);
      if (slot >= 0)
        store_state<64 * kHalves>(smem_addr(s.state),
                                  args.states + (slot * args.v_heads + walk.v_head) * kHeadDim * kHeadDim, a, channel0,
                                  lane, walk.channel);
    }
    uint32_t v[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j) ldmatrix_trans(v[j], frag_address_trans<kChunk>(x, channel0, j, lane));

    wgmma_wait<kOutput ? 1 : 0>();
    pin(u);
    uint32_t w[4][4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 beta = *reinterpret_cast<const float2*>(stage.beta + 16 * j + 8 * h + 2 * (lane & 3));
#pragma unroll
        for (int r = 2 * h; r < 2 * h + 2; ++r) {
          const int e = acc_index(j, r);
          w[j][r] = pack_bf16(beta.x * (bf16_lo(v[j][r]) - u[e]), beta.y * (bf16_hi(v[j][r]) - u[e + 1]));
        }
      }
    float d[32];
    pin(w);
    wgmma_fence();
    gemm_rs<Major::K, kChunk, 4>(d, w, smem_addr(stage.t), false);
    wgmma_commit();
    scale_columns(state, stage.last, lane);
    wgmma_wait<0>();
    pin(d);
    if constexpr (kOutput) pin(o);

    // The state first: it is what the next chunk waits for.
    uint32_t delta[4][4];
    to_frag(delta, d);
    pin(delta);
    pin(state);
    wgmma_fence();
    if constexpr (kOutput) {
      gemm_rs<Major::K, kChunk, 4>(o, delta, smem_addr(stage.p), true);
      wgmma_commit();
    }
    gemm_rs<Major::MN, kChunk, 4>(state, delta, smem_addr(stage.kr), true);
    wgmma_commit();
    if constexpr (kOutput) {
      wgmma_wait<1>();
      pin(o);
      uint32_t out[4][4];
      to_frag(out, o);
      leave_channels(x, out, channel0, lane);
    }
    wgmma_wait<0>();
    pin(state);
    s.ring.signal_empty(at, lane);
  }
  const Edges edges = edges_of<true, kTransfer>(args, walk);
  if (edges.out) store_edge(edges.out, state, walk.channel + channel0, lane);
  if (kTape && lane == 0) bulk_wait();  // shared memory must outlive the copies
}

template <int kHalves, bool kOutput, bool kTape>
static __global__ void __launch_bounds__(kWalkThreads<kHalves>, 1) scan_kernel(const __grid_constant__ WalkArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& s = *reinterpret_cast<WalkShared<kHalves>*>(raw);
  const KdaWalk walk = kda_walk_of<kHalves>(args, blockIdx.x);
  if (args.inner && unneeded(walk, args.plan.segment(walk.index))) return;
  walk_init(s);
  if (threadIdx.x >= kHalves * 128) {
    if constexpr (kHalves == 2) registers_shrink<kProducerRegisters>();
    produce<kHalves, true, kOutput>(s, args, walk, threadIdx.x % 128);
  } else {
    if constexpr (kHalves == 2) registers_grow<kStateRegisters>();
    scan_states<kHalves, kOutput, kTape>(s, args, walk, threadIdx.x);
  }
}

}  // namespace cake::kda
