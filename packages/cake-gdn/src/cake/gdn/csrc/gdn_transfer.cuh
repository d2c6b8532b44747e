// gdn_transfer: pre-scans of segments. What a segment does to the state is an affine map, S_out = M S_in + B, and a CTA walks
// one of its two parts for one v head: B is the walk of gdn_scan from a zero state (from the sequence's own where no segment
// comes before), M the same walk of the unit matrix with v = 0. The adjoint R_in = M^T R_out + B is the walk of gdn_adj from
// zero. Roles and shared memory: gdn_walk.cuh; there is no output and no tape.
//
// M is chained over segments, so its operands in registers are sums of two bf16 (k and T are bf16 themselves).
//
// With keys of length 1 and 0 <= beta <= 2, |M| <= exp(sum of g). Where that is below a threshold, M is taken to be 0, and
// what comes before the last chunks whose decay reaches it can't be seen in B: the walk begins there.
#pragma once

#include "gdn_adj.cuh"

namespace cake::gdn {

struct TransferArgs {
  WalkArgs walk;  // edge_in: the sequences' own states; edge_out: B [segments, HV, K, V]
  float* m;  // [segments, HV, K, K]; forward
  int* live;  // [segments, HV]: whether M isn't 0; written forward, read backward
  float least;  // log2 of the decay at which M counts as 0; -inf for never
};

// How many chunks of the segment a pre-scan walks: from its end (forward) or start (backward) up to where the decay reaches
// `least`, or all of them. The warp does it together; every warp of the CTA finds the same.
template <bool kForward>
__device__ __forceinline__ int reach(const TransferArgs& args, const Walk& walk, bool& faded) {
  const int lane = threadIdx.x & 31;
  const float* b = args.walk.b + int64_t(walk.v_head) * args.walk.plan.total;
  float before = 0.f;
  for (int base = 0; base < walk.chunks; base += 32) {
    const int i = base + lane;
    float sum = 0.f;
    if (i < walk.chunks) {
      const int chunk = walk.chunk(i, !kForward);
      sum = b[walk.token(chunk) + walk.rows(chunk) - 1];
    }
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const float x = __shfl_up_sync(0xffffffffu, sum, d);
      if (lane >= d) sum += x;
    }
    sum += before;
    const unsigned gone = __ballot_sync(0xffffffffu, i < walk.chunks && sum <= args.least);
    if (gone) {
      faded = true;
      return base + __ffs(gone);
    }
    before = __shfl_sync(0xffffffffu, sum, 31);
  }
  faded = false;
  return walk.chunks;
}

template <bool kMap>
__device__ __forceinline__ void transfer_states(WalkShared& s, const TransferArgs& args, const Walk& walk, int thread) {
  const int lane = thread & 31, warp = thread >> 5;
  const int channel0 = 16 * warp;  // the warp's first row of S^T

  float state[64];
  if constexpr (kMap) {
#pragma unroll
    for (int i = 0; i < 64; ++i)
      state[i] = acc_column(i, lane) == channel0 + (lane >> 2) + 8 * ((i >> 1) & 1) ? 1.f : 0.f;
  } else {
    load_edge(state, transfer_edges<true>(args.walk.plan, walk, args.walk.v_heads, args.walk.edge_in, nullptr).in,
              channel0, lane);
  }

  RingState<kStages> at;
  RingState<kHelperStages> help_at;
  for (int i = 0; i < walk.chunks; ++i, at.advance(), help_at.advance()) {
    WalkStage& stage = s.stages[at.stage];
    const Factors& f = s.factors[help_at.stage];
    const uint32_t k = smem_addr(stage.k), x = smem_addr(stage.x), t = smem_addr(stage.t);

    float u[32];
    uint32_t v[4][4];
    if constexpr (kMap) {
      uint32_t high[8][4], low[8][4];
      to_two_frags(high, low, state);
      s.ring.wait_full(at);
      pin(high);
      pin(low);
      wgmma_fence();
      gemm_rs<Major::K, kChunk, 8>(u, high, k, false);
      gemm_rs<Major::K, kChunk, 8>(u, low, k, true);
      wgmma_commit();
      s.helped.wait_full(help_at);
      wgmma_wait<0>();
    } else {
      uint32_t a[8][4];
      to_frag(a, state);
      s.ring.wait_full(at);
      pin(a);
      wgmma_fence();
      gemm_rs<Major::K, kChunk, 8>(u, a, k, false);
      wgmma_commit();
#pragma unroll
      for (int j = 0; j < 4; ++j) ldmatrix_trans(v[j], frag_address_trans<kChunk>(x, channel0, j, lane));
      s.helped.wait_full(help_at);
      wgmma_wait<0>();
    }
    pin(u);

    float d[32];
    if constexpr (kMap) {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float2 fb = *reinterpret_cast<const float2*>(f.b + 8 * c + 2 * (lane & 3));
#pragma unroll
        for (int h = 0; h < 2; ++h) u[4 * c + 2 * h] *= -fb.x, u[4 * c + 2 * h + 1] *= -fb.y;
      }
      uint32_t high[4][4], low[4][4];
      to_two_frags(high, low, u);
      pin(high);
      pin(low);
      wgmma_fence();
      gemm_rs<Major::K, kChunk, 4>(d, high, t, false);
      gemm_rs<Major::K, kChunk, 4>(d, low, t, true);
      wgmma_commit();
      wgmma_wait<0>();
    } else {
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
      pin(w);
      wgmma_fence();
      gemm_rs<Major::K, kChunk, 4>(d, w, t, false);
      wgmma_commit();
      wgmma_wait<0>();
    }
    pin(d);

    const float decay = f.decay;
#pragma unroll
    for (int e = 0; e < 64; ++e) state[e] *= decay;
    if constexpr (kMap) {
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const float2 fd = *reinterpret_cast<const float2*>(f.d + 8 * c + 2 * (lane & 3));
#pragma unroll
        for (int h = 0; h < 2; ++h) d[4 * c + 2 * h] *= fd.x, d[4 * c + 2 * h + 1] *= fd.y;
      }
      uint32_t high[4][4], low[4][4];
      to_two_frags(high, low, d);
      pin(high);
      pin(low);
      wgmma_fence();
      gemm_rs<Major::MN, kChunk, 4>(state, high, k, true);
      gemm_rs<Major::MN, kChunk, 4>(state, low, k, true);
      wgmma_commit();
    } else {
      uint32_t update[4][4];
      to_frag_scaled(update, d, f.d, lane);
      pin(update);
      wgmma_fence();
      gemm_rs<Major::MN, kChunk, 4>(state, update, k, true);
      wgmma_commit();
    }
    wgmma_wait<0>();
    pin(state);
    __syncwarp();
    s.ring.signal_empty(at, lane);
    s.helped.signal_empty(help_at, lane);
  }
  const int64_t row = (int64_t(walk.index) * args.walk.v_heads + walk.v_head) * kHeadDim * kHeadDim;
  store_edge((kMap ? args.m : args.walk.edge_out) + row, state, channel0, lane);
}

template <bool kMap>
__device__ __forceinline__ void transfer_walk(const TransferArgs& args, const Walk& walk) {
  extern __shared__ __align__(1024) uint8_t raw[];
  WalkShared& s = *reinterpret_cast<WalkShared*>(raw);
  walk_init<false>(s, threadIdx.x);
  const Role role = static_cast<Role>(threadIdx.x / 128);
  if (role == Role::kProducer) {
    registers_shrink<kProducerRegisters>();
    produce<true, false, false, !kMap>(s, args.walk, walk, threadIdx.x % 128);
  } else if (role == Role::kHelper) {
    registers_shrink<kHelperRegisters>();
    help<true, false>(s, args.walk, walk, threadIdx.x % 128);
  } else {
    registers_grow<kStateRegisters>();
    transfer_states<kMap>(s, args, walk, threadIdx.x);
  }
}

// Two CTAs for each (segment, v head): one walks B, the other one M.
static __global__ void __launch_bounds__(kWalkThreads, 1) transfer_kernel(const __grid_constant__ TransferArgs args) {
  Walk walk = walk_of(args.walk.plan, args.walk.v_heads, args.walk.group, blockIdx.x / 2);
  const bool map = blockIdx.x % 2;
  const Segment segment = args.walk.plan.segment(walk.index);
  if (!segment.followed || (map && !segment.opens) || unneeded(walk, segment)) return;
  bool faded;
  const int count = reach<true>(args, walk, faded);
  const int64_t row = int64_t(walk.index) * args.walk.v_heads + walk.v_head;
  if (!map) {
    if (threadIdx.x == 0) args.live[row] = segment.opens && !faded;
    walk.first = walk.chunks - count, walk.chunks = count;
    transfer_walk<false>(args, walk);
  } else if (faded) {
    float4* m = reinterpret_cast<float4*>(args.m + row * kHeadDim * kHeadDim);
    for (int i = threadIdx.x; i < kHeadDim * kHeadDim / 4; i += kWalkThreads) m[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  } else {
    transfer_walk<true>(args, walk);
  }
}

static __global__ void __launch_bounds__(kWalkThreads, 1)
    adj_transfer_kernel(const __grid_constant__ TransferArgs args) {
  Walk walk = walk_of(args.walk.plan, args.walk.v_heads, args.walk.group, blockIdx.x);
  const Segment segment = args.walk.plan.segment(walk.index);
  if (!segment.opens || unneeded(walk, segment)) return;
  // The forward has decided which maps vanish. A last segment has none: it may begin late by its own decay.
  bool faded;
  const int count = reach<false>(args, walk, faded);
  if (segment.followed) faded = args.live[int64_t(walk.index) * args.walk.v_heads + walk.v_head] == 0;
  if (faded) walk.chunks = count;
  adj_walk<true>(args.walk, walk);
}

}  // namespace cake::gdn
