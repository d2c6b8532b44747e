// Inverse of a 64 x 64 unit lower triangular matrix by one warpgroup, in fp32 with tensor cores.
//
// X = (I + L)^-1: the diagonal 16 x 16 blocks by forward substitution in fp32 (warp w takes block w), then blocks of 32 and
// of 64 from their halves, X_21 = -X_22 (L_21 X_11), each warp making a strip of 8 columns on its own. Products run on
// mma.sync in tf32 with both operands split in two, so the result keeps fp32's accuracy to about 2^-21 and needs no
// bounded keys.
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

// x = hi + lo: hi keeps tf32's mantissa, mma drops what lo has beyond its own.
__device__ __forceinline__ void split_tf32(float x, uint32_t& hi, uint32_t& lo) {
  hi = __float_as_uint(x) & 0xffffe000u;
  lo = __float_as_uint(x - __uint_as_float(hi));
}

// One k8 step of D[16][8] += A[16][8] B[8][8].
struct SplitA {
  uint32_t hi[4], lo[4];
  // a: top left of the [16][8] block.
  __device__ __forceinline__ SplitA(const float* a, int lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      split_tf32(a[((lane >> 2) + 8 * (i & 1)) * kTriStride + (lane & 3) + 4 * (i >> 1)], hi[i], lo[i]);
  }
};

struct SplitB {
  uint32_t hi[2], lo[2];
  // b: top left of the [8][8] block.
  __device__ __forceinline__ SplitB(const float* b, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) split_tf32(b[((lane & 3) + 4 * i) * kTriStride + (lane >> 2)], hi[i], lo[i]);
  }
};

__device__ __forceinline__ void mma_split(float (&d)[4], const SplitA& a, const SplitB& b) {
  mma_tf32(d, a.lo, b.hi);
  mma_tf32(d, a.hi, b.lo);
  mma_tf32(d, a.hi, b.hi);
}

// [16][8] to shared memory; d[i] is row lane / 4 + 8 * (i >> 1), column 2 * (lane % 4) + (i & 1).
__device__ __forceinline__ void store_strip(float* x, const float (&d)[4], float sign, int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
    *reinterpret_cast<float2*>(x + ((lane >> 2) + 8 * h) * kTriStride + 2 * (lane & 3)) =
        make_float2(sign * d[2 * h], sign * d[2 * h + 1]);
}

// l: strictly lower triangle of L (of the diagonal 16 x 16 blocks nothing else is read), x: receives the lower triangle
// of the inverse; upper triangles of the diagonal blocks become exact zeros, blocks above them are neither written nor
// read. All 128 threads; `l` must be visible to them, and a barrier must follow before `x` is read by others.
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
  // 16 -> 32: two pairs of blocks, two warps each, a warp makes 8 columns: X_21 = -X_22 (L_21 X_11).
  {
    const int first = 32 * (warp >> 1), column = first + 8 * (warp & 1);
    float* target = x + (first + 16) * kTriStride + column;
    float sum[4] = {}, product[4] = {};
#pragma unroll
    for (int k = 0; k < 16; k += 8)
      mma_split(sum, SplitA(l + (first + 16) * kTriStride + first + k, lane),
                SplitB(x + (first + k) * kTriStride + column, lane));
    store_strip(target, sum, 1.f, lane);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 16; k += 8)
      mma_split(product, SplitA(x + (first + 16) * kTriStride + first + 16 + k, lane),
                SplitB(target + k * kTriStride, lane));
    __syncwarp();
    store_strip(target, product, -1.f, lane);
  }
  barrier();
  // 32 -> 64: a warp makes 8 of the 32 columns.
  {
    const int column = 8 * warp;
    float* target = x + 32 * kTriStride + column;
    float sum[2][4] = {}, product[2][4] = {};
#pragma unroll
    for (int k = 0; k < 32; k += 8) {
      if (k < column) continue;  // above the diagonal of X_11
      const SplitB b(x + k * kTriStride + column, lane);
#pragma unroll
      for (int m = 0; m < 2; ++m) mma_split(sum[m], SplitA(l + (32 + 16 * m) * kTriStride + k, lane), b);
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) store_strip(target + 16 * m * kTriStride, sum[m], 1.f, lane);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < 32; k += 8) {
      const SplitB b(target + k * kTriStride, lane);
#pragma unroll
      for (int m = 0; m < 2; ++m)
        if (k < 16 * (m + 1)) mma_split(product[m], SplitA(x + (32 + 16 * m) * kTriStride + 32 + k, lane), b);
    }
    __syncwarp();
#pragma unroll
    for (int m = 0; m < 2; ++m) store_strip(target + 16 * m * kTriStride, product[m], -1.f, lane);
  }
}

}  // namespace cake
