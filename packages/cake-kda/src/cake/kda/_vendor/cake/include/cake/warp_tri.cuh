// Inverse of a 64 x 64 unit lower triangular matrix by one warp, in registers, with bf16 tensor cores at about fp32's accuracy.
//
// X = (I - N)^-1: the diagonal 8 x 8 blocks by forward substitution in fp32, a column at a time, then blocks of 16, 32 and 64
// from their halves, X_21 = X_22 (N_21 X_11). Products are made of operands that are split into two bf16, which keeps about
// 16 bits, with fp32's range: nothing is asked of the keys.
//
// An accumulator holds of an 8 x 8 block in each lane the pair at row lane / 4, columns 2 (lane % 4) and the next. Packed, that
// is what mma takes for the same rows of A, and for the rows of B^T. So A B^T needs no shuffle; what has to change sides is
// made a second time, transposed: with P^T = X_11^T N_21^T, X_21 = X_22 (P^T)^T and X_21^T = P^T X_22^T.
#pragma once

#include "frag.cuh"

namespace cake {

// An 8 x 8 block, as a sum of two bf16. `hi` is rounded to nearest: it is the block in bf16.
struct Split {
  uint32_t hi = 0, lo = 0;

  __device__ __forceinline__ Split() {}
  __device__ __forceinline__ Split(float x, float y) : hi(pack_bf16(x, y)) {
    lo = pack_bf16(x - bf16_lo(hi), y - bf16_hi(hi));
  }
};

// A 16 x 16 block, by halves of rows and of columns.
struct SplitBlock {
  Split m[2][2];

  __device__ __forceinline__ SplitBlock() {}
  // Of accumulators of its two halves of columns.
  __device__ __forceinline__ explicit SplitBlock(const float (&d)[2][4]) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int c = 0; c < 2; ++c) m[r][c] = Split(d[c][2 * r], d[c][2 * r + 1]);
  }
  __device__ __forceinline__ SplitBlock(Split a, Split b, Split c, Split d) : m{{a, b}, {c, d}} {}
};

// D[16][8] += A[16][16] B[8][16]^T.
__device__ __forceinline__ void mma_split(float (&d)[4], const SplitBlock& a, const Split& b0, const Split& b1) {
  const uint32_t hi[4] = {a.m[0][0].hi, a.m[1][0].hi, a.m[0][1].hi, a.m[1][1].hi};
  const uint32_t lo[4] = {a.m[0][0].lo, a.m[1][0].lo, a.m[0][1].lo, a.m[1][1].lo};
  mma_bf16(d, lo, b0.hi, b1.hi);
  mma_bf16(d, hi, b0.lo, b1.lo);
  mma_bf16(d, hi, b0.hi, b1.hi);
}

// D += A B^T, all 16 x 16.
__device__ __forceinline__ void mma_split(float (&d)[2][4], const SplitBlock& a, const SplitBlock& b) {
#pragma unroll
  for (int n = 0; n < 2; ++n) mma_split(d[n], a, b.m[n][0], b.m[n][1]);
}

// To a tile of 64 columns, in bf16.
__device__ __forceinline__ void store_block(uint32_t tile, int row, int column, const SplitBlock& x, int lane) {
  const uint32_t words[4] = {x.m[0][0].hi, x.m[1][0].hi, x.m[0][1].hi, x.m[1][1].hi};
  stmatrix(frag_address<kChunk>(tile, 16 * row, column, lane), words);
}
// From its transpose.
__device__ __forceinline__ void store_block_trans(uint32_t tile, int row, int column, const SplitBlock& x, int lane) {
  const uint32_t words[4] = {x.m[0][0].hi, x.m[0][1].hi, x.m[1][0].hi, x.m[1][1].hi};
  stmatrix_trans(frag_address<kChunk>(tile, 16 * row, column, lane), words);
}

// Where the diagonal 8 x 8 blocks change hands.
struct WarpTriShared {
  static constexpr int kStride = 72;  // floats between blocks: a column of four of them is free of conflicts
  alignas(16) float blocks[8 * kStride];
};

// Of the diagonal blocks N, rows of 8, X^T in their place.
__device__ __forceinline__ void invert_blocks_of_8(WarpTriShared& s, int lane) {
  __syncwarp();
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // lane: a column of one of four blocks
    const int block = (4 * half + (lane >> 3)) * WarpTriShared::kStride, column = lane & 7;
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float n[8];
#pragma unroll
      for (int j = 0; j < i; j += 4) {
        const float4 four = *reinterpret_cast<const float4*>(s.blocks + block + 8 * i + j);
        n[j] = four.x, n[j + 1] = four.y, n[j + 2] = four.z, n[j + 3] = four.w;
      }
      float sum = i == column ? 1.f : 0.f;
#pragma unroll
      for (int j = 0; j < i; ++j) sum = fmaf(n[j], x[j], sum);
      x[i] = i < column ? 0.f : sum;
    }
    __syncwarp();
    float4* out = reinterpret_cast<float4*>(s.blocks + block + 8 * column);
    out[0] = make_float4(x[0], x[1], x[2], x[3]), out[1] = make_float4(x[4], x[5], x[6], x[7]);
  }
  __syncwarp();
}

// X in bf16 to the 64 x 64 tile `tile`, of which the blocks of 16 above the diagonal aren't written. `lower(i, c, x)` gives
// rows 16 i to 16 i + 15, columns 8 c to 8 c + 7 of N as an accumulator; on N's diagonal and above it must be 0.
template <typename Lower>
__device__ __forceinline__ void invert_unit_lower(WarpTriShared& s, uint32_t tile, int lane, Lower lower) {
  const int row = lane >> 2, pair = 2 * (lane & 3);
  Split below[4];  // the lower left quarters of the diagonal blocks of 16
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float a[4], b[4];
    lower(i, 2 * i, a);
    lower(i, 2 * i + 1, b);
    *reinterpret_cast<float2*>(s.blocks + 2 * i * WarpTriShared::kStride + 8 * row + pair) = make_float2(a[0], a[1]);
    *reinterpret_cast<float2*>(s.blocks + (2 * i + 1) * WarpTriShared::kStride + 8 * row + pair) =
        make_float2(b[2], b[3]);
    below[i] = Split(a[2], a[3]);
  }
  invert_blocks_of_8(s, lane);
  Split x8[8], x8_trans[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float* block = s.blocks + i * WarpTriShared::kStride;
    const float2 trans = *reinterpret_cast<const float2*>(block + 8 * row + pair);
    x8_trans[i] = Split(trans.x, trans.y);
    x8[i] = Split(block[8 * pair + row], block[8 * (pair + 1) + row]);
  }

  // 8 -> 16, two blocks to a product, in its two halves of rows and of the inner index.
  SplitBlock x[4], x_trans[4];
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const int a0 = 2 * i, b0 = a0 + 1, a1 = a0 + 2, b1 = a0 + 3;
    float p[4] = {}, sum[4] = {}, sum_trans[4] = {};
    mma_split(p, SplitBlock(x8_trans[a0], Split(), Split(), x8_trans[a1]), below[i], below[i + 1]);
    const Split p0(p[0], p[1]), p1(p[2], p[3]);
    mma_split(sum, SplitBlock(x8[b0], Split(), Split(), x8[b1]), p0, p1);
    mma_split(sum_trans, SplitBlock(p0, Split(), Split(), p1), x8[b0], x8[b1]);
    x[i] = SplitBlock(x8[a0], Split(), Split(sum[0], sum[1]), x8[b0]);
    x[i + 1] = SplitBlock(x8[a1], Split(), Split(sum[2], sum[3]), x8[b1]);
    x_trans[i] = SplitBlock(x8_trans[a0], Split(sum_trans[0], sum_trans[1]), Split(), x8_trans[b0]);
    x_trans[i + 1] = SplitBlock(x8_trans[a1], Split(sum_trans[2], sum_trans[3]), Split(), x8_trans[b1]);
  }
  store_block_trans(tile, 0, 0, x_trans[0], lane);
#pragma unroll
  for (int i = 1; i < 4; ++i) store_block(tile, i, i, x[i], lane);

  const auto lower_block = [&](int i, int j) {
    float n[2][4];
    lower(i, 2 * j, n[0]);
    lower(i, 2 * j + 1, n[1]);
    return SplitBlock(n);
  };
  // 16 -> 32: of the first half the transpose is needed, of the second the block itself.
  SplitBlock x10_trans, x32;
  {
    float p[2][4] = {}, sum[2][4] = {};
    mma_split(p, x_trans[0], lower_block(1, 0));
    mma_split(sum, SplitBlock(p), x[1]);
    x10_trans = SplitBlock(sum);
  }
  {
    float p[2][4] = {}, sum[2][4] = {};
    mma_split(p, x_trans[2], lower_block(3, 2));
    mma_split(sum, x[3], SplitBlock(p));
    x32 = SplitBlock(sum);
  }
  store_block_trans(tile, 1, 0, x10_trans, lane);
  store_block(tile, 3, 2, x32, lane);

  // 32 -> 64: P_i = N_i X_11 of the two block rows i of N_21, and what each gives to the rows of X_21.
  float last[2][2][4] = {};  // the third block row, by columns
#pragma unroll
  for (int i = 2; i < 4; ++i) {
    float p[2][2][4] = {};  // P_i^T, by rows
    {
      const SplitBlock n = lower_block(i, 1);
      mma_split(p[0], x10_trans, n);
      mma_split(p[1], x_trans[1], n);
    }
    mma_split(p[0], x_trans[0], lower_block(i, 0));
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const SplitBlock pj(p[j]);
      mma_split(last[j], i == 2 ? x32 : x[3], pj);
      if (i == 2) {
        float sum[2][4] = {};
        mma_split(sum, x[2], pj);
        store_block(tile, 2, j, SplitBlock(sum), lane);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) store_block(tile, 3, j, SplitBlock(last[j]), lane);
}

}  // namespace cake
