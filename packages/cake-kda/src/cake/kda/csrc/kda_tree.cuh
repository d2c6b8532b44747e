// Gradients through the pairs of tokens of a chunk, i >= j, under decays of their own in every channel.
//
//   A_ij = sum_c q_ic k_jc 2^(b_ic - b_jc)       N_ij alike with k_ic, i > j
//
// Every pair i > j meets once in a binary tree over the chunk's rows: at the node that has i in its right half and j in its
// left one. With r = b of the left half's last row both 2^(b_i - r) and 2^(r - b_j) are at most 1 and neither is smaller
// than their product, so no gate overflows and nothing underflows that isn't 0 anyway; no choice depends on values.
// A node is a product of bf16 operands, and the gradient of b takes the same rounded operands: the two sides of a pair
// cancel in it to fp32.
//
// A warp works on 16 channels of all tokens, transposed: rows of an accumulator are channels, columns are tokens, so that
// an operand scaled by its decay is a register fragment as it stands and nothing is exchanged between warps. A thread holds
// channels lane / 4 + 8 h of its warp's and tokens 8 o + 2 t + e: octet o, t = lane % 4; index 4 o + 2 h + e.
#pragma once

#include "cake/frag.cuh"

namespace cake::kda {

constexpr int kOctets = kChunk / 8;
constexpr int kStripThreads = 256;  // 8 warps of 16 channels

// A thread's sums: gradients of q^, k^ and b at its values.
struct Sums {
  float q[32], k[32], b[32];
};

// b of all tokens, each thread's own: index 2 h + e.
using Decays = float4[kOctets][kStripThreads];

// What the tree reads of a chunk.
struct Tree {
  uint32_t q, k;  // raw rows, token tiles
  uint32_t da, dn;  // gradients of A (lower triangle) and of N (below the diagonal), square tiles
  const float *rq, *rk, *diagonal;  // [64]; the last: of dA
  const Decays* decays;
};

struct Strip {
  int thread, lane, t, channel0;  // of 256 threads; the warp's first channel
  __device__ __forceinline__ explicit Strip(int i) : thread(i), lane(i & 31), t(i & 3), channel0(16 * (i >> 5)) {}
  __device__ __forceinline__ int channel(int h) const { return channel0 + (lane >> 2) + 8 * h; }
  __device__ __forceinline__ int token(int octet) const { return 8 * octet + 2 * t; }
};

__device__ __forceinline__ float half_of(uint32_t pair, int e) { return e ? bf16_hi(pair) : bf16_lo(pair); }
__device__ __forceinline__ float part_of(float2 x, int e) { return e ? x.y : x.x; }
__device__ __forceinline__ float2 pair_at(const float* x, int i) { return *reinterpret_cast<const float2*>(x + i); }

// 16 tokens of a token tile for this warp's channels: word 2 p + h holds octet p's pair of channel half h.
__device__ __forceinline__ void load_block(uint32_t (&x)[4], uint32_t tile, int block, const Strip& me) {
  ldmatrix_trans(x, frag_address_trans<kChunk>(tile, me.channel0, block, me.lane));
}

__device__ __forceinline__ void load_decays(float (&b)[4], const Tree& tree, int octet, const Strip& me) {
  const float4 x = (*tree.decays)[octet][me.thread];
  b[0] = x.x, b[1] = x.y, b[2] = x.z, b[3] = x.w;
}

// b of an octet's last token, by channel half.
__device__ __forceinline__ float2 border(const Tree& tree, int octet, const Strip& me) {
  const float4 x = (*tree.decays)[octet][me.thread | 3];
  return make_float2(x.y, x.w);
}

// ---- an octet in one of the halves of a node: octet p of a block of 16 tokens ----------------------------------------

// Operand k^ 2^(r - b) of the left half.
__device__ __forceinline__ void left_operand(uint32_t (&kl)[4], const uint32_t (&k)[4], int block, int p, float2 r,
                                             const Tree& tree, const Strip& me) {
  float b[4];
  load_decays(b, tree, 2 * block + p, me);
  const float2 rk = pair_at(tree.rk, me.token(2 * block + p));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int w = 2 * p + h;
    const float ref = part_of(r, h);
    kl[w] = pack_bf16(bf16_lo(k[w]) * rk.x * ex2(ref - b[2 * h]), bf16_hi(k[w]) * rk.y * ex2(ref - b[2 * h + 1]));
  }
}

// What the right half's rows get from the node's products, to_q = dA kl and to_x = dN kl of the left half. Makes the
// operands q^ 2^(b - r) and k^ 2^(b - r).
__device__ __forceinline__ void right_octet(Sums& sums, uint32_t (&ql)[4], uint32_t (&kl)[4], const float (&to_q)[4],
                                            const float (&to_x)[4], const uint32_t (&q)[4], const uint32_t (&k)[4],
                                            int block, int p, float2 r, const Tree& tree, const Strip& me) {
  const int octet = 2 * block + p;
  float b[4];
  load_decays(b, tree, octet, me);
  const float2 rq = pair_at(tree.rq, me.token(octet)), rk = pair_at(tree.rk, me.token(octet));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int w = 2 * p + h;
    const float f[2] = {ex2(b[2 * h] - part_of(r, h)), ex2(b[2 * h + 1] - part_of(r, h))};
    ql[w] = pack_bf16(bf16_lo(q[w]) * rq.x * f[0], bf16_hi(q[w]) * rq.y * f[1]);
    kl[w] = pack_bf16(bf16_lo(k[w]) * rk.x * f[0], bf16_hi(k[w]) * rk.y * f[1]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int c = 2 * h + e, i = 4 * octet + c;
      sums.q[i] = fmaf(f[e], to_q[c], sums.q[i]);
      sums.k[i] = fmaf(f[e], to_x[c], sums.k[i]);
      sums.b[i] = fmaf(half_of(ql[w], e), to_q[c], sums.b[i]);
      sums.b[i] = fmaf(half_of(kl[w], e), to_x[c], sums.b[i]);
    }
  }
}

// What the left half's rows get, to_k = dA^T ql + dN^T kl of the right half; `kl` is their own operand.
__device__ __forceinline__ void left_octet(Sums& sums, const uint32_t (&kl)[4], const float (&to_k)[4], int block,
                                           int p, float2 r, const Tree& tree, const Strip& me) {
  float b[4];
  load_decays(b, tree, 2 * block + p, me);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int i = 4 * (2 * block + p) + c;
    sums.k[i] = fmaf(ex2(part_of(r, c >> 1) - b[c]), to_k[c], sums.k[i]);
    sums.b[i] = fmaf(-half_of(kl[2 * p + (c >> 1)], c & 1), to_k[c], sums.b[i]);
  }
}

// Between phases nothing but the sums is worth a register: addresses are computed afresh, and the barrier keeps the compiler
// from loading a phase's values during the one before.
__device__ __forceinline__ Strip tree_phase(int thread) {
  __syncwarp();
  return Strip(thread);
}

// ---- nodes of 64 and 32 rows ---------------------------------------------------------------------------------------

// A node whose halves are kBlocks blocks of 16 rows each, from block `first` on.
template <int kBlocks>
__device__ __forceinline__ void wide_node(Sums& sums, const Tree& tree, int first, int thread) {
  Strip me = tree_phase(thread);
  const float2 r = border(tree, 2 * (first + kBlocks) - 1, me);
  uint32_t left[kBlocks][4], ql[kBlocks][4], kl[kBlocks][4];
#pragma unroll
  for (int l = 0; l < kBlocks; ++l) {
    uint32_t k[4];
    load_block(k, tree.k, first + l, me);
#pragma unroll
    for (int p = 0; p < 2; ++p) left_operand(left[l], k, first + l, p, r, tree, me);
  }
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) {
    const int block = first + kBlocks + i;
    me = tree_phase(thread);
    uint32_t q[4], k[4];
    load_block(q, tree.q, block, me);
    load_block(k, tree.k, block, me);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      float to_q[4] = {}, to_x[4] = {};
#pragma unroll
      for (int l = 0; l < kBlocks; ++l) {
        uint32_t f[4];
        ldmatrix(f, frag_address<kChunk>(tree.da, 16 * block, first + l, me.lane));
        mma_bf16(to_q, left[l], f[p], f[2 + p]);
        ldmatrix(f, frag_address<kChunk>(tree.dn, 16 * block, first + l, me.lane));
        mma_bf16(to_x, left[l], f[p], f[2 + p]);
      }
      right_octet(sums, ql[i], kl[i], to_q, to_x, q, k, block, p, r, tree, me);
    }
  }
#pragma unroll
  for (int l = 0; l < kBlocks; ++l) {
    me = tree_phase(thread);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      float to_k[4] = {};
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        const int row0 = 16 * (first + kBlocks + i);
        uint32_t f[4];
        ldmatrix_trans(f, frag_address<kChunk>(tree.da, row0, first + l, me.lane));
        mma_bf16(to_k, ql[i], f[2 * p], f[2 * p + 1]);
        ldmatrix_trans(f, frag_address<kChunk>(tree.dn, row0, first + l, me.lane));
        mma_bf16(to_k, kl[i], f[2 * p], f[2 * p + 1]);
      }
      left_octet(sums, left[l], to_k, first + l, p, r, tree, me);
    }
  }
}

// ---- nodes within a block of 16 rows ---------------------------------------------------------------------------------

// Words of an 8 x 8 block that a node of 2 kWidth rows has: as it stands (column of the thread's word in the left half, row
// in the right one) and transposed.
template <int kWidth>
struct NodeMask {
  uint32_t plain, transposed;

  __device__ __forceinline__ explicit NodeMask(const Strip& me) {
    const int n = me.lane >> 2;  // the row, or transposed the column; t numbers the pairs of the other
    if (kWidth == 4) {
      plain = n >= 4 && me.t < 2 ? ~0u : 0u;
      transposed = n < 4 && me.t >= 2 ? ~0u : 0u;
    } else if (kWidth == 2) {
      const bool same = n >> 2 == me.t >> 1;
      plain = same && (n & 2) && !(me.t & 1) ? ~0u : 0u;
      transposed = same && !(n & 2) && (me.t & 1) ? ~0u : 0u;
    } else {
      const bool same = n >> 1 == me.t;
      plain = same && (n & 1) ? 0xffffu : 0u;
      transposed = same && !(n & 1) ? 0xffff0000u : 0u;
    }
  }
};

// The nodes of 2 kWidth rows, 8 at most, of an octet. da, dn: its 8 x 8 block on the diagonal, da_t, dn_t transposed.
template <int kWidth>
__device__ __forceinline__ void narrow_nodes(Sums& sums, uint32_t da, uint32_t da_t, uint32_t dn, uint32_t dn_t,
                                             const float (&b)[4], const uint32_t (&q)[4], const uint32_t (&k)[4],
                                             int octet, int p, const Tree& tree, const Strip& me) {
  const NodeMask<kWidth> mask(me);
  const float2 rq = pair_at(tree.rq, me.token(octet)), rk = pair_at(tree.rk, me.token(octet));
  float f[4];
  uint32_t ql[2], kl[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (kWidth == 1) {
      f[2 * h] = 1.f, f[2 * h + 1] = ex2(b[2 * h + 1] - b[2 * h]);
    } else {
      const float r = __shfl_sync(0xffffffffu, b[2 * h + 1], kWidth == 4 ? (me.lane & ~3) | 1 : me.lane & ~1);
#pragma unroll
      for (int e = 0; e < 2; ++e) f[2 * h + e] = ex2(-fabsf(b[2 * h + e] - r));
    }
    const int w = 2 * p + h;
    kl[h] = pack_bf16(bf16_lo(k[w]) * rk.x * f[2 * h], bf16_hi(k[w]) * rk.y * f[2 * h + 1]);
    ql[h] = pack_bf16(bf16_lo(q[w]) * rq.x * f[2 * h], bf16_hi(q[w]) * rq.y * f[2 * h + 1]);
  }
  // Rows of right halves get to_q and to_x, those of left ones the two parts of to_k.
  float with_a[4] = {}, with_n[4] = {};
  mma_bf16(with_a, kl, da & mask.plain);
  mma_bf16(with_a, ql, da_t & mask.transposed);
  mma_bf16(with_n, kl, (dn & mask.plain) | (dn_t & mask.transposed));
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int e = c & 1, i = 4 * octet + c;
    const bool right = kWidth == 4 ? me.t >= 2 : kWidth == 2 ? me.t & 1 : e == 1;
    const float to_q = right ? with_a[c] : 0.f, to_k = right ? with_n[c] : with_a[c] + with_n[c];
    const float operand = half_of(kl[c >> 1], e);
    sums.q[i] = fmaf(f[c], to_q, sums.q[i]);
    sums.k[i] = fmaf(f[c], to_k, sums.k[i]);
    sums.b[i] = fmaf(half_of(ql[c >> 1], e), to_q, sums.b[i]);
    sums.b[i] = fmaf(right ? operand : -operand, to_k, sums.b[i]);
  }
}

// The diagonal and all nodes within a block. Words of the 16 x 16 block: rows + 8 (1), columns + 8 (2).
__device__ __forceinline__ void block_nodes(Sums& sums, const Tree& tree, int block, int thread) {
  Strip me = tree_phase(thread);
  uint32_t q[4], k[4], x[4];
  load_block(q, tree.q, block, me);
  load_block(k, tree.k, block, me);
  {
    const float2 r = border(tree, 2 * block, me);
    uint32_t left[4], ql[4], kl[4];
    float to_q[4] = {}, to_x[4] = {}, to_k[4] = {};
    left_operand(left, k, block, 0, r, tree, me);
    const uint32_t operand[2] = {left[0], left[1]};
    ldmatrix(x, frag_address<kChunk>(tree.da, 16 * block, block, me.lane));
    mma_bf16(to_q, operand, x[1]);
    ldmatrix(x, frag_address<kChunk>(tree.dn, 16 * block, block, me.lane));
    mma_bf16(to_x, operand, x[1]);
    right_octet(sums, ql, kl, to_q, to_x, q, k, block, 1, r, tree, me);
    const uint32_t queries[2] = {ql[2], ql[3]}, keys[2] = {kl[2], kl[3]};
    ldmatrix_trans(x, frag_address<kChunk>(tree.da, 16 * block, block, me.lane));
    mma_bf16(to_k, queries, x[1]);
    ldmatrix_trans(x, frag_address<kChunk>(tree.dn, 16 * block, block, me.lane));
    mma_bf16(to_k, keys, x[1]);
    left_octet(sums, left, to_k, block, 0, r, tree, me);
  }
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    const int octet = 2 * block + p;
    me = tree_phase(thread);
    ldmatrix(x, frag_address<kChunk>(tree.da, 16 * block, block, me.lane));
    const uint32_t da = x[3 * p];
    ldmatrix(x, frag_address<kChunk>(tree.dn, 16 * block, block, me.lane));
    const uint32_t dn = x[3 * p];
    ldmatrix_trans(x, frag_address<kChunk>(tree.da, 16 * block, block, me.lane));
    const uint32_t da_t = x[3 * p];
    ldmatrix_trans(x, frag_address<kChunk>(tree.dn, 16 * block, block, me.lane));
    const uint32_t dn_t = x[3 * p];
    float b[4];
    load_decays(b, tree, octet, me);
    narrow_nodes<4>(sums, da, da_t, dn, dn_t, b, q, k, octet, p, tree, me);
    narrow_nodes<2>(sums, da, da_t, dn, dn_t, b, q, k, octet, p, tree, me);
    narrow_nodes<1>(sums, da, da_t, dn, dn_t, b, q, k, octet, p, tree, me);
    const float2 rq = pair_at(tree.rq, me.token(octet)), rk = pair_at(tree.rk, me.token(octet)),
                 diagonal = pair_at(tree.diagonal, me.token(octet));
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int e = c & 1, i = 4 * octet + c, w = 2 * p + (c >> 1);
      sums.q[i] = fmaf(part_of(diagonal, e), half_of(k[w], e) * part_of(rk, e), sums.q[i]);
      sums.k[i] = fmaf(part_of(diagonal, e), half_of(q[w], e) * part_of(rq, e), sums.k[i]);
    }
  }
}

__device__ __forceinline__ void tree_gradients(Sums& sums, const Tree& tree, int thread) {
  // The widest last: in this order the registers do.
#pragma unroll
  for (int block = 0; block < 4; ++block) block_nodes(sums, tree, block, thread);
#pragma unroll
  for (int first = 0; first < 4; first += 2) wide_node<1>(sums, tree, first, thread);
  wide_node<2>(sums, tree, 0, thread);
}

}  // namespace cake::kda
