// Warpgroup 2 of gdn_out: U, D and the rest of dk^.
#pragma once

#include "gdn_out_shared.cuh"

namespace cake::gdn {

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

}  // namespace cake::gdn
