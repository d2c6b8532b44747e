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

// Multiplies column c of an accumulator by sign * factor[c].
template <int kElements>
__device__ __forceinline__ void scale_columns(float (&x)[kElements], const float* factor, int lane, float sign = 1.f) {
#pragma unroll
  for (int c = 0; c < kElements / 4; ++c) {
    const float2 f = *reinterpret_cast<const float2*>(factor + 8 * c + 2 * (lane & 3));
#pragma unroll
    for (int h = 0; h < 2; ++h) x[4 * c + 2 * h] *= sign * f.x, x[4 * c + 2 * h + 1] *= sign * f.y;
  }
}

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

// An accumulator as a sum of two fragments: what bf16 leaves of it is rounded to bf16 again.
template <int kSteps>
__device__ __forceinline__ void to_two_frags(uint32_t (&high)[kSteps][4], uint32_t (&low)[kSteps][4],
                                             const float (&acc)[kSteps * 8]) {
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float x = acc[acc_index(s, j)], y = acc[acc_index(s, j) + 1];
      high[s][j] = pack_bf16(x, y);
      low[s][j] = pack_bf16(x - bf16_lo(high[s][j]), y - bf16_hi(high[s][j]));
    }
}

// Address that this lane gives to ldmatrix / stmatrix for step s of a row-major operand: rows of the tile are the
// operand's rows, `row0` its first row for this warp. Tiles are aligned, so a step within a panel is one xor away from
// the first: nothing but that first address is worth a register.
template <int kRows>
__device__ __forceinline__ uint32_t frag_address(uint32_t tile, int row0, int s, int lane) {
  const uint32_t first = tile + group_offset<kRows>(row0 + (lane & 7) + 8 * ((lane >> 3) & 1), lane >> 4);
  return (first ^ ((s & 3) << 5)) + (s >> 2) * (kRows * kPanelRowBytes);
}

// The same for an operand whose rows are the tile's columns (ldmatrix_trans / stmatrix_trans): `column0` is the
// operand's first row for this warp, step s covers the tile's rows 16 s .. 16 s + 15.
template <int kRows>
__device__ __forceinline__ uint32_t frag_address_trans(uint32_t tile, int column0, int s, int lane) {
  return tile + group_offset<kRows>((lane & 7) + 8 * (lane >> 4), (column0 >> 3) + ((lane >> 3) & 1)) +
         s * (16 * kPanelRowBytes);
}

// Sum over the four lanes that share a row; every lane gets it.
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  x += __shfl_xor_sync(0xffffffffu, x, 2);
  return x;
}

// Sum over the warp; every lane gets it.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int d = 16; d >= 1; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
  return x;
}

// All of a token tile's rows of this warp.
__device__ __forceinline__ void load_frags(uint32_t (&f)[8][4], uint32_t tile, int row0, int lane) {
#pragma unroll
  for (int s = 0; s < 8; ++s) ldmatrix(f[s], frag_address<kChunk>(tile, row0, s, lane));
}

// Row dots of a 64 x 128 accumulator with a fragment: dot[h] for row row0 + lane / 4 + 8 h.
__device__ __forceinline__ void row_dots(float (&dot)[2], const float (&acc)[64], const uint32_t (&f)[8][4]) {
  float sum[2][2] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int n = acc_index(i, j);
      sum[j & 1][0] = fmaf(acc[n], bf16_lo(f[i][j]), sum[j & 1][0]);
      sum[j & 1][1] = fmaf(acc[n + 1], bf16_hi(f[i][j]), sum[j & 1][1]);
    }
  dot[0] = row_sum(sum[0][0] + sum[0][1]);
  dot[1] = row_sum(sum[1][0] + sum[1][1]);
}

// Row dots of a 64 x 128 accumulator with a token tile: dot[h] for row row0 + lane / 4 + 8 h.
__device__ __forceinline__ void row_dots(float (&dot)[2], const float (&acc)[64], uint32_t tile, int row0, int lane) {
  float sum[2][2] = {};
#pragma unroll
  for (int first = 0; first < 8; first += 4) {  // four loads under way at a time
    uint32_t x[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) ldmatrix(x[i], frag_address<kChunk>(tile, row0, first + i, lane));
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int n = acc_index(first + i, j);
        sum[j & 1][0] = fmaf(acc[n], bf16_lo(x[i][j]), sum[j & 1][0]);
        sum[j & 1][1] = fmaf(acc[n + 1], bf16_hi(x[i][j]), sum[j & 1][1]);
      }
  }
  dot[0] = row_sum(sum[0][0] + sum[0][1]);
  dot[1] = row_sum(sum[1][0] + sum[1][1]);
}

// The rows of a tile as a fragment, row lane / 4 + 8 h multiplied by scale[h].
template <int kSteps>
__device__ __forceinline__ void load_scaled(uint32_t (&f)[kSteps][4], uint32_t tile, int row0, const float (&scale)[2],
                                            int lane) {
#pragma unroll
  for (int first = 0; first < kSteps; first += 4) {  // four loads under way at a time
#pragma unroll
    for (int s = first; s < first + 4; ++s) ldmatrix(f[s], frag_address<kChunk>(tile, row0, s, lane));
#pragma unroll
    for (int s = first; s < first + 4; ++s)
#pragma unroll
      for (int j = 0; j < 4; ++j) f[s][j] = pack_bf16(scale[j & 1] * bf16_lo(f[s][j]), scale[j & 1] * bf16_hi(f[s][j]));
  }
}

}  // namespace cake
