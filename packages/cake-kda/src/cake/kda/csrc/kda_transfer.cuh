// kda_transfer: pre-scans of segments (cake/transfer.cuh). B is the walk of kda_scan, M the same walk of the unit matrix with
// v = 0, the adjoint's B the walk of kda_adj. Roles and shared memory: kda_walk.cuh; there is no output and no tape.
//
// A segment is judged by the product over its chunks of their slowest channels' decays. A state moves from channel to channel:
// between chunks that costs nothing of this bound, inside a chunk what moves may miss the decay of either channel. So a chunk
// counts for kLeastChunk at most, and a map is taken to vanish after several chunks alone.
#pragma once

#include "cake/transfer.cuh"
#include "kda_adj.cuh"
#include "kda_scan.cuh"

namespace cake::kda {

constexpr float kLeastChunk = 0.0067379470f;  // e^-5

struct TransferArgs {
  WalkArgs walk;  // edge_in: the sequences' own states; edge_out: B [segments, HV, K, V]
  TransferMaps maps;
  float least;  // the decay at which M counts as 0; negative for never
};

// See cake/transfer.cuh. The warp does it together, a lane four channels of each chunk.
template <bool kForward>
__device__ __forceinline__ int reach(const TransferArgs& args, const KdaWalk& walk, bool& faded) {
  constexpr int kAtOnce = 8;  // chunks whose loads are under way
  const int lane = threadIdx.x & 31;
  faded = false;
  if (args.least < 0.f) return walk.chunks;
  float kept = 1.f;
  for (int base = 0; base < walk.chunks; base += kAtOnce) {
    float slowest[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      slowest[j] = 1.f;
      if (base + j < walk.chunks) {
        const int64_t image = walk.image(walk.chunk(base + j, !kForward), args.walk.v_heads);
        const float4 c = *reinterpret_cast<const float4*>(args.walk.last + image * kHeadDim + 4 * lane);
        slowest[j] = fmaxf(fmaxf(c.x, c.y), fmaxf(c.z, c.w));
      }
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      float x = slowest[j];
#pragma unroll
      for (int d = 16; d > 0; d >>= 1) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, d));
      if (base + j < walk.chunks) kept *= fmaxf(x, kLeastChunk);
      if (kept <= args.least) {
        faded = true;
        return base + j + 1;
      }
    }
  }
  return walk.chunks;
}

template <int kHalves>
__device__ __forceinline__ void map_states(WalkShared<kHalves>& s, const TransferArgs& args, const KdaWalk& walk,
                                           int thread) {
  const int lane = thread & 31, warp = thread >> 5;
  const int row0 = walk.channel + 16 * warp;  // the warp's first row of the transposed state

  float state[64];
  unit_state(state, row0, lane);

  RingState<kStages> at;
  for (int i = 0; i < walk.chunks; ++i, at.advance()) {
    auto& stage = s.stages[at.stage];
    map_chunk(
        state, smem_addr(stage.kg), smem_addr(stage.t), smem_addr(stage.kr), [&] { s.ring.wait_full(at); }, [] {},
        [&](float (&u)[32]) { scale_columns(u, stage.beta, lane, -1.f); },
        [&](float (&x)[64]) { scale_columns(x, stage.last, lane); }, [](float (&)[32]) {});
    s.ring.signal_empty(at, lane);
  }
  const int64_t row = (int64_t(walk.index) * args.walk.v_heads + walk.v_head) * kHeadDim * kHeadDim;
  store_edge(args.maps.m + row, state, row0, lane);
}

template <int kHalves, bool kMap>
__device__ __forceinline__ void transfer_walk(const TransferArgs& args, const KdaWalk& walk) {
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& s = *reinterpret_cast<WalkShared<kHalves>*>(raw);
  walk_init(s);
  if (threadIdx.x >= kHalves * 128) {
    if constexpr (kHalves == 2) registers_shrink<kProducerRegisters>();
    produce<kHalves, true, false, !kMap>(s, args.walk, walk, threadIdx.x % 128);
  } else {
    if constexpr (kHalves == 2) registers_grow<kStateRegisters>();
    if constexpr (kMap) map_states(s, args, walk, threadIdx.x);
    else scan_states<kHalves, false, false, true>(s, args.walk, walk, threadIdx.x);
  }
}

// CTAs for each (segment, v head): the first half of them walk B, the others M.
template <int kHalves>
static __global__ void __launch_bounds__(kWalkThreads<kHalves>, 1)
    transfer_kernel(const __grid_constant__ TransferArgs args) {
  constexpr int kCtas = kWalkCtas<kHalves>;
  const bool map = blockIdx.x / kCtas % 2;
  KdaWalk walk = kda_walk_of<kHalves>(args.walk, blockIdx.x / (2 * kCtas) * kCtas + blockIdx.x % kCtas);
  const auto far = [&](bool& faded) { return reach<true>(args, walk, faded); };
  if (!begin_transfer(args.maps, args.walk.plan, args.walk.v_heads, walk, map, blockIdx.x % kCtas, kCtas, far)) return;
  if (map) transfer_walk<kHalves, true>(args, walk);
  else transfer_walk<kHalves, false>(args, walk);
}

template <int kHalves>
static __global__ void __launch_bounds__(kWalkThreads<kHalves>, 1)
    adj_transfer_kernel(const __grid_constant__ TransferArgs args) {
  KdaWalk walk = kda_walk_of<kHalves>(args.walk, blockIdx.x);
  const auto far = [&](bool& faded) { return reach<false>(args, walk, faded); };
  if (!begin_adj_transfer(args.maps, args.walk.plan, args.walk.v_heads, walk, far)) return;
  adj_walk<kHalves, true>(args.walk, walk);
}

}  // namespace cake::kda
