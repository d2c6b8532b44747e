// gdn_prep: everything of a chunk that needs no state. One CTA per (chunk, q/k head), looping over its v heads.
//
//   r_q,i = 1 / sqrt(|q_i|^2 + eps), r_k,i likewise (1 without L2 norm)
//   b_i   = sum_{j<=i} max(g_j, -88) / ln 2                      inclusive, restarted at the chunk
//   L_ij  = beta_i (k_i . k_j) r_k,i r_k,j 2^(b_i - b_j)         i > j
//   T     = (I + L)^-1                                          stored as bf16
//
// k . k^T is one wgmma per q/k head on the raw keys (exact products of bf16), its norms are applied to the result.
// The clamp at -88 is exact in fp32 (e^-88 is at its underflow) and keeps b small enough to subtract.
#pragma once

#include "cake/frag.cuh"
#include "cake/seq.cuh"
#include "cake/tri.cuh"

namespace cake::gdn {

struct PrepArgs {
  View<const __nv_bfloat16> q, k;  // [B, T, H, 128]
  Scalars g, beta;                 // [B, T, HV]
  Plan plan;
  __nv_bfloat16* t;   // [HV, total, 64]
  float* b;           // [HV, total]
  float *rq, *rk;     // [H, total]
  int heads, group;   // H, HV / H
  bool l2norm;
};

constexpr float kNormEps = 1e-6f;
constexpr float kLeastGate = -88.f;
constexpr float kLog2E = 1.4426950408889634f;

struct PrepShared {
  alignas(1024) uint8_t k[kTokenTileBytes];
  alignas(16) float l[kChunk * kTriStride];
  alignas(16) float x[kChunk * kTriStride];
  float b[kChunk], beta[kChunk], rk[kChunk];
  float first_half;  // decay of rows 0..31
};

constexpr int kPrepThreads = 128;

// Sum of squares of 8 bf16.
__device__ __forceinline__ float squares(uint4 v, float sum) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (uint32_t w : words) {
    sum = fmaf(bf16_lo(w), bf16_lo(w), sum);
    sum = fmaf(bf16_hi(w), bf16_hi(w), sum);
  }
  return sum;
}

// 16 lanes hold a row; every lane gets the reciprocal norm.
__device__ __forceinline__ float reciprocal_norm(uint4 v) {
  float sum = squares(v, 0.f);
#pragma unroll
  for (int d = 8; d >= 1; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  return 1.f / sqrtf(sum + kNormEps);
}

static __global__ void __launch_bounds__(kPrepThreads) prep_kernel(const __grid_constant__ PrepArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  PrepShared& s = *reinterpret_cast<PrepShared*>(raw);
  if (blockIdx.x >= args.plan.chunk_count()) return;  // capacity is an upper bound when boundaries are on the device
  const Chunk chunk = args.plan.chunk(blockIdx.x);
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, head = blockIdx.y;
  const int tokens = args.plan.tokens_per_batch;
  const int64_t total = args.plan.total;
  const uint32_t k_tile = smem_addr(s.k);

  // ---- norms of q (from global memory) and k (from its tile) ----
  load_rows<16, kPrepThreads>(k_tile, args.k.row(chunk.token, tokens, head), args.k.token_stride, chunk.rows, tid);
  cp_async_commit();
  const __nv_bfloat16* q = args.q.row(chunk.token, tokens, head);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = 16 * warp + 2 * i + (lane >> 4);
    if (args.l2norm) {
      const uint4 v = row < chunk.rows
                          ? *reinterpret_cast<const uint4*>(q + row * args.q.token_stride + 8 * (lane & 15))
                          : make_uint4(0, 0, 0, 0);
      const float r = reciprocal_norm(v);
      if (row < chunk.rows && (lane & 15) == 0) args.rq[head * total + chunk.token + row] = r;
    } else if (row < chunk.rows && (lane & 15) == 0) {
      args.rq[head * total + chunk.token + row] = 1.f;
    }
  }
  cp_async_wait<0>();
  fence_proxy_async();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = 16 * warp + 2 * i + (lane >> 4);
    const uint4 v = ld_shared_16(k_tile + group_offset<kChunk>(row, lane & 15));
    const float r = args.l2norm ? reciprocal_norm(v) : 1.f;
    if ((lane & 15) == 0) {
      s.rk[row] = r;
      if (row < chunk.rows) args.rk[head * total + chunk.token + row] = r;
    }
  }

  // ---- K K^T, once for the group ----
  float kk[32];
  wgmma_fence();
  gemm_ss<Major::K, kChunk, Major::K, kChunk, 8>(kk, k_tile, k_tile, false);
  wgmma_commit();
  wgmma_wait<0>();
  pin(kk);

  for (int j = 0; j < args.group; ++j) {
    const int v_head = head * args.group + j;
    // ---- gates: thread = token ----
    float decay = 0.f;
    if (tid < kChunk) {
      float beta = 0.f;
      if (tid < chunk.rows) {
        decay = fmaxf(args.g.at(chunk.token + tid, tokens, v_head), kLeastGate) * kLog2E;
        beta = args.beta.at(chunk.token + tid, tokens, v_head);
      }
#pragma unroll
      for (int d = 1; d < 32; d <<= 1) {
        const float up = __shfl_up_sync(0xffffffffu, decay, d);
        if (lane >= d) decay += up;
      }
      if (tid == 31) s.first_half = decay;
      s.beta[tid] = beta;
    }
    __syncthreads();
    if (tid < kChunk) {
      if (warp == 1) decay += s.first_half;
      s.b[tid] = decay;
      if (tid < chunk.rows) args.b[v_head * total + chunk.token + tid] = decay;
    }
    __syncthreads();

    // ---- L ----
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = 16 * warp + (lane >> 2) + 8 * h;
      const float b_row = s.b[row], scale = s.beta[row] * s.rk[row];
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const int column = 8 * c + 2 * (lane & 3);
        float2 l;
        l.x = row > column ? scale * s.rk[column] * kk[4 * c + 2 * h] * ex2(b_row - s.b[column]) : 0.f;
        l.y = row > column + 1 ? scale * s.rk[column + 1] * kk[4 * c + 2 * h + 1] * ex2(b_row - s.b[column + 1]) : 0.f;
        *reinterpret_cast<float2*>(s.l + row * kTriStride + column) = l;
      }
    }
    __syncthreads();
    invert_unit_lower(s.x, s.l, tid, [] { __syncthreads(); });
    __syncthreads();

    // ---- T ----
    const int row = tid >> 1;
    if (row < chunk.rows) {
      __nv_bfloat16* out = args.t + (v_head * total + chunk.token + row) * kChunk;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 32 * (tid & 1) + 8 * i;
        const float* x = s.x + row * kTriStride + column;
        uint32_t words[4];
#pragma unroll
        for (int p = 0; p < 4; ++p)
          words[p] = pack_bf16(column + 2 * p <= row ? x[2 * p] : 0.f, column + 2 * p + 1 <= row ? x[2 * p + 1] : 0.f);
        *reinterpret_cast<uint4*>(out + column) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
    __syncthreads();  // x, l and the vectors are rewritten for the next v head
  }
}

}  // namespace cake::gdn
