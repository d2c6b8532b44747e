// The channel warpgroups of kda_out: dq, dk, dg, and dbeta of dead rows.
#pragma once

#include "kda_out_gates.cuh"

namespace cake::kda {

// dO S and Y S: what the state before the chunk gives to q^, to k^ in its query role and, as their start, to db.
__device__ __forceinline__ void read_part(Sums& sums, const float (&queried)[32], const float (&erased)[32],
                                          const Tree& tree, const float* beta, float scale, const Strip& me) {
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    __syncwarp();
    uint32_t q[4], k[4];
    load_block(q, tree.q, block, me);
    load_block(k, tree.k, block, me);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const int octet = 2 * block + p;
      float b[4];
      load_decays(b, tree, octet, me);
      const float2 rq = pair_at(tree.rq, me.token(octet)), rk = pair_at(tree.rk, me.token(octet)),
                   weight = pair_at(beta, me.token(octet));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t x = q[2 * p + h], y = k[2 * p + h];
        const float grow[2] = {ex2(b[2 * h]), ex2(b[2 * h + 1])};
        const uint32_t qg = pack_bf16(scale * rq.x * bf16_lo(x) * grow[0], scale * rq.y * bf16_hi(x) * grow[1]);
        const uint32_t kg = pack_bf16(bf16_lo(y) * rk.x * grow[0], bf16_hi(y) * rk.y * grow[1]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 4 * octet + 2 * h + e;
          const float from_y = -part_of(weight, e) * erased[i];
          sums.q[i] = fmaf(scale * grow[e], queried[i], sums.q[i]);
          sums.k[i] = fmaf(grow[e], from_y, sums.k[i]);
          sums.b[i] = fmaf(half_of(kg, e), from_y, half_of(qg, e) * queried[i]);
        }
      }
    }
  }
}

// D R: the state's part of dk^. `edge`: what every token's decay gets of it, by channel half, this thread's share.
__device__ __forceinline__ void write_part(Sums& sums, float (&edge)[2], const float (&acc)[32], const Tree& tree,
                                           const Strip& me) {
  const float2 last = border(tree, kOctets - 1, me);
  edge[0] = edge[1] = 0.f;
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    __syncwarp();
    uint32_t k[4];
    load_block(k, tree.k, block, me);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const int octet = 2 * block + p;
      float b[4];
      load_decays(b, tree, octet, me);
      const float2 rk = pair_at(tree.rk, me.token(octet));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t x = k[2 * p + h];
        const float fade[2] = {ex2(part_of(last, h) - b[2 * h]), ex2(part_of(last, h) - b[2 * h + 1])};
        const uint32_t kr = pack_bf16(bf16_lo(x) * rk.x * fade[0], bf16_hi(x) * rk.y * fade[1]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 4 * octet + 2 * h + e;
          const float written = half_of(kr, e) * acc[i];
          sums.k[i] = fmaf(fade[e], acc[i], sums.k[i]);
          sums.b[i] -= written;
          edge[h] += written;
        }
      }
    }
  }
}

// <S, R> of this warp's channels: the diagonal of S^T R. Every thread gets those of its two.
__device__ __forceinline__ void state_dots(float (&dot)[2], uint32_t s, uint32_t r, const Strip& me) {
  float upper[4] = {}, lower[4] = {};
#pragma unroll 4
  for (int i = 0; i < 8; ++i) {
    uint32_t a[4], b[4];
    ldmatrix_trans(a, frag_address_trans<kHeadDim>(s, me.channel0, i, me.lane));
    ldmatrix_trans(b, frag_address_trans<kHeadDim>(r, me.channel0, i, me.lane));
    mma_bf16(upper, a, b[0], b[2]);
    mma_bf16(lower, a, b[1], b[3]);
  }
  // Channel lane / 4 lies on the diagonal in the lane whose t is half of it.
  const int row = me.lane >> 2;
  dot[0] = __shfl_sync(0xffffffffu, row & 1 ? upper[1] : upper[0], row >> 1, 4);
  dot[1] = __shfl_sync(0xffffffffu, row & 1 ? lower[3] : lower[2], row >> 1, 4);
}

// Sums of x over the warp's channels, by token: each exchange halves what a lane has left.
template <int n>
__device__ __forceinline__ void halve(float (&x)[16], const Strip& me) {
  const bool upper = me.lane & (2 * n);
#pragma unroll
  for (int i = 0; i < n; ++i) {
    const float sent = upper ? x[i] : x[i + n], kept = upper ? x[i + n] : x[i];
    x[i] = kept + __shfl_xor_sync(0xffffffffu, sent, 2 * n);
  }
}

__device__ __forceinline__ void store_token_sums(float* out, float (&x)[16], const Strip& me) {
  halve<8>(x, me), halve<4>(x, me), halve<2>(x, me);
  // Bits 4, 3 and 2 of the lane chose the highest, middle and lowest bit of the octet.
  const int octet = ((me.lane >> 4) & 1) * 4 + ((me.lane >> 3) & 1) * 2 + ((me.lane >> 2) & 1);
  *reinterpret_cast<float2*>(out + me.token(octet)) = make_float2(x[0], x[1]);
}

// By token, this thread's share of x^ . dx^.
__device__ __forceinline__ void unit_dots(float (&dot)[16], const float (&acc)[32], uint32_t tile, const float* norm,
                                          const Strip& me) {
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    uint32_t x[4];
    load_block(x, tile, block, me);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const int octet = 2 * block + p;
      const float2 r = pair_at(norm, me.token(octet));
#pragma unroll
      for (int e = 0; e < 2; ++e)
        dot[2 * octet + e] = part_of(r, e) * fmaf(half_of(x[2 * p], e), acc[4 * octet + e],
                                                  half_of(x[2 * p + 1], e) * acc[4 * octet + 2 + e]);
    }
  }
}

// dx = r (dx^ - x^ dot) over the warp's channels of the tile, and on to memory. Rows that weren't normalised have r = 1 and a
// dot of 0.
__device__ __forceinline__ void store_channels(uint32_t tile, const float (&acc)[32], const float* norm,
                                               const float* dot, __nv_bfloat16* out, int64_t row_stride, int rows,
                                               const Strip& me) {
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    uint32_t x[4];
    load_block(x, tile, block, me);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int i = 8 * block + 2 * w, token = me.token(2 * block + (w >> 1));
      const float2 r = pair_at(norm, token), t = pair_at(dot, token);
      x[w] = pack_bf16(r.x * (acc[i] - r.x * bf16_lo(x[w]) * t.x), r.y * (acc[i + 1] - r.y * bf16_hi(x[w]) * t.y));
    }
    stmatrix_trans(frag_address_trans<kChunk>(tile, me.channel0, block, me.lane), x);
  }
  __syncwarp();
  const int row = me.lane >> 1, group = me.channel0 / 8 + (me.lane & 1);
  out += row * row_stride + group * 8;
  tile += group_offset<kChunk>(row, group);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 x = ld_shared_16(tile + 16 * i * kPanelRowBytes);
    st_global_16_if(row + 16 * i < rows, out + 16 * i * row_stride, x);
  }
}

// For every dead row i, this warp's part of sum_{j<i} (-Y_i . D_j) N_ij.
__device__ __forceinline__ void dead_rows(OutShared& s, const OutVectors& vectors, const Tree& tree, const Strip& me) {
#pragma unroll 1
  for (int i = 0; i < kChunk; ++i) {
    if (!(vectors.dead[i >> 5] >> (i & 31) & 1)) continue;
    const float4 b = s.decays[i >> 3][(me.thread & ~3) | (i >> 1 & 3)];
    const float b_i[2] = {i & 1 ? b.y : b.x, i & 1 ? b.w : b.z};
    float sum = 0.f;
#pragma unroll 1
    for (int j = 2 * me.t; j < i; j += 8) {
      const float4 slot = s.decays[j >> 3][me.thread];
      const float b_j[4] = {slot.x, slot.y, slot.z, slot.w};
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int h = c >> 1, row = j + (c & 1), channel = me.channel(h);
        if (row >= i) continue;
        const float pair = half_of(ld_shared_4(tree.dn + pair_offset<kChunk>(row, i & ~1)), i & 1);
        const float k_i = half_of(ld_shared_4(tree.k + pair_offset<kChunk>(i, channel & ~1)), channel & 1);
        const float k_j = half_of(ld_shared_4(tree.k + pair_offset<kChunk>(row, channel & ~1)), channel & 1);
        sum = fmaf(pair, tree.rk[i] * k_i * tree.rk[row] * k_j * ex2(b_i[h] - b_j[c]), sum);
      }
    }
    sum = warp_sum(sum);
    if (me.lane == 0) s.dead_dots[me.thread >> 5][i] = sum;
  }
}

// dbeta of dead rows, the totals of q^ . dq^ and k^ . dk^, and the A_log share of this v head, from what the warps left.
__device__ __forceinline__ void finish_sums(OutShared& s, const OutArgs& args, const OutVectors& vectors,
                                            int chunk_index, int v_head, int thread) {
  const int v_heads = args.heads * args.group, token = thread % kChunk, what = thread / kChunk;
  if (what < 3) {
    if (what == 0 && !(vectors.dead[token >> 5] >> (token & 31) & 1)) return;
    const float (*parts)[kChunk] = what == 0 ? s.dead_dots : what == 1 ? s.q_dots : s.k_dots;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < 8; ++w) sum += parts[w][token];
    if (what == 1) s.q_dot[token] = args.l2norm ? sum : 0.f;
    else if (what == 2) s.k_dot[token] = args.l2norm ? sum : 0.f;
    else put_dbeta(args, vectors, token, vectors.residual[token] + sum);
  } else if (token < 32 && args.partials != nullptr) {  // a warp
    float sum = token < 8 ? s.a_log[token] : 0.f;
#pragma unroll
    for (int d = 4; d >= 1; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (token == 0) args.partials[(int64_t(chunk_index) * v_heads + v_head) * kPartial] = sum;
  }
}

template <GateKind kKind, typename T>
__device__ __forceinline__ void out_channels(OutShared& s, const OutArgs& args, int thread) {
  const int works = args.plan.chunk_count() * args.heads;
  if (blockIdx.x >= works) return;
  int step = 0;
  mbar_wait(smem_addr(&s.grads_full), 0);
  GateHead gates(args, s.vectors[0], Strip(fresh(thread)));
  RawGates<T> raw;
  raw.load(args, gates, 0, Strip(fresh(thread)));
  for (int work = blockIdx.x; work < works; work += gridDim.x) {
    Sums sums;
#pragma unroll
    for (int i = 0; i < 32; ++i) sums.q[i] = 0.f, sums.k[i] = 0.f;
    for (int j = 0; j < args.group; ++j, ++step) {
      const int set = step & 1;
      const uint32_t parity = step & 1, set_parity = (step >> 1) & 1;
      const OutVectors& vectors = s.vectors[set];
      Strip me(fresh(thread));
      const Tree tree{smem_addr(s.q), smem_addr(s.k), smem_addr(s.pairs[set].da), smem_addr(s.pairs[set].dn),
                      s.rq,           s.rk,           vectors.diagonal,           &s.decays};
      make_decays<kKind, T>(s, args, gates, raw, me);

      // All waits come here: what follows is one basic block, whose sums the compiler won't leave half made for later.
      mbar_wait(smem_addr(&s.s_full), parity);
      mbar_wait(smem_addr(&s.grads_full), parity);
      mbar_wait(smem_addr(&s.r_full), parity);
      mbar_wait(smem_addr(&s.delta_full), parity);
      mbar_wait(smem_addr(&s.pairs_full[set]), set_parity);
      mbar_wait(smem_addr(&s.rows_full), parity);
      float edge[2];
      {
        const uint32_t panel = (me.channel0 >> 6) * (kHeadDim * kPanelRowBytes);  // the warpgroup's channels in S and R
        float acc[32];
        {
          float erased[32];
          wgmma_fence();
          gemm_ss<Major::MN, kHeadDim, Major::K, kChunk, 8>(acc, smem_addr(s.s) + panel, smem_addr(s.grad), false);
          gemm_ss<Major::MN, kHeadDim, Major::K, kChunk, 8>(erased, smem_addr(s.s) + panel, smem_addr(s.y), false);
          wgmma_commit();
          wgmma_wait<0>();
          pin(acc), pin(erased);
          warp_arrive(s.grads_empty, me.lane);
          me = Strip(fresh(thread));
          read_part(sums, acc, erased, tree, vectors.beta, args.scale, me);
        }
        me = Strip(fresh(thread));
        float dots[2];
        wgmma_fence();
        gemm_ss<Major::MN, kHeadDim, Major::K, kChunk, 8>(acc, smem_addr(s.r) + panel, smem_addr(s.v), false);
        wgmma_commit();
        state_dots(dots, smem_addr(s.s), smem_addr(s.r), me);
        warp_arrive(s.s_empty, me.lane);
        wgmma_wait<0>();
        pin(acc);
        warp_arrive(s.r_empty, me.lane);
        warp_arrive(s.v_empty, me.lane);
        me = Strip(fresh(thread));
        write_part(sums, edge, acc, tree, me);
        const float2 b = border(tree, kOctets - 1, me);
#pragma unroll
        for (int h = 0; h < 2; ++h) edge[h] = fmaf(ex2(part_of(b, h)), dots[h], row_sum(edge[h]));
      }

      me = Strip(fresh(thread));
      tree_gradients(sums, tree, me);
      me = Strip(fresh(thread));
      const int warp = me.thread >> 5, chunk_index = fresh(work) / args.heads, head = fresh(work) % args.heads;
      const int v_head = head * args.group + j;
      const bool last = j + 1 == args.group;
      if (vectors.dead[0] | vectors.dead[1]) dead_rows(s, vectors, tree, me);
      fence_proxy_async();
      warp_arrive(s.pairs_empty[set], me.lane);

      // What every token's decay gets is the last token's own, over which all of them sum.
      if (me.t == 3) sums.b[4 * kOctets - 3] += edge[0], sums.b[4 * kOctets - 1] += edge[1];
      __syncwarp();
#pragma unroll
      for (int o = 0; o < kOctets; ++o)
        s.decays[o][me.thread] = make_float4(sums.b[4 * o], sums.b[4 * o + 1], sums.b[4 * o + 2], sums.b[4 * o + 3]);
      gates = GateHead(args, vectors, me);
      raw = RawGates<T>();
      if (kKind != GateKind::kNone) raw.load(args, gates, 1, me);
      finish_gates<kKind, T>(s, args, vectors, gates, raw, chunk_index, v_head, me);
      // The next v head's: the loading warps have described it by now.
      if (const int next = last ? work + gridDim.x : work; next < works) {
        mbar_wait(smem_addr(&s.grads_full), parity ^ 1);
        gates = GateHead(args, s.vectors[set ^ 1], me);
        raw.load(args, gates, 0, me);
      }
      if (last && args.l2norm) {
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
          float x[32], dots[16];
#pragma unroll
          for (int n = 0; n < 32; ++n) x[n] = i ? sums.k[n] : sums.q[n];
          unit_dots(dots, x, smem_addr(i ? s.k : s.q), i ? s.rk : s.rq, me);
          store_token_sums(i ? s.k_dots[warp] : s.q_dots[warp], dots, me);
        }
      }
      bar_sync(kChannelBarrier, 256);
      finish_sums(s, args, vectors, chunk_index, v_head, me.thread);
      if (last) {
        bar_sync(kChannelBarrier, 256);
        me = Strip(fresh(thread));
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
          float x[32];
#pragma unroll
          for (int n = 0; n < 32; ++n) x[n] = i ? sums.k[n] : sums.q[n];
          const OutResult result = i ? kDk : kDq;
          store_channels(smem_addr(i ? s.k : s.q), x, i ? s.rk : s.rq, i ? s.k_dot : s.q_dot,
                         args.rows(result, vectors.first[result]), args.results[result].token_stride, vectors.rows, me);
        }
      }
      warp_arrive(s.rows_empty, me.lane);
    }
  }
}

}  // namespace cake::kda
