// gdn_out: the parallel rest of the backward. Persistent CTAs take (chunk, q/k head) pairs and loop over the pair's v heads;
// everything about a pair stays in its CTA, so no sum crosses CTAs. Per v head, rows are tokens, G_ij = 2^(b_i - b_j):
//
//   W   = v - 2^b k^ S        D   = T (beta W)
//   dP  = s tril(G) (dO D^T)            dL  = -m stril(G) (Y D^T)
//   dq^ = s 2^b dO S^T + dP k^          X   = -m 2^b Y S^T + dL k^          (query role of k; m below)
//   dk^ = 2^(b_C - b) D R^T + dP^T q^ + dL^T k^ + X
//   dv  = beta Y              dbeta = Y . v + k^ . X / m
//   db  = q^ . dq^ + k^ . X - k^ . (dk^ - X)
//   dg_i = sum_{j>=i} db_j + sum_j 2^(b_C - b_j) k^_j . (D R^T)_j + 2^b_C <S, R>
//
// m = beta, so that one bf16 rounding of m dL serves row i and column j of a pair alike and they cancel in dg; where
// beta is too small to divide by, m = 1 and what stems from X beside dbeta is dropped. q^, k^ are normalised once
// to bf16 and used for products and row dots alike, for the same reason. At the end of a group the norm's own
// backward: dq = r_q (dq^ - q^ (q^ . dq^)), dk likewise.
//
// Warpgroups: 0 (query) dP, dq^; 1 (erase) dL, X, dv, dbeta; 2 (delta) D, dk^; 3 (producer) loads the next v head as soon as
// its buffers are free. S and R are [V][K] images: K-major for k^ S, MN-major for the products with S^T and R^T.
#pragma once

#include "cake/frag.cuh"
#include "cake/seq.cuh"

namespace cake::gdn {

constexpr int kOutThreads = 512;
constexpr int kQueryRegisters = 136, kEraseRegisters = 152, kDeltaRegisters = 176, kOutProducerRegisters = 48;
static_assert(kQueryRegisters + kEraseRegisters + kDeltaRegisters + kOutProducerRegisters == 512, "of a lane slot");
constexpr float kLeastBeta = 0x1p-60f;

enum OutBarrier { kComputeBarrier = 1, kDeltaBarrier = 2 };

struct OutArgs {
  View<const __nv_bfloat16> q, k, v, grad;  // [B, T, H or HV, 128]; grad = dO
  Scalars beta;
  Plan plan;
  const __nv_bfloat16* t;            // [HV, total, 64]
  const float *b, *rq, *rk;          // [HV, total], [H, total]
  const __nv_bfloat16* y;            // [total, HV, 128]
  const __nv_bfloat16 *states, *adjoints;  // images [slots, HV, 128, 128]
  bool states_edge, adjoints_edge;   // whether the tapes have the sequences' edge slots
  __nv_bfloat16 *dq, *dk, *dv;       // [total, H or HV, 128]; dv may be y
  float *dbeta, *dg;                 // [total, HV]
  int heads, group;
  float scale;
  bool l2norm;
};

// Per token and v head; two sets, for the v head in work and the next.
struct alignas(16) OutVectors {
  float b[kChunk], grown[kChunk], rest[kChunk], beta[kChunk];  // b, 2^b, 2^(b_C - b)
  float decay;                                                 // 2^b_C
};

struct OutDots {
  float query[kChunk], erase[kChunk], key[kChunk];  // the three terms of db
  float state[8], written[4];                       // per-warp parts of <S, R> and of sum 2^(b_C - b) k^ . (D R^T)
};

struct OutShared {
  alignas(1024) uint8_t q[kTokenTileBytes], k[kTokenTileBytes];  // normalised in place; dq, dk on the way out
  alignas(1024) uint8_t s[kStateTileBytes], r[kStateTileBytes];
  alignas(1024) uint8_t v[kTokenTileBytes], grad[kTokenTileBytes], y[kTokenTileBytes], t[kSquareTileBytes];
  alignas(1024) uint8_t delta[kTokenTileBytes];                  // beta W, then D
  alignas(1024) uint8_t dp[kSquareTileBytes], dl[kSquareTileBytes];
  alignas(16) float4 erase_total[16][128];                       // sum over the group of X: thread-private slots
  OutVectors vectors[2];
  OutDots dots[2];
  float rq[kChunk], rk[kChunk], value_dot[kChunk];
  alignas(8) uint64_t pair_full, pair_empty;      // q, k, rq, rk
  uint64_t tokens_full, tokens_empty;             // v, grad, y, t, vectors
  uint64_t s_full, s_empty, r_full, r_empty;
  uint64_t delta_full, products_full;             // D; dP and dL
};
static_assert(sizeof(OutShared) <= 232448, "an SM gives a CTA 227 KB");

struct OutPair {
  Chunk chunk;
  Sequence sequence;
  int head;
};

__device__ __forceinline__ OutPair out_pair(const OutArgs& args, int work) {
  OutPair p;
  p.chunk = args.plan.chunk(work / args.heads);
  p.sequence = args.plan.sequence(p.chunk.sequence);
  p.head = work % args.heads;
  return p;
}

// ---- producer --------------------------------------------------------------------------------------------------

// A 32 KB state image, or zeros where the tape has no slot. All 128 threads; each arrives once.
__device__ __forceinline__ void load_state(uint32_t tile, uint64_t& full, const __nv_bfloat16* tape, int64_t slot,
                                           int v_heads, int v_head, int thread) {
  const uint32_t bar = smem_addr(&full);
  if (slot < 0) {
    zero_fill<128>(tile, kStateTileBytes, thread);
    fence_proxy_async();
    mbar_arrive(bar);
  } else if (thread == 0) {
    mbar_arrive_expect_tx(bar, kStateTileBytes);
    bulk_load(tile, tape + (slot * v_heads + v_head) * kHeadDim * kHeadDim, kStateTileBytes, bar);
  } else {
    mbar_arrive(bar);
  }
}

__device__ __forceinline__ void out_produce(OutShared& s, const OutArgs& args, int thread) {
  const int tokens = args.plan.tokens_per_batch, v_heads = args.heads * args.group;
  const int64_t total = args.plan.total;
  const int works = args.plan.chunk_count() * args.heads;
  uint32_t pair_parity = 0;
  int step = 0;  // v heads so far
  for (int work = blockIdx.x; work < works; work += gridDim.x, pair_parity ^= 1) {
    const OutPair p = out_pair(args, work);
    const int token = p.chunk.token, rows = p.chunk.rows;
    for (int j = 0; j < args.group; ++j, ++step) {
      const int v_head = p.head * args.group + j;
      const uint32_t parity = step & 1;
      OutVectors& vectors = s.vectors[parity];
      float b = 0.f, last = 0.f, beta = 0.f;
      if (thread < kChunk) {
        b = args.b[v_head * total + token + min(thread, rows - 1)];
        last = args.b[v_head * total + token + rows - 1];
        if (thread < rows) beta = args.beta.at(token + thread, tokens, v_head);
      }
      mbar_wait(smem_addr(&s.tokens_empty), parity ^ 1);
      load_rows<16, 128>(smem_addr(s.v), args.v.row(token, tokens, v_head), args.v.token_stride, rows, thread);
      load_rows<8, 128>(smem_addr(s.t), args.t + (v_head * total + token) * kChunk, kChunk, rows, thread);
      load_rows<16, 128>(smem_addr(s.y), args.y + (int64_t(token) * v_heads + v_head) * kHeadDim, v_heads * kHeadDim,
                         rows, thread);
      load_rows<16, 128>(smem_addr(s.grad), args.grad.row(token, tokens, v_head), args.grad.token_stride, rows, thread);
      cp_async_commit();
      if (thread < kChunk) {
        vectors.b[thread] = b, vectors.grown[thread] = ex2(b), vectors.rest[thread] = ex2(last - b);
        vectors.beta[thread] = beta;
        if (thread == 0) vectors.decay = ex2(last);
      }
      mbar_wait(smem_addr(&s.s_empty), parity ^ 1);
      load_state(smem_addr(s.s), s.s_full, args.states, state_slot(p.sequence, p.chunk.index, args.states_edge), v_heads,
                 v_head, thread);
      cp_async_wait<0>();
      fence_proxy_async();
      mbar_arrive(smem_addr(&s.tokens_full));
      if (j == 0) {
        mbar_wait(smem_addr(&s.pair_empty), pair_parity ^ 1);
        load_rows<16, 128>(smem_addr(s.q), args.q.row(token, tokens, p.head), args.q.token_stride, rows, thread);
        load_rows<16, 128>(smem_addr(s.k), args.k.row(token, tokens, p.head), args.k.token_stride, rows, thread);
        cp_async_commit();
        if (thread < kChunk) {
          s.rq[thread] = thread < rows ? args.rq[p.head * total + token + thread] : 0.f;
          s.rk[thread] = thread < rows ? args.rk[p.head * total + token + thread] : 0.f;
        }
        cp_async_wait<0>();
        fence_proxy_async();
        mbar_arrive(smem_addr(&s.pair_full));
      }
      mbar_wait(smem_addr(&s.r_empty), parity ^ 1);
      load_state(smem_addr(s.r), s.r_full, args.adjoints,
                 adjoint_slot(p.sequence, p.chunk.index, p.chunk.last, args.adjoints_edge), v_heads, v_head, thread);
    }
  }
}

// ---- what the computing warpgroups share -------------------------------------------------------------------------

// A thread's place in an accumulator.
struct Lane {
  int thread, lane, warp, row0;  // within the warpgroup; the warp's first row
  __device__ __forceinline__ explicit Lane(int t) : thread(t), lane(t & 31), warp(t >> 5), row0(16 * (t >> 5)) {}
  __device__ __forceinline__ int row(int half) const { return row0 + (lane >> 2) + 8 * half; }
  __device__ __forceinline__ int column(int block) const { return 8 * block + 2 * (lane & 3); }
};

__device__ __forceinline__ void release(uint64_t& bar, int lane) {
  __syncwarp();
  if (lane == 0) mbar_arrive(smem_addr(&bar));
}

// q^ = r_q q and k^ = r_k k in place, by the 384 computing threads.
__device__ __forceinline__ void normalise(OutShared& s, int thread) {
  for (int i = thread; i < 2 * kChunk * 16; i += 384) {
    const int row = (i >> 4) & 63, group = i & 15;
    const bool is_q = i < kChunk * 16;
    const uint32_t at = smem_addr(is_q ? s.q : s.k) + group_offset<kChunk>(row, group);
    const float r = is_q ? s.rq[row] : s.rk[row];
    uint4 x = ld_shared_16(at);
    x.x = pack_bf16(r * bf16_lo(x.x), r * bf16_hi(x.x));
    x.y = pack_bf16(r * bf16_lo(x.y), r * bf16_hi(x.y));
    x.z = pack_bf16(r * bf16_lo(x.z), r * bf16_hi(x.z));
    x.w = pack_bf16(r * bf16_lo(x.w), r * bf16_hi(x.w));
    st_shared_16(at, x);
  }
}

// This warpgroup's half of <S, R>: both images are swizzled alike, so their bytes pair up as they lie.
__device__ __forceinline__ void state_dot(OutShared& s, OutDots& dots, int half, const Lane& me) {
  float sum = 0.f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t offset = (i >> 2) * (kStateTileBytes / 2) + half * (kStateTileBytes / 4) + ((i & 3) * 128 + me.thread) * 16;
    const uint4 x = ld_shared_16(smem_addr(s.s) + offset), y = ld_shared_16(smem_addr(s.r) + offset);
    const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      sum = fmaf(bf16_lo(xs[w]), bf16_lo(ys[w]), sum);
      sum = fmaf(bf16_hi(xs[w]), bf16_hi(ys[w]), sum);
    }
  }
#pragma unroll
  for (int d = 16; d >= 1; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  if (me.lane == 0) dots.state[4 * half + me.warp] = sum;
}

// A 64 x 128 result over the tile it was made from, and on to memory. A warp keeps to its own 16 rows.
__device__ __forceinline__ void store_rows(uint32_t tile, const float (&acc)[64], __nv_bfloat16* out, int64_t row_stride,
                                           int rows, const Lane& me) {
  uint32_t f[8][4];
  to_frag(f, acc);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; ++i) stmatrix(frag_address<kChunk>(tile, me.row0, i, me.lane), f[i]);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = me.row0 + 2 * i + (me.lane >> 4), group = me.lane & 15;
    if (row < rows)
      *reinterpret_cast<uint4*>(out + row * row_stride + group * 8) = ld_shared_16(tile + group_offset<kChunk>(row, group));
  }
}

// x = r (x^ - h (h . x^)) for the normalised tile h: the backward of the L2 norm.
__device__ __forceinline__ void norm_backward(float (&acc)[64], const float (&dot)[2], uint32_t tile, const float* r,
                                              const Lane& me) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = me.row(h);
    const float scale = r[row];
#pragma unroll
    for (int c = 0; c < 16; ++c) {
      const uint32_t x = ld_shared_4(tile + pair_offset<kChunk>(row, me.column(c)));
      acc[4 * c + 2 * h] = scale * (acc[4 * c + 2 * h] - bf16_lo(x) * dot[h]);
      acc[4 * c + 2 * h + 1] = scale * (acc[4 * c + 2 * h + 1] - bf16_hi(x) * dot[h]);
    }
  }
}

// G_ij factor of the accumulator's pair (block c, half h): 0 above the diagonal, and on it when `strict`.
__device__ __forceinline__ float2 decays(const OutVectors& vectors, int row, int column, bool strict) {
  const float b = vectors.b[row];
  const float2 bc = *reinterpret_cast<const float2*>(vectors.b + column);
  const int least = row - (strict ? 1 : 0);
  return make_float2(column <= least ? ex2(b - bc.x) : 0.f, column + 1 <= least ? ex2(b - bc.y) : 0.f);
}

// ---- warpgroup 0: the query side ---------------------------------------------------------------------------------

__device__ __forceinline__ void out_query(OutShared& s, const OutArgs& args, int thread) {
  const Lane me(thread);
  const int v_heads = args.heads * args.group, works = args.plan.chunk_count() * args.heads;
  uint32_t pair_parity = 0;
  int step = 0;
  for (int work = blockIdx.x; work < works; work += gridDim.x, pair_parity ^= 1) {
    const OutPair p = out_pair(args, work);
    mbar_wait(smem_addr(&s.pair_full), pair_parity);
    if (args.l2norm) normalise(s, thread);
    fence_proxy_async();
    bar_sync(kComputeBarrier, 384);
    float dq[64], dot[2] = {0.f, 0.f};
    for (int j = 0; j < args.group; ++j, ++step) {
      const uint32_t parity = step & 1;
      const OutVectors& vectors = s.vectors[parity];
      OutDots& dots = s.dots[parity];
      mbar_wait(smem_addr(&s.tokens_full), parity);
      uint32_t a[8][4];
      const float scale[2] = {args.scale * vectors.grown[me.row(0)], args.scale * vectors.grown[me.row(1)]};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        ldmatrix(a[i], frag_address<kChunk>(smem_addr(s.grad), me.row0, i, me.lane));
#pragma unroll
        for (int n = 0; n < 4; ++n)
          a[i][n] = pack_bf16(scale[n & 1] * bf16_lo(a[i][n]), scale[n & 1] * bf16_hi(a[i][n]));
      }
      mbar_wait(smem_addr(&s.s_full), parity);
      pin(a);
      wgmma_fence();
      gemm_rs<Major::MN, kHeadDim, 8>(dq, a, smem_addr(s.s), j > 0);
      wgmma_commit();
      mbar_wait(smem_addr(&s.r_full), parity);
      state_dot(s, dots, 0, me);
      wgmma_wait<0>();
      pin(dq);
      release(s.s_empty, me.lane);
      release(s.r_empty, me.lane);

      mbar_wait(smem_addr(&s.delta_full), parity);
      float dp[32];
      wgmma_fence();
      gemm_ss<Major::K, kChunk, Major::K, kChunk, 8>(dp, smem_addr(s.grad), smem_addr(s.delta), false);
      wgmma_commit();
      wgmma_wait<0>();
      pin(dp);
      release(s.tokens_empty, me.lane);
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const float2 g = decays(vectors, me.row(h), me.column(c), false);
          dp[4 * c + 2 * h] *= args.scale * g.x, dp[4 * c + 2 * h + 1] *= args.scale * g.y;
        }
      uint32_t f[4][4];
      to_frag(f, dp);
#pragma unroll
      for (int i = 0; i < 4; ++i) stmatrix(frag_address<kChunk>(smem_addr(s.dp), me.row0, i, me.lane), f[i]);
      fence_proxy_async();
      mbar_arrive(smem_addr(&s.products_full));
      pin(f);
      wgmma_fence();
      gemm_rs<Major::MN, kChunk, 4>(dq, f, smem_addr(s.k), true);
      wgmma_commit();
      wgmma_wait<0>();
      pin(dq);
      float now[2];
      row_dots(now, dq, smem_addr(s.q), me.row0, me.lane);
      if ((me.lane & 3) == 0) dots.query[me.row(0)] = now[0] - dot[0], dots.query[me.row(1)] = now[1] - dot[1];
      dot[0] = now[0], dot[1] = now[1];
      bar_sync(kComputeBarrier, 384);  // every dot of this v head is there, and every product of it done

      if (me.warp == 0) {  // dg: sums from the end of the chunk, two tokens a lane
        const int i = 2 * me.lane;
        const float first = dots.query[i] + dots.erase[i] - dots.key[i];
        const float second = dots.query[i + 1] + dots.erase[i + 1] - dots.key[i + 1];
        float sum = first + second;
#pragma unroll
        for (int d = 1; d < 32; d <<= 1) {
          const float down = __shfl_down_sync(0xffffffffu, sum, d);
          if (me.lane + d < 32) sum += down;
        }
        const float after = __shfl_down_sync(0xffffffffu, sum, 1);
        float edge = 0.f;
#pragma unroll
        for (int n = 0; n < 8; ++n) edge += dots.state[n];
        edge *= vectors.decay;
#pragma unroll
        for (int n = 0; n < 4; ++n) edge += dots.written[n];
        const float tail = second + (me.lane < 31 ? after : 0.f);
        float* dg = args.dg + int64_t(p.chunk.token + i) * v_heads + p.head * args.group + j;
        if (i < p.chunk.rows) dg[0] = first + tail + edge;
        if (i + 1 < p.chunk.rows) dg[v_heads] = tail + edge;
      }
    }
    if (args.l2norm) norm_backward(dq, dot, smem_addr(s.q), s.rq, me);
    store_rows(smem_addr(s.q), dq, args.dq + (int64_t(p.chunk.token) * args.heads + p.head) * kHeadDim,
               args.heads * kHeadDim, p.chunk.rows, me);
    release(s.pair_empty, me.lane);
  }
}

// ---- warpgroup 1: the erasing side (k in its query role) ------------------------------------------------------------

// Y . v of every row, and dv = beta Y.
__device__ __forceinline__ void value_side(OutShared& s, const OutVectors& vectors, __nv_bfloat16* dv, int64_t row_stride,
                                           int rows, const Lane& me) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int row = me.row0 + 2 * i + (me.lane >> 4), group = me.lane & 15;
    const uint32_t offset = group_offset<kChunk>(row, group);
    const uint4 y = ld_shared_16(smem_addr(s.y) + offset), v = ld_shared_16(smem_addr(s.v) + offset);
    const uint32_t ys[4] = {y.x, y.y, y.z, y.w}, vs[4] = {v.x, v.y, v.z, v.w};
    const float beta = vectors.beta[row];
    uint32_t out[4];
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      sum = fmaf(bf16_lo(ys[w]), bf16_lo(vs[w]), sum);
      sum = fmaf(bf16_hi(ys[w]), bf16_hi(vs[w]), sum);
      out[w] = pack_bf16(beta * bf16_lo(ys[w]), beta * bf16_hi(ys[w]));
    }
#pragma unroll
    for (int d = 8; d >= 1; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (group == 0) s.value_dot[row] = sum;
    if (row < rows)
      *reinterpret_cast<uint4*>(dv + row * row_stride + group * 8) = make_uint4(out[0], out[1], out[2], out[3]);
  }
}

__device__ __forceinline__ void out_erase(OutShared& s, const OutArgs& args, int thread) {
  const Lane me(thread);
  const int v_heads = args.heads * args.group, works = args.plan.chunk_count() * args.heads;
  uint32_t pair_parity = 0;
  int step = 0;
  for (int work = blockIdx.x; work < works; work += gridDim.x, pair_parity ^= 1) {
    const OutPair p = out_pair(args, work);
    mbar_wait(smem_addr(&s.pair_full), pair_parity);
    if (args.l2norm) normalise(s, 128 + thread);
    fence_proxy_async();
    bar_sync(kComputeBarrier, 384);
    for (int j = 0; j < args.group; ++j, ++step) {
      const uint32_t parity = step & 1;
      const int v_head = p.head * args.group + j;
      const OutVectors& vectors = s.vectors[parity];
      OutDots& dots = s.dots[parity];
      mbar_wait(smem_addr(&s.tokens_full), parity);
      mbar_wait(smem_addr(&s.s_full), parity);
      float x[64];
      wgmma_fence();
      gemm_ss<Major::K, kChunk, Major::MN, kHeadDim, 8>(x, smem_addr(s.y), smem_addr(s.s), false);
      wgmma_commit();
      value_side(s, vectors, args.dv + (int64_t(p.chunk.token) * v_heads + v_head) * kHeadDim, v_heads * kHeadDim,
                 p.chunk.rows, me);
      mbar_wait(smem_addr(&s.r_full), parity);
      state_dot(s, dots, 1, me);
      wgmma_wait<0>();
      pin(x);
      release(s.s_empty, me.lane);
      release(s.r_empty, me.lane);
      float m[2], live[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float beta = vectors.beta[me.row(h)];
        live[h] = fabsf(beta) >= kLeastBeta ? 1.f : 0.f;
        m[h] = live[h] != 0.f ? beta : 1.f;
        const float scale = -m[h] * vectors.grown[me.row(h)];
#pragma unroll
        for (int c = 0; c < 16; ++c) x[4 * c + 2 * h] *= scale, x[4 * c + 2 * h + 1] *= scale;
      }

      mbar_wait(smem_addr(&s.delta_full), parity);
      float dl[32];
      wgmma_fence();
      gemm_ss<Major::K, kChunk, Major::K, kChunk, 8>(dl, smem_addr(s.y), smem_addr(s.delta), false);
      wgmma_commit();
      wgmma_wait<0>();
      pin(dl);
      release(s.tokens_empty, me.lane);
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int c = 0; c < 8; ++c) {
          const float2 g = decays(vectors, me.row(h), me.column(c), true);
          dl[4 * c + 2 * h] *= -m[h] * g.x, dl[4 * c + 2 * h + 1] *= -m[h] * g.y;
        }
      uint32_t f[4][4], kept[4];
      to_frag(f, dl);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int n = 0; n < 4; ++n) kept[n] = live[n & 1] != 0.f ? f[i][n] : 0u;
        stmatrix(frag_address<kChunk>(smem_addr(s.dl), me.row0, i, me.lane), kept);
      }
      fence_proxy_async();
      mbar_arrive(smem_addr(&s.products_full));
      pin(f);
      wgmma_fence();
      gemm_rs<Major::MN, kChunk, 4>(x, f, smem_addr(s.k), true);
      wgmma_commit();
      wgmma_wait<0>();
      pin(x);
      float dot[2];
      row_dots(dot, x, smem_addr(s.k), me.row0, me.lane);
      if ((me.lane & 3) == 0) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = me.row(h);
          dots.erase[row] = live[h] * dot[h];
          if (row < p.chunk.rows)
            args.dbeta[int64_t(p.chunk.token + row) * v_heads + v_head] = s.value_dot[row] + dot[h] / m[h];
        }
      }
#pragma unroll
      for (int c = 0; c < 16; ++c) {
        float4& slot = s.erase_total[c][me.thread];
        float4 sum = j > 0 ? slot : make_float4(0.f, 0.f, 0.f, 0.f);
        sum.x += live[0] * x[4 * c], sum.y += live[0] * x[4 * c + 1];
        sum.z += live[1] * x[4 * c + 2], sum.w += live[1] * x[4 * c + 3];
        slot = sum;
      }
      bar_sync(kComputeBarrier, 384);
    }
  }
}

// ---- warpgroup 2: D and the key side --------------------------------------------------------------------------------

__device__ __forceinline__ void out_delta(OutShared& s, const OutArgs& args, int thread) {
  const Lane me(thread);
  const int works = args.plan.chunk_count() * args.heads;
  const uint32_t delta = smem_addr(s.delta), k = smem_addr(s.k);
  uint32_t pair_parity = 0;
  int step = 0;
  for (int work = blockIdx.x; work < works; work += gridDim.x, pair_parity ^= 1) {
    const OutPair p = out_pair(args, work);
    mbar_wait(smem_addr(&s.pair_full), pair_parity);
    if (args.l2norm) normalise(s, 256 + thread);
    fence_proxy_async();
    bar_sync(kComputeBarrier, 384);
    float dk[64], dot[2] = {0.f, 0.f};
    for (int j = 0; j < args.group; ++j, ++step) {
      const uint32_t parity = step & 1;
      const OutVectors& vectors = s.vectors[parity];
      OutDots& dots = s.dots[parity];
      mbar_wait(smem_addr(&s.tokens_full), parity);
      mbar_wait(smem_addr(&s.s_full), parity);
      float u[64];
      wgmma_fence();
      gemm_ss<Major::K, kChunk, Major::K, kHeadDim, 8>(u, k, smem_addr(s.s), false);
      wgmma_commit();
      wgmma_wait<0>();
      pin(u);
      release(s.s_empty, me.lane);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = me.row(h);
        const float beta = vectors.beta[row], grown = vectors.grown[row];
#pragma unroll
        for (int c = 0; c < 16; ++c) {
          const uint32_t v = ld_shared_4(smem_addr(s.v) + pair_offset<kChunk>(row, me.column(c)));
          u[4 * c + 2 * h] = beta * (bf16_lo(v) - grown * u[4 * c + 2 * h]);
          u[4 * c + 2 * h + 1] = beta * (bf16_hi(v) - grown * u[4 * c + 2 * h + 1]);
        }
      }
      uint32_t f[8][4];
      to_frag(f, u);
#pragma unroll
      for (int i = 0; i < 8; ++i) stmatrix(frag_address<kChunk>(delta, me.row0, i, me.lane), f[i]);
      fence_proxy_async();
      bar_sync(kDeltaBarrier, 128);
      wgmma_fence();
      gemm_ss<Major::K, kChunk, Major::MN, kChunk, 4>(u, smem_addr(s.t), delta, false);
      wgmma_commit();
      wgmma_wait<0>();
      pin(u);
      release(s.tokens_empty, me.lane);
      to_frag(f, u);
      bar_sync(kDeltaBarrier, 128);  // every warp's product has read beta W
#pragma unroll
      for (int i = 0; i < 8; ++i) stmatrix(frag_address<kChunk>(delta, me.row0, i, me.lane), f[i]);
      fence_proxy_async();
      mbar_arrive(smem_addr(&s.delta_full));

      // The scaled operand is made of the rounded D, as the products with D see it.
      const float rest[2] = {vectors.rest[me.row(0)], vectors.rest[me.row(1)]};
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int n = 0; n < 4; ++n)
          f[i][n] = pack_bf16(rest[n & 1] * bf16_lo(f[i][n]), rest[n & 1] * bf16_hi(f[i][n]));
      mbar_wait(smem_addr(&s.r_full), parity);
      pin(f);
      wgmma_fence();
      gemm_rs<Major::MN, kHeadDim, 8>(dk, f, smem_addr(s.r), j > 0);
      wgmma_commit();
      wgmma_wait<0>();
      pin(dk);
      release(s.r_empty, me.lane);
      float now[2];
      row_dots(now, dk, k, me.row0, me.lane);
      float written = (now[0] - dot[0]) + (now[1] - dot[1]);
#pragma unroll
      for (int d = 4; d <= 16; d <<= 1) written += __shfl_xor_sync(0xffffffffu, written, d);
      if (me.lane == 0) dots.written[me.warp] = written;

      mbar_wait(smem_addr(&s.products_full), parity);
      wgmma_fence();
      gemm_ss<Major::MN, kChunk, Major::MN, kChunk, 4>(dk, smem_addr(s.dp), smem_addr(s.q), true);
      gemm_ss<Major::MN, kChunk, Major::MN, kChunk, 4>(dk, smem_addr(s.dl), k, true);
      wgmma_commit();
      wgmma_wait<0>();
      pin(dk);
      row_dots(now, dk, k, me.row0, me.lane);
      if ((me.lane & 3) == 0) dots.key[me.row(0)] = now[0] - dot[0], dots.key[me.row(1)] = now[1] - dot[1];
      dot[0] = now[0], dot[1] = now[1];
      bar_sync(kComputeBarrier, 384);
    }
    // The erasing side's total lies in the same places of the same thread numbers.
#pragma unroll
    for (int c = 0; c < 16; ++c) {
      const float4 x = s.erase_total[c][me.thread];
      dk[4 * c] += x.x, dk[4 * c + 1] += x.y, dk[4 * c + 2] += x.z, dk[4 * c + 3] += x.w;
    }
    if (args.l2norm) {
      row_dots(dot, dk, k, me.row0, me.lane);
      norm_backward(dk, dot, k, s.rk, me);
    }
    store_rows(k, dk, args.dk + (int64_t(p.chunk.token) * args.heads + p.head) * kHeadDim, args.heads * kHeadDim,
               p.chunk.rows, me);
    release(s.pair_empty, me.lane);
  }
}

static __global__ void __launch_bounds__(kOutThreads, 1) out_kernel(const __grid_constant__ OutArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  OutShared& s = *reinterpret_cast<OutShared*>(raw);
  if (threadIdx.x == 0) {
    mbar_init(smem_addr(&s.pair_full), 128);
    mbar_init(smem_addr(&s.pair_empty), 8);    // warps of query and delta
    mbar_init(smem_addr(&s.tokens_full), 128);
    mbar_init(smem_addr(&s.tokens_empty), 12);  // warps of all three
    mbar_init(smem_addr(&s.s_full), 128);
    mbar_init(smem_addr(&s.s_empty), 12);
    mbar_init(smem_addr(&s.r_full), 128);
    mbar_init(smem_addr(&s.r_empty), 12);
    mbar_init(smem_addr(&s.delta_full), 128);
    mbar_init(smem_addr(&s.products_full), 256);
    mbar_init_fence();
  }
  __syncthreads();
  const int thread = threadIdx.x % 128;
  switch (threadIdx.x / 128) {
    case 0:
      registers_grow<kQueryRegisters>();
      out_query(s, args, thread);
      break;
    case 1:
      registers_grow<kEraseRegisters>();
      out_erase(s, args, thread);
      break;
    case 2:
      registers_grow<kDeltaRegisters>();
      out_delta(s, args, thread);
      break;
    default:
      registers_shrink<kOutProducerRegisters>();
      out_produce(s, args, thread);
  }
}

}  // namespace cake::gdn
