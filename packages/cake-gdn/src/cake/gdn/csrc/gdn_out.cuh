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

#include "gdn_out_delta.cuh"
#include "gdn_out_erase.cuh"
#include "gdn_out_load.cuh"
#include "gdn_out_query.cuh"

namespace cake::gdn {

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
