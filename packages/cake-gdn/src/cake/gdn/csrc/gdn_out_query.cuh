// Warpgroup 0 of gdn_out, the query side: dP, dq^ and <S, R>, and dq when a pair is done.
#pragma once

#include "gdn_out_shared.cuh"

namespace cake::gdn {

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
  return warp_sum(sum);
}

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

}  // namespace cake::gdn
