// gdn_transfer: pre-scans of segments (cake/transfer.cuh). B is the walk of gdn_scan, M the same walk of the unit matrix with
// v = 0, the adjoint's B the walk of gdn_adj. Roles and shared memory: gdn_walk.cuh; there is no output and no tape.
//
// With keys of length 1 and 0 <= beta <= 2, |M| <= exp(sum of g): that is the decay that a threshold judges.
#pragma once

#include "cake/transfer.cuh"
#include "gdn_adj.cuh"
#include "gdn_scan.cuh"

namespace cake::gdn {

struct TransferArgs {
  WalkArgs walk;  // edge_in: the sequences' own states; edge_out: B [segments, HV, K, V]
  TransferMaps maps;
  float least;  // log2 of the decay at which M counts as 0; -inf for never

  void readdress() { walk.readdress(); }
};

// See cake/transfer.cuh. The warp does it together.
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

__device__ __forceinline__ void map_states(WalkShared& s, const TransferArgs& args, const Walk& walk, int thread) {
  const int lane = thread & 31, warp = thread >> 5;
  const int channel0 = 16 * warp;  // the warp's first row of S^T

  float state[64];
  unit_state(state, channel0, lane);

  RingState<kStages> at;
  RingState<kHelperStages> help_at;
  for (int i = 0; i < walk.chunks; ++i, at.advance(), help_at.advance()) {
    WalkStage& stage = s.stages[at.stage];
    const Factors& f = s.factors[help_at.stage];
    const uint32_t k = smem_addr(stage.k);
    map_chunk(
        state, k, smem_addr(stage.t), k, [&] { s.ring.wait_full(at); }, [&] { s.helped.wait_full(help_at); },
        [&](float (&u)[32]) { scale_columns(u, f.b, lane, -1.f); },
        [&](float (&x)[64]) {
          const float decay = f.decay;
#pragma unroll
          for (int e = 0; e < 64; ++e) x[e] *= decay;
        },
        [&](float (&d)[32]) { scale_columns(d, f.d, lane); });
    __syncwarp();
    s.ring.signal_empty(at, lane);
    s.helped.signal_empty(help_at, lane);
  }
  const int64_t row = (int64_t(walk.index) * args.walk.v_heads + walk.v_head) * kHeadDim * kHeadDim;
  store_edge(args.maps.m + row, state, channel0, lane);
}

template <bool kMap>
__device__ __forceinline__ void transfer_walk(const TransferArgs& args, const Walk& walk) {
  extern __shared__ __align__(1024) uint8_t raw[];
  WalkShared& s = *reinterpret_cast<WalkShared*>(raw);
  walk_roles<WalkKind<true, false, !kMap, false>>(s, args.walk, walk, [&] {
    if constexpr (kMap) map_states(s, args, walk, threadIdx.x);
    else scan_states<false, false, true>(s, args.walk, walk, threadIdx.x);
  });
}

// Two CTAs for each (segment, v head): one walks B, the other one M.
static __global__ void __launch_bounds__(kWalkThreads, 1) transfer_kernel(const __grid_constant__ TransferArgs args) {
  Walk walk = walk_of(args.walk.plan, args.walk.v_heads, args.walk.group, blockIdx.x / 2);
  const bool map = blockIdx.x % 2;
  const auto far = [&](bool& faded) { return reach<true>(args, walk, faded); };
  if (!begin_transfer(args.maps, args.walk.plan, args.walk.v_heads, walk, map, 0, 1, far)) return;
  if (map) transfer_walk<true>(args, walk);
  else transfer_walk<false>(args, walk);
}

static __global__ void __launch_bounds__(kWalkThreads, 1)
    adj_transfer_kernel(const __grid_constant__ TransferArgs args) {
  Walk walk = walk_of(args.walk.plan, args.walk.v_heads, args.walk.group, blockIdx.x);
  const auto far = [&](bool& faded) { return reach<false>(args, walk, faded); };
  if (!begin_adj_transfer(args.maps, args.walk.plan, args.walk.v_heads, walk, far)) return;
  adj_walk<true>(args.walk, walk);
}

}  // namespace cake::gdn
