// kda_out: the parallel rest of the backward. Persistent CTAs take (chunk, q/k head) pairs and loop over the pair's v heads;
// everything about a pair stays in its CTA, so no sum crosses CTAs. Per v head, rows are tokens, b [64][128] the summed log2
// decays of every channel, Kg = k^ 2^b and T from prep:
//
//   W   = v - Kg S^T          D   = T (beta W)
//   dA  = s tril(dO D^T)      dL  = -beta stril(Y D^T)
//   dq^ = s 2^b (dO S) + [A]
//   dk^ = -beta 2^b (Y S) + 2^(b_C - b) (D R) + [A, L]
//   dv  = beta Y              dbeta_i = Y_i . D_i / beta_i
//   db  = Qg (dO S) - beta Kg (Y S) - Kr (D R) + [A, L]
//   dlog_t = sum_{i>=t} db_i + sum_i Kr (D R) + 2^(b_C) <S, R>
//
// A row whose beta is too small to divide by is dead: it adds nothing anywhere else, and its dbeta is taken from D_i / beta_i
// = W_i - sum_{j<i} N_ij D_j itself, pair by pair.
// [A] and [L] are the pairs' gradients with dA and dL (kda_tree.cuh). db takes the operands as they were rounded for the
// products. Then the gate's own backward with its partial sums, and at the end of a group the norm's: dq = r_q (dq^ - q^
// (q^ . dq^)), dk likewise.
//
// Warpgroups: 0 and 1 (channels) hold dq^, dk^ and db of 64 channels of K each, transposed: a warp has 16 channels of all
// tokens; 2 (delta) makes D, dA and dL, a v head ahead; 3 (producer) loads, and makes dv.
// S and R are [V][K] images: K-major for Kg S^T, MN-major as the transposed first operand of the rest.
#pragma once

#include "kda_out_channels.cuh"
#include "kda_out_delta.cuh"
#include "kda_out_load.cuh"

namespace cake::kda {

// A kernel for each kind of gate and T of g: code for all of them would be more than an SM's instruction cache holds.
template <GateKind kKind, typename T>
static __global__ void __launch_bounds__(kOutThreads, 1) out_kernel(const __grid_constant__ OutArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  OutShared& s = *reinterpret_cast<OutShared*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      mbar_init(smem_addr(&s.kg_full[i]), 1);
      mbar_init(smem_addr(&s.pairs_full[i]), 128);
      mbar_init(smem_addr(&s.pairs_empty[i]), 8 * kWarpArrivals);
    }
    mbar_init(smem_addr(&s.s_full), 128);
    mbar_init(smem_addr(&s.s_empty), 12 * kWarpArrivals);  // warps of delta and the channels
    mbar_init(smem_addr(&s.r_full), 128);
    mbar_init(smem_addr(&s.r_empty), 8 * kWarpArrivals);
    mbar_init(smem_addr(&s.t_empty), 4 * kWarpArrivals);
    mbar_init(smem_addr(&s.v_full), 128);
    mbar_init(smem_addr(&s.v_empty), 12 * kWarpArrivals);
    mbar_init(smem_addr(&s.grads_full), 128);
    mbar_init(smem_addr(&s.grads_empty), 16 * kWarpArrivals);  // all warps
    mbar_init(smem_addr(&s.rows_full), 128);
    mbar_init(smem_addr(&s.rows_empty), 8 * kWarpArrivals);
    mbar_init(smem_addr(&s.delta_full), 128);
    mbar_init_fence();
  }
  // Rows of partial sums past the chunks that there are count as 0.
  if (args.partials != nullptr) {
    const int64_t row = int64_t(args.heads) * args.group * kPartial, all = args.plan.chunk_capacity * row;
    for (int64_t i = args.plan.chunk_count() * row + blockIdx.x * kOutThreads + threadIdx.x; i < all;
         i += int64_t(gridDim.x) * kOutThreads)
      args.partials[i] = 0.f;
  }
  __syncthreads();
  const int thread = threadIdx.x % 128;
  switch (threadIdx.x / 128) {
    case 0:
    case 1:
      registers_grow<kChannelRegisters>();
      out_channels<kKind, T>(s, args, threadIdx.x);
      break;
    case 2:
      registers_shrink<kDeltaRegisters>();
      out_delta(s, args, thread);
      break;
    default: registers_shrink<kProducerRegisters>(); out_produce(s, args, thread);
  }
}

}  // namespace cake::kda
