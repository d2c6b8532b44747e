// The delta warpgroup of kda_out: D, and the gradients of the chunk's two matrices of pairs, a v head ahead of the channels.
#pragma once

#include "kda_out_shared.cuh"

namespace cake::kda {

// W = v - U for 64 channels of V: bf16(beta W) over v, and the row dots Y . W, added to `dot`.
__device__ __forceinline__ void residual(uint32_t v_tile, uint32_t y_tile, const float* beta_of, float (&dot)[2],
                                         const float (&u)[32], const Lane& me) {
  const float beta[2] = {beta_of[me.row(0)], beta_of[me.row(1)]};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t v[4], y[4], f[4];
    ldmatrix(v, frag_address<kChunk>(v_tile, me.row0, i, me.lane));
    ldmatrix(y, frag_address<kChunk>(y_tile, me.row0, i, me.lane));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int n = acc_index(i, j), h = j & 1;
      const float w0 = bf16_lo(v[j]) - u[n], w1 = bf16_hi(v[j]) - u[n + 1];
      f[j] = pack_bf16(beta[h] * w0, beta[h] * w1);
      dot[h] = fmaf(bf16_hi(y[j]), w1, fmaf(bf16_lo(y[j]), w0, dot[h]));
    }
    stmatrix(frag_address<kChunk>(v_tile, me.row0, i, me.lane), f);
  }
}

// D for 64 channels of V: rounded to its tile, and the row dots Y . D as it was, added to `dot`.
__device__ __forceinline__ void store_delta(uint32_t tile, uint32_t y_tile, float (&dot)[2], const float (&d)[32],
                                            const Lane& me) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t y[4], f[4];
    ldmatrix(y, frag_address<kChunk>(y_tile, me.row0, i, me.lane));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int n = acc_index(i, j), h = j & 1;
      f[j] = pack_bf16(d[n], d[n + 1]);
      dot[h] = fmaf(bf16_hi(y[j]), d[n + 1], fmaf(bf16_lo(y[j]), d[n], dot[h]));
    }
    stmatrix(frag_address<kChunk>(tile, me.row0, i, me.lane), f);
  }
}

// Stores factor_i acc_ij on and below the diagonal (kStrict: below), rounded; the rest is 0.
template <bool kStrict>
__device__ __forceinline__ void store_lower(uint32_t tile, float (&acc)[32], const float (&factor)[2], const Lane& me) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t f[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int n = acc_index(i, j), h = j & 1, column = 16 * i + 8 * (j >> 1) + 2 * (me.lane & 3);
      const int last = me.row(h) - kStrict;
      f[j] = pack_bf16(column <= last ? factor[h] * acc[n] : 0.f, column + 1 <= last ? factor[h] * acc[n + 1] : 0.f);
    }
    stmatrix(frag_address<kChunk>(tile, me.row0, i, me.lane), f);
  }
}

// What the dbeta of dead rows i needs, -Y_i . D_j for j < i, at (j, i): above the diagonal, where nothing else is read.
__device__ __forceinline__ void store_dead(uint32_t tile, uint32_t y, uint32_t delta, const uint32_t (&dead)[2],
                                           int thread) {
  bar_sync(kDeltaBarrier, 128);  // the zeros of all warps' rows are there
#pragma unroll 1
  for (int i = 1; i < kChunk; ++i) {
    if (!(dead[i >> 5] >> (i & 31) & 1)) continue;
#pragma unroll 1
    for (int j = thread; j < i; j += 128) {
      float sum = 0.f;
#pragma unroll 1
      for (int c = 0; c < kHeadDim; c += 2) {
        const uint32_t a = ld_shared_4(y + pair_offset<kChunk>(i, c)),
                       d = ld_shared_4(delta + pair_offset<kChunk>(j, c));
        sum = fmaf(bf16_hi(a), bf16_hi(d), fmaf(bf16_lo(a), bf16_lo(d), sum));
      }
      st_shared_2(tile + pair_offset<kChunk>(j, i & ~1) + 2 * (i & 1), pack_bf16(-sum, 0.f));
    }
  }
}

__device__ __forceinline__ void out_delta(OutShared& s, const OutArgs& args, int thread) {
  const int works = args.plan.chunk_count() * args.heads;
  const uint32_t delta = smem_addr(s.v);
  constexpr int kPanel = kChunk * kPanelRowBytes;
  int step = 0;
  for (int work = blockIdx.x; work < works; work += gridDim.x) {
    const Chunk chunk = args.plan.chunk(work / args.heads);
    for (int j = 0; j < args.group; ++j, ++step) {
      const int set = step & 1;
      const uint32_t parity = step & 1, set_parity = (step >> 1) & 1;
      const uint32_t da = smem_addr(s.pairs[set].da), dn = smem_addr(s.pairs[set].dn);
      OutVectors& vectors = s.vectors[set];
      Lane me(fresh(thread));
      float acc[32], dot[2] = {0.f, 0.f};
      mbar_wait(smem_addr(&s.kg_full[set]), set_parity);
      mbar_wait(smem_addr(&s.s_full), parity);
      // Half of V's channels at a time: a panel of v, 64 rows of S.
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        wgmma_fence();
        gemm_ss<Major::K, kChunk, Major::K, kHeadDim, 8>(acc, da, smem_addr(s.s) + half * (64 * kPanelRowBytes), false);
        wgmma_commit();
        mbar_wait(smem_addr(&s.v_full), parity);
        mbar_wait(smem_addr(&s.grads_full), parity);
        wgmma_wait<0>();
        pin(acc);
        me = Lane(fresh(thread));
        residual(delta + half * kPanel, smem_addr(s.y) + half * kPanel, vectors.beta, dot, acc, me);
      }
      warp_arrive(s.s_empty, me.lane);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float sum = row_sum(dot[h]);
        if ((me.lane & 3) == 0) vectors.residual[me.row(h)] = sum;
        dot[h] = 0.f;
      }
      fence_proxy_async();
      bar_sync(kDeltaBarrier, 128);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        wgmma_fence();
        gemm_ss<Major::K, kChunk, Major::MN, kChunk, 4>(acc, smem_addr(s.t), delta + half * kPanel, false);
        wgmma_commit();
        wgmma_wait<0>();
        pin(acc);
        me = Lane(fresh(thread));
        bar_sync(kDeltaBarrier, 128);  // every warp's product has read this panel of beta W
        store_delta(delta + half * kPanel, smem_addr(s.y) + half * kPanel, dot, acc, me);
      }
      warp_arrive(s.t_empty, me.lane);
      fence_proxy_async();
      mbar_arrive(smem_addr(&s.delta_full));
      bar_sync(kDeltaBarrier, 128);
      float beta[2];
      bool dead[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = me.row(h);
        beta[h] = vectors.beta[row];
        dead[h] = vectors.dead[row >> 5] >> (row & 31) & 1;
        dot[h] = row_sum(dot[h]);
        if ((me.lane & 3) == 0 && row < chunk.rows && !dead[h]) put_dbeta(args, vectors, row, dot[h] / beta[h]);
      }
      wgmma_fence();
      gemm_ss<Major::K, kChunk, Major::K, kChunk, 8>(acc, smem_addr(s.grad), delta, false);
      wgmma_commit();
      wgmma_wait<0>();
      pin(acc);
      me = Lane(fresh(thread));
      const float scale[2] = {args.scale, args.scale};
      store_lower<false>(da, acc, scale, me);
      wgmma_fence();
      gemm_ss<Major::K, kChunk, Major::K, kChunk, 8>(acc, smem_addr(s.y), delta, false);
      wgmma_commit();
      wgmma_wait<0>();
      pin(acc);
      me = Lane(fresh(thread));
      const float factor[2] = {dead[0] ? 0.f : -beta[0], dead[1] ? 0.f : -beta[1]};
      store_lower<true>(dn, acc, factor, me);
      __syncwarp();
      if (me.lane < 16) {  // of the warp's own rows
        const int i = me.row0 + me.lane;
        vectors.diagonal[i] = half_of(ld_shared_4(da + pair_offset<kChunk>(i, i & ~1)), i & 1);
      }
      if (vectors.dead[0] | vectors.dead[1]) store_dead(dn, smem_addr(s.y), delta, vectors.dead, me.thread);
      warp_arrive(s.grads_empty, me.lane);
      warp_arrive(s.v_empty, me.lane);
      mbar_arrive(smem_addr(&s.pairs_full[set]));
    }
  }
}

}  // namespace cake::kda
