// affine_merge: states along chains of affine maps. For each chain, head and column of the state, step by step,
//
//   S = M S + B      (M^T if transposed)      S = B where M counts as 0, as in every first step
//
// and S goes to a row of the result where a step names one. Columns don't meet, so a CTA takes a block of them.
//
// S, B and the sums are fp32. The product is made on tensor cores: M and S are sums of two bf16, high + low, 16 bits
// together, and the product is low high + high low + high high, each summed over all of k, one after the other; B is
// added last. So an element is the same sums in the same order whatever the block, and builds differ in no bit.
//
// Two warpgroups have 64 rows of S each: M in registers as operand A, S^T in shared memory as operand B, written there
// again after every step. One warp more loads maps, up to two steps ahead.
//
// Chains come in a table, or are the segments of the sequences of a call that was cut on the device (`runs` in
// seq.cuh), whose map s takes the state that enters segment s to the one that enters s + 1 (or back, transposed).
#pragma once

#include "cake/frag.cuh"
#include "cake/pipe.cuh"

namespace cake::state_chain {

constexpr int kState = 128;  // rows of S
constexpr int kStateWarps = 8, kMergeThreads = 384;  // of the third warpgroup one warp loads
constexpr int kMapStages = 2;
constexpr int kMostSteps = 640, kMostChains = 128;  // of a launch: what its parameters hold

struct Step {
  int b, m, out;  // tiles of B and M, row of the result; -1: M = 0, and no row
};

struct MergeArgs {
  const float* b;  // [tiles, heads, 128, columns]
  const float* m;  // [tiles, heads, 128, 128]
  const int* live;  // [tiles of m, heads] or null: 0 counts as M = 0
  float* out;  // [rows, heads, 128, columns]
  const int* runs;  // null: the table below; else [chains + 1][2]
  int heads, columns;
  int first[kMostChains + 1];  // steps of chain i: first[i] .. first[i + 1] - 1
  Step steps[kMostSteps];
};

// M in shared memory, fp32, and the order of S's 128 rows that goes with it.
//
// Rows of M lie four by four with a gap behind each four, so that a bulk copy takes 2 KB and yet a warp's lanes, which
// differ in row and column, read from different banks. That takes rows of a warp that are not neighbours: in M's rows
// and in S, which is along M's columns, position 16 w + 8 h + i (warp w, h of 2, i of 8) stands for
//
//   row 32 (w / 2) + 4 i + 2 (w % 2) + h,      transposed for 16 w + 2 i + h.
//
// A lane has i = lane / 4 of its warp's rows, and of each 16 columns positions 2 q and 2 q + 1 of both h, q = lane % 4.
template <bool kTransposed>
struct MapTile {
  static constexpr int kBlockFloats = 4 * kState, kPitch = kBlockFloats + (kTransposed ? 8 : 4);
  float values[kState / 4 * kPitch];

  // A lane's row of h = 0; that of h = 1 is the next.
  __device__ static int row(int warp, int lane) {
    const int i = lane >> 2;
    return kTransposed ? 16 * warp + 2 * i : 32 * (warp >> 1) + 4 * i + 2 * (warp & 1);
  }
  __device__ const float* at(int row, int column) const {
    return values + (row >> 2) * kPitch + (row & 3) * kState + column;
  }
};

template <int kColumns>
struct StateTile {
  uint8_t bytes[kColumns * kState * 2];  // [columns][128 positions]
};

template <int kColumns, bool kTransposed>
struct MergeShared {
  alignas(1024) StateTile<kColumns> high, low;  // of S^T
  alignas(16) MapTile<kTransposed> maps[kMapStages];
  Ring<kMapStages> maps_ring;
  Ring<1> state_ring;  // between the warps of the states
  uint8_t multiplies[kMostSteps];  // of the chain's steps
};
static_assert(sizeof(MergeShared<64, false>) <= 232448 && sizeof(MergeShared<64, true>) <= 232448,
              "an SM gives a CTA 227 KB");

// Two numbers as sums of two bf16.
struct Split {
  uint32_t high, low;

  __device__ __forceinline__ Split(float x, float y) {
    high = pack_bf16(x, y);
    low = pack_bf16(x - bf16_lo(high), y - bf16_hi(high));
  }
};

// A warp's rows of M as fragments of operand A.
struct MapFragments {
  uint32_t high[8][4], low[8][4];

  __device__ __forceinline__ void put(int s, int j, float x, float y) {
    const Split split(x, y);
    high[s][j] = split.high, low[s][j] = split.low;
  }
};

template <bool kTransposed>
__device__ __forceinline__ void load_map(MapFragments& a, const MapTile<kTransposed>& m, int warp, int lane) {
  const int row = m.row(warp, lane), q = lane & 3;
  if constexpr (kTransposed) {
    const float* from = m.at(4 * q, row);
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      float2 v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) v[k] = *reinterpret_cast<const float2*>(from + 4 * s * m.kPitch + k * kState);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        a.put(s, 2 * h, v[h].x, v[h + 2].x);
        a.put(s, 2 * h + 1, v[h].y, v[h + 2].y);
      }
    }
  } else {
    const float* from = m.at(row, 8 * q);
#pragma unroll
    for (int s = 0; s < 8; s += 2)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float4 x = *reinterpret_cast<const float4*>(from + 16 * s + h * kState);
        const float4 y = *reinterpret_cast<const float4*>(from + 16 * s + h * kState + 4);
        a.put(s, h, x.x, y.x);
        a.put(s, h + 2, x.y, y.y);
        a.put(s + 1, h, x.z, y.z);
        a.put(s + 1, h + 2, x.w, y.w);
      }
  }
  // All has come from shared memory before the place is let go: an arrival waits for no read.
  pin(a.high);
  pin(a.low);
}

// x = M S.
template <int kColumns>
__device__ __forceinline__ void multiply(float (&x)[kColumns / 2], const MapFragments& a, uint32_t high, uint32_t low) {
  wgmma_fence();
  gemm_rs<Major::K, kColumns, 8>(x, a.low, high, false);
  gemm_rs<Major::K, kColumns, 8>(x, a.high, low, true);
  gemm_rs<Major::K, kColumns, 8>(x, a.high, high, true);
  wgmma_commit();
  wgmma_wait<0>();
  pin(x);
}

// A lane's elements of a tile of B or S: neighbouring columns, in two neighbouring rows. A product's columns may have
// any order: columns 2 q and 2 q + 1 of two groups of 8 stand for four neighbours.
template <int kColumns>
struct Pieces {
  static constexpr int kWidth = kColumns == 8 ? 2 : 4, kCount = kColumns / (4 * kWidth);
  struct alignas(4 * kWidth) Piece {
    float values[kWidth];
  };
  // Element of an accumulator that is element i of a piece, in the row of h.
  __device__ static constexpr int element(int piece, int h, int i) {
    return 4 * (piece * (kWidth / 2) + i / 2) + 2 * h + i % 2;
  }
};

// A warp's rows of S into the tiles at `high` and, behind it, `low`.
template <int kColumns>
__device__ __forceinline__ void store_state(uint32_t high, const float (&s)[kColumns / 2], int warp, int lane) {
  // A lane has a row, 8 positions of a column, in one of four matrices: those of both h and both parts.
  const uint32_t at =
      high + (lane >> 4) * sizeof(StateTile<kColumns>) + group_offset<kColumns>(lane & 7, 2 * warp + ((lane >> 3) & 1));
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const Split even(s[4 * j], s[4 * j + 1]), odd(s[4 * j + 2], s[4 * j + 3]);  // rows of h = 0 and 1
    stmatrix_trans(at + j * kAtomBytes, {even.high, odd.high, even.low, odd.low});
  }
}

template <int kColumns, bool kTransposed>
static __global__ void __launch_bounds__(kMergeThreads, 1) merge_kernel(const __grid_constant__ MergeArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  MergeShared<kColumns, kTransposed>& s = *reinterpret_cast<MergeShared<kColumns, kTransposed>*>(raw);

  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  const int blocks = args.columns / kColumns;
  const int column0 = (blockIdx.x % blocks) * kColumns, head = blockIdx.x / blocks % args.heads;
  const int chain = blockIdx.x / blocks / args.heads;
  int first = 0, count = 0;
  if (args.runs) {
    first = args.runs[2 * chain];
    const int end = args.runs[2 * chain + 2];
    count = min(end - first - 1, kMostSteps);
    if (kTransposed) first = end - 1;
  } else {
    first = args.first[chain], count = args.first[chain + 1] - first;
  }
  if (count <= 0) return;
  const auto step = [&](int i) -> Step {
    if (!args.runs) return args.steps[first + i];
    const int s = kTransposed ? first - i : first + i;
    return {s, s, kTransposed ? s - 1 : s + 1};
  };

  if (thread == 0) {
    s.maps_ring.init(1, kStateWarps * kWarpArrivals);
    s.state_ring.init(kStateWarps * kWarpArrivals, kStateWarps * kWarpArrivals);
    mbar_init_fence();
  }
  for (int i = thread; i < count; i += kMergeThreads) {
    const int m = step(i).m;
    s.multiplies[i] = i > 0 && m >= 0 && (!args.live || args.live[int64_t(m) * args.heads + head] != 0);
  }
  __syncthreads();

  if (warp >= kStateWarps) {
    registers_shrink<24>();
    if (warp > kStateWarps) return;
    RingState<kMapStages> map;
    for (int i = 1; i < count; ++i) {
      if (!s.multiplies[i]) continue;
      s.maps_ring.wait_empty(map);
      const uint32_t bar = smem_addr(s.maps_ring.full + map.stage);
      if (lane == 0) mbar_arrive_expect_tx(bar, kState * kState * sizeof(float));
      __syncwarp();
      using Tile = MapTile<kTransposed>;
      const float* m = args.m + (int64_t(step(i).m) * args.heads + head) * kState * kState;
      bulk_load(smem_addr(s.maps[map.stage].values + lane * Tile::kPitch), m + lane * Tile::kBlockFloats,
                Tile::kBlockFloats * sizeof(float), bar);
      map.advance();
    }
    return;
  }

  registers_grow<240>();

  using P = Pieces<kColumns>;
  const int at = MapTile<kTransposed>::row(warp, lane) * args.columns + column0 + P::kWidth * (lane & 3);
  const int64_t tile = int64_t(kState) * args.columns;
  typename P::Piece b[P::kCount][2];
  float x[kColumns / 2];  // S, in an accumulator's order
  const auto load_b = [&](int i) {
    const float* from = args.b + (int64_t(step(i).b) * args.heads + head) * tile + at;
#pragma unroll
    for (int n = 0; n < P::kCount; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        b[n][h] = *reinterpret_cast<const typename P::Piece*>(from + h * args.columns + n * 4 * P::kWidth);
  };
  const auto store_out = [&](int i) {
    const int row_out = step(i).out;
    if (row_out < 0) return;
    float* to = args.out + (int64_t(row_out) * args.heads + head) * tile + at;
#pragma unroll
    for (int n = 0; n < P::kCount; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        typename P::Piece piece;
#pragma unroll
        for (int k = 0; k < P::kWidth; ++k) piece.values[k] = x[P::element(n, h, k)];
        *reinterpret_cast<typename P::Piece*>(to + h * args.columns + n * 4 * P::kWidth) = piece;
      }
  };

  const uint32_t high = smem_addr(&s.high), low = smem_addr(&s.low);
  RingState<kMapStages> map;
  RingState<1> written, read;
  load_b(0);
  for (int i = 0; i < count; ++i) {
    if (s.multiplies[i]) {
      MapFragments a;
      s.maps_ring.wait_full(map);
      load_map(a, s.maps[map.stage], warp, lane);
      s.maps_ring.signal_empty(map, lane);
      map.advance();
      store_out(i - 1);  // what other warps still write of the state is waited for meanwhile
      s.state_ring.wait_full(read);
      multiply<kColumns>(x, a, high, low);
      s.state_ring.signal_empty(read, lane);
      read.advance();
    } else {
      if (i > 0) store_out(i - 1);
#pragma unroll
      for (int j = 0; j < kColumns / 2; ++j) x[j] = 0.f;
    }
#pragma unroll
    for (int n = 0; n < P::kCount; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int k = 0; k < P::kWidth; ++k) x[P::element(n, h, k)] += b[n][h].values[k];
    if (i + 1 == count) break;
    if (s.multiplies[i + 1]) {
      s.state_ring.wait_empty(written);
      store_state<kColumns>(high, x, warp, lane);
      fence_proxy_async();
      warp_arrive(s.state_ring.full[0], lane);
      written.advance();
    }
    load_b(i + 1);  // behind the fence, which waits for what was loaded before it
  }
  store_out(count - 1);
}

}  // namespace cake::state_chain
