// kda_prep: everything of a chunk that needs no state. One CTA per (chunk, v head). Per key channel c, rows are tokens:
//
//   b_i  = sum_{j<=i} log2 decay_j                             restarted at the chunk; rows past its end repeat the last
//   q^   = r_q q, k^ = r_k k                                   r = 1 / sqrt(|x|^2 + eps), or 1 without L2 norm
//   Qg   = scale q^ 2^b      Kg = k^ 2^b      Kr = k^ 2^(b_C - b)
//   N_ij = sum_c k^_ic k^_jc 2^(b_ic - b_jc)  (i > j)          A_ij likewise with q^_i  (i >= j)
//   P    = scale A           T = (I + beta N)^-1
//
// Qg, Kg, Kr, P and T are stored in bf16 as images of the tiles that the walks use.
//
// Pairs. 2^(b_i - b_j) is at most 1 for i > j, but 2^b_i and 2^-b_j apart would under- and overflow. Each pair i > j meets
// exactly once in a binary tree over the rows: at the node of 2 w rows that has i in its right half and j in its left one.
// With r = b of the left half's last row (the border), 2^(b_i - b_j) = 2^(b_i - r) 2^(r - b_j), both at most 1: nothing
// underflows that isn't 0 anyway, and no gate needs a bound. 8 right rows of q, the same 8 of k and 8 left rows of k are one
// m16n8 product, A above N, in tf32: bf16 operands would cost T its accuracy where keys repeat. The upper two levels are cut
// into such products evenly. Of the lower four, a warp makes those of its own 16 rows, each level's right rows against all
// its left ones at once, and drops what crosses nodes. Where these 16 rows decay little enough, as their values say and as
// they always do under a gate's bound of -5, one border in their middle serves all their pairs instead.
#pragma once

#include "cake/frag.cuh"
#include "cake/seq.cuh"
#include "cake/tri.cuh"
#include "kda_gate.cuh"

namespace cake::kda {

struct PrepArgs {
  View<const __nv_bfloat16> q, k;  // [B, T, H, 128]
  Scalars g, beta;  // [B, T, HV, 128], contiguous channels, and [B, T, HV]
  GateArgs gate;
  Plan plan;
  __nv_bfloat16 *qg, *kg, *kr;  // tile images [chunks, HV, 64, 128]
  __nv_bfloat16 *p, *t;  // tile images [chunks, HV, 64, 64]
  float* last;  // [chunks, HV, 128]: 2^b_C
  float *rq, *rk;  // [H, total]
  int v_heads, group;  // HV, HV / H
  float scale;
  bool l2norm;
};

constexpr int kPrepThreads = 128, kPrepCtasPerSm = 3;

struct PrepShared {
  union {
    struct {
      alignas(1024) uint8_t q[kTokenTileBytes], k[kTokenTileBytes];  // bf16 [64][128], see row_offset
    } rows;
    struct {  // once the pairs are made
      alignas(1024) uint8_t p[kSquareTileBytes];
      alignas(16) float l[kChunk * kTriStride];
    } pairs;
  };
  union {
    alignas(1024) float b[kChunk * kHeadDim];  // see b_offset
    alignas(16) float x[kChunk * kTriStride];  // once the pairs are made: the inverse
  };
  float rq[kChunk], rk[kChunk], beta[kChunk];  // rq with the scale
  float diagonal[kChunk];  // of P
};

// Byte offsets in rows of 256 bytes of bf16, and of 512 bytes of fp32. Their swizzles let 8 lanes g read 8 rows that differ
// in one of their lowest three bits less, four lanes t to a row, without bank conflicts: at every level of the tree.
__device__ __forceinline__ uint32_t row_offset(int row, int channel) {
  const int swizzle = (row & 3) ^ ((row & 4) ? 3 : 0);
  return (row * 256 + channel * 2) ^ (swizzle << 5);
}
__device__ __forceinline__ uint32_t b_offset(int row, int channel) {
  return (row * 512 + channel * 4) ^ (((row ^ (row >> 1)) & 1) << 6);
}

// Where gates in bf16, rows of 256 bytes, wait in b.
constexpr uint32_t kRawOffset = kChunk * kHeadDim * 2;

__device__ __forceinline__ float4 ld_floats(uint32_t addr) {
  const uint4 v = ld_shared_16(addr);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}

// ---- gates -------------------------------------------------------------------------------------------------------

// Starts the copies of `count` rows, `every` apart, whose 16-byte groups lie `step` bytes apart in shared memory. `row`: the
// thread's first one; rows past the chunk's end become zeros.
template <int count, int every, int step, typename T>
__device__ __forceinline__ void load_group(uint32_t to, const T* from, int64_t stride, int row, int rows) {
  from += row * stride;
#pragma unroll
  for (int i = 0; i < count; ++i, from += every * stride) cp_async_16(to + i * step, from, row + i * every < rows);
}

// The gates of a chunk: fp32 to where b will be, bf16 as they lie to its second half.
__device__ __forceinline__ void load_gates(uint32_t b, const PrepArgs& args, const Chunk& chunk, int v_head, int tid) {
  const auto& g = args.g.view;
  const int tokens = args.plan.tokens_per_batch;
  if (args.g.is_bf16) {
    const View<const __nv_bfloat16> view{static_cast<const __nv_bfloat16*>(g.data), g.batch_stride, g.token_stride,
                                         g.head_stride};
    const int row = tid >> 4, group = tid & 15;
    load_group<8, 8, 8 * 256>(b + kRawOffset + row * 256 + 16 * group,
                              view.row(chunk.token, tokens, v_head) + 8 * group, g.token_stride, row, chunk.rows);
  } else {
    const View<const float> view{static_cast<const float*>(g.data), g.batch_stride, g.token_stride, g.head_stride};
    const int row = tid >> 5, group = tid & 31;
    load_group<16, 4, 4 * 512>(b + b_offset(row, 4 * group), view.row(chunk.token, tokens, v_head) + 4 * group,
                               g.token_stride, row, chunk.rows);
  }
}

// Turns one channel's gates into b, and returns its last row. All threads, each with its channel.
template <GateKind kKind, bool kBf16>
__device__ __forceinline__ float accumulate_gates(uint32_t b, const PrepArgs& args, int rows, int v_head, int channel) {
  const Gate gate = Gate(args.gate, v_head).of_kind<kKind>();
  const float bias = kKind == GateKind::kNone ? 0.f : args.gate.bias_of(v_head, channel);
  float sum = 0.f;
  for (int first = 0; first < kChunk; first += kChunk / 2, rows -= kChunk / 2) {
    const uint32_t raw = b + kRawOffset + first * 256 + channel * 2;
    const uint32_t even = b + first * 512 + b_offset(0, channel), odd = b + first * 512 + b_offset(1, channel) - 512;
    const auto at = [=](int i) { return ((i ^ (i >> 1)) & 1 ? odd : even) + i * 512; };
    float x[kChunk / 2];
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i)
      x[i] = kBf16 ? bf16_lo(ld_shared_2(raw + i * 256)) : __uint_as_float(ld_shared_4(at(i)));
    if (kBf16 && first > 0) __syncthreads();  // b takes over the place of what everyone has read by now
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      const float step = log2_decay(x[i], bias, gate);
      sum += i < rows ? step : 0.f;
      st_shared_4(at(i), __float_as_uint(sum));
    }
  }
  return sum;
}

template <bool kBf16>
__device__ __forceinline__ float accumulate_gates(uint32_t b, const PrepArgs& args, int rows, int v_head, int channel) {
  if (args.gate.kind == GateKind::kNone)
    return accumulate_gates<GateKind::kNone, kBf16>(b, args, rows, v_head, channel);
  if (args.gate.kind == GateKind::kStandard)
    return accumulate_gates<GateKind::kStandard, kBf16>(b, args, rows, v_head, channel);
  return accumulate_gates<GateKind::kBounded, kBf16>(b, args, rows, v_head, channel);
}

// ---- pairs -------------------------------------------------------------------------------------------------------

// A product drops what its operands have beyond 10 bits of mantissa. Factors are this much larger in log2, 0.72 / 2^11, which
// makes up for it on average; bf16 values times such a factor of 1 come out exact.
constexpr float kTf32Bias = 5.07e-4f;

// What the left rows of a product are: others than its right rows, the border row itself, or the right rows.
enum class Left { kOthers, kBorder, kRight };

// Adds the products of kRight groups of 8 right rows with kLeft groups of 8 left ones, acc[i * kLeft + j]. Lane 4 g + t gives
// the g-th row of each group (channels 4 t .. 4 t + 3 of each 16) and its node's border row. Row g of a product's 16 is the
// group's q, row g + 8 its k.
template <int kRight, int kLeft, Left kWhich = Left::kOthers>
__device__ __forceinline__ void add_pairs(float (*acc)[4], const PrepShared& s, const int (&right)[kRight],
                                          const int (&left)[kLeft], int border, int lane) {
  const int channel0 = 4 * (lane & 3);
  const uint32_t q = smem_addr(s.rows.q), k = smem_addr(s.rows.k), b = smem_addr(s.b);
  uint32_t b_right[kRight], b_left[kLeft], row_right[kRight], row_left[kLeft];
#pragma unroll
  for (int i = 0; i < kRight; ++i)
    b_right[i] = b + b_offset(right[i], channel0), row_right[i] = row_offset(right[i], channel0);
#pragma unroll
  for (int j = 0; j < kLeft; ++j)
    b_left[j] = b + b_offset(left[j], channel0), row_left[j] = k + row_offset(left[j], channel0);
  const uint32_t b_border = b + b_offset(border, channel0);
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int c = 0; c < kHeadDim / 32; ++c) {
      // The swizzles reach the lowest bit of c in b and the lowest two in rows.
      const auto b_at = [=](uint32_t base) { return ld_floats((base ^ ((c & 1) << 6)) + (c >> 1) * 128 + half * 256); };
      const auto row_at = [=](uint32_t base) { return ld_shared_8((base ^ (c << 5)) + half * 128); };
      const float4 r = b_at(b_border);
      const float low[4] = {r.x - kTf32Bias, r.y - kTf32Bias, r.z - kTf32Bias, r.w - kTf32Bias};
      const float high[4] = {r.x + kTf32Bias, r.y + kTf32Bias, r.z + kTf32Bias, r.w + kTf32Bias};
      uint32_t x[kRight][2][4], y[kLeft][2][2];
      uint2 ki[kRight];
      float4 bi[kRight];
#pragma unroll
      for (int i = 0; i < kRight; ++i) {
        bi[i] = b_at(b_right[i]);
        const uint2 qi = row_at(q + row_right[i]);
        ki[i] = row_at(k + row_right[i]);
        const float f[4] = {ex2(bi[i].x - low[0]), ex2(bi[i].y - low[1]), ex2(bi[i].z - low[2]), ex2(bi[i].w - low[3])};
        const float q4[4] = {bf16_lo(qi.x), bf16_hi(qi.x), bf16_lo(qi.y), bf16_hi(qi.y)};
        const float k4[4] = {bf16_lo(ki[i].x), bf16_hi(ki[i].x), bf16_lo(ki[i].y), bf16_hi(ki[i].y)};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x[i][e >> 1][2 * (e & 1)] = __float_as_uint(q4[e] * f[e]);
          x[i][e >> 1][2 * (e & 1) + 1] = __float_as_uint(k4[e] * f[e]);
        }
      }
#pragma unroll
      for (int j = 0; j < kLeft; ++j) {
        const uint2 kj = kWhich == Left::kRight ? ki[j] : row_at(row_left[j]);
        float k4[4] = {bf16_lo(kj.x), bf16_hi(kj.x), bf16_lo(kj.y), bf16_hi(kj.y)};
        if constexpr (kWhich != Left::kBorder) {
          const float4 bj = kWhich == Left::kRight ? bi[j] : b_at(b_left[j]);
          k4[0] *= ex2(high[0] - bj.x), k4[1] *= ex2(high[1] - bj.y);
          k4[2] *= ex2(high[2] - bj.z), k4[3] *= ex2(high[3] - bj.w);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) y[j][e >> 1][e & 1] = __float_as_uint(k4[e]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < kRight; ++i)
#pragma unroll
          for (int j = 0; j < kLeft; ++j)
            if (kWhich != Left::kRight || j <= i) mma_tf32(acc[i * kLeft + j], x[i][h], y[j][h]);
    }
  }
}

// The i-th of the left rows of the nodes of 2 w rows; the right row of the same rank lies w below.
template <int w>
__device__ __forceinline__ int left_row(int i) {
  return (i & ~(w - 1)) * 2 + (i & (w - 1));
}

// Whether the 16 rows from `row0` on decay by so little, in every channel, that the row in their middle can be the border of
// all of them: its factors stay within 2^+-64.
__device__ __forceinline__ bool is_narrow(const PrepShared& s, int row0, int lane) {
  const uint32_t b = smem_addr(s.b);
  const float4 first = ld_floats(b + b_offset(row0, 4 * lane)), middle = ld_floats(b + b_offset(row0 + 7, 4 * lane)),
               last = ld_floats(b + b_offset(row0 + 15, 4 * lane));
  const float rise =
      fmaxf(fmaxf(first.x - middle.x, first.y - middle.y), fmaxf(first.z - middle.z, first.w - middle.w));
  const float fall = fmaxf(fmaxf(middle.x - last.x, middle.y - last.y), fmaxf(middle.z - last.z, middle.w - last.w));
  return __all_sync(0xffffffffu, fmaxf(rise, fall) <= 64.f);
}

// One level of the 16 rows from `row0` on.
template <int w>
__device__ __forceinline__ void add_level(float (&acc)[4], const PrepShared& s, int row0, int lane) {
  const int left = row0 + left_row<w>(lane >> 2);
  add_pairs<1, 1, w == 1 ? Left::kBorder : Left::kOthers>(&acc, s, {left + w}, {left}, left | (w - 1), lane);
}

// Stores what a product says of row i in columns j (even) and j + 1. What isn't below the diagonal gets what P has there; L's
// place there is free.
__device__ __forceinline__ void put_pairs(PrepShared& s, const float (&acc)[4], int i, int j, bool below0 = true,
                                          bool below1 = true) {
  const float2 r = *reinterpret_cast<const float2*>(s.rk + j);
  const float rq = s.rq[i], rk = s.rk[i] * s.beta[i];
  const float p0 = below0 ? rq * r.x * acc[0] : i == j ? s.diagonal[i] : 0.f;
  const float p1 = below1 ? rq * r.y * acc[1] : i == j + 1 ? s.diagonal[i] : 0.f;
  st_shared_4(smem_addr(s.pairs.p) + pair_offset<kChunk>(i, j), pack_bf16(p0, p1));
  *reinterpret_cast<float2*>(s.pairs.l + i * kTriStride + j) = make_float2(rk * r.x * acc[2], rk * r.y * acc[3]);
}

__device__ __forceinline__ void put_p(PrepShared& s, int i, int j, float p) {
  *reinterpret_cast<__nv_bfloat16*>(s.pairs.p + group_offset<kChunk>(i, j >> 3) + 2 * (j & 7)) = __float2bfloat16_rn(p);
}

template <int w>
__device__ __forceinline__ void put_level(PrepShared& s, const float (&acc)[4], int row0, int lane) {
  const int g = lane >> 2, t = lane & 3, i = row0 + left_row<w>(g) + w;
  if constexpr (w > 1) {
    if (g / w == 2 * t / w) put_pairs(s, acc, i, row0 + left_row<w>(2 * t));
  } else if (g / 2 == t) {  // nodes of two rows
    const float rk = s.rk[i - 1];
    put_p(s, i, i - 1, s.rq[i] * rk * (g & 1 ? acc[1] : acc[0]));
    s.pairs.l[i * kTriStride + i - 1] = s.rk[i] * s.beta[i] * rk * (g & 1 ? acc[3] : acc[2]);
  }
}

// ---- rows --------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void unpack(float (&x)[8], uint4 v) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) x[2 * i] = bf16_lo(words[i]), x[2 * i + 1] = bf16_hi(words[i]);
}

__device__ __forceinline__ uint4 pack_product(const float (&x)[8], float r, const float (&f)[8]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) words[i] = pack_bf16(r * x[2 * i] * f[2 * i], r * x[2 * i + 1] * f[2 * i + 1]);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Sum over 16 lanes; every one gets it.
__device__ __forceinline__ float half_warp_sum(float x) {
#pragma unroll
  for (int d = 8; d >= 1; d >>= 1) x += __shfl_xor_sync(0xffffffffu, x, d);
  return x;
}

static __global__ void __launch_bounds__(kPrepThreads, kPrepCtasPerSm)
    prep_kernel(const __grid_constant__ PrepArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  PrepShared& s = *reinterpret_cast<PrepShared*>(raw);
  const int index = blockIdx.x / args.v_heads, v_head = blockIdx.x % args.v_heads, head = v_head / args.group;
  const Chunk chunk = args.plan.chunk(index);  // both reads at once
  if (index >= args.plan.chunk_count()) return;  // capacity is an upper bound when boundaries are on the device
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int tokens = args.plan.tokens_per_batch;
  const int64_t image = int64_t(index) * args.v_heads + v_head;
  const uint32_t q_rows = smem_addr(s.rows.q), k_rows = smem_addr(s.rows.k), b = smem_addr(s.b);

  // ---- the gates, then q and k: 16 threads load a row, whose place in the swizzle is a thread's own ----
  const int row8 = tid >> 4, group = tid & 15;
  const uint32_t row_at = row_offset(row8, 8 * group), b_at = b_offset(row8, 8 * group);
  load_gates(b, args, chunk, v_head, tid);
  cp_async_commit();
  load_group<8, 8, 2048>(q_rows + row_at, args.q.row(chunk.token, tokens, head) + 8 * group, args.q.token_stride, row8,
                         chunk.rows);
  load_group<8, 8, 2048>(k_rows + row_at, args.k.row(chunk.token, tokens, head) + 8 * group, args.k.token_stride, row8,
                         chunk.rows);
  cp_async_commit();
  if (tid < kChunk) s.beta[tid] = tid < chunk.rows ? args.beta.at(chunk.token + tid, tokens, v_head) : 0.f;
  cp_async_wait<1>();
  __syncthreads();
  // A thread has a channel.
  const float total = args.g.is_bf16 ? accumulate_gates<true>(b, args, chunk.rows, v_head, tid)
                                     : accumulate_gates<false>(b, args, chunk.rows, v_head, tid);
  args.last[image * kHeadDim + tid] = ex2(total);
  cp_async_wait<0>();
  __syncthreads();

  // ---- norms and decayed rows: 16 threads have a row ----
  {
    const uint32_t last_row = b + b_offset(kChunk - 1, 8 * group);
    const float4 lo = ld_floats(last_row), hi = ld_floats(last_row ^ 16);
    const float last[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
    const int64_t to = image * kChunk * kHeadDim + group_offset<kChunk>(row8, group) / 2;
    __nv_bfloat16 *qg = args.qg + to, *kg = args.kg + to, *kr = args.kr + to;
    const bool first_of_group = v_head % args.group == 0;
#pragma unroll 2
    for (int i = 0; i < 8; ++i) {
      const int row = 8 * i + row8;
      float q[8], k[8];
      unpack(q, ld_shared_16(q_rows + row_at + i * 2048));
      unpack(k, ld_shared_16(k_rows + row_at + i * 2048));
      float qq = 0.f, kk = 0.f, qk = 0.f;
#pragma unroll
      for (int e = 0; e < 8; ++e) qq = fmaf(q[e], q[e], qq), kk = fmaf(k[e], k[e], kk), qk = fmaf(q[e], k[e], qk);
      qq = half_warp_sum(qq), kk = half_warp_sum(kk), qk = half_warp_sum(qk);
      const float rq = args.l2norm ? rsqrtf(qq + kNormEps) : 1.f, rk = args.l2norm ? rsqrtf(kk + kNormEps) : 1.f;
      if (group == 0) {
        s.rq[row] = args.scale * rq, s.rk[row] = rk, s.diagonal[row] = args.scale * rq * rk * qk;
        if (row < chunk.rows && first_of_group) {
          const int64_t token = int64_t(head) * args.plan.total + chunk.token + row;
          args.rq[token] = rq, args.rk[token] = rk;
        }
      }
      const float4 b0 = ld_floats(b + b_at + i * 4096), b1 = ld_floats((b + b_at + i * 4096) ^ 16);
      const float at[8] = {b0.x, b0.y, b0.z, b0.w, b1.x, b1.y, b1.z, b1.w};
      float grow[8], rest[8];
#pragma unroll
      for (int e = 0; e < 8; ++e) grow[e] = ex2(at[e]), rest[e] = ex2(last[e] - at[e]);
      *reinterpret_cast<uint4*>(qg + i * 512) = pack_product(q, args.scale * rq, grow);
      *reinterpret_cast<uint4*>(kg + i * 512) = pack_product(k, rk, grow);
      *reinterpret_cast<uint4*>(kr + i * 512) = pack_product(k, rk, rest);
    }
  }

  // ---- pairs: nodes of 64 and 32 rows shared out among the warps, below them the warp's own 16 rows ----
  const int g = lane >> 2, t = lane & 3;
  const int right64 = 32 + 16 * (warp & 1), left64 = 16 * (warp >> 1);
  const int left32 = 32 * (warp >> 1), right32 = left32 + 16 + 8 * (warp & 1), row0 = 16 * warp;
  float acc64[4][4] = {}, acc32[2][4] = {};
  add_pairs<2, 2>(acc64, s, {right64 + g, right64 + 8 + g}, {left64 + g, left64 + 8 + g}, 31, lane);
  add_pairs<1, 2>(acc32, s, {right32 + g}, {left32 + g, left32 + 8 + g}, left32 + 15, lane);
  float own[4][4] = {};  // four products, or four levels
  const bool narrow = is_narrow(s, row0, lane);
  if (narrow) {
    add_pairs<2, 2, Left::kRight>(own, s, {row0 + g, row0 + 8 + g}, {row0 + g, row0 + 8 + g}, row0 + 7, lane);
  } else {
    add_level<8>(own[0], s, row0, lane);
    add_level<4>(own[1], s, row0, lane);
    add_level<2>(own[2], s, row0, lane);
    add_level<1>(own[3], s, row0, lane);
  }
  __syncthreads();

  const uint32_t p = smem_addr(s.pairs.p);
  zero_fill<kPrepThreads>(p, kSquareTileBytes, tid);
  __syncthreads();
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    put_pairs(s, acc64[j], right64 + g, left64 + 8 * j + 2 * t);
    put_pairs(s, acc64[2 + j], right64 + 8 + g, left64 + 8 * j + 2 * t);
    put_pairs(s, acc32[j], right32 + g, left32 + 8 * j + 2 * t);
  }
  if (narrow) {
    put_pairs(s, own[0], row0 + g, row0 + 2 * t, g > 2 * t, g > 2 * t + 1);
    put_pairs(s, own[2], row0 + 8 + g, row0 + 2 * t);
    put_pairs(s, own[3], row0 + 8 + g, row0 + 8 + 2 * t, g > 2 * t, g > 2 * t + 1);
  } else {
    put_level<8>(s, own[0], row0, lane);
    put_level<4>(s, own[1], row0, lane);
    put_level<2>(s, own[2], row0, lane);
    put_level<1>(s, own[3], row0, lane);
    if (lane < 16) put_p(s, row0 + lane, row0 + lane, s.diagonal[row0 + lane]);
  }
  fence_proxy_async();
  __syncthreads();
  if (tid == 0) {
    bulk_store(args.p + image * (kChunk * kChunk), p, kSquareTileBytes);
    bulk_commit();
  }

  // ---- T: 8 lanes write a row ----
  invert_unit_lower(s.x, s.pairs.l, tid, [] { __syncthreads(); });
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 16 * i + (tid >> 3), column = 8 * (tid & 7);
    uint32_t words[4] = {};
    if (column <= row) {
      const float4* x = reinterpret_cast<const float4*>(s.x + row * kTriStride + column);
      const float4 lo = x[0], hi = x[1];
      const float values[8] = {lo.x, lo.y, lo.z, lo.w, hi.x, hi.y, hi.z, hi.w};
#pragma unroll
      for (int e = 0; e < 4; ++e)
        words[e] =
            pack_bf16(column + 2 * e <= row ? values[2 * e] : 0.f, column + 2 * e + 1 <= row ? values[2 * e + 1] : 0.f);
    }
    *reinterpret_cast<uint4*>(args.t + image * (kChunk * kChunk) + group_offset<kChunk>(row, tid & 7) / 2) =
        make_uint4(words[0], words[1], words[2], words[3]);
  }
  if (tid == 0) bulk_wait_read();  // shared memory must outlive the copy
}

}  // namespace cake::kda
