// Inverse of a 64 x 64 unit lower triangular matrix by one warpgroup, in fp32 with tensor cores.
//
// X = (I + L)^-1 in 16 x 16 blocks: the diagonal ones by forward substitution in fp32 (warp w takes block w), then
// each warp w makes block column w downwards, X_Iw = -X_II sum_{w<=M<I} L_IM X_Mw. Products run on mma.sync in tf32
// with both operands split in two, so the result carries fp32's accuracy to about 2^-21 and needs no bounded keys.
#pragma once

#include "ptx.cuh"

namespace cake {

constexpr int kTriStride = 68;  // floats between rows: 16-byte rows, conflict-free column walks

__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// x = hi + lo, both with tf32's mantissa (lo to its own rounding).
__device__ __forceinline__ void split_tf32(float x, uint32_t& hi, uint32_t& lo) {
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(hi) : "f"(x));
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(lo) : "f"(x - __uint_as_float(hi)));
}

// D[16][16] += A[16][16] B[16][16]; A and B are blocks in shared memory with kTriStride floats between rows. Lane
// layout of D: d[n][i] is row lane / 4 + 8 * (i >> 1), column 8 n + 2 * (lane % 4) + (i & 1).
__device__ __forceinline__ void block_product(float (&d)[2][4], const float* a, const float* b, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int k = 0; k < 16; k += 8) {
    uint32_t ah[4], al[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      split_tf32(a[(g + 8 * (i & 1)) * kTriStride + k + t + 4 * (i >> 1)], ah[i], al[i]);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      uint32_t bh[2], bl[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) split_tf32(b[(k + t + 4 * i) * kTriStride + 8 * n + g], bh[i], bl[i]);
      mma_tf32(d[n], al, bh);
      mma_tf32(d[n], ah, bl);
      mma_tf32(d[n], ah, bh);
    }
  }
}

__device__ __forceinline__ void store_block(float* x, const float (&d)[2][4], float sign, int lane) {
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      *reinterpret_cast<float2*>(x + ((lane >> 2) + 8 * h) * kTriStride + 8 * n + 2 * (lane & 3)) =
          make_float2(sign * d[n][2 * h], sign * d[n][2 * h + 1]);
}

// l: strictly lower triangle of L (the rest of each diagonal block is never read), x: receives the lower blocks of
// the inverse; the diagonal blocks' upper triangles become exact zeros, blocks above the diagonal are not written.
// All 128 threads; `l` must be visible to them, and a barrier must follow before `x` is read by others.
template <typename Barrier>
__device__ __forceinline__ void invert_unit_lower(float* x, const float* l, int thread, Barrier barrier) {
  const int lane = thread & 31, warp = thread >> 5;
  const int diagonal = 16 * warp * (kTriStride + 1);
  if (lane < 16) {  // lane: a column of the diagonal block
    float column[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float sum = i == lane ? 1.f : 0.f;
#pragma unroll
      for (int j = 0; j < i; ++j) sum = fmaf(-l[diagonal + i * kTriStride + j], column[j], sum);
      column[i] = i < lane ? 0.f : sum;
      x[diagonal + i * kTriStride + lane] = column[i];
    }
  }
  barrier();
  for (int row = warp + 1; row < 4; ++row) {
    float sum[2][4] = {};
    for (int m = warp; m < row; ++m)
      block_product(sum, l + 16 * (row * kTriStride + m), x + 16 * (m * kTriStride + warp), lane);
    float* target = x + 16 * (row * kTriStride + warp);
    store_block(target, sum, 1.f, lane);
    __syncwarp();
    float product[2][4] = {};
    block_product(product, x + 16 * row * (kTriStride + 1), target, lane);
    __syncwarp();
    store_block(target, product, -1.f, lane);
    __syncwarp();
  }
}

}  // namespace cake
