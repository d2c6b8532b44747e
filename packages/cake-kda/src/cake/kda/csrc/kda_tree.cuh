// Gradients through the pairs of tokens of a chunk, i >= j, under decays of their own in every channel.
//
//   A_ij = sum_c q_ic k_jc 2^(b_ic - b_jc)       N_ij alike with k_ic, i > j
//
// Every pair i > j meets once in a binary tree over the chunk's rows: at the node that has i in its right half and j in its
// left one. With r = b of the left half's last row both 2^(b_i - r) and 2^(r - b_j) are at most 1 and neither is smaller
// than their product, so no gate overflows and nothing underflows that isn't 0 anyway. Where a block of 16 rows falls by
// little, as with all but strong gates, it is one product with r halfway: the factors stay within 2^90, and within 1 in
// pairs. A node is a product of bf16 operands, and the gradient of b takes the same rounded operands: the two sides of a
// pair cancel in it to fp32.
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

// The same of one block of 16 tokens, octets p of it: index 4 p + 2 h + e.
struct BlockSums {
  float q[8] = {}, k[8] = {}, b[8] = {};
};

// Loops over blocks are loops: unrolled, the kernel's code would be more than an SM's instruction cache holds. What belongs to
// a block is therefore chosen from the registers by the loop's counter.
__device__ __forceinline__ void add(float (&sums)[32], const float (&part)[8], int block) {
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    if (s != block) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) sums[8 * s + i] += part[i];
  }
}

__device__ __forceinline__ void add(Sums& sums, const BlockSums& part, int block) {
  add(sums.q, part.q, block), add(sums.k, part.k, block), add(sums.b, part.b, block);
}

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
__device__ __forceinline__ void right_octet(BlockSums& sums, uint32_t (&ql)[4], uint32_t (&kl)[4],
                                            const float (&to_q)[4], const float (&to_x)[4], const uint32_t (&q)[4],
                                            const uint32_t (&k)[4], int block, int p, float2 r, const Tree& tree,
                                            const Strip& me) {
  float b[4];
  load_decays(b, tree, 2 * block + p, me);
  const int token = me.token(2 * block + p);
  const float2 rq = pair_at(tree.rq, token), rk = pair_at(tree.rk, token);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int w = 2 * p + h;
    const float f[2] = {ex2(b[2 * h] - part_of(r, h)), ex2(b[2 * h + 1] - part_of(r, h))};
    ql[w] = pack_bf16(bf16_lo(q[w]) * rq.x * f[0], bf16_hi(q[w]) * rq.y * f[1]);
    kl[w] = pack_bf16(bf16_lo(k[w]) * rk.x * f[0], bf16_hi(k[w]) * rk.y * f[1]);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int c = 2 * h + e, i = 4 * p + c;
      sums.q[i] = fmaf(f[e], to_q[c], sums.q[i]);
      sums.k[i] = fmaf(f[e], to_x[c], sums.k[i]);
      sums.b[i] = fmaf(half_of(ql[w], e), to_q[c], sums.b[i]);
      sums.b[i] = fmaf(half_of(kl[w], e), to_x[c], sums.b[i]);
    }
  }
}

// What the left half's rows get, to_k = dA^T ql + dN^T kl of the right half; `kl` is their own operand.
__device__ __forceinline__ void left_octet(BlockSums& sums, const uint32_t (&kl)[4], const float (&to_k)[4], int block,
                                           int p, float2 r, const Tree& tree, const Strip& me) {
  float b[4];
  load_decays(b, tree, 2 * block + p, me);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int i = 4 * p + c;
    sums.k[i] = fmaf(ex2(part_of(r, c >> 1) - b[c]), to_k[c], sums.k[i]);
    sums.b[i] = fmaf(-half_of(kl[2 * p + (c >> 1)], c & 1), to_k[c], sums.b[i]);
  }
}

// ---- nodes of 32 and 64 rows ---------------------------------------------------------------------------------------

// Blocks `left` and `right` of a node's halves; r: b of the left half's last row.
__device__ __forceinline__ void block_pair(Sums& sums, const Tree& tree, int left, int right, float2 r,
                                           const Strip& me) {
  uint32_t q[4], k[4], left_kl[4], ql[4], kl[4], f[4];
  load_block(k, tree.k, left, me);
#pragma unroll
  for (int p = 0; p < 2; ++p) left_operand(left_kl, k, left, p, r, tree, me);
  float to_q[2][4] = {}, to_x[2][4] = {};
  const uint32_t da = frag_address<kChunk>(tree.da, 16 * right, left, me.lane);
  const uint32_t dn = frag_address<kChunk>(tree.dn, 16 * right, left, me.lane);
  ldmatrix(f, da);
  mma_bf16(to_q[0], left_kl, f[0], f[2]);
  mma_bf16(to_q[1], left_kl, f[1], f[3]);
  ldmatrix(f, dn);
  mma_bf16(to_x[0], left_kl, f[0], f[2]);
  mma_bf16(to_x[1], left_kl, f[1], f[3]);
  load_block(q, tree.q, right, me);
  load_block(k, tree.k, right, me);
  {
    BlockSums part;
#pragma unroll
    for (int p = 0; p < 2; ++p) right_octet(part, ql, kl, to_q[p], to_x[p], q, k, right, p, r, tree, me);
    add(sums, part, right);
  }
  float to_k[2][4] = {};
  ldmatrix_trans(f, da);
  mma_bf16(to_k[0], ql, f[0], f[1]);
  mma_bf16(to_k[1], ql, f[2], f[3]);
  ldmatrix_trans(f, dn);
  mma_bf16(to_k[0], kl, f[0], f[1]);
  mma_bf16(to_k[1], kl, f[2], f[3]);
  BlockSums part;
#pragma unroll
  for (int p = 0; p < 2; ++p) left_octet(part, left_kl, to_k[p], left, p, r, tree, me);
  add(sums.k, part.k, left), add(sums.b, part.b, left);
}

// The node of the whole chunk: as block_pair for its four pairs, with every operand made once.
__device__ __forceinline__ void chunk_node(Sums& sums, const Tree& tree, const Strip& me) {
  const float2 r = border(tree, 3, me);
  uint32_t left_kl[2][4];
#pragma unroll
  for (int l = 0; l < 2; ++l) {
    uint32_t k[4];
    load_block(k, tree.k, l, me);
#pragma unroll
    for (int p = 0; p < 2; ++p) left_operand(left_kl[l], k, l, p, r, tree, me);
  }
  float to_k[2][2][4] = {};
#pragma unroll 1
  for (int right = 2; right < 4; ++right) {
    uint32_t q[4], k[4], ql[4], kl[4], f[4];
    load_block(q, tree.q, right, me);
    load_block(k, tree.k, right, me);
    BlockSums part;
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      float to_q[4] = {}, to_x[4] = {};
#pragma unroll
      for (int l = 0; l < 2; ++l) {
        ldmatrix(f, frag_address<kChunk>(tree.da, 16 * right, l, me.lane));
        mma_bf16(to_q, left_kl[l], f[p], f[2 + p]);
        ldmatrix(f, frag_address<kChunk>(tree.dn, 16 * right, l, me.lane));
        mma_bf16(to_x, left_kl[l], f[p], f[2 + p]);
      }
      right_octet(part, ql, kl, to_q, to_x, q, k, right, p, r, tree, me);
    }
    add(sums, part, right);
#pragma unroll
    for (int l = 0; l < 2; ++l) {
      ldmatrix_trans(f, frag_address<kChunk>(tree.da, 16 * right, l, me.lane));
      mma_bf16(to_k[l][0], ql, f[0], f[1]);
      mma_bf16(to_k[l][1], ql, f[2], f[3]);
      ldmatrix_trans(f, frag_address<kChunk>(tree.dn, 16 * right, l, me.lane));
      mma_bf16(to_k[l][0], kl, f[0], f[1]);
      mma_bf16(to_k[l][1], kl, f[2], f[3]);
    }
  }
#pragma unroll
  for (int l = 0; l < 2; ++l) {
    BlockSums part;
#pragma unroll
    for (int p = 0; p < 2; ++p) left_octet(part, left_kl[l], to_k[l][p], l, p, r, tree, me);
    add(sums.k, part.k, l), add(sums.b, part.b, l);
  }
}

// ---- nodes within a block of 16 rows ---------------------------------------------------------------------------------

// Words of an 8 x 8 block that the nodes of 2 `width` rows have: as it stands (column of the thread's word in the left half,
// row in the right one) and transposed; and which of the thread's two tokens are in right halves.
struct NarrowLevel {
  uint32_t plain, transposed;
  bool right[2];

  __device__ __forceinline__ NarrowLevel(int width, const Strip& me) {
    const int n = me.lane >> 2;  // the row, or transposed the column
    if (width == 1) {
      const bool same = n >> 1 == me.t;
      plain = same && (n & 1) ? 0xffffu : 0u;
      transposed = same && !(n & 1) ? 0xffff0000u : 0u;
      right[0] = false, right[1] = true;
    } else {
      const int half = width >> 1;  // pairs of tokens
      const bool same = n / (2 * width) == me.t / width;
      plain = same && (n & width) && !(me.t & half) ? ~0u : 0u;
      transposed = same && !(n & width) && (me.t & half) ? ~0u : 0u;
      right[0] = right[1] = me.t & half;
    }
  }
};

// A level's nodes in octet p of a block. da, dn: its 8 x 8 block on the diagonal, da_t, dn_t transposed.
__device__ __forceinline__ void narrow_nodes(BlockSums& sums, int width, const NarrowLevel& level, uint32_t da,
                                             uint32_t da_t, uint32_t dn, uint32_t dn_t, const float (&b)[4],
                                             const uint32_t (&q)[4], const uint32_t (&k)[4], float2 rq, float2 rk,
                                             int p, const Strip& me) {
  float f[4];
  uint32_t ql[2], kl[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    // The left half's last token: its pair's second one, but for a pair that is a node itself.
    const float odd = __shfl_sync(0xffffffffu, b[2 * h + 1], width == 4 ? (me.lane & ~3) | 1 : me.lane & ~1);
    const float r = width == 1 ? b[2 * h] : odd;
    f[2 * h] = ex2(-fabsf(b[2 * h] - r)), f[2 * h + 1] = ex2(-fabsf(b[2 * h + 1] - r));
    const int w = 2 * p + h;
    kl[h] = pack_bf16(bf16_lo(k[w]) * rk.x * f[2 * h], bf16_hi(k[w]) * rk.y * f[2 * h + 1]);
    ql[h] = pack_bf16(bf16_lo(q[w]) * rq.x * f[2 * h], bf16_hi(q[w]) * rq.y * f[2 * h + 1]);
  }
  // Rows of right halves get to_q and to_x, those of left ones the two parts of to_k.
  float with_a[4] = {}, with_n[4] = {};
  mma_bf16(with_a, kl, da & level.plain);
  mma_bf16(with_a, ql, da_t & level.transposed);
  mma_bf16(with_n, kl, (dn & level.plain) | (dn_t & level.transposed));
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int e = c & 1, i = 4 * p + c;
    const bool right = level.right[e];
    const float to_q = right ? with_a[c] : 0.f, to_k = right ? with_n[c] : with_a[c] + with_n[c];
    const float operand = half_of(kl[c >> 1], e);
    sums.q[i] = fmaf(f[c], to_q, sums.q[i]);
    sums.k[i] = fmaf(f[c], to_k, sums.k[i]);
    sums.b[i] = fmaf(half_of(ql[c >> 1], e), to_q, sums.b[i]);
    sums.b[i] = fmaf(right ? operand : -operand, to_k, sums.b[i]);
  }
}

// The diagonal and all nodes within a block. Words of the 16 x 16 block: rows + 8 (1), columns + 8 (2).
__device__ __forceinline__ void block_nodes(Sums& sums, const Tree& tree, int block, const Strip& me) {
  BlockSums part;
  uint32_t q[4], k[4], da[4], dn[4], da_t[4], dn_t[4];
  load_block(q, tree.q, block, me);
  load_block(k, tree.k, block, me);
  ldmatrix(da, frag_address<kChunk>(tree.da, 16 * block, block, me.lane));
  ldmatrix(dn, frag_address<kChunk>(tree.dn, 16 * block, block, me.lane));
  ldmatrix_trans(da_t, frag_address<kChunk>(tree.da, 16 * block, block, me.lane));
  ldmatrix_trans(dn_t, frag_address<kChunk>(tree.dn, 16 * block, block, me.lane));
  {
    const float2 r = border(tree, 2 * block, me);
    uint32_t left[4], ql[4], kl[4];
    float to_q[4] = {}, to_x[4] = {}, to_k[4] = {};
    left_operand(left, k, block, 0, r, tree, me);
    const uint32_t operand[2] = {left[0], left[1]};
    mma_bf16(to_q, operand, da[1]);
    mma_bf16(to_x, operand, dn[1]);
    right_octet(part, ql, kl, to_q, to_x, q, k, block, 1, r, tree, me);
    const uint32_t queries[2] = {ql[2], ql[3]}, keys[2] = {kl[2], kl[3]};
    mma_bf16(to_k, queries, da_t[1]);
    mma_bf16(to_k, keys, dn_t[1]);
    left_octet(part, left, to_k, block, 0, r, tree, me);
  }
  float b[2][4];
  float2 rq[2], rk[2];
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    const int token = me.token(2 * block + p);
    load_decays(b[p], tree, 2 * block + p, me);
    rq[p] = pair_at(tree.rq, token), rk[p] = pair_at(tree.rk, token);
    const float2 diagonal = pair_at(tree.diagonal, token);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int e = c & 1, i = 4 * p + c, w = 2 * p + (c >> 1);
      part.q[i] = fmaf(part_of(diagonal, e), half_of(k[w], e) * part_of(rk[p], e), part.q[i]);
      part.k[i] = fmaf(part_of(diagonal, e), half_of(q[w], e) * part_of(rq[p], e), part.k[i]);
    }
  }
#pragma unroll 1
  for (int width = 4; width >= 1; width >>= 1) {
    const NarrowLevel level(width, me);
#pragma unroll
    for (int p = 0; p < 2; ++p)
      narrow_nodes(part, width, level, da[3 * p], da_t[3 * p], dn[3 * p], dn_t[3 * p], b[p], q, k, rq[p], rk[p], p, me);
  }
  add(sums, part, block);
}

// The most that b may fall within a block for it to be one product with r halfway: its factors then stay within 2^90. A log
// decay of -8 at every token fits.
constexpr float kNear = 180.f;

// Whether a block falls by so little in all of this warp's channels, and r.
__device__ __forceinline__ bool is_near(float2& r, const Tree& tree, int block, const Strip& me) {
  const float4 first = (*tree.decays)[2 * block][me.thread & ~3];
  const float2 last = border(tree, 2 * block + 1, me);
  r = make_float2(0.5f * (first.x + last.x), 0.5f * (first.z + last.y));
  return __all_sync(0xffffffffu, first.x - last.x <= kNear && first.z - last.y <= kNear);
}

// All pairs of a block, the diagonal included, with r as every row's border.
__device__ __forceinline__ void near_block(Sums& sums, const Tree& tree, int block, float2 r, const Strip& me) {
  uint32_t q[4], k[4], ql[4], kl[4], left[4];
  float grow[8], fade[8];
  load_block(q, tree.q, block, me);
  load_block(k, tree.k, block, me);
#pragma unroll
  for (int p = 0; p < 2; ++p) {
    float b[4];
    load_decays(b, tree, 2 * block + p, me);
    const int token = me.token(2 * block + p);
    const float2 rq = pair_at(tree.rq, token), rk = pair_at(tree.rk, token);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int w = 2 * p + h;
      float* f = grow + 4 * p + 2 * h;
      float* g = fade + 4 * p + 2 * h;
#pragma unroll
      for (int e = 0; e < 2; ++e) f[e] = ex2(b[2 * h + e] - part_of(r, h)), g[e] = ex2(part_of(r, h) - b[2 * h + e]);
      const float k_lo = bf16_lo(k[w]) * rk.x, k_hi = bf16_hi(k[w]) * rk.y;
      ql[w] = pack_bf16(bf16_lo(q[w]) * rq.x * f[0], bf16_hi(q[w]) * rq.y * f[1]);
      kl[w] = pack_bf16(k_lo * f[0], k_hi * f[1]);
      left[w] = pack_bf16(k_lo * g[0], k_hi * g[1]);
    }
  }
  const uint32_t upper_left[2] = {left[0], left[1]}, lower_ql[2] = {ql[2], ql[3]}, lower_kl[2] = {kl[2], kl[3]};
  // Above dN's diagonal something else may lie.
  const int row = me.lane >> 2, column = 2 * me.t;
  const uint32_t below = (column < row ? 0xffffu : 0u) | (column + 1 < row ? 0xffff0000u : 0u);
  const uint32_t beyond = (column > row ? 0xffffu : 0u) | (column + 1 > row ? 0xffff0000u : 0u);
  float to_q[2][4] = {}, to_x[2][4] = {}, to_k[2][4] = {};
  uint32_t f[4];
  const uint32_t da = frag_address<kChunk>(tree.da, 16 * block, block, me.lane);
  const uint32_t dn = frag_address<kChunk>(tree.dn, 16 * block, block, me.lane);
  ldmatrix(f, da);
  mma_bf16(to_q[0], upper_left, f[0]);
  mma_bf16(to_q[1], left, f[1], f[3]);
  ldmatrix(f, dn);
  mma_bf16(to_x[0], upper_left, f[0] & below);
  mma_bf16(to_x[1], left, f[1], f[3] & below);
  ldmatrix_trans(f, da);
  mma_bf16(to_k[0], ql, f[0], f[1]);
  mma_bf16(to_k[1], lower_ql, f[3]);
  ldmatrix_trans(f, dn);
  mma_bf16(to_k[0], kl, f[0] & beyond, f[1]);
  mma_bf16(to_k[1], lower_kl, f[3] & beyond);
  BlockSums part;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int p = i >> 2, c = i & 3, w = i >> 1, e = i & 1;
    part.q[i] = grow[i] * to_q[p][c];
    part.k[i] = fmaf(fade[i], to_k[p][c], grow[i] * to_x[p][c]);
    part.b[i] = fmaf(half_of(kl[w], e), to_x[p][c], half_of(ql[w], e) * to_q[p][c]);
    part.b[i] = fmaf(-half_of(left[w], e), to_k[p][c], part.b[i]);
  }
  add(sums, part, block);
}

__device__ __forceinline__ void tree_gradients(Sums& sums, const Tree& tree, const Strip& me) {
#pragma unroll 1
  for (int block = 0; block < 4; ++block) {
    float2 r;
    if (is_near(r, tree, block, me)) near_block(sums, tree, block, r, me);
    else block_nodes(sums, tree, block, me);
  }
#pragma unroll 1
  for (int left = 0; left < 4; left += 2) block_pair(sums, tree, left, left + 1, border(tree, 2 * left + 1, me), me);
  chunk_node(sums, tree, me);
}

}  // namespace cake::kda
