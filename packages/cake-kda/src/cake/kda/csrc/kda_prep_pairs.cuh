// The pairs of kda_prep: P and beta N of a chunk, and what of its rows is made of the same numbers: Qg, Kg and Kr.
//
// 2^(b_i - b_j) is at most 1 for i > j, but 2^b_i and 2^-b_j apart would under- and overflow. So a block of 16 rows has a
// border for what it is as the right rows of pairs and one for what it is as their left rows, and for rows i of a block R and
// j of an earlier one L
//
//   2^(b_i - b_j) = 2^(b_i - right_R) 2^(right_R - left_L) 2^(left_L - b_j)
//
// Where a block decays little enough in every channel, as its values say and as it always does under a gate's bound of -5,
// both borders are b of the row in its middle: the outer factors stay within 2^+-64, and the block's own pairs are one more
// product. In a wide block they are b of its first and of its last row, so that no factor is larger than 1, and its own
// pairs meet in a binary tree over its rows: i > j at the node of 2 w rows that has i in its right half and j in its left
// one, whose border is the left half's last row. Nothing underflows that isn't 0 anyway, and no gate needs a bound.
//
// Products are m16n8k8 in tf32, 8 right rows of q and the same 8 of k, A above N: bf16 operands would cost T its accuracy
// where keys repeat. A warp has 64 channels, and of the 10 pairs of blocks 5: blocks 0 and 3 with (3, 0), (3, 2) and (3, 1),
// or blocks 1 and 2 with (2, 1), (1, 0) and (2, 0). A lane 4 g + t holds rows g and g + 8 of a block, channels 4 t .. 4 t + 3
// of each 16, which is what a product takes of them on either side.
#pragma once

#include "kda_prep_rows.cuh"

namespace cake::kda {

// A product drops what its operands have beyond 10 bits of mantissa. Factors are this much larger in log2, 0.72 / 2^11, which
// makes up for it on average.
constexpr float kTf32Bias = 5.07e-4f;

// A warp's share and a lane's place in it.
struct PairLane {
  int g, t, half, role;  // half: which 64 channels
  int wide;  // a bit for each block

  __device__ __forceinline__ PairLane(int lane, int warp, int wide)
      : g(lane >> 2), t(lane & 3), half(warp & 1), role(warp >> 1), wide(wide) {}

  // Its n-th own block.
  __device__ __forceinline__ int own(int n) const { return n == 0 ? role : 3 - role; }
  // Octet i of a block: the warps of the two halves count them against each other, so that either keeps its first one.
  __device__ __forceinline__ int octet(int block, int i) const { return 2 * block + (i ^ half); }
  __device__ __forceinline__ bool is_wide(int block) const { return wide >> block & 1; }
};

// Operands of 16 channels, [octet][step]: of right rows q and k, of left ones k.
struct Right {
  uint32_t x[2][2][4];
};
struct Left {
  uint32_t y[2][2][2];
};
using Product = float[4][4];  // [2 * right octet + left octet]

__device__ __forceinline__ void add_product(Product& acc, const Right& right, const Left& left) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 2; ++j) mma_tf32(acc[2 * i + j], right.x[i][h], left.y[j][h]);
}

__device__ __forceinline__ void unpack(float (&x)[4], uint2 v) {
  x[0] = bf16_lo(v.x), x[1] = bf16_hi(v.x), x[2] = bf16_lo(v.y), x[3] = bf16_hi(v.y);
}

__device__ __forceinline__ void unpack(float (&x)[4], float4 v) { x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w; }

// The chunk's images.
struct Images {
  uint8_t *qg, *kg, *kr;
};

// 16 channels of a block as a lane reads and writes them: where its octet 0 lies, and how far from it octet 1 is in an image.
// In q and k it is twice as far, in b four times.
struct Slice {
  int flip;
  uint32_t rows, b, border;
  uint8_t *qg, *kg, *kr;

  __device__ __forceinline__ Slice(const PrepShared& s, const Images& images, const PairLane& me, int block, int c)
      : flip((1 - 2 * me.half) * (8 * kPanelRowBytes)) {
    const int row = 16 * block + 8 * me.half + me.g, channel = 64 * me.half + 16 * c + 4 * me.t;
    rows = smem_addr(s.rows.q) + row_offset(row, channel), b = smem_addr(s.b) + b_offset(row, channel);
    border = smem_addr(s.b) + b_offset(16 * block, channel);
    const uint32_t to = pair_offset<kChunk>(row, channel);
    qg = images.qg + to, kg = images.kg + to, kr = images.kr + to;
  }
  // On to the block that lies `blocks` further.
  __device__ __forceinline__ void move(int blocks) {
    rows += blocks * 4096, b += blocks * 8192, border += blocks * 8192;
    const int image = blocks * (16 * kPanelRowBytes);
    qg += image, kg += image, kr += image;
  }
  // b of a row of the block whose swizzle is none: the first, the middle or the last one.
  __device__ __forceinline__ float4 border_of(int row) const { return ld_floats(border + row * 512); }
  __device__ __forceinline__ float4 right_border(bool wide) const { return border_of(wide ? 0 : 7); }
  __device__ __forceinline__ float4 left_border(bool wide) const { return border_of(wide ? 15 : 7); }
  // Octet i of it, or of an earlier one.
  __device__ __forceinline__ float4 b_of(int i, int before = 0) const {
    return ld_floats(b + i * 4 * flip - before * 8192);
  }
  __device__ __forceinline__ uint2 q_of(int i) const { return ld_shared_8(rows + i * 2 * flip); }
  __device__ __forceinline__ uint2 k_of(int i, int before = 0) const {
    return ld_shared_8(rows + i * 2 * flip + kTokenTileBytes - before * 4096);
  }
};

__device__ __forceinline__ void st_product(uint8_t* to, const float (&x)[4], float r, const float (&f)[4]) {
  st_global_8(to, pack_bf16(x[0] * (r * f[0]), x[1] * (r * f[1])), pack_bf16(x[2] * (r * f[2]), x[3] * (r * f[3])));
}

// A block of the warp's own: both its operands, and what they make of its rows on their way out. `last_row`:
// where b of the chunk's last row lies.
__device__ __forceinline__ void take_block(Right& right, Left& left, const PrepShared& s, const PairLane& me,
                                           const Slice& at, int block, uint32_t last_row) {
  float low[4], high[4], last[4];
  unpack(low, at.right_border(me.is_wide(block))), unpack(high, at.left_border(me.is_wide(block)));
#pragma unroll
  for (int e = 0; e < 4; ++e) low[e] -= kTf32Bias, high[e] += kTf32Bias;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float q[4], k[4], b[4];
    unpack(b, at.b_of(i)), unpack(q, at.q_of(i)), unpack(k, at.k_of(i));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float f = ex2(b[e] - low[e]);
      right.x[i][e >> 1][2 * (e & 1)] = __float_as_uint(q[e] * f);
      right.x[i][e >> 1][2 * (e & 1) + 1] = __float_as_uint(k[e] * f);
      left.y[i][e >> 1][e & 1] = __float_as_uint(k[e] * ex2(high[e] - b[e]));
    }
  }
  unpack(last, ld_floats(last_row));
#pragma unroll
  for (int e = 0; e < 4; ++e) low[e] = ex2(low[e]), high[e] = ex2(last[e] - high[e]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 8 * me.octet(block, i) + me.g;
    const float rq = s.rq[row], rk = s.rk[row];
    float qx[4], kx[4], ky[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      qx[e] = __uint_as_float(right.x[i][e >> 1][2 * (e & 1)]);
      kx[e] = __uint_as_float(right.x[i][e >> 1][2 * (e & 1) + 1]);
      ky[e] = __uint_as_float(left.y[i][e >> 1][e & 1]);
    }
    st_product(at.qg + i * at.flip, qx, rq, low);
    st_product(at.kg + i * at.flip, kx, rk, low);
    st_product(at.kr + i * at.flip, ky, rk, high);
  }
}

// The left rows of another warp's block, so many before the right ones'.
__device__ __forceinline__ void add_pairs_with(Product& acc, const Right& right, int before, bool right_is_wide,
                                               const Slice& at) {
  Left left;
  float high[4];
  unpack(high, at.right_border(right_is_wide));
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float k[4], b[4];
    unpack(b, at.b_of(j, before)), unpack(k, at.k_of(j, before));
#pragma unroll
    for (int e = 0; e < 4; ++e) left.y[j][e >> 1][e & 1] = __float_as_uint(k[e] * ex2((high[e] + kTf32Bias) - b[e]));
  }
  add_product(acc, right, left);
}

// The i-th of the left rows of the nodes of 2 w rows; the right row of the same rank lies w below.
__device__ __forceinline__ int left_row(int w, int i) { return (i & ~(w - 1)) * 2 + (i & (w - 1)); }

// A level of the tree over a wide block, nodes of 2 w rows: all right rows against all left ones, of which what crosses nodes
// isn't used.
__device__ __forceinline__ void add_level(float (&acc)[4], const PrepShared& s, const PairLane& me, int block, int w) {
  const int left = 16 * block + left_row(w, me.g), right = left + w, channel = 64 * me.half + 4 * me.t;
  const uint32_t b = smem_addr(s.b), q = smem_addr(s.rows.q), k = smem_addr(s.rows.k);
  const uint32_t b_left = b_offset(left, channel), b_right = b_offset(right, channel),
                 b_border = b_offset(left | (w - 1), channel), row_left = row_offset(left, channel),
                 row_right = row_offset(right, channel);
#pragma unroll 1
  for (int c = 0; c < 4; ++c) {
    float border[4], bi[4], bj[4], qi[4], ki[4], kj[4];
    unpack(border, ld_floats(b + (b_border ^ (c << 6)))), unpack(bi, ld_floats(b + (b_right ^ (c << 6))));
    unpack(bj, ld_floats(b + (b_left ^ (c << 6)))), unpack(qi, ld_shared_8(q + (row_right ^ (c << 5))));
    unpack(ki, ld_shared_8(k + (row_right ^ (c << 5)))), unpack(kj, ld_shared_8(k + (row_left ^ (c << 5))));
    uint32_t x[2][4], y[2][2];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float f = ex2(bi[e] - (border[e] - kTf32Bias));
      x[e >> 1][2 * (e & 1)] = __float_as_uint(qi[e] * f);
      x[e >> 1][2 * (e & 1) + 1] = __float_as_uint(ki[e] * f);
      // A border itself is exact as it is.
      y[e >> 1][e & 1] = __float_as_uint(w == 1 ? kj[e] : kj[e] * ex2((border[e] + kTf32Bias) - bj[e]));
    }
    mma_tf32(acc, x[0], y[0]), mma_tf32(acc, x[1], y[1]);
  }
}

// The width of the n-th level as a warp counts them, against that of the other half.
__device__ __forceinline__ int level_width(const PairLane& me, int n) { return 8 >> (n ^ 3 * me.half); }

// A warp's five products over its channels, see the head: of its own blocks (of a wide one the levels of its tree), of the
// second with the first, and of the one or the other with the blocks before it.
__device__ __forceinline__ void make_pairs(Product (&acc)[kProducts], const PrepShared& s, const Images& images,
                                           const PairLane& me) {
  const int first = me.own(0), second = me.own(1);
#pragma unroll 1
  for (int c = 0; c < 4; ++c) {
    Slice at(s, images, me, first, c);
    const uint32_t last_row = at.border + (kChunk - 1 - 16 * first) * 512;
    Right right;
    Left left, own;
    take_block(right, left, s, me, at, first, last_row);
    add_product(acc[0], right, left);
    if (me.role == 1) add_pairs_with(acc[3], right, 1, me.is_wide(first), at);
    float from[4], to[4];
    unpack(from, at.left_border(me.is_wide(first)));
    at.move(second - first);
    unpack(to, at.right_border(me.is_wide(second)));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float f = ex2(to[e] - from[e]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        uint32_t& y = left.y[j][e >> 1][e & 1];
        y = __float_as_uint(__uint_as_float(y) * f);
      }
    }
    __syncwarp();  // what belongs to the second block needs no registers before
    take_block(right, own, s, me, at, second, last_row);
    add_product(acc[1], right, own);
    add_product(acc[2], right, left);
    __syncwarp();
    add_pairs_with(acc[4], right, 2, me.is_wide(second), at);
    if (me.role == 0) add_pairs_with(acc[3], right, 1, me.is_wide(second), at);
  }
#pragma unroll 1
  for (int n = 0; n < 2; ++n) {
    if (!me.is_wide(me.own(n))) continue;
    Product levels = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) add_level(levels[i], s, me, me.own(n), level_width(me, i));
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (n == 0) acc[0][i][e] = levels[i][e];
        else acc[1][i][e] = levels[i][e];
      }
  }
}

// Gives the other half's warp this one's sums of what that one keeps, and adds what it gives. Barriers around.
template <typename Barrier>
__device__ __forceinline__ void exchange(Product (&acc)[kProducts], PrepShared& s, int lane, int warp,
                                         Barrier barrier) {
#pragma unroll
  for (int p = 0; p < kProducts; ++p)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float (&x)[4] = acc[p][2 + j];
      st_shared_16(smem_addr(&s.sums[warp][2 * p + j][lane]), make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]),
                                                                         __float_as_uint(x[2]), __float_as_uint(x[3])));
    }
  barrier();
#pragma unroll
  for (int p = 0; p < kProducts; ++p)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float4 x = s.sums[warp ^ 1][2 * p + (j ^ 1)][lane];  // its octets count the other way round
      acc[p][j][0] += x.x, acc[p][j][1] += x.y, acc[p][j][2] += x.z, acc[p][j][3] += x.w;
    }
}

// What a row i of the chunk multiplies its pairs with.
struct RowScales {
  float q, k;  // of P and of L
  __device__ __forceinline__ RowScales(const PrepShared& s, int i) : q(s.rq[i]), k(s.rk[i] * s.beta[i]) {}
};

// Stores what a product says of row i in columns j (even) and j + 1, r: of k^ there. What isn't below the diagonal gets what P
// has there; L's place there is free.
__device__ __forceinline__ void put_pairs(PrepShared& s, const float (&acc)[4], RowScales row, float2 r, int i, int j,
                                          bool below0 = true, bool below1 = true, float diagonal = 0.f) {
  const float p0 = below0 ? row.q * r.x * acc[0] : i == j ? diagonal : 0.f;
  const float p1 = below1 ? row.q * r.y * acc[1] : i == j + 1 ? diagonal : 0.f;
  st_shared_4(smem_addr(s.pairs.p) + pair_offset<kChunk>(i, j), pack_bf16(p0, p1));
  *reinterpret_cast<float2*>(s.pairs.l + i * kTriStride + j) = make_float2(row.k * r.x * acc[2], row.k * r.y * acc[3]);
}

__device__ __forceinline__ float2 keys_at(const PrepShared& s, int j) {
  return *reinterpret_cast<const float2*>(s.rk + j);
}

__device__ __forceinline__ void put_p(PrepShared& s, int i, int j, float p) {
  *reinterpret_cast<__nv_bfloat16*>(s.pairs.p + group_offset<kChunk>(i, j >> 3) + 2 * (j & 7)) = __float2bfloat16_rn(p);
}

__device__ __forceinline__ void put_level(PrepShared& s, const float (&acc)[4], int row0, int w, const PairLane& me) {
  const int i = row0 + left_row(w, me.g) + w;
  const RowScales row(s, i);
  if (w > 1) {
    const int j = row0 + left_row(w, 2 * me.t);
    if ((me.g ^ 2 * me.t) < w) put_pairs(s, acc, row, keys_at(s, j), i, j);
  } else if (me.g / 2 == me.t) {  // nodes of two rows
    put_p(s, i, i - 1, row.q * s.rk[i - 1] * (me.g & 1 ? acc[1] : acc[0]));
    s.pairs.l[i * kTriStride + i - 1] = row.k * s.rk[i - 1] * (me.g & 1 ? acc[3] : acc[2]);
  }
}

// What a warp keeps of its products: right rows of its first octet.
__device__ __forceinline__ void put_products(PrepShared& s, const Product (&acc)[kProducts], const PairLane& me,
                                             int lane) {
  // Blocks of left rows, and all that is read, before anything is stored.
  const int lefts[kProducts] = {me.own(0), me.own(1), me.own(0), me.role == 1 ? 0 : 2, me.role == 1 ? 0 : 1};
  const int rows[2] = {8 * me.octet(me.own(0), 0) + me.g, 8 * me.octet(me.own(1), 0) + me.g};
  const RowScales scales[2] = {RowScales(s, rows[0]), RowScales(s, rows[1])};
  const float diagonals[2] = {s.diagonal[rows[0]], s.diagonal[rows[1]]};
  float2 keys[kProducts][2];
#pragma unroll
  for (int p = 0; p < kProducts; ++p)
#pragma unroll
    for (int j = 0; j < 2; ++j) keys[p][j] = keys_at(s, 8 * me.octet(lefts[p], j) + 2 * me.t);
#pragma unroll
  for (int p = 2; p < kProducts; ++p)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const bool first = p == 3 && me.role == 1;  // whether the right rows are the first own block's
      put_pairs(s, acc[p][j], first ? scales[0] : scales[1], keys[p][j], first ? rows[0] : rows[1],
                8 * me.octet(lefts[p], j) + 2 * me.t);
    }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int block = me.own(n), row0 = 16 * block;
    if (me.is_wide(block)) {
      put_level(s, acc[n][0], row0, level_width(me, 0), me);
      put_level(s, acc[n][1], row0, level_width(me, 1), me);
      const int i = row0 + lane;
      if (me.half == 0 && lane < 16) put_p(s, i, i, s.diagonal[i]);
    } else {
      put_pairs(s, acc[n][0], scales[n], keys[n][0], rows[n], 8 * me.octet(block, 0) + 2 * me.t, me.g > 2 * me.t,
                me.g > 2 * me.t + 1, diagonals[n]);
      if (me.half == 1) put_pairs(s, acc[n][1], scales[n], keys[n][1], rows[n], 8 * me.octet(block, 1) + 2 * me.t);
    }
  }
}

}  // namespace cake::kda
