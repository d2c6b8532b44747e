// kda_reduce: sums of kda_out's rows [chunks][HV][129] over chunks, in an order that depends on nothing: 32 strided sums of a
// column, then a tree over them.
#pragma once

#include "kda_out_shared.cuh"

namespace cake::kda {

constexpr int kReduceColumns = 32, kReduceRows = 32, kReduceThreads = kReduceColumns * kReduceRows;
constexpr int kReduceBlocks = (kPartial + kReduceColumns - 1) / kReduceColumns;

// Block (v head, columns). A warp reads 32 columns of a row.
static __global__ void __launch_bounds__(kReduceThreads)
    reduce_kernel(const float* partials, int chunks, float* a_log, float* bias) {
  __shared__ float sums[kReduceRows][kReduceColumns + 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, v_head = blockIdx.x;
  const int column = blockIdx.y * kReduceColumns + lane;
  float sum = 0.f;
  if (column < kPartial) {
#pragma unroll 4
    for (int i = warp; i < chunks; i += kReduceRows)
      sum += partials[(int64_t(i) * gridDim.x + v_head) * kPartial + column];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  // A warp to a column.
  sum = warp_sum(sums[lane][warp]);
  const int mine = blockIdx.y * kReduceColumns + warp;
  if (lane != 0 || mine >= kPartial) return;
  if (mine == 0) a_log[v_head] = sum;
  else bias[v_head * kHeadDim + mine - 1] = sum;
}

}  // namespace cake::kda
