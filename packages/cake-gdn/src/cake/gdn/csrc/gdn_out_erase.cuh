// Warpgroup 1 of gdn_out, the erasing side, k in its query role: dL, e, the last two terms of dk^, dbeta and dg, and dk when a pair
// is done.
#pragma once

#include "gdn_out_shared.cuh"

namespace cake::gdn {

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

}  // namespace cake::gdn
