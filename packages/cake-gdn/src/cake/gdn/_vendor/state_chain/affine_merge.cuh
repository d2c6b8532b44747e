// affine_merge: states along chains of affine maps, fp32. For each chain, head and column of the state, step by step,
//
//   S = M S + B      (M^T if transposed)      S = B where M counts as 0, as in every first step
//
// and S goes to a row of the result where a step names one. Columns don't meet, so a CTA takes a block of them. Every element is
// a sum over k = 0..127 in this order, one fma each from zero, then B is added: the same in every build, whatever its block.
//
// Shared memory: two buffers of M (the next step's is on its way while this one's is used), two of S. Rows of M are padded, so
// that threads on different rows read different banks. 256 threads; a thread owns rows ty + i * kThreadRows and kWide columns.
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
  int heads, columns;
  int first[kMostChains + 1];  // steps of chain i: first[i] .. first[i + 1] - 1
  Step steps[kMostSteps];
};

template <int kColumns>
struct MergeShared {
  alignas(16) float m[2][kState][kPitch];
  alignas(16) float s[2][kState][kColumns];
  alignas(8) uint64_t landed[2];
  uint8_t multiplies[kMostSteps];  // of the chain's steps
};
static_assert(sizeof(MergeShared<64>) <= 232448, "an SM gives a CTA 227 KB");

// How a build cuts a block of columns over its threads.
template <int kColumns>
struct Tiling {
  static constexpr int kWide = kColumns == 64 ? 8 : 4;  // columns of a thread
  static constexpr int kAcross = kColumns / kWide;  // threads along a row
  static constexpr int kThreadRows = kMergeThreads / kAcross;
  static constexpr int kHigh = kState / kThreadRows;  // rows of a thread
  static_assert(kHigh >= 1 && kHigh * kThreadRows == kState, "threads cover the state once");
};

template <int kColumns, bool kTransposed>
static __global__ void __launch_bounds__(kMergeThreads, 1) merge_kernel(const __grid_constant__ MergeArgs args) {
  using T = Tiling<kColumns>;
  extern __shared__ __align__(16) uint8_t raw[];
  MergeShared<kColumns>& s = *reinterpret_cast<MergeShared<kColumns>*>(raw);

  const int thread = threadIdx.x;
  const int blocks = args.columns / kColumns;
  const int column0 = (blockIdx.x % blocks) * kColumns, head = blockIdx.x / blocks % args.heads;
  const int chain = blockIdx.x / blocks / args.heads;
  const int first = args.first[chain], count = args.first[chain + 1] - first;
  const int column = (thread % T::kAcross) * T::kWide, row0 = thread / T::kAcross;

  for (int i = thread; i < count; i += kMergeThreads) {
    const int m = args.steps[first + i].m;
    s.multiplies[i] = i > 0 && m >= 0 && (!args.live || args.live[int64_t(m) * args.heads + head] != 0);
  }
  if (thread == 0) {
    mbar_init(smem_addr(s.landed), 1);
    mbar_init(smem_addr(s.landed + 1), 1);
    mbar_init_fence();
  }
  __syncthreads();

  // Rows of M go to shared memory one by one, because of their padding.
  const auto load_m = [&](int i) {
    if (i >= count || !s.multiplies[i]) return;
    const int buffer = i & 1;
    const float* m = args.m + (int64_t(args.steps[first + i].m) * args.heads + head) * kState * kState;
    if (thread < 32) {
      if (thread == 0) mbar_arrive_expect_tx(smem_addr(s.landed + buffer), kState * kState * sizeof(float));
      __syncwarp();
      for (int row = thread; row < kState; row += 32)
        bulk_load(smem_addr(s.m[buffer][row]), m + row * kState, kState * sizeof(float), smem_addr(s.landed + buffer));
    }
  };
  float4 b[T::kHigh][T::kWide / 4];
  const auto load_b = [&](int i) {
    const int64_t tile = int64_t(args.steps[first + i].b) * args.heads + head;
#pragma unroll
    for (int h = 0; h < T::kHigh; ++h) {
      const float* row = args.b + (tile * kState + row0 + h * T::kThreadRows) * args.columns + column0 + column;
#pragma unroll
      for (int w = 0; w < T::kWide / 4; ++w) b[h][w] = __ldg(reinterpret_cast<const float4*>(row) + w);
    }
  };

  uint32_t parity = 0;  // a bit for each buffer
  load_m(0);
  load_b(0);
  for (int i = 0; i < count; ++i) {
    // Buffer (i + 1) & 1 was read in step i - 1, before the barrier at its end.
    load_m(i + 1);
    float acc[T::kHigh][T::kWide] = {};
    if (s.multiplies[i]) {
      const int buffer = i & 1;
      const float (&m)[kState][kPitch] = s.m[buffer];
      const float (&in)[kState][kColumns] = s.s[(i + 1) & 1];
      mbar_wait(smem_addr(s.landed + buffer), parity >> buffer & 1);
      parity ^= 1u << buffer;
#pragma unroll 2
      for (int k = 0; k < kState; k += 4) {
        float x[4][T::kWide], a[T::kHigh][4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int w = 0; w < T::kWide; w += 4) {
            const float4 v = *reinterpret_cast<const float4*>(&in[k + j][column + w]);
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
    const int row_out = args.steps[first + i].out;
#pragma unroll
    for (int h = 0; h < T::kHigh; ++h) {
      const int row = row0 + h * T::kThreadRows;
#pragma unroll
      for (int w = 0; w < T::kWide / 4; ++w) {
        const float4 v = make_float4(acc[h][4 * w] + b[h][w].x, acc[h][4 * w + 1] + b[h][w].y,
                                     acc[h][4 * w + 2] + b[h][w].z, acc[h][4 * w + 3] + b[h][w].w);
        *reinterpret_cast<float4*>(&s.s[i & 1][row][column + 4 * w]) = v;
        if (row_out >= 0) {
          const int64_t at = ((int64_t(row_out) * args.heads + head) * kState + row) * args.columns + column0 + column;
          *reinterpret_cast<float4*>(args.out + at + 4 * w) = v;
        }
      }
    }
    if (i + 1 < count) load_b(i + 1);
    __syncthreads();
  }
}

}  // namespace cake::state_chain
