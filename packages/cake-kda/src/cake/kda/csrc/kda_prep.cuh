// kda_prep: everything of a chunk that needs no state. One CTA per (chunk, v head). Per key channel c, rows are tokens:
//
//   b_i  = sum_{j<=i} log2 decay_j                             restarted at the chunk; rows past its end repeat the last
//   q^   = r_q q, k^ = r_k k                                   r = 1 / sqrt(|x|^2 + eps), or 1 without L2 norm
//   Qg   = scale q^ 2^b      Kg = k^ 2^b      Kr = k^ 2^(b_C - b)
//   N_ij = sum_c k^_ic k^_jc 2^(b_ic - b_jc)  (i > j)          A_ij likewise with q^_i  (i >= j)
//   P    = scale A           T = (I + beta N)^-1
//
// Qg, Kg, Kr, P and T are stored in bf16 as images of the tiles that the walks use. How the pairs are made: kda_prep_pairs.cuh.
#pragma once

#include "kda_prep_pairs.cuh"

namespace cake::kda {

// Where gates in bf16, rows of 256 bytes, wait in b.
constexpr uint32_t kRawOffset = kChunk * kHeadDim * 2;

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

// A block of 16 rows is wide if b falls by more than that in a channel, from its first row to the middle one or from there.
constexpr float kNarrow = 64.f;

// Turns one channel's gates into b, and returns its last row. All threads, each with its channel. `wide`: a bit for each block.
template <GateKind kKind, bool kBf16>
__device__ __forceinline__ float accumulate_gates(uint32_t b, const Gate& any, float bias, int rows, int channel,
                                                  int& wide) {
  const Gate gate = any.of_kind<kKind>();
  float sum = 0.f;
#pragma unroll 1
  for (int first = 0; first < kChunk; first += kChunk / 2) {
    const uint32_t raw = b + kRawOffset + first * 256 + channel * 2;
    const uint32_t even = b + first * 512 + b_offset(0, channel), odd = b + first * 512 + b_offset(1, channel) - 512;
    const auto at = [=](int i) { return ((i ^ (i >> 1)) & 1 ? odd : even) + i * 512; };
    float x[kChunk / 2], before = 0.f;
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i)
      x[i] = kBf16 ? bf16_lo(ld_shared_2(raw + i * 256)) : __uint_as_float(ld_shared_4(at(i)));
    if (kBf16 && first > 0) __syncthreads();  // b takes over the place of what everyone has read by now
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) x[i] = log2_decay(x[i], bias, gate);
#pragma unroll
    for (int i = 0; i < kChunk / 2; ++i) {
      sum += x[i];
      st_shared_4(at(i), __float_as_uint(sum));
      if (!(before - sum <= kNarrow) && (i % 16 == 7 || i % 16 == 15)) wide |= 1 << (first + i) / 16;
      if (i % 16 == 0 || i % 16 == 7) before = sum;
    }
  }
  if (rows < kChunk) {
    const auto at = [=](int i) { return b + b_offset(i, channel); };
    sum = __uint_as_float(ld_shared_4(at(rows - 1)));
#pragma unroll 1
    for (int i = rows; i < kChunk; ++i) st_shared_4(at(i), __float_as_uint(sum));
  }
  return sum;
}

template <bool kBf16>
__device__ __forceinline__ float accumulate_gates(uint32_t b, const Gate& gate, float bias, int rows, int channel,
                                                  int& wide) {
  if (gate.kind == GateKind::kNone) return accumulate_gates<GateKind::kNone, kBf16>(b, gate, bias, rows, channel, wide);
  if (gate.kind == GateKind::kStandard)
    return accumulate_gates<GateKind::kStandard, kBf16>(b, gate, bias, rows, channel, wide);
  return accumulate_gates<GateKind::kBounded, kBf16>(b, gate, bias, rows, channel, wide);
}

// Leaves which blocks are wide in one of the warp's channels.
__device__ __forceinline__ void mark_wide(PrepShared& s, int wide, int warp, int lane) {
  int all = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) all |= __ballot_sync(0xffffffffu, wide >> i & 1) != 0 ? 1 << i : 0;
  if (lane == 0) s.wide[warp] = all;
}

// ---- norms -------------------------------------------------------------------------------------------------------

// r_q, r_k and P's diagonal of a warp's 16 rows, as diagonals of q q^T, k q^T and k k^T.
__device__ __forceinline__ void make_norms(PrepShared& s, const PrepArgs& args, const Chunk& chunk, int head,
                                           bool keeps, int warp, int lane) {
  const int row0 = 16 * warp;
  float with_q[2][4] = {}, with_k[2][4] = {};  // [octet]
  // Rows of q above the same rows of k, as a first operand and as two second ones.
  const int row = row0 + (lane & 7), upper = lane >> 4, odd_matrix = (lane >> 3) & 1;
  const uint32_t first = smem_addr(s.rows.q) + odd_matrix * kTokenTileBytes + row_offset(row, 8 * upper);
  const uint32_t second = smem_addr(s.rows.q) + upper * kTokenTileBytes + row_offset(row, 8 * odd_matrix);
#pragma unroll
  for (int c = 0; c < 8; ++c)
#pragma unroll
    for (int o = 0; o < 2; ++o) {
      uint32_t both[4], apart[4];
      ldmatrix(both, (first ^ ((c & 3) << 5)) + (c >> 2) * 128 + o * 2048);
      ldmatrix(apart, (second ^ ((c & 3) << 5)) + (c >> 2) * 128 + o * 2048);
      mma_bf16(with_q[o], both, apart[0], apart[1]);
      mma_bf16(with_k[o], both, apart[2], apart[3]);
    }
  const int g = lane >> 2, odd = g & 1;
  if ((lane & 3) != g >> 1) return;  // the lanes that hold the diagonals
#pragma unroll
  for (int o = 0; o < 2; ++o) {
    const int row = row0 + 8 * o + g;
    const float qq = odd ? with_q[o][1] : with_q[o][0], qk = odd ? with_k[o][1] : with_k[o][0],
                kk = odd ? with_k[o][3] : with_k[o][2];
    const float rq = args.l2norm ? rsqrtf(qq + kNormEps) : 1.f, rk = args.l2norm ? rsqrtf(kk + kNormEps) : 1.f;
    s.rq[row] = args.scale * rq, s.rk[row] = rk, s.diagonal[row] = args.scale * rq * rk * qk;
    if (row < chunk.rows && keeps) {
      const int64_t token = int64_t(head) * args.plan.total + chunk.token + row;
      args.rq[token] = rq, args.rk[token] = rk;
    }
  }
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
  const int64_t image = blockIdx.x;
  const uint32_t b = smem_addr(s.b);

  // Asked for before the rows, which they would wait for otherwise.
  const uint32_t a_log = args.gate.a_log_bits(v_head), bias = args.gate.bias_bits(v_head, tid);
  const uint32_t beta = tid < chunk.rows ? args.beta.bits(args.beta.view.place(chunk.token + tid, tokens, v_head)) : 0;

  // ---- rows: 16 threads load one, whose place in the swizzle is a thread's own ----
  {
    const int row8 = tid >> 4, group = tid & 15;
    const uint32_t at = row_offset(row8, 8 * group);
    load_group<8, 8, 2048>(smem_addr(s.rows.q) + at, args.q.row(chunk.token, tokens, head) + 8 * group,
                           args.q.token_stride, row8, chunk.rows);
    load_group<8, 8, 2048>(smem_addr(s.rows.k) + at, args.k.row(chunk.token, tokens, head) + 8 * group,
                           args.k.token_stride, row8, chunk.rows);
    cp_async_commit();
    load_gates(b, args, chunk, v_head, tid);
    cp_async_commit();
  }
  cp_async_wait<1>();
  __syncthreads();
  make_norms(s, args, chunk, head, v_head % args.group == 0, warp, lane);
  cp_async_wait<0>();
  __syncthreads();

  // ---- gates: a thread has a channel ----
  if (tid < kChunk) s.beta[tid] = args.beta.value(fresh(beta));
  const Gate gate(args.gate, GateArgs::value(fresh(a_log), args.gate.a_log_bf16));
  const float gate_bias = GateArgs::value(fresh(bias), args.gate.bias_bf16);
  int wide = 0;
  const float total = args.g.is_bf16 ? accumulate_gates<true>(b, gate, gate_bias, chunk.rows, tid, wide)
                                     : accumulate_gates<false>(b, gate, gate_bias, chunk.rows, tid, wide);
  args.last[image * kHeadDim + tid] = ex2(total);
  mark_wide(s, wide, warp, lane);
  __syncthreads();

  // ---- pairs ----
  const PairLane me(lane, warp, s.wide[0] | s.wide[1] | s.wide[2] | s.wide[3]);
  const uint32_t p = smem_addr(s.pairs.p);
  {
    Product acc[kProducts] = {};
    const auto place = [=](__nv_bfloat16* all) { return reinterpret_cast<uint8_t*>(all) + image * kTokenTileBytes; };
    make_pairs(acc, s, {place(args.qg), place(args.kg), place(args.kr)}, me);
    __syncthreads();
    zero_fill<kPrepThreads>(p, kSquareTileBytes, tid);
    exchange(acc, s, lane, warp, [] { __syncthreads(); });
    put_products(s, acc, me, lane);
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
    st_global_16(args.t + image * (kChunk * kChunk) + group_offset<kChunk>(row, tid & 7) / 2,
                 make_uint4(words[0], words[1], words[2], words[3]));
  }
  if (tid == 0) bulk_wait_read();  // shared memory must outlive the copy
}

}  // namespace cake::kda
