// What the parallel backward does with whole tiles: state images, normalised rows, row-wise results on their way out.
#pragma once

#include "frag.cuh"

namespace cake {

// A 32 KB state image, or zeros where the tape has no slot. All 128 threads; each arrives once.
__device__ __forceinline__ void load_state(uint32_t tile, uint64_t& full, const __nv_bfloat16* tape, int slot,
                                           int v_heads, int v_head, int thread) {
  const uint32_t bar = smem_addr(&full);
  if (slot < 0) {
    zero_fill<128>(tile, kStateTileBytes, thread);
    fence_proxy_async();
    mbar_arrive(bar);
  } else if (thread == 0) {
    mbar_arrive_expect_tx(bar, kStateTileBytes);
    bulk_load(tile, tape + (int64_t(slot) * v_heads + v_head) * kHeadDim * kHeadDim, kStateTileBytes, bar);
  } else {
    mbar_arrive(bar);
  }
}

// x^ = r x in place, on the 16-byte groups that this thread copied itself.
__device__ __forceinline__ void normalise(uint32_t tile, const float* r, int thread) {
  tile += group_offset<kChunk>(thread / 16, thread % 16);
#pragma unroll 2
  for (int i = 0; i < 8; ++i, tile += 8 * kPanelRowBytes) {
    const float scale = r[thread / 16 + 8 * i];
    uint4 x = ld_shared_16(tile);
    x.x = pack_bf16(scale * bf16_lo(x.x), scale * bf16_hi(x.x));
    x.y = pack_bf16(scale * bf16_lo(x.y), scale * bf16_hi(x.y));
    x.z = pack_bf16(scale * bf16_lo(x.z), scale * bf16_hi(x.z));
    x.w = pack_bf16(scale * bf16_lo(x.w), scale * bf16_hi(x.w));
    st_shared_16(tile, x);
  }
}

// A warp's part of <S, R>: the trace of S R^T from 16 x 8 products of which only the diagonals are wanted, still an
// eighth of the instructions of a plain dot.
__device__ __forceinline__ float state_dot(uint32_t s, uint32_t r, int warp, int lane) {
  float upper[4] = {}, lower[4] = {};  // rows 0..7 against rows 0..7, and 8..15 against 8..15
#pragma unroll 1
  for (int block = 0; block < 2; ++block)
#pragma unroll 4
    for (int k = 0; k < 8; ++k) {
      uint32_t a[4], b[4];
      ldmatrix(a, frag_address<kHeadDim>(s, 32 * warp + 16 * block, k, lane));
      ldmatrix(b, frag_address<kHeadDim>(r, 32 * warp + 16 * block, k, lane));
      mma_bf16(upper, a, b[0], b[2]);
      mma_bf16(lower, a, b[1], b[3]);
    }
  const int row = lane >> 2, column = 2 * (lane & 3);
  float sum = row == column ? upper[0] + lower[2] : row == column + 1 ? upper[1] + lower[3] : 0.f;
#pragma unroll
  for (int d = 16; d >= 1; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  return sum;
}

// A thread's place in an accumulator.
struct Lane {
  int thread, lane, warp, row0;  // within the warpgroup; the warp's first row
  __device__ __forceinline__ explicit Lane(int t) : thread(t), lane(t & 31), warp(t >> 5), row0(16 * (t >> 5)) {}
  __device__ __forceinline__ int row(int half) const { return row0 + (lane >> 2) + 8 * half; }
  __device__ __forceinline__ int column(int block) const { return 8 * block + 2 * (lane & 3); }
};

// A 64 x 128 result over the tile it was made from, and on to memory. A warp keeps to its own 16 rows.
__device__ __forceinline__ void store_rows(uint32_t tile, const float (&acc)[64], __nv_bfloat16* out, int row_stride,
                                           int rows, const Lane& me) {
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t f[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) f[j] = pack_bf16(acc[acc_index(i, j)], acc[acc_index(i, j) + 1]);
    stmatrix(frag_address<kChunk>(tile, me.row0, i, me.lane), f);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = me.row0 + 2 * i + (me.lane >> 4), group = me.lane & 15;
    if (row < rows)
      *reinterpret_cast<uint4*>(out + int64_t(row) * row_stride + group * 8) =
          ld_shared_16(tile + group_offset<kChunk>(row, group));
  }
}

// x = r (x^ - h (h . x^)) for the normalised tile h: the backward of the L2 norm.
__device__ __forceinline__ void norm_backward(float (&acc)[64], const float (&dot)[2], uint32_t tile, const float* r,
                                              const Lane& me) {
  const float scale[2] = {r[me.row(0)], r[me.row(1)]};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t x[4];
    ldmatrix(x, frag_address<kChunk>(tile, me.row0, i, me.lane));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int n = acc_index(i, j), h = j & 1;
      acc[n] = scale[h] * (acc[n] - bf16_lo(x[j]) * dot[h]);
      acc[n + 1] = scale[h] * (acc[n + 1] - bf16_hi(x[j]) * dot[h]);
    }
  }
}

}  // namespace cake
