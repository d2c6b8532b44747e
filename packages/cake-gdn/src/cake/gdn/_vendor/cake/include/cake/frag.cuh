// Register fragments: the bf16 A operand of wgmma, and its traffic with accumulators and tiles.
//
// Frag of a 64 x 16 * n operand is uint32_t[n][4]; register j of step s holds the pair at
//   row 16 * warp + lane / 4 + 8 * (j & 1),  columns 16 * s + 2 * (lane % 4) + 8 * (j >> 1) and the next.
// That is the accumulator's own layout in pairs, so an accumulator becomes an operand without a shuffle.
#pragma once

#include "wgmma.cuh"

namespace cake {

// Index in the accumulator of the first element of register j of step s.
__host__ __device__ constexpr int acc_index(int s, int j) { return 8 * s + 4 * (j >> 1) + 2 * (j & 1); }

// Column of accumulator element i, and of the pair (s, j).
__device__ __forceinline__ int acc_column(int i, int lane) { return 8 * (i >> 2) + 2 * (lane & 3) + (i & 1); }

template <int kSteps>
__device__ __forceinline__ void to_frag(uint32_t (&f)[kSteps][4], const float (&acc)[kSteps * 8]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int j = 0; j < 4; ++j) f[s][j] = pack_bf16(acc[acc_index(s, j)], acc[acc_index(s, j) + 1]);
}

// The same with column factors: scale[c] multiplies column c (64 of them, in shared memory).
template <int kSteps>
__device__ __forceinline__ void to_frag_scaled(uint32_t (&f)[kSteps][4], const float (&acc)[kSteps * 8],
                                               const float* scale, int lane) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 c = *reinterpret_cast<const float2*>(scale + 16 * s + 8 * h + 2 * (lane & 3));
#pragma unroll
      for (int j = 2 * h; j < 2 * h + 2; ++j)
        f[s][j] = pack_bf16(acc[acc_index(s, j)] * c.x, acc[acc_index(s, j) + 1] * c.y);
    }
}

// Address that this lane gives to ldmatrix / stmatrix for step s of a row-major operand: rows of the tile are the
// operand's rows, `row0` its first row for this warp.
template <int kRows>
__device__ __forceinline__ uint32_t frag_address(uint32_t tile, int row0, int s, int lane) {
  return tile + group_offset<kRows>(row0 + (lane & 7) + 8 * ((lane >> 3) & 1), 2 * s + (lane >> 4));
}

// The same for an operand whose rows are the tile's columns (ldmatrix_trans / stmatrix_trans): `column0` is the
// operand's first row for this warp, step s covers the tile's rows 16 s .. 16 s + 15.
template <int kRows>
__device__ __forceinline__ uint32_t frag_address_trans(uint32_t tile, int column0, int s, int lane) {
  return tile + group_offset<kRows>(16 * s + (lane & 7) + 8 * (lane >> 4), (column0 >> 3) + ((lane >> 3) & 1));
}

// Sum over the four lanes that share a row; every lane gets it.
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  x += __shfl_xor_sync(0xffffffffu, x, 2);
  return x;
}

// Row dots of a 64 x 128 accumulator with a token tile: dot[h] for row row0 + lane / 4 + 8 h.
__device__ __forceinline__ void row_dots(float (&dot)[2], const float (&acc)[64], uint32_t tile, int row0, int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = row0 + (lane >> 2) + 8 * h;
    float sum = 0.f;
#pragma unroll
    for (int b = 0; b < 16; ++b) {
      const uint32_t x = ld_shared_4(tile + pair_offset<kChunk>(row, 8 * b + 2 * (lane & 3)));
      sum = fmaf(acc[4 * b + 2 * h], bf16_lo(x), sum);
      sum = fmaf(acc[4 * b + 2 * h + 1], bf16_hi(x), sum);
    }
    dot[h] = row_sum(sum);
  }
}

}  // namespace cake
