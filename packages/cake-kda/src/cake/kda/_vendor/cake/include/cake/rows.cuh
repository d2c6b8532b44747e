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

__device__ __forceinline__ uint4 scaled(uint4 x, float r) {
  return make_uint4(pack_bf16(r * bf16_lo(x.x), r * bf16_hi(x.x)), pack_bf16(r * bf16_lo(x.y), r * bf16_hi(x.y)),
                    pack_bf16(r * bf16_lo(x.z), r * bf16_hi(x.z)), pack_bf16(r * bf16_lo(x.w), r * bf16_hi(x.w)));
}

// x^ = r x in place, on the 16-byte groups that this thread copied itself.
__device__ __forceinline__ void normalise(uint32_t tile, const float* r, int thread) {
  tile += group_offset<kChunk>(thread / 16, thread % 16);
  r += thread / 16;
#pragma unroll 1
  for (int i = 0; i < 2; ++i, tile += 32 * kPanelRowBytes, r += 32) {
    uint4 x[4];
    float by[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) x[n] = ld_shared_16(tile + n * 8 * kPanelRowBytes), by[n] = r[8 * n];
    __syncwarp();  // shared memory answers late beside products: ptxas would put each load next to its use
#pragma unroll
    for (int n = 0; n < 4; ++n) st_shared_16(tile + n * 8 * kPanelRowBytes, scaled(x[n], by[n]));
  }
}

// A thread's place in an accumulator.
struct Lane {
  int thread, lane, warp, row0;  // within the warpgroup; the warp's first row
  __device__ __forceinline__ explicit Lane(int t) : thread(t), lane(t & 31), warp(t >> 5), row0(16 * (t >> 5)) {}
  __device__ __forceinline__ int row(int half) const { return row0 + (lane >> 2) + 8 * half; }
  __device__ __forceinline__ int column(int block) const { return 8 * block + 2 * (lane & 3); }
};

// A 64 x 128 result over the tile it was made from. A warp keeps to its own 16 rows.
__device__ __forceinline__ void stage_rows(uint32_t tile, const float (&acc)[64], const Lane& me) {
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t f[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) f[j] = pack_bf16(acc[acc_index(i, j)], acc[acc_index(i, j) + 1]);
    stmatrix(frag_address<kChunk>(tile, me.row0, i, me.lane), f);
  }
  __syncwarp();
}

// And on to memory.
__device__ __forceinline__ void send_rows(uint32_t tile, __nv_bfloat16* out, int64_t row_stride, int rows,
                                          const Lane& me) {
  const int row0 = me.row0 + (me.lane >> 4);
  out += row0 * row_stride + (me.lane & 15) * 8;
#pragma unroll
  for (int first = 0; first < 16; first += 8) {
    uint4 x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = ld_shared_16(tile + group_offset<kChunk>(row0 + first + 2 * i, me.lane & 15));
    __syncwarp();  // as in normalise
#pragma unroll
    for (int i = 0; i < 4; ++i, out += 2 * row_stride) st_global_16_if(row0 + first + 2 * i < rows, out, x[i]);
  }
}

// x = r (x^ - h (h . x^)) for the normalised tile h: the backward of the L2 norm.
__device__ __forceinline__ void norm_backward(float (&acc)[64], const float (&dot)[2], uint32_t tile, const float* r,
                                              const Lane& me) {
  const float scale[2] = {r[me.row(0)], r[me.row(1)]};
#pragma unroll
  for (int first = 0; first < 8; first += 4) {
    uint32_t x[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) ldmatrix(x[i], frag_address<kChunk>(tile, me.row0, first + i, me.lane));
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int n = acc_index(first + i, j), h = j & 1;
        acc[n] = scale[h] * (acc[n] - bf16_lo(x[i][j]) * dot[h]);
        acc[n + 1] = scale[h] * (acc[n + 1] - bf16_hi(x[i][j]) * dot[h]);
      }
  }
}

}  // namespace cake
