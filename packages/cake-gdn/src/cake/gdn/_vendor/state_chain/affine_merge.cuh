// affine_merge: states along chains of affine maps. For each chain, head and
// column of the state, step by step,
//
//   S = M S + B      (M^T if transposed)      S = B where M counts as 0, as in
//   every first step
//
// and S goes to a row of the result where a step names one. Columns don't meet,
// so a CTA takes a block of them.
//
// S, B and the sums are fp32. The product is made on tensor cores: M and S are
// sums of two bf16, high + low, 16 bits together, and the product is low high +
// high low + high high, each summed over all of k, one after the other; B is
// added last. So an element is the same sums in the same order whatever the
// block, and builds differ in no bit.
//
// Two warpgroups have 64 rows of S each: M in registers as operand A, S^T in
// shared memory as operand B, written there again after every step. One warp
// more loads maps, up to two steps ahead.
//
// Chains come in a table, or are the segments of the sequences of a call that
// was cut on the device (`runs` in seq.cuh), whose map s takes the state that
// enters segment s to the one that enters s + 1 (or back, transposed).
#pragma once

#include "cake/frag.cuh"
#include "cake/pipe.cuh"

namespace cake::state_chain {

constexpr int kState = 128; // rows of S
constexpr int kStateWarps = 8, kMergeThreads = 32 * (kStateWarps + 1);
constexpr int kParts = 2; // bf16 of a number
constexpr int kMapStages = 2;
constexpr int kMostSteps = 640,
              kMostChains = 128; // of a launch: what its parameters hold

struct Step {
  int b, m, out; // tiles of B and M, row of the result; -1: M = 0, and no row
};

struct MergeArgs {
  const float* b;  // [tiles, heads, 128, columns]
  const float* m;  // [tiles, heads, 128, 128]
  const int* live; // [tiles of m, heads] or null: 0 counts as M = 0
  float* out;      // [rows, heads, 128, columns]
  const int* runs; // null: the table below; else [chains + 1][2]
  int heads, columns;
  int first[kMostChains + 1]; // steps of chain i: first[i] .. first[i + 1] - 1
  Step steps[kMostSteps];
};

// M in shared memory, fp32, and the order of S's 128 rows that goes with it.
//
// Rows of M lie four by four with a gap behind each four, so that a bulk copy
// takes 2 KB and yet a warp's lanes, which differ in row and column, read from
// different banks. That takes rows of a warp that are not neighbours: in M's
// rows and in S, which is along M's columns, position 16 w + 8 h + i (warp w, h
// of 2, i of 8) stands for
//
//   row 32 (w / 2) + 4 i + 2 (w % 2) + h,      transposed for 16 w + 2 i + h.
//
// A lane has i = lane / 4 of its warp's rows, and of each 16 columns positions
// 2 q and 2 q + 1 of both h, q = lane % 4.
template <bool kTransposed>
struct MapTile {
  static constexpr int kBlocks = kState / 4, kBlockFloats = 4 * kState, kPitch = kBlockFloats + (kTransposed ? 8 : 4);
  float values[kBlocks * kPitch];

  // The first of a lane's rows; the other one, of h = 1, is the next.
  __device__ static int row(int warp, int lane) {
    const int i = lane >> 2;
    return kTransposed ? 16 * warp + 2 * i : 32 * (warp >> 1) + 4 * i + 2 * (warp & 1);
  }
  __device__ const float* at(int row, int column) const {
    return values + (row >> 2) * kPitch + (row & 3) * kState + column;
  }
};

template <int kColumns, bool kTransposed>
struct MergeShared {
  alignas(1024) uint8_t state[kParts][kColumns * kState * 2]; // tiles [columns][128 positions]
  alignas(16) MapTile<kTransposed> maps[kMapStages];
  Ring<kMapStages> maps_ring;
  Ring<1> state_ring;
  uint8_t multiplies[kMostSteps]; // of the chain's steps
};
static_assert(sizeof(MergeShared<64, false>) <= 232448 && sizeof(MergeShared<64, true>) <= 232448,
              "an SM gives a CTA 227 KB");

// Each of x and y as a sum of kParts bf16, the largest first.
__device__ __forceinline__ void split(uint32_t (&part)[kParts], float x, float y) {
#pragma unroll
  for (int p = 0; p < kParts; ++p) {
    part[p] = pack_bf16(x, y);
    x -= bf16_lo(part[p]), y -= bf16_hi(part[p]);
  }
}

// A warp's 16 rows of M as fragments of operand A.
template <bool kTransposed>
__device__ __forceinline__ void load_map(uint32_t (&a)[kParts][8][4], const MapTile<kTransposed>& m, int warp,
                                         int lane) {
  const int row = m.row(warp, lane), q = lane & 3;
  const auto put = [&](int s, int j, float x, float y) {
    uint32_t part[kParts];
    split(part, x, y);
#pragma unroll
    for (int p = 0; p < kParts; ++p) a[p][s][j] = part[p];
  };
  if constexpr (kTransposed) {
    const float* from = m.at(4 * q, row);
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      float2 v[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) v[k] = *reinterpret_cast<const float2*>(from + 4 * s * m.kPitch + k * kState);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        put(s, 2 * h, v[h].x, v[h + 2].x);
        put(s, 2 * h + 1, v[h].y, v[h + 2].y);
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
        put(s, h, x.x, y.x);
        put(s, h + 2, x.y, y.y);
        put(s + 1, h, x.z, y.z);
        put(s + 1, h + 2, x.w, y.w);
      }
  }
}

// A warp's rows of S into the state's tiles.
template <int kColumns>
__device__ __forceinline__ void store_state(const uint8_t (&state)[kParts][kColumns * kState * 2],
                                            const float (&s)[kColumns / 2], int warp, int lane) {
  // Of four matrices of 8 columns and 8 positions a lane has a row of one: both
  // h of two parts.
  const uint32_t at = smem_addr(state) + group_offset<kColumns>(lane & 7, 2 * warp + ((lane >> 3) & 1));
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    uint32_t part[2][kParts];
#pragma unroll
    for (int h = 0; h < 2; ++h) split(part[h], s[4 * j + 2 * h], s[4 * j + 2 * h + 1]);
    stmatrix_trans(at + (lane >> 4) * sizeof(state[0]) + j * kAtomBytes,
                   {part[0][0], part[1][0], part[0][1], part[1][1]});
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

  if (warp == kStateWarps) {
    RingState<kMapStages> to;
    for (int i = 1; i < count; ++i) {
      if (!s.multiplies[i]) continue;
      s.maps_ring.wait_empty(to);
      const uint32_t bar = smem_addr(s.maps_ring.full + to.stage);
      if (lane == 0) mbar_arrive_expect_tx(bar, kState * kState * sizeof(float));
      __syncwarp();
      using Tile = MapTile<kTransposed>;
      const float* m = args.m + (int64_t(step(i).m) * args.heads + head) * kState * kState;
      bulk_load(smem_addr(s.maps[to.stage].values + lane * Tile::kPitch), m + lane * Tile::kBlockFloats,
                Tile::kBlockFloats * sizeof(float), bar);
      to.advance();
    }
    return;
  }

  const int row = MapTile<kTransposed>::row(warp, lane);
  const int at = row * args.columns + column0 + 2 * (lane & 3); // in a tile, of the lane's first element
  const int64_t tile = int64_t(kState) * args.columns;
  float2 b[kColumns / 8][2];
  const auto load_b = [&](int i) {
    const float* from = args.b + (int64_t(step(i).b) * args.heads + head) * tile + at;
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) b[j][h] = __ldg(reinterpret_cast<const float2*>(from + h * args.columns + 8 * j));
  };

  RingState<kMapStages> map;
  RingState<1> written, read;
  load_b(0);
  for (int i = 0; i < count; ++i) {
    float x[kColumns / 2];
    if (s.multiplies[i]) {
      uint32_t a[kParts][8][4];
      s.maps_ring.wait_full(map);
      load_map(a, s.maps[map.stage], warp, lane);
      s.maps_ring.signal_empty(map, lane);
      map.advance();
      s.state_ring.wait_full(read);
#pragma unroll
      for (int p = 0; p < kParts; ++p) pin(a[p]);
      wgmma_fence();
#pragma unroll
      for (int places = kParts - 1; places >= 0; --places)
#pragma unroll
        for (int p = 0; p <= places; ++p)
          gemm_rs<Major::K, kColumns, 8>(x, a[p], smem_addr(s.state[places - p]), places < kParts - 1 || p > 0);
      wgmma_commit();
      wgmma_wait<0>();
      pin(x);
      s.state_ring.signal_empty(read, lane);
      read.advance();
    } else {
#pragma unroll
      for (int j = 0; j < kColumns / 2; ++j) x[j] = 0.f;
    }
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) x[4 * j + 2 * h] += b[j][h].x, x[4 * j + 2 * h + 1] += b[j][h].y;
    const bool more = i + 1 < count;
    if (more) load_b(i + 1);
    if (more && s.multiplies[i + 1]) {
      s.state_ring.wait_empty(written);
      store_state<kColumns>(s.state, x, warp, lane);
      fence_proxy_async();
      warp_arrive(s.state_ring.full[0], lane);
      written.advance();
    }
    const int row_out = step(i).out;
    if (row_out >= 0) {
      float* to = args.out + (int64_t(row_out) * args.heads + head) * tile + at;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          *reinterpret_cast<float2*>(to + h * args.columns + 8 * j) =
              make_float2(x[4 * j + 2 * h], x[4 * j + 2 * h + 1]);
    }
  }
}

} // namespace cake::state_chain
