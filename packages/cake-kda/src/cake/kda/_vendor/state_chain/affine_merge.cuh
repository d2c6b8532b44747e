// affine_merge: states along chains of affine maps, fp32. For each chain, head and column of the state, step by step,
//
//   S = M S + B      (M^T if transposed)      S = B where M counts as 0, as in every first step
//
// and S goes to a row of the result where a step names one. Columns don't meet, so a CTA takes a block of them. Every
// element is the sum ((q0 + q1) + (q2 + q3)) + B, with q a sum over a quarter of k in ascending order, one fma each from
// zero: the same in every build, whatever its block.
//
// Chains come in a table, or are the segments of the sequences of a call that was cut on the device (`runs` in seq.cuh), whose
// map s takes the state that enters segment s to the one that enters s + 1 (or back, transposed).
//
// Shared memory: two buffers of M (the next step's is on its way while this one's is used), S, and sums on their way from
// thread to thread. Rows of M are padded, so that threads on different rows read different banks. A thread should read
// little from there for each fma: its tile is as square as the block allows, and tiles that are too few for 256 threads
// are shared by up to four of them, each with its quarters of k.
#pragma once

#include "cake/ptx.cuh"

namespace cake::state_chain {

constexpr int kState = 128;  // rows of S
constexpr int kMergeThreads = 256;
constexpr int kPitch = kState + 4;  // floats from row to row of M
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

// How a build cuts a block of columns over its threads: tiles of kHigh rows, kThreadRows apart, and kWide columns, four by
// four.
template <int kColumns>
struct Tiling {
  static constexpr int kHigh = kColumns <= 16 ? 4 : 8, kWide = kColumns == 8 ? 4 : 8;
  static constexpr int kAcross = kColumns / kWide;  // threads along a row
  static constexpr int kThreadRows = kState / kHigh;
  static constexpr int kTileThreads = kAcross * kThreadRows;
  static constexpr int kParts = kMergeThreads / kTileThreads;  // threads that share a tile
  static constexpr int kQuarters = 4 / kParts;  // of k, of one thread
  static_assert(kParts >= 2 && kQuarters >= 1, "a tile has two or four threads");
};

template <int kColumns>
struct MergeShared {
  alignas(16) float m[2][kState][kPitch];
  alignas(16) float s[kState][kColumns];
  alignas(16) float sums[Tiling<kColumns>::kParts - 1][kState][kColumns];  // of the second and later threads of a tile
  uint8_t multiplies[kMostSteps];  // of the chain's steps
};
static_assert(sizeof(MergeShared<64>) <= 232448 && sizeof(MergeShared<32>) <= 232448, "an SM gives a CTA 227 KB");

// The sum over a quarter of k of a thread's tile.
template <int kColumns, bool kTransposed>
__device__ __forceinline__ void quarter_sum(float (&acc)[Tiling<kColumns>::kHigh][Tiling<kColumns>::kWide],
                                            const float (&m)[kState][kPitch], const float (&in)[kState][kColumns],
                                            int quarter, int row0, int column0) {
  using T = Tiling<kColumns>;
#pragma unroll
  for (int h = 0; h < T::kHigh; ++h)
#pragma unroll
    for (int w = 0; w < T::kWide; ++w) acc[h][w] = 0.f;
#pragma unroll(T::kHigh* T::kWide > 32 ? 1 : 2)
  for (int i = 0; i < kState / 4; i += 4) {
    const int k = quarter * (kState / 4) + i;
    float x[4][T::kWide], a[T::kHigh][4];
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int w = 0; w < T::kWide; w += 4) {
        const float4 v = *reinterpret_cast<const float4*>(&in[k + j][column0 + w * T::kAcross]);
        x[j][w] = v.x, x[j][w + 1] = v.y, x[j][w + 2] = v.z, x[j][w + 3] = v.w;
      }
#pragma unroll
    for (int h = 0; h < T::kHigh; ++h) {
      const int row = row0 + h * T::kThreadRows;
      if constexpr (kTransposed) {
#pragma unroll
        for (int j = 0; j < 4; ++j) a[h][j] = m[k + j][row];
      } else {
        const float4 v = *reinterpret_cast<const float4*>(&m[row][k]);
        a[h][0] = v.x, a[h][1] = v.y, a[h][2] = v.z, a[h][3] = v.w;
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int h = 0; h < T::kHigh; ++h)
#pragma unroll
        for (int w = 0; w < T::kWide; ++w) acc[h][w] = fmaf(a[h][j], x[j][w], acc[h][w]);
  }
}

template <int kColumns, bool kTransposed>
static __global__ void __launch_bounds__(kMergeThreads, 1) merge_kernel(const __grid_constant__ MergeArgs args) {
  using T = Tiling<kColumns>;
  extern __shared__ __align__(16) uint8_t raw[];
  MergeShared<kColumns>& s = *reinterpret_cast<MergeShared<kColumns>*>(raw);

  const int thread = threadIdx.x;
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
  // A thread's tile, and which of the tile's threads it is; column `w` of the tile is column + w % 4 + w / 4 * 4 * kAcross.
  const int part = thread / T::kTileThreads, tile = thread % T::kTileThreads;
  const int column = (tile % T::kAcross) * 4, row0 = tile / T::kAcross;

  for (int i = thread; i < count; i += kMergeThreads) {
    const int m = step(i).m;
    s.multiplies[i] = i > 0 && m >= 0 && (!args.live || args.live[int64_t(m) * args.heads + head] != 0);
  }
  __syncthreads();

  // A group of copies for each step, of nothing where M counts as 0.
  const auto load_m = [&](int i) {
    if (i < count && s.multiplies[i]) {
      const float* m = args.m + (int64_t(step(i).m) * args.heads + head) * kState * kState;
      constexpr int kGroups = kState / 4;  // of 16 bytes in a row
#pragma unroll 4
      for (int j = thread; j < kState * kGroups; j += kMergeThreads)
        cp_async_16(smem_addr(&s.m[i & 1][j / kGroups][j % kGroups * 4]), m + j * 4, true);
    }
    cp_async_commit();
  };
  float4 b[T::kHigh][T::kWide / 4];
  const auto load_b = [&](int i) {
    const int64_t at = (int64_t(step(i).b) * args.heads + head) * kState;
#pragma unroll
    for (int h = 0; h < T::kHigh; ++h)
#pragma unroll
      for (int w = 0; w < T::kWide; w += 4)
        b[h][w / 4] = __ldg(reinterpret_cast<const float4*>(args.b + (at + row0 + h * T::kThreadRows) * args.columns +
                                                            column0 + column + w * T::kAcross));
  };

  load_m(0);
  for (int i = 0; i < count; ++i) {
    // Buffer (i + 1) & 1 was read in step i - 1, before the barriers at its end.
    load_m(i + 1);
    // Registers for B and for two quarters' sums are too many: then B comes after them.
    constexpr bool kEarly = T::kQuarters == 1;
    if (kEarly && part == 0) load_b(i);
    float acc[T::kHigh][T::kWide] = {};
    if (s.multiplies[i]) {
      const int buffer = i & 1;
      cp_async_wait<1>();  // this thread's part of M; the next step's is on its way
      __syncthreads();
      quarter_sum<kColumns, kTransposed>(acc, s.m[buffer], s.s, part * T::kQuarters, row0, column);
      if constexpr (T::kQuarters == 2) {
        float second[T::kHigh][T::kWide];
        quarter_sum<kColumns, kTransposed>(second, s.m[buffer], s.s, part * 2 + 1, row0, column);
#pragma unroll
        for (int h = 0; h < T::kHigh; ++h)
#pragma unroll
          for (int w = 0; w < T::kWide; ++w) acc[h][w] += second[h][w];
      }
      if (part > 0) {
#pragma unroll
        for (int h = 0; h < T::kHigh; ++h)
#pragma unroll
          for (int w = 0; w < T::kWide; w += 4)
            *reinterpret_cast<float4*>(&s.sums[part - 1][row0 + h * T::kThreadRows][column + w * T::kAcross]) =
                make_float4(acc[h][w], acc[h][w + 1], acc[h][w + 2], acc[h][w + 3]);
      }
    }
    __syncthreads();
    if (part == 0) {
      if (!kEarly) load_b(i);
      const int row_out = step(i).out;
#pragma unroll
      for (int h = 0; h < T::kHigh; ++h) {
        const int row = row0 + h * T::kThreadRows;
#pragma unroll
        for (int w = 0; w < T::kWide; w += 4) {
          const int at = column + w * T::kAcross;
          float4 v = make_float4(acc[h][w], acc[h][w + 1], acc[h][w + 2], acc[h][w + 3]);
          if (s.multiplies[i]) {
            const float4 q1 = *reinterpret_cast<const float4*>(&s.sums[0][row][at]);
            v = make_float4(v.x + q1.x, v.y + q1.y, v.z + q1.z, v.w + q1.w);
            if constexpr (T::kParts == 4) {
              const float4 q2 = *reinterpret_cast<const float4*>(&s.sums[1][row][at]);
              const float4 q3 = *reinterpret_cast<const float4*>(&s.sums[2][row][at]);
              v = make_float4(v.x + (q2.x + q3.x), v.y + (q2.y + q3.y), v.z + (q2.z + q3.z), v.w + (q2.w + q3.w));
            }
          }
          const float4 d = b[h][w / 4];
          v = make_float4(v.x + d.x, v.y + d.y, v.z + d.z, v.w + d.w);
          *reinterpret_cast<float4*>(&s.s[row][at]) = v;
          if (row_out >= 0) {
            const int64_t to = ((int64_t(row_out) * args.heads + head) * kState + row) * args.columns + column0 + at;
            *reinterpret_cast<float4*>(args.out + to) = v;
          }
        }
      }
    }
    __syncthreads();
  }
}

}  // namespace cake::state_chain
