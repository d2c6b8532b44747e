// gdn_prep: everything of a chunk that needs no state. One CTA per (chunk, q/k head), looping over its v heads.
//
//   r_q,i = 1 / sqrt(|q_i|^2 + eps), r_k,i likewise (1 without L2 norm)
//   b_i   = sum_{j<=i} max(g_j, -88) / ln 2                      inclusive, restarted at the chunk
//   L_ij  = beta_i (k_i . k_j) r_k,i r_k,j 2^(b_i - b_j)         i > j
//   T     = (I + L)^-1                                           stored as bf16
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
  union {
    alignas(1024) uint8_t k[kTokenTileBytes];  // until its products are made
    float l[kChunk * kTriStride];
  };
  alignas(16) float x[kChunk * kTriStride];
  float b[kChunk], beta[kChunk], rk[kChunk];
  float first_half;  // decay of rows 0..31
};

constexpr int kPrepThreads = 128, kPrepCtasPerSm = 5;

// 16 lanes hold a row, 8 bf16 each; every lane gets the reciprocal norms of its rows.
__device__ __forceinline__ void reciprocal_norms(float (&r)[8], const uint4 (&v)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t words[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
    r[i] = 0.f;
#pragma unroll
    for (uint32_t w : words) {
      r[i] = fmaf(bf16_lo(w), bf16_lo(w), r[i]);
      r[i] = fmaf(bf16_hi(w), bf16_hi(w), r[i]);
    }
  }
#pragma unroll
  for (int d = 8; d >= 1; d >>= 1)
#pragma unroll
    for (int i = 0; i < 8; ++i) r[i] += __shfl_xor_sync(0xffffffffu, r[i], d);
#pragma unroll
  for (int i = 0; i < 8; ++i) r[i] = rsqrtf(r[i] + kNormEps);
}

static __global__ void __launch_bounds__(kPrepThreads, kPrepCtasPerSm)
    prep_kernel(const __grid_constant__ PrepArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  PrepShared& s = *reinterpret_cast<PrepShared*>(raw);
  if (blockIdx.x >= args.plan.chunk_count()) return;  // capacity is an upper bound when boundaries are on the device
  const Chunk chunk = args.plan.chunk(blockIdx.x);
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, head = blockIdx.y;
  const int tokens = args.plan.tokens_per_batch;
  const int64_t total = args.plan.total;
  const uint32_t k_tile = smem_addr(s.k);
  const bool has_token = tid < chunk.rows;  // thread = token, where gates are concerned

  load_rows<16, kPrepThreads>(k_tile, args.k.row(chunk.token, tokens, head), args.k.token_stride, chunk.rows, tid);
  cp_async_commit();
  float gate = has_token ? args.g.at(chunk.token + tid, tokens, head * args.group) : 0.f;
  float beta = has_token ? args.beta.at(chunk.token + tid, tokens, head * args.group) : 0.f;

  // ---- norms of q (from global memory) and k (from its tile), two rows a warp at a time ----
  if (args.l2norm) {
    const __nv_bfloat16* q = args.q.row(chunk.token, tokens, head) + 8 * (lane & 15);
    uint4 v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = 16 * warp + 2 * i + (lane >> 4);
      v[i] = row < chunk.rows ? *reinterpret_cast<const uint4*>(q + row * args.q.token_stride) : make_uint4(0, 0, 0, 0);
    }
    float r[8];
    reciprocal_norms(r, v);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = 16 * warp + 2 * i + (lane >> 4);
      if ((lane & 15) == 0 && row < chunk.rows) args.rq[head * total + chunk.token + row] = r[i];
    }
  } else if (has_token) {
    args.rq[head * total + chunk.token + tid] = 1.f;
  }
  cp_async_wait<0>();
  fence_proxy_async();
  __syncthreads();
  float norm[8] = {1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f, 1.f};
  if (args.l2norm) {
    uint4 v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      v[i] = ld_shared_16(k_tile + group_offset<kChunk>(16 * warp + 2 * i + (lane >> 4), lane & 15));
    reciprocal_norms(norm, v);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = 16 * warp + 2 * i + (lane >> 4);
    if ((lane & 15) == 0) {
      s.rk[row] = norm[i];
      if (row < chunk.rows) args.rk[head * total + chunk.token + row] = norm[i];
    }
  }

  // ---- normalised k k^T, once for the group ----
  float kk[32];
  wgmma_fence();
  gemm_ss<Major::K, kChunk, Major::K, kChunk, 8>(kk, k_tile, k_tile, false);
  wgmma_commit();
  wgmma_wait<0>();
  pin(kk);
  __syncthreads();
  const int row0 = 16 * warp + (lane >> 2);
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const float2 rk = *reinterpret_cast<const float2*>(s.rk + 8 * c + 2 * (lane & 3));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      kk[4 * c + 2 * h] *= s.rk[row0 + 8 * h] * rk.x;
      kk[4 * c + 2 * h + 1] *= s.rk[row0 + 8 * h] * rk.y;
    }
  }

  for (int j = 0; j < args.group; ++j) {
    const int v_head = head * args.group + j;
    // ---- gates ----
    float decay = has_token ? fmaxf(gate, kLeastGate) * kLog2E : 0.f;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1) {
      const float up = __shfl_up_sync(0xffffffffu, decay, d);
      if (lane >= d) decay += up;
    }
    if (tid == 31) s.first_half = decay;
    if (tid < kChunk) s.beta[tid] = beta;
    __syncthreads();
    if (tid < kChunk) {
      if (warp == 1) decay += s.first_half;
      s.b[tid] = decay;
      if (has_token) {
        args.b[v_head * total + chunk.token + tid] = decay;
        if (j + 1 < args.group) {  // the next v head's, while this one's inverse is made
          gate = args.g.at(chunk.token + tid, tokens, v_head + 1);
          beta = args.beta.at(chunk.token + tid, tokens, v_head + 1);
        }
      }
    }
    __syncthreads();

    // ---- L, blocks on and below the diagonal ----
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + 8 * h;
      const float b_row = s.b[row], beta_row = s.beta[row];
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        if (c > 2 * warp + 1) continue;
        const int column = 8 * c + 2 * (lane & 3);
        const float2 b = *reinterpret_cast<const float2*>(s.b + column);
        const float x = row > column ? beta_row * kk[4 * c + 2 * h] * ex2(b_row - b.x) : 0.f;
        const float y = row > column + 1 ? beta_row * kk[4 * c + 2 * h + 1] * ex2(b_row - b.y) : 0.f;
        *reinterpret_cast<float2*>(s.l + row * kTriStride + column) = make_float2(x, y);
      }
    }
    __syncthreads();
    invert_unit_lower(s.x, s.l, tid, [] { __syncthreads(); });
    __syncthreads();

    // ---- T: 8 lanes write a row ----
    __nv_bfloat16* out = args.t + (v_head * total + chunk.token) * kChunk;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = 16 * i + (tid >> 3), column = 8 * (tid & 7);
      if (row >= chunk.rows) continue;
      uint32_t words[4] = {};
      if (column <= row) {
        const float4* x = reinterpret_cast<const float4*>(s.x + row * kTriStride + column);
        const float4 lo = x[0], hi = x[1];
        const float values[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
        for (int p = 0; p < 4; ++p)
          words[p] = pack_bf16(column + 2 * p <= row ? values[2 * p] : 0.f,
                               column + 2 * p + 1 <= row ? values[2 * p + 1] : 0.f);
      }
      *reinterpret_cast<uint4*>(out + row * kChunk + column) = make_uint4(words[0], words[1], words[2], words[3]);
    }
    // x, l and the vectors are next written behind the barriers of the next v head's gates.
  }
}

}  // namespace cake::gdn
