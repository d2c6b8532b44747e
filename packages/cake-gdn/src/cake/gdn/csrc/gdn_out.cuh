// gdn_out: the parallel rest of the backward. Persistent CTAs take (chunk, q/k head) pairs and loop over the pair's v
// heads; everything about a pair stays in its CTA, so no sum crosses CTAs. Per v head, rows are tokens, G_ij = 2^(b_i-b_j):
//
//   U   = k^ S                W   = v - 2^b U                     D   = T (beta W)
//   dP  = s tril(G) (dO D^T)                       dL  = -stril(G) (Z D^T)              Z = m Y, see below
//   dq^ = s 2^b dO S^T + dP k^                     X   = -2^b Z S^T
//   dk^ = 2^(b_C - b) D R^T + dP^T q^ + dL^T k^ + X + dL k^
//   dv  = Z                   e_i = k^_i . X_i + sum_j dL_ij (k^_i . k^_j)              dbeta = Z . D / beta^2
//   db  = q^ . dq^ + e - k^ . (2^(b_C - b) D R^T + dP^T q^ + dL^T k^)
//   dg_i = sum_{j>=i} db_j + sum_j 2^(b_C - b_j) k^_j . (D R^T)_j + 2^b_C <S, R>
//
// m = beta, so that one bf16 rounding of dL serves row i and column j of a pair alike and they cancel in dg; the walk before
// left Z where dv goes. q^ and k^ are normalised once to bf16 and used for products and row dots alike, for the same reason. At
// the end of a group comes the norm's own backward: dq = r_q (dq^ - q^ (q^ . dq^)), dk likewise.
//
// dbeta_i is Y_i . (W_i - sum_{j<i} G_ij (k^_i . k^_j) D_j), and (I + L) D = beta W makes that Y_i . D_i / beta_i, from the
// diagonal of Z D^T. Where a beta is too small for that, or a chunk's tokens too few, dbeta comes of the sum itself; where beta
// is too small for anything (gdn_beta.cuh), m is 1, dv is 0, and the row adds to dbeta alone.
//
// Warpgroups: 0 (query) dP, dq^ and <S, R>; 1 (erase) dL, e, the last two terms of dk^, and dk when a pair is done; 2 (delta)
// U, D and the rest of dk^; 3 (producer) loads, and normalises q and k of the pair to come. A v head's chain is U, D, the
// products with D, and those with dP and dL: whatever else is made while one of these is waited for, most of all reads of
// shared memory, which answers late beside products.
// S and R are [V][K] images: K-major for k^ S, MN-major for the products with S^T and R^T.
#pragma once

#include "cake/frag.cuh"
#include "cake/pipe.cuh"
#include "cake/rows.cuh"
#include "cake/seq.cuh"
#include "gdn_beta.cuh"

namespace cake::gdn {

constexpr int kOutThreads = 512;
constexpr int kQueryRegisters = 152, kEraseRegisters = 160, kDeltaRegisters = 160, kOutProducerRegisters = 40;
static_assert(kQueryRegisters + kEraseRegisters + kDeltaRegisters + kOutProducerRegisters == 512, "of a lane slot");

enum OutBarrier { kDeltaBarrier = 1, kProducerBarrier = 2 };

// Results that lie as the host has it. dv holds Z when the kernel begins: what differs is written.
enum OutResult { kDq, kDk, kDv, kDbeta, kDg, kOutResults };

struct OutArgs {
  View<const __nv_bfloat16> q, k, v, grad;  // [B, T, H or HV, 128]; grad = dO
  Scalars beta;
  Plan plan;
  const __nv_bfloat16* t;  // [HV, total, 64]
  const float *b, *rq, *rk;  // [HV, total], [H, total]
  const __nv_bfloat16 *states, *adjoints;  // images [slots, HV, 128, 128]
  bool states_edge, adjoints_edge;  // whether the tapes have the sequences' edge slots
  View<void> results[kOutResults];  // dq, dk, dv [B, T, H or HV, 128] bf16; dbeta, dg [B, T, HV] fp32 or bf16
  bool dbeta_bf16, dg_bf16;
  int heads, group;
  float scale;
  bool l2norm;

  __device__ __forceinline__ __nv_bfloat16* rows(OutResult result, int64_t place) const {
    return static_cast<__nv_bfloat16*>(results[result].data) + place;
  }
};

// Per token and v head; two sets, for the v head in work and the next.
struct alignas(16) OutVectors {
  float b[kChunk], grown[kChunk], read[kChunk], rest[kChunk], beta[kChunk];  // b, 2^b, s 2^b, 2^(b_C - b)
  float decay;  // 2^b_C
};

// Parts of db and dg: q^ . dq^, e, k^ . (...), and per-warp parts of <S, R> and of the sum of 2^(b_C - b) k^ . (D R^T); and
// Z . W where dbeta comes of sums.
struct OutDots {
  float query[kChunk], erase[kChunk], residual[kChunk], key[kChunk];
  float state[4], written[4];
  int small[4];  // whether 16 rows have one whose dbeta comes of sums
};

// Where a pair's results begin, and how many rows they have. Those of its v head j lie j head strides further.
struct OutPlace {
  int64_t first[kOutResults];
  int rows;
};

// q^ and k^ of a pair; dq and dk on their way out.
struct OutPairTiles {
  alignas(1024) uint8_t q[kTokenTileBytes], k[kTokenTileBytes];
};

struct OutShared {
  OutPairTiles pairs[2];
  alignas(1024) uint8_t s[kStateTileBytes], r[kStateTileBytes];
  alignas(1024) uint8_t v[kTokenTileBytes], grad[kTokenTileBytes], z[kTokenTileBytes], t[kSquareTileBytes];
  union {
    struct {
      alignas(1024) uint8_t delta[kTokenTileBytes];  // beta W, then D
      alignas(1024) uint8_t dp[kSquareTileBytes], dl[kSquareTileBytes];
    };
    float4 key[16][128];  // at the end of a group: warpgroup 2's part of dk^, in thread-private slots
  };
  OutVectors vectors[2];
  OutDots dots[2];
  float rq[2][kChunk], rk[2][kChunk];
  OutPlace places[2];
  alignas(8) uint64_t pair_full[2], pair_empty[2];  // q^, k^, rq, rk
  uint64_t values_full, values_empty;  // v, t, vectors
  uint64_t grads_full, grads_empty;  // grad, z
  uint64_t s_full, s_empty, r_full, r_empty;
  uint64_t delta_full, products_full;  // D; dP and dL
  uint64_t dots_full;  // of a v head, whose products are all made by then
  uint64_t key_full, key_empty;
};
static_assert(sizeof(OutShared) <= 232448, "an SM gives a CTA 227 KB");

// ---- producer --------------------------------------------------------------------------------------------------

// Starts the copies of q and k of this CTA's pair number `turn`.
__device__ __forceinline__ void load_pair(OutShared& s, const OutArgs& args, int work, int turn, int thread) {
  const Chunk chunk = args.plan.chunk(work / args.heads);
  const int head = work % args.heads, tokens = args.plan.tokens_per_batch, set = turn & 1;
  const int64_t first = int64_t(head) * args.plan.total + chunk.token;
  OutPairTiles& tiles = s.pairs[set];
  mbar_wait(smem_addr(&s.pair_empty[set]), ((turn >> 1) & 1) ^ 1);
  load_rows<16, 128>(smem_addr(tiles.q), args.q.row(chunk.token, tokens, head), args.q.token_stride, chunk.rows,
                     thread);
  load_rows<16, 128>(smem_addr(tiles.k), args.k.row(chunk.token, tokens, head), args.k.token_stride, chunk.rows,
                     thread);
  cp_async_commit();
  if (thread < kChunk) {
    s.rq[set][thread] = thread < chunk.rows ? args.rq[first + thread] : 0.f;
    s.rk[set][thread] = thread < chunk.rows ? args.rk[first + thread] : 0.f;
  }
  if (thread < kOutResults)
    s.places[set].first[thread] =
        args.results[thread].place(chunk.token, tokens, thread < kDv ? head : head * args.group);
  if (thread == 0) s.places[set].rows = chunk.rows;
}

// Makes q^ and k^ of them, when this thread's copies have landed.
__device__ __forceinline__ void normalise_pair(OutShared& s, const OutArgs& args, int turn, int thread) {
  const int set = turn & 1;
  bar_sync(kProducerBarrier, 128);  // rq and rk
  if (args.l2norm) {
    normalise(smem_addr(s.pairs[set].q), s.rq[set], thread);
    normalise(smem_addr(s.pairs[set].k), s.rk[set], thread);
  }
  fence_proxy_async();
  mbar_arrive(smem_addr(&s.pair_full[set]));
}

__device__ __forceinline__ void out_produce(OutShared& s, const OutArgs& args, int thread) {
  const int tokens = args.plan.tokens_per_batch, v_heads = args.heads * args.group;
  const int64_t total = args.plan.total;
  const int works = args.plan.chunk_count() * args.heads;
  int step = 0, turn = 0;  // v heads and pairs so far
  bool loading_pair = false;
  if (blockIdx.x < works) {
    load_pair(s, args, blockIdx.x, 0, thread);
    cp_async_wait<0>();
    normalise_pair(s, args, 0, thread);
  }
  for (int work = blockIdx.x; work < works; work += gridDim.x, ++turn) {
    const Chunk chunk = args.plan.chunk(work / args.heads);
    const Sequence sequence = args.plan.sequence(chunk.sequence);
    const int token = chunk.token, rows = chunk.rows;
    const int s_slot = state_slot(sequence, chunk.index, args.states_edge);
    const int r_slot = adjoint_slot(sequence, chunk.index, chunk.last, args.adjoints_edge);
    int v_head = work % args.heads * args.group;
    for (int j = 0; j < args.group; ++j, ++step, ++v_head) {
      const uint32_t parity = step & 1;
      OutVectors& vectors = s.vectors[parity];
      // In the order in which the previous v head lets go of them.
      mbar_wait(smem_addr(&s.s_empty), parity ^ 1);
      load_state(smem_addr(s.s), s.s_full, args.states, s_slot, v_heads, v_head, thread);
      float b = 0.f, last = 0.f, beta = 0.f;  // on their way while the copies are started
      if (thread < kChunk) {
        b = args.b[v_head * total + token + min(fresh(thread), rows - 1)];
        last = args.b[v_head * total + token + rows - 1];
        if (thread < rows) beta = args.beta.at(token + thread, tokens, v_head);
      }
      mbar_wait(smem_addr(&s.values_empty), parity ^ 1);
      load_rows<16, 128>(smem_addr(s.v), args.v.row(fresh(token), tokens, v_head), args.v.token_stride, rows,
                         fresh(thread));
      load_rows<8, 128>(smem_addr(s.t), args.t + (v_head * total + token) * kChunk, kChunk, rows, fresh(thread));
      cp_async_commit();
      mbar_wait(smem_addr(&s.grads_empty), parity ^ 1);
      load_rows<16, 128>(smem_addr(s.z), args.rows(kDv, args.results[kDv].place(fresh(token), tokens, v_head)),
                         args.results[kDv].token_stride, rows, fresh(thread));
      load_rows<16, 128>(smem_addr(s.grad), args.grad.row(fresh(token), tokens, v_head), args.grad.token_stride, rows,
                         fresh(thread));
      cp_async_commit();
      mbar_wait(smem_addr(&s.r_empty), parity ^ 1);
      load_state(smem_addr(s.r), s.r_full, args.adjoints, r_slot, v_heads, v_head, thread);
      if (thread < kChunk) {
        const float grown = ex2(b);
        vectors.b[thread] = b, vectors.grown[thread] = grown, vectors.read[thread] = args.scale * grown;
        vectors.rest[thread] = ex2(last - b);
        vectors.beta[thread] = beta;
        if (thread == 0) vectors.decay = ex2(last);
      }
      if (loading_pair && j == 0) {  // a pair since the v head before, which was its pair's only one: this one's
        cp_async_wait<2>();
        normalise_pair(s, args, turn, thread);
      }
      cp_async_wait<1>();
      fence_proxy_async();
      mbar_arrive(smem_addr(&s.values_full));
      cp_async_wait<0>();
      fence_proxy_async();
      mbar_arrive(smem_addr(&s.grads_full));
      if (loading_pair && j > 0) normalise_pair(s, args, turn + 1, thread);
      loading_pair = j == 0 && work + gridDim.x < works;
      if (loading_pair) load_pair(s, args, work + gridDim.x, turn + 1, thread);
    }
  }
}

// ---- what the computing warpgroups share -------------------------------------------------------------------------

__device__ __forceinline__ int pairs_of_cta(const OutArgs& args) {
  const int works = args.plan.chunk_count() * args.heads;
  return blockIdx.x < works ? (works - 1 - int(blockIdx.x)) / int(gridDim.x) + 1 : 0;
}

// G_ij, zero above the diagonal, and on it when kStrict.
template <bool kStrict>
__device__ __forceinline__ void decays(float (&g)[32], const OutVectors& vectors, const Lane& me) {
  const float b[2] = {vectors.b[me.row(0)], vectors.b[me.row(1)]};
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const int column = me.column(c);
    const float2 bc = *reinterpret_cast<const float2*>(vectors.b + column);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int least = me.row(h) - (kStrict ? 1 : 0), n = 4 * c + 2 * h;
      g[n] = column <= least ? ex2(b[h] - bc.x) : 0.f;
      g[n + 1] = column + 1 <= least ? ex2(b[h] - bc.y) : 0.f;
    }
  }
}

// Where a result of row r of a pair's v head j lies.
__device__ __forceinline__ int64_t place_of(const OutArgs& args, OutResult result, const OutPlace& place, int j,
                                            int r) {
  const View<void>& view = args.results[result];
  return place.first[result] + j * view.head_stride + r * view.token_stride;
}

// dg of the chunk by one warp, sums from the end, two tokens a lane, to `dg` of the first; and dv where it isn't Z.
__device__ __forceinline__ void gate_gradient(const OutVectors& vectors, const OutDots& dots, const OutArgs& args,
                                              const OutPlace& place, int j, int64_t dg, int lane) {
  float db[2];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int i = 2 * lane + n;
    const bool live = writes(vectors.beta[i]);
    if (!live && i < place.rows) {
      __nv_bfloat16* dv = args.rows(kDv, place_of(args, kDv, place, j, i));
#pragma unroll 1
      for (int group = 0; group < 16; ++group) st_global_16(dv + group * 8, make_uint4(0, 0, 0, 0));
    }
    db[n] = dots.query[i] + dots.erase[i] - dots.key[i];
  }
  float sum = db[0] + db[1];
#pragma unroll
  for (int d = 1; d < 32; d <<= 1) {
    const float down = __shfl_down_sync(0xffffffffu, sum, d);
    if (lane + d < 32) sum += down;
  }
  const float after = __shfl_down_sync(0xffffffffu, sum, 1);
  float edge = 0.f;
#pragma unroll
  for (int n = 0; n < 4; ++n) edge += dots.state[n];
  edge *= vectors.decay;
#pragma unroll
  for (int n = 0; n < 4; ++n) edge += dots.written[n];
  const float tail = db[1] + (lane < 31 ? after : 0.f);
  const View<void>& out = args.results[kDg];
  if (2 * lane < place.rows) put_scalar(out, args.dg_bf16, dg, db[0] + tail + edge);
  if (2 * lane + 1 < place.rows) put_scalar(out, args.dg_bf16, dg + out.token_stride, tail + edge);
}

// A warp's part of the trace of a 64 x 64 accumulator: its rows have their diagonal in the columns of blocks 2 w and 2 w + 1.
__device__ __forceinline__ float trace(const float (&acc)[32], const Lane& me) {
  float sum = 0.f;
#pragma unroll
  for (int c = 0; c < 8; ++c)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int h = c & 1;
      if (me.row(h) == me.column(c) + i) sum += acc[4 * c + 2 * h + i];
    }
#pragma unroll
  for (int d = 16; d >= 1; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
  return sum;
}

// ---- warpgroup 0: the query side ---------------------------------------------------------------------------------

__device__ __forceinline__ void out_query(OutShared& s, const OutArgs& args, int thread) {
  const int turns = pairs_of_cta(args);
  int step = 0;
  for (int turn = 0; turn < turns; ++turn) {
    mbar_wait(smem_addr(&s.pair_full[turn & 1]), (turn >> 1) & 1);
    float dq[64], dot[2] = {0.f, 0.f};
    for (int j = 0; j < args.group; ++j, ++step) {
      Lane me(fresh(thread));
      const uint32_t parity = step & 1;
      const OutVectors& vectors = s.vectors[parity];
      mbar_wait(smem_addr(&s.grads_full), parity);
      uint32_t a[8][4];
      const float read[2] = {vectors.read[me.row(0)], vectors.read[me.row(1)]};
      load_scaled(a, smem_addr(s.grad), me.row0, read, me.lane);
      mbar_wait(smem_addr(&s.s_full), parity);
      pin(a);
      wgmma_fence();
      gemm_rs<Major::MN, kHeadDim, 8>(dq, a, smem_addr(s.s), j > 0);
      wgmma_commit();
      wgmma_wait<0>();
      pin(dq);
      mbar_wait(smem_addr(&s.r_full), parity);
      {
        // <S, R> is the trace of S R^T: of its two diagonal blocks, added up.
        float product[32];
        wgmma_fence();
        gemm_ss<Major::K, kHeadDim, Major::K, kHeadDim, 8>(product, smem_addr(s.s), smem_addr(s.r), false);
        gemm_ss<Major::K, kHeadDim, Major::K, kHeadDim, 8>(product, smem_addr(s.s) + kChunk * kPanelRowBytes,
                                                           smem_addr(s.r) + kChunk * kPanelRowBytes, true);
        wgmma_commit();
        wgmma_wait<0>();
        pin(product);
        me = Lane(fresh(thread));
        warp_arrive(s.s_empty, me.lane);
        warp_arrive(s.r_empty, me.lane);
        const float sum = trace(product, me);
        if (me.lane == 0) s.dots[parity].state[me.warp] = sum;
      }
      float g[32];
      decays<false>(g, vectors, me);
      pin(g);

      mbar_wait(smem_addr(&s.delta_full), parity);
      float dp[32];
      wgmma_fence();
      gemm_ss<Major::K, kChunk, Major::K, kChunk, 8>(dp, smem_addr(s.grad), smem_addr(s.delta), false);
      wgmma_commit();
      wgmma_wait<0>();
      pin(dp);
      me = Lane(fresh(thread));
      warp_arrive(s.grads_empty, me.lane);
#pragma unroll
      for (int n = 0; n < 32; ++n) dp[n] *= args.scale * g[n];
      uint32_t f[4][4];
      to_frag(f, dp);
#pragma unroll
      for (int i = 0; i < 4; ++i) stmatrix(frag_address<kChunk>(smem_addr(s.dp), me.row0, i, me.lane), f[i]);
      fence_proxy_async();
      mbar_arrive(smem_addr(&s.products_full));
      pin(f);
      wgmma_fence();
      gemm_rs<Major::MN, kChunk, 4>(dq, f, smem_addr(s.pairs[fresh(turn) & 1].k), true);
      wgmma_commit();
      me = Lane(fresh(thread));
      uint32_t rows[8][4];  // of q^
      load_frags(rows, smem_addr(s.pairs[fresh(turn) & 1].q), me.row0, me.lane);
      wgmma_wait<0>();
      pin(dq);
      pin(rows);
      OutDots& dots = s.dots[fresh(step) & 1];
      float now[2];
      row_dots(now, dq, rows);
      if ((me.lane & 3) == 0) dots.query[me.row(0)] = now[0] - dot[0], dots.query[me.row(1)] = now[1] - dot[1];
      dot[0] = now[0], dot[1] = now[1];
      warp_arrive(s.dots_full, fresh(thread) & 31);
    }
    mbar_wait(smem_addr(&s.dots_full), (fresh(step) - 1) & 1);  // nothing reads q^ any more
    const Lane me(fresh(thread));
    const uint32_t q = smem_addr(s.pairs[fresh(turn) & 1].q);
    if (args.l2norm) norm_backward(dq, dot, q, s.rq[turn & 1], me);
    stage_rows(q, dq, me);
    const OutPlace& place = s.places[fresh(turn) & 1];
    send_rows(q, args.rows(kDq, place.first[kDq]), args.results[kDq].token_stride, place.rows, me);
    warp_arrive(s.pair_empty[turn & 1], me.lane);
  }
}

// ---- warpgroup 1: the erasing side (k in its query role) ------------------------------------------------------------

__device__ __forceinline__ void put_dbeta(const OutArgs& args, const OutPlace& place, int j, int row, float x) {
  put_scalar(args.results[kDbeta], args.dbeta_bf16, place_of(args, kDbeta, place, j, row), x);
}

// dbeta where the diagonal isn't for it, from sums over the tokens before.
__device__ __forceinline__ void small_betas(OutShared& s, const OutVectors& vectors, const OutDots& dots,
                                            const uint32_t (&dl)[4][4], uint32_t k, const OutPlace& place,
                                            const OutArgs& args, int j, const Lane& me) {
  float kk[32];
  wgmma_fence();
  gemm_ss<Major::K, kChunk, Major::K, kChunk, 8>(kk, k, k, false);
  wgmma_commit();
  wgmma_wait<0>();
  pin(kk);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float e = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int n = h; n < 4; n += 2) {
        e = fmaf(bf16_lo(dl[i][n]), kk[acc_index(i, n)], e);
        e = fmaf(bf16_hi(dl[i][n]), kk[acc_index(i, n) + 1], e);
      }
    e = row_sum(e);
    const int row = me.row(h);
    const float beta = vectors.beta[row];
    if ((me.lane & 3) == 0 && row < place.rows && !divides(beta, place.rows))
      put_dbeta(args, place, j, row, (dots.residual[row] + e) / row_factor(beta));
  }
}

__device__ __forceinline__ void out_erase(OutShared& s, const OutArgs& args, int thread) {
  const int turns = pairs_of_cta(args);
  int step = 0;
  for (int turn = 0; turn < turns; ++turn) {
    const OutPlace& place = s.places[turn & 1];
    const uint32_t k = smem_addr(s.pairs[turn & 1].k);
    mbar_wait(smem_addr(&s.pair_full[turn & 1]), (turn >> 1) & 1);
    float dk[64], dot[2] = {0.f, 0.f};
    for (int j = 0; j < args.group; ++j, ++step) {
      Lane me(fresh(thread));
      const uint32_t parity = step & 1;
      const OutVectors& vectors = s.vectors[parity];
      OutDots& dots = s.dots[parity];
      mbar_wait(smem_addr(&s.grads_full), parity);
      {
        float scale[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) scale[h] = writes(vectors.beta[me.row(h)]) ? -vectors.grown[me.row(h)] : 0.f;
        uint32_t a[8][4];
        load_scaled(a, smem_addr(s.z), me.row0, scale, me.lane);
        mbar_wait(smem_addr(&s.s_full), parity);
        pin(a);
        wgmma_fence();
        gemm_rs<Major::MN, kHeadDim, 8>(dk, a, smem_addr(s.s), j > 0);
        wgmma_commit();
        wgmma_wait<0>();
        pin(dk);
      }
      me = Lane(fresh(thread));
      warp_arrive(s.s_empty, me.lane);
      float g[32];
      decays<true>(g, vectors, me);
      pin(g);

      mbar_wait(smem_addr(&s.delta_full), parity);
      float dl[32];
      wgmma_fence();
      gemm_ss<Major::K, kChunk, Major::K, kChunk, 8>(dl, smem_addr(s.z), smem_addr(s.delta), false);
      wgmma_commit();
      wgmma_wait<0>();
      pin(dl);
      me = Lane(fresh(thread));
      warp_arrive(s.grads_empty, me.lane);
      bool live[2];
      float zd[2] = {0.f, 0.f};  // Z . D
#pragma unroll
      for (int h = 0; h < 2; ++h) live[h] = writes(vectors.beta[me.row(h)]);
#pragma unroll
      for (int c = 0; c < 8; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (me.row(c & 1) == me.column(c) + i) zd[c & 1] += dl[4 * c + 2 * (c & 1) + i];
#pragma unroll
      for (int n = 0; n < 32; ++n) dl[n] *= -g[n];
      uint32_t f[4][4];
      to_frag(f, dl);
      uint32_t kept[4][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int n = 0; n < 4; ++n) kept[i][n] = live[n & 1] ? f[i][n] : 0u;
        stmatrix(frag_address<kChunk>(smem_addr(s.dl), me.row0, i, me.lane), kept[i]);
      }
      fence_proxy_async();
      mbar_arrive(smem_addr(&s.products_full));
      pin(kept);
      if (dots.small[0] | dots.small[1] | dots.small[2] | dots.small[3])
        small_betas(s, vectors, dots, f, k, place, args, j, me);
      wgmma_fence();
      gemm_rs<Major::MN, kChunk, 4>(dk, kept, k, true);
      wgmma_commit();
      uint32_t rows[8][4];  // of k^
      load_frags(rows, k, me.row0, me.lane);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = me.row(h);
        const float beta = vectors.beta[row], dot_d = row_sum(zd[h]);
        if ((me.lane & 3) == 0 && row < place.rows && divides(beta, place.rows))
          put_dbeta(args, place, j, row, dot_d / beta / beta);
      }
      wgmma_wait<0>();
      pin(dk);
      pin(rows);
      float now[2];
      row_dots(now, dk, rows);
      if ((me.lane & 3) == 0) dots.erase[me.row(0)] = now[0] - dot[0], dots.erase[me.row(1)] = now[1] - dot[1];
      dot[0] = now[0], dot[1] = now[1];
      me = Lane(fresh(thread));
      warp_arrive(s.dots_full, me.lane);
      if (me.warp == 0) {
        const int64_t dg = fresh(place_of(args, kDg, place, j, 2 * me.lane));
        mbar_wait(smem_addr(&s.dots_full), fresh(step) & 1);
        gate_gradient(vectors, dots, args, place, j, dg, me.lane);
      }
    }
    mbar_wait(smem_addr(&s.dots_full), (fresh(step) - 1) & 1);  // no product reads k^ any more
    mbar_wait(smem_addr(&s.key_full), fresh(turn) & 1);
    // Warpgroup 2's part lies in the same places of the same thread numbers.
#pragma unroll
    for (int first = 0; first < 16; first += 4) {
      float4 part[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) part[c] = s.key[first + c][thread];
      __syncwarp();
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float* to = dk + 4 * (first + c);
        to[0] += part[c].x, to[1] += part[c].y, to[2] += part[c].z, to[3] += part[c].w;
      }
    }
    mbar_arrive(smem_addr(&s.key_empty));
    const Lane me(fresh(thread));
    if (args.l2norm) {
      row_dots(dot, dk, k, me.row0, me.lane);
      norm_backward(dk, dot, k, s.rk[fresh(turn) & 1], me);
    }
    stage_rows(k, dk, me);
    send_rows(k, args.rows(kDk, place.first[kDk]), args.results[kDk].token_stride, place.rows, me);
    warp_arrive(s.pair_empty[fresh(turn) & 1], me.lane);
  }
}

// ---- warpgroup 2: D and the key side --------------------------------------------------------------------------------

// Steps first .. first + 3 of a tile's rows as fragments.
__device__ __forceinline__ void load_half(uint32_t (&f)[4][4], uint32_t tile, int first, const Lane& me) {
#pragma unroll
  for (int i = 0; i < 4; ++i) ldmatrix(f[i], frag_address<kChunk>(tile, me.row0, first + i, me.lane));
}

// W = v - 2^b U: bf16(beta W) to its tile.
__device__ __forceinline__ void residual(OutShared& s, const OutVectors& vectors, const float (&u)[64],
                                         const Lane& me) {
  const float beta[2] = {vectors.beta[me.row(0)], vectors.beta[me.row(1)]};
  const float grown[2] = {vectors.grown[me.row(0)], vectors.grown[me.row(1)]};
#pragma unroll
  for (int first = 0; first < 8; first += 4) {
    uint32_t v[4][4];
    load_half(v, smem_addr(s.v), first, me);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t f[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int n = acc_index(first + i, j), h = j & 1;
        f[j] = pack_bf16(beta[h] * (bf16_lo(v[i][j]) - grown[h] * u[n]),
                         beta[h] * (bf16_hi(v[i][j]) - grown[h] * u[n + 1]));
      }
      stmatrix(frag_address<kChunk>(smem_addr(s.delta), me.row0, first + i, me.lane), f);
    }
  }
}

// Z . W.
__device__ __forceinline__ void residual_dots(OutShared& s, const OutVectors& vectors, OutDots& dots,
                                              const float (&u)[64], const Lane& me) {
  const float grown[2] = {vectors.grown[me.row(0)], vectors.grown[me.row(1)]};
  float sum[2] = {0.f, 0.f};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    uint32_t v[4], z[4];
    ldmatrix(v, frag_address<kChunk>(smem_addr(s.v), me.row0, i, me.lane));
    ldmatrix(z, frag_address<kChunk>(smem_addr(s.z), me.row0, i, me.lane));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int n = acc_index(i, j), h = j & 1;
      sum[h] = fmaf(bf16_lo(z[j]), bf16_lo(v[j]) - grown[h] * u[n], sum[h]);
      sum[h] = fmaf(bf16_hi(z[j]), bf16_hi(v[j]) - grown[h] * u[n + 1], sum[h]);
    }
    __syncwarp();  // one step's registers at a time
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float dot = row_sum(sum[h]);
    if ((me.lane & 3) == 0) dots.residual[me.row(h)] = dot;
  }
}

__device__ __forceinline__ void out_delta(OutShared& s, const OutArgs& args, int thread) {
  const int turns = pairs_of_cta(args);
  const uint32_t delta = smem_addr(s.delta);
  int step = 0;
  for (int turn = 0; turn < turns; ++turn) {
    mbar_wait(smem_addr(&s.pair_full[turn & 1]), (turn >> 1) & 1);
    float dk[64], dot[2] = {0.f, 0.f};
    for (int j = 0; j < args.group; ++j, ++step) {
      Lane me(fresh(thread));
      const uint32_t parity = step & 1;
      const OutVectors& vectors = s.vectors[parity];
      OutDots& dots = s.dots[parity];
      mbar_wait(smem_addr(&s.s_full), parity);
      float u[64];
      wgmma_fence();
      gemm_ss<Major::K, kChunk, Major::K, kHeadDim, 8>(u, smem_addr(s.pairs[fresh(turn) & 1].k), smem_addr(s.s), false);
      wgmma_commit();
      mbar_wait(smem_addr(&s.values_full), parity);
      if (j == 0 && turn > 0) mbar_wait(smem_addr(&s.key_empty), (turn - 1) & 1);  // beta W takes its place
      wgmma_wait<0>();
      pin(u);
      me = Lane(fresh(thread));
      warp_arrive(s.s_empty, me.lane);
      {
        const int rows = s.places[fresh(turn) & 1].rows;
        const bool small =
            !__all_sync(0xffffffffu, divides(vectors.beta[me.row(0)], rows) && divides(vectors.beta[me.row(1)], rows));
        if (me.lane == 0) dots.small[me.warp] = small;
        if (small) {
          mbar_wait(smem_addr(&s.grads_full), parity);
          residual_dots(s, vectors, dots, u, Lane(fresh(thread)));
        }
      }
      me = Lane(fresh(thread));
      warp_arrive(s.grads_empty, me.lane);
      residual(s, vectors, u, me);
      const float rest[2] = {vectors.rest[me.row(0)], vectors.rest[me.row(1)]};
      fence_proxy_async();
      bar_sync(kDeltaBarrier, 128);
      wgmma_fence();
      gemm_ss<Major::K, kChunk, Major::MN, kChunk, 4>(u, smem_addr(s.t), delta, false);
      wgmma_commit();
      wgmma_wait<0>();
      pin(u);
      warp_arrive(s.values_empty, me.lane);
      me = Lane(fresh(thread));
      uint32_t f[8][4];
      to_frag(f, u);
      bar_sync(kDeltaBarrier, 128);  // every warp's product has read beta W
#pragma unroll
      for (int i = 0; i < 8; ++i) stmatrix(frag_address<kChunk>(delta, me.row0, i, me.lane), f[i]);
      fence_proxy_async();
      mbar_arrive(smem_addr(&s.delta_full));

      // The scaled operand is made of the rounded D, as the products with D see it.
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int n = 0; n < 4; ++n) f[i][n] = pack_bf16(rest[n & 1] * bf16_lo(f[i][n]), rest[n & 1] * bf16_hi(f[i][n]));
      mbar_wait(smem_addr(&s.r_full), parity);
      pin(f);
      wgmma_fence();
      gemm_rs<Major::MN, kHeadDim, 8>(dk, f, smem_addr(s.r), j > 0);
      wgmma_commit();
      me = Lane(fresh(thread));
      uint32_t rows[8][4];  // of k^
      load_frags(rows, smem_addr(s.pairs[fresh(turn) & 1].k), me.row0, me.lane);
      wgmma_wait<0>();
      pin(dk);
      pin(rows);
      warp_arrive(s.r_empty, me.lane);
      float now[2];
      row_dots(now, dk, rows);
      float sum = (now[0] - dot[0]) + (now[1] - dot[1]);
#pragma unroll
      for (int d = 4; d <= 16; d <<= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
      if (me.lane == 0) dots.written[me.warp] = sum;

      mbar_wait(smem_addr(&s.products_full), parity);
      wgmma_fence();
      const OutPairTiles& pair = s.pairs[fresh(turn) & 1];
      gemm_ss<Major::MN, kChunk, Major::MN, kChunk, 4>(dk, smem_addr(s.dp), smem_addr(pair.q), true);
      gemm_ss<Major::MN, kChunk, Major::MN, kChunk, 4>(dk, smem_addr(s.dl), smem_addr(pair.k), true);
      wgmma_commit();
      wgmma_wait<0>();
      pin(dk);
      me = Lane(fresh(thread));
      row_dots(now, dk, rows);
      if ((me.lane & 3) == 0) dots.key[me.row(0)] = now[0] - dot[0], dots.key[me.row(1)] = now[1] - dot[1];
      dot[0] = now[0], dot[1] = now[1];
      warp_arrive(s.dots_full, me.lane);
    }
    bar_sync(kDeltaBarrier, 128);  // every product of this warpgroup has been made, as those of D with dO and Z have
#pragma unroll
    for (int c = 0; c < 16; ++c) s.key[c][thread] = make_float4(dk[4 * c], dk[4 * c + 1], dk[4 * c + 2], dk[4 * c + 3]);
    mbar_arrive(smem_addr(&s.key_full));  // warpgroup 1 takes them over
  }
}

static __global__ void __launch_bounds__(kOutThreads, 1) out_kernel(const __grid_constant__ OutArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  OutShared& s = *reinterpret_cast<OutShared*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      mbar_init(smem_addr(&s.pair_full[i]), 128);
      mbar_init(smem_addr(&s.pair_empty[i]), 8 * kWarpArrivals);  // warps of query and erase
    }
    mbar_init(smem_addr(&s.values_full), 128);
    mbar_init(smem_addr(&s.values_empty), 4 * kWarpArrivals);  // warps of delta
    mbar_init(smem_addr(&s.grads_full), 128);
    mbar_init(smem_addr(&s.grads_empty), 12 * kWarpArrivals);  // warps of query, erase and delta
    mbar_init(smem_addr(&s.s_full), 128);
    mbar_init(smem_addr(&s.s_empty), 12 * kWarpArrivals);  // warps of query, erase and delta
    mbar_init(smem_addr(&s.r_full), 128);
    mbar_init(smem_addr(&s.r_empty), 8 * kWarpArrivals);  // warps of query and delta
    mbar_init(smem_addr(&s.dots_full), 12 * kWarpArrivals);  // warps of query, erase and delta
    mbar_init(smem_addr(&s.key_full), 128);
    mbar_init(smem_addr(&s.key_empty), 128);
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
    default: registers_shrink<kOutProducerRegisters>(); out_produce(s, args, thread);
  }
}

}  // namespace cake::gdn
