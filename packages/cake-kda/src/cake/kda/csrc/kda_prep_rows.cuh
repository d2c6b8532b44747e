// What kda_prep keeps of a chunk in shared memory, and how its rows lie there.
#pragma once

#include "cake/frag.cuh"
#include "cake/seq.cuh"
#include "cake/tri.cuh"
#include "kda_gate.cuh"

namespace cake::kda {

struct PrepArgs {
  View<const __nv_bfloat16> q, k;  // [B, T, H, 128]
  Scalars g, beta;  // [B, T, HV, 128], contiguous channels, and [B, T, HV]
  GateArgs gate;
  Plan plan;
  __nv_bfloat16 *qg, *kg, *kr;  // tile images [chunks, HV, 64, 128]
  __nv_bfloat16 *p, *t;  // tile images [chunks, HV, 64, 64]
  float* last;  // [chunks, HV, 128]: 2^b_C
  float *rq, *rk;  // [H, total]
  int v_heads, group;  // HV, HV / H
  float scale;
  bool l2norm;
};

constexpr int kPrepThreads = 128, kPrepCtasPerSm = 3;
constexpr int kProducts = 5;  // of two blocks of 16 rows, that a warp makes

struct PrepShared {
  union {
    struct {
      alignas(1024) uint8_t q[kTokenTileBytes], k[kTokenTileBytes];  // bf16 [64][128], see row_offset
    } rows;
    struct {  // once the pairs are made
      alignas(1024) uint8_t p[kSquareTileBytes];
      alignas(16) float l[kChunk * kTriStride];
    } pairs;
  };
  union {
    alignas(1024) float b[kChunk * kHeadDim];  // see b_offset
    float4 sums[kPrepThreads / 32][2 * kProducts][32];  // once the pairs are made: for the warp with the other channels
    alignas(16) float x[kChunk * kTriStride];  // and then: the inverse
  };
  float rq[kChunk], rk[kChunk], beta[kChunk];  // rq with the scale
  float diagonal[kChunk];  // of P
  int wide[kPrepThreads / 32];  // by warp, a bit for each block of 16 rows: see mark_wide
};

// Byte offsets in rows of 256 bytes of bf16, and of 512 bytes of fp32. Their swizzles let 8 lanes g read 8 rows that differ
// in one of their lowest three bits less, four lanes t to a row, without bank conflicts: at every level of the tree. So
// does ldmatrix.
__device__ __forceinline__ uint32_t row_offset(int row, int channel) {
  const int swizzle = (row & 3) ^ ((row & 4) ? 3 : 0);
  return (row * 256 + channel * 2) ^ (swizzle << 5 | (row & 4) << 2);
}
__device__ __forceinline__ uint32_t b_offset(int row, int channel) {
  return (row * 512 + channel * 4) ^ (((row ^ (row >> 1)) & 1) << 6);
}

__device__ __forceinline__ float4 ld_floats(uint32_t addr) {
  const uint4 v = ld_shared_16(addr);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

}  // namespace cake::kda
