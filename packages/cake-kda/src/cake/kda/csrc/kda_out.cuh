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
// tokens; 2 (delta) makes D, dA and dL, a v head ahead; 3 (producer) loads, and makes dv. Between their own work the warps of
// 2 and 3 are the gates' to those of 0 and 1, each to its own: they make the decays of a v head and turn its db into dg.
// S and R are [V][K] images: K-major for Kg S^T, MN-major as the transposed first operand of the rest.
#pragma once

#include "cake/pipe.cuh"
#include "cake/rows.cuh"
#include "cake/seq.cuh"
#include "kda_gate.cuh"
#include "kda_tree.cuh"

namespace cake::kda {

constexpr int kOutThreads = 512;
constexpr int kChannelRegisters = 192, kDeltaRegisters = 72, kProducerRegisters = 56;
static_assert(2 * kChannelRegisters + kDeltaRegisters + kProducerRegisters == 512, "of a lane slot");
constexpr float kLeastBeta = 0x1p-60f;
constexpr int kPartial = 1 + kHeadDim;  // floats of a row of partial sums

enum OutBarrier { kChannelBarrier = 1, kDeltaBarrier = 2 };

struct OutArgs {
  View<const __nv_bfloat16> q, k, v, grad;  // [B, T, H or HV, 128]; grad = dO
  View<const void> g;  // [B, T, HV, 128]
  bool g_bf16;
  GateArgs gate;
  Scalars beta;
  Plan plan;
  const __nv_bfloat16 *kg, *t;  // images [chunks, HV, 64, 128] and [chunks, HV, 64, 64]
  const float *rq, *rk;  // [H, total]
  const __nv_bfloat16* y;  // [total, HV, 128]
  const __nv_bfloat16 *states, *adjoints;  // images [slots, HV, 128, 128]
  bool states_edge, adjoints_edge;  // whether the tapes have the sequences' edge slots
  __nv_bfloat16 *dq, *dk, *dv;  // [total, H or HV, 128]; dv may be y
  float* dbeta;  // [total, HV]
  void* dg;  // [total, HV, 128], of g's type
  float* partials;  // [chunk capacity, HV, 129], or null without a gate
  int heads, group;
  float scale;
  bool l2norm;

  __device__ __forceinline__ int64_t g_index(int token, int v_head) const {
    const int tokens = plan.tokens_per_batch, batch = token / tokens;
    return batch * g.batch_stride + (token - batch * tokens) * g.token_stride + v_head * g.head_stride;
  }
};

// Per token and v head; two sets, since warpgroup 2 is a v head ahead.
struct alignas(16) OutVectors {
  float beta[kChunk], diagonal[kChunk];  // the latter: of dA
  float residual[kChunk];  // Y . W
  uint32_t dead[2];  // a bit for each row; -Y_i . D_j of such a row i lies in column i of dL, above the diagonal
};

struct OutShared {
  alignas(1024) uint8_t s[kStateTileBytes], r[kStateTileBytes];
  // Kg of a v head, and after it dA and dL.
  struct {
    alignas(1024) uint8_t da[kSquareTileBytes], dn[kSquareTileBytes];
  } pairs[2];
  alignas(1024) uint8_t v[kTokenTileBytes];  // then beta W, then D
  alignas(1024) uint8_t grad[kTokenTileBytes], y[kTokenTileBytes];
  alignas(1024) uint8_t q[kTokenTileBytes], k[kTokenTileBytes];  // then dq and dk on their way out
  alignas(1024) uint8_t t[kSquareTileBytes];
  alignas(16) Decays decays;  // then db
  OutVectors vectors[2];
  float rq[kChunk], rk[kChunk];
  float dead_dots[8][kChunk], q_dots[8][kChunk], k_dots[8][kChunk];  // by warp; the latter q^ . dq^ and k^ . dk^
  float q_dot[kChunk], k_dot[kChunk];
  float a_log[2][8];
  alignas(8) uint64_t kg_full[2], pairs_full[2], pairs_empty[2];  // Kg and t; dA, dL and vectors
  uint64_t s_full, s_empty, r_full, r_empty, t_empty;
  uint64_t v_full, v_empty;
  uint64_t grads_full, grads_empty;  // grad, y, beta
  uint64_t decays_full[8], db_full[8];  // between a warp of the channels and its warp of the gates
  uint64_t rows_full, rows_empty;  // q, k, rq, rk
  uint64_t a_log_full[2];
  uint64_t delta_full;  // D
};
static_assert(sizeof(OutShared) <= 232448, "an SM gives a CTA 227 KB");

// ---- gates ---------------------------------------------------------------------------------------------------------

// An octet's raw gate from memory and its gradient to memory, at element `p`, the thread's first token and channel: index
// 2 h + e; `rows` from that token on exist. The lanes of two neighbouring channels share bf16 words, one for each token.
__device__ __forceinline__ void load_raw(float (&raw)[4], const OutArgs& args, int64_t p, int rows, const Strip& me) {
  const int64_t stride = args.g.token_stride;
  if (!args.g_bf16) {
    const float* g = static_cast<const float*>(args.g.data) + p;
#pragma unroll
    for (int c = 0; c < 4; ++c) raw[c] = (c & 1) < rows ? g[(c & 1) * stride + 8 * (c >> 1)] : 0.f;
    return;
  }
  const int odd = me.lane >> 2 & 1;
  const __nv_bfloat16* g = static_cast<const __nv_bfloat16*>(args.g.data) + p + odd * (stride - 1);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint32_t mine = odd < rows ? *reinterpret_cast<const uint32_t*>(g + 8 * h) : 0u;
    const uint32_t other = __shfl_xor_sync(0xffffffffu, mine, 4);
    raw[2 * h] = odd ? bf16_hi(other) : bf16_lo(mine);
    raw[2 * h + 1] = odd ? bf16_hi(mine) : bf16_lo(other);
  }
}

__device__ __forceinline__ void store_raw(const float (&d)[4], const OutArgs& args, int64_t p, int rows,
                                          const Strip& me) {
  const int64_t stride = int64_t(args.heads) * args.group * kHeadDim;
  if (!args.g_bf16) {
    float* g = static_cast<float*>(args.dg) + p;
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if ((c & 1) < rows) g[(c & 1) * stride + 8 * (c >> 1)] = d[c];
    return;
  }
  const int odd = me.lane >> 2 & 1;
  __nv_bfloat16* g = static_cast<__nv_bfloat16*>(args.dg) + p + odd * (stride - 1);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float other = __shfl_xor_sync(0xffffffffu, odd ? d[2 * h] : d[2 * h + 1], 4);
    const uint32_t pair = odd ? pack_bf16(other, d[2 * h + 1]) : pack_bf16(d[2 * h], other);
    if (odd < rows) *reinterpret_cast<uint32_t*>(g + 8 * h) = pair;
  }
}

// What this CTA does at a step: v head j of pair `work`, if there is one.
struct Item {
  int work, j;
  __device__ __forceinline__ Item(const OutArgs& args, int step)
      : work(blockIdx.x + step / args.group * gridDim.x), j(step % args.group) {}
};

// A v head of a chunk, as a thread of the gates sees it.
struct GateHead {
  Gate gate;
  float bias[2];
  int rows;
  int64_t place, out;  // in g and in dg, at the thread's first token and channel

  __device__ __forceinline__ GateHead(const OutArgs& args, const Item& item, const Strip& me)
      : gate(args.gate, item.work % args.heads * args.group + item.j) {
    const Chunk chunk = args.plan.chunk(item.work / args.heads);
    const int v_head = item.work % args.heads * args.group + item.j;
    rows = chunk.rows;
    place = args.g_index(chunk.token, v_head) + me.token(0) * args.g.token_stride + me.channel(0);
    out = ((int64_t(chunk.token) + me.token(0)) * args.heads * args.group + v_head) * kHeadDim + me.channel(0);
#pragma unroll
    for (int h = 0; h < 2; ++h) bias[h] = args.gate.bias_of(v_head, me.channel(h));
  }
};

// The summed decays of a v head, in the places of the warp's channels.
template <GateKind kKind>
__device__ __forceinline__ void sum_decays(OutShared& s, const OutArgs& args, const GateHead& head, const Strip& me) {
  const Gate gate = head.gate.of_kind<kKind>();
  int64_t place = head.place;
  int rows = head.rows - me.token(0);
  float before[2] = {0.f, 0.f}, next[4];
  load_raw(next, args, place, rows, me);
#pragma unroll 1
  for (int o = 0; o < kOctets; ++o, rows -= 8) {
    float b[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) b[c] = next[c];
    place += 8 * args.g.token_stride;
    if (o + 1 < kOctets) load_raw(next, args, place, rows - 8, me);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      b[c] = log2_decay(b[c], head.bias[c >> 1], gate);
      if ((c & 1) >= rows) b[c] = 0.f;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = b[2 * h] + b[2 * h + 1];
#pragma unroll
      for (int d = 1; d < 4; d <<= 1) {
        const float up = __shfl_up_sync(0xffffffffu, sum, d, 4);
        if (me.t >= d) sum += up;
      }
      const float lower = __shfl_up_sync(0xffffffffu, sum, 1, 4);
      b[2 * h] = before[h] + ((me.t > 0 ? lower : 0.f) + b[2 * h]);
      b[2 * h + 1] = before[h] + sum;
      before[h] += __shfl_sync(0xffffffffu, sum, 3, 4);
    }
    s.decays[o][me.thread] = make_float4(b[0], b[1], b[2], b[3]);
  }
}

// What dt_bias of the thread's two channels and A_log get.
struct GateSums {
  float bias[2] = {0.f, 0.f}, a_log = 0.f;
};

// dg from db, which lies in the decays' place: the gradient of the log decays is the sum from each token to the chunk's end,
// then comes the gate's backward.
template <GateKind kKind>
__device__ __forceinline__ void gate_rows(GateSums& sums, const OutShared& s, const OutArgs& args, const GateHead& head,
                                          const Strip& me) {
  const Gate gate = head.gate.of_kind<kKind>();
  const int64_t out_stride = int64_t(args.heads) * args.group * kHeadDim;
  int64_t place = head.place + 8 * (kOctets - 1) * args.g.token_stride, out = head.out + 8 * (kOctets - 1) * out_stride;
  int rows = head.rows - me.token(kOctets - 1);
  float after[2] = {0.f, 0.f};
#pragma unroll 1
  for (int o = kOctets - 1; o >= 0; --o, out -= 8 * out_stride, rows += 8) {
    float x[4];
    if (kKind != GateKind::kNone) load_raw(x, args, place, rows, me);
    place -= 8 * args.g.token_stride;
    const float4 slot = s.decays[o][me.thread];
    float d[4] = {slot.x, slot.y, slot.z, slot.w};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float later = d[2 * h] + d[2 * h + 1];
#pragma unroll
      for (int n = 1; n < 4; n <<= 1) {
        const float down = __shfl_down_sync(0xffffffffu, later, n, 4);
        if (me.t + n < 4) later += down;
      }
      const float higher = __shfl_down_sync(0xffffffffu, later, 1, 4);
      d[2 * h + 1] = after[h] + ((me.t < 3 ? higher : 0.f) + d[2 * h + 1]);
      d[2 * h] = after[h] + later;
      after[h] += __shfl_sync(0xffffffffu, later, 0, 4);
    }
    if (kKind != GateKind::kNone) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const GateGradient grad = gate_backward(x[c], head.bias[c >> 1], (c & 1) < rows ? d[c] : 0.f, gate);
        d[c] = grad.raw;
        sums.bias[c >> 1] += grad.raw, sums.a_log += grad.a_log;
      }
    }
    store_raw(d, args, out, rows, me);
  }
}

// The decays of a step, for a warp of the channels.
__device__ __forceinline__ void make_decays(OutShared& s, const OutArgs& args, int step, const Strip& me) {
  const GateHead head(args, Item(args, step), me);
  switch (head.gate.kind) {
    case GateKind::kNone: sum_decays<GateKind::kNone>(s, args, head, me); break;
    case GateKind::kStandard: sum_decays<GateKind::kStandard>(s, args, head, me); break;
    default: sum_decays<GateKind::kBounded>(s, args, head, me);
  }
  warp_arrive(s.decays_full[me.thread >> 5], me.lane);
}

// dg of a step.
__device__ __forceinline__ void finish_gates(OutShared& s, const OutArgs& args, int step, const Strip& me) {
  const int warp = me.thread >> 5;
  const uint32_t parity = step & 1;
  const GateHead head(args, Item(args, step), me);
  GateSums sums;
  mbar_wait(smem_addr(&s.db_full[warp]), parity);
  switch (head.gate.kind) {
    case GateKind::kNone: gate_rows<GateKind::kNone>(sums, s, args, head, me); break;
    case GateKind::kStandard: gate_rows<GateKind::kStandard>(sums, s, args, head, me); break;
    default: gate_rows<GateKind::kBounded>(sums, s, args, head, me);
  }
  if (args.partials == nullptr) return;
  const Item item(args, step);
  float* row =
      args.partials +
      ((int64_t(item.work / args.heads) * args.heads + item.work % args.heads) * args.group + item.j) * kPartial;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = row_sum(sums.bias[h]);
    if (me.t == 0) row[1 + me.channel(h)] = sum;
  }
#pragma unroll
  for (int d = 16; d >= 1; d >>= 1) sums.a_log += __shfl_xor_sync(0xffffffffu, sums.a_log, d);
  if (me.lane == 0) s.a_log[parity][warp] = sums.a_log;
  warp_arrive(s.a_log_full[parity], me.lane);
  // The producer's last warp puts the shares of all together.
  if (warp == 7) {
    mbar_wait(smem_addr(&s.a_log_full[parity]), (step >> 1) & 1);
    float sum = me.lane < 8 ? s.a_log[parity][me.lane] : 0.f;
#pragma unroll
    for (int d = 4; d >= 1; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (me.lane == 0) row[0] = sum;
  }
}

// ---- producer --------------------------------------------------------------------------------------------------

// A token tile from rows of 128 bf16; zeros past the end. A loop, and no more, for the sake of the kernel's size.
__device__ __forceinline__ void load_tile(uint32_t tile, const __nv_bfloat16* src, int64_t row_stride, int rows,
                                          int thread) {
  int row = thread / 16;
  tile += group_offset<kChunk>(row, thread % 16);
  src += row * row_stride + thread % 16 * 8;
#pragma unroll 2
  for (int i = 0; i < 8; ++i, row += 8, tile += 8 * kPanelRowBytes, src += 8 * row_stride)
    cp_async_16(tile, src, row < rows);
}

// A chunk's first row in a view.
template <typename T>
__device__ __forceinline__ T* first_row(const View<T>& x, int batch, int token, int head) {
  return x.data + batch * x.batch_stride + token * x.token_stride + head * x.head_stride;
}

// dv = beta Y.
__device__ __forceinline__ void value_gradient(uint32_t y, const float* beta, __nv_bfloat16* dv, int row_stride,
                                               int rows, int thread) {
  int row = thread / 16;
  y += group_offset<kChunk>(row, thread % 16);
  dv += int64_t(row) * row_stride + thread % 16 * 8;
#pragma unroll 2
  for (int i = 0; i < 8; ++i, row += 8, y += 8 * kPanelRowBytes, dv += 8 * row_stride) {
    if (row >= rows) continue;
    const uint4 x = ld_shared_16(y);
    const float scale = beta[row];
    *reinterpret_cast<uint4*>(dv) = make_uint4(
        pack_bf16(scale * bf16_lo(x.x), scale * bf16_hi(x.x)), pack_bf16(scale * bf16_lo(x.y), scale * bf16_hi(x.y)),
        pack_bf16(scale * bf16_lo(x.z), scale * bf16_hi(x.z)), pack_bf16(scale * bf16_lo(x.w), scale * bf16_hi(x.w)));
  }
}

// What may only be loaded when the step in work is done lies in L2 by then: g, and q and k with a pair's first v head.
__device__ __forceinline__ void prefetch_rows(const OutArgs& args, const Item& item, int thread) {
  const Chunk chunk = args.plan.chunk(item.work / args.heads);
  const int head = item.work % args.heads, row = thread / 2, half = thread % 2 * (kHeadDim / 2);
  if (row >= chunk.rows) return;
  const int batch = chunk.token / args.plan.tokens_per_batch;
  const int token = chunk.token - batch * args.plan.tokens_per_batch + row;
  if (item.j == 0) {
    prefetch_l2(first_row(args.q, batch, token, head) + half);
    prefetch_l2(first_row(args.k, batch, token, head) + half);
  }
  const uint8_t* g = static_cast<const uint8_t*>(args.g.data);
  g += (args.g_index(chunk.token + row, head * args.group + item.j) + half) * (args.g_bf16 ? 2 : 4);
  prefetch_l2(g);
  if (!args.g_bf16) prefetch_l2(g + 128);
}

__device__ __forceinline__ void out_produce(OutShared& s, const OutArgs& args, int producer_thread) {
  const int v_heads = args.heads * args.group;
  const int works = args.plan.chunk_count() * args.heads;
  for (int step = 0;; ++step) {
    const uint32_t parity = step & 1;
    const auto [work, j] = Item(args, fresh(step));
    int thread = fresh(producer_thread);
    const int lane = thread & 31;
    if (work < works) {
      const Chunk chunk = args.plan.chunk(work / args.heads);
      const int s_slot = state_slot(args.plan.sequence(chunk.sequence), chunk.index, args.states_edge);
      const int head = work % args.heads, rows = chunk.rows;
      const int batch = chunk.token / args.plan.tokens_per_batch,
                token = chunk.token - batch * args.plan.tokens_per_batch;
      const int v_head = head * args.group + j, set = step & 1;
      const uint32_t set_parity = (step >> 1) & 1;
      const int64_t first = (int64_t(chunk.token) * v_heads + v_head) * kHeadDim;  // of y and dv
      OutVectors& vectors = s.vectors[set];
      float beta = 0.f;
      if (thread < rows) beta = args.beta.at(chunk.token + thread, args.plan.tokens_per_batch, v_head);
      // In the order in which the previous v heads let go of them.
      mbar_wait(smem_addr(&s.pairs_empty[set]), set_parity ^ 1);
      mbar_wait(smem_addr(&s.t_empty), parity ^ 1);
      if (thread == 0) {
        const int64_t image = int64_t(work / args.heads) * v_heads + v_head;
        const uint32_t bar = smem_addr(&s.kg_full[set]);
        mbar_arrive_expect_tx(bar, kTokenTileBytes + kSquareTileBytes);
        bulk_load(smem_addr(s.pairs[set].da), args.kg + image * kChunk * kHeadDim, kTokenTileBytes, bar);
        bulk_load(smem_addr(s.t), args.t + image * kChunk * kChunk, kSquareTileBytes, bar);
      }
      mbar_wait(smem_addr(&s.s_empty), parity ^ 1);
      load_state(smem_addr(s.s), s.s_full, args.states, s_slot, v_heads, v_head, thread);
      mbar_wait(smem_addr(&s.v_empty), parity ^ 1);
      load_tile(smem_addr(s.v), first_row(args.v, batch, token, v_head), args.v.token_stride, rows, thread);
      cp_async_commit();
      mbar_wait(smem_addr(&s.grads_empty), parity ^ 1);
      load_tile(smem_addr(s.y), args.y + first, v_heads * kHeadDim, rows, thread);
      load_tile(smem_addr(s.grad), first_row(args.grad, batch, token, v_head), args.grad.token_stride, rows, thread);
      cp_async_commit();
      if (thread < kChunk) {
        vectors.beta[thread] = beta;
        const uint32_t dead = __ballot_sync(0xffffffffu, thread < rows && fabsf(beta) < kLeastBeta);
        if (lane == 0) vectors.dead[thread >> 5] = dead;
      }
      mbar_wait(smem_addr(&s.r_empty), parity ^ 1);
      {
        const Chunk again = args.plan.chunk(Item(args, fresh(step)).work / args.heads);
        const int r_slot =
            adjoint_slot(args.plan.sequence(again.sequence), again.index, again.last, args.adjoints_edge);
        load_state(smem_addr(s.r), s.r_full, args.adjoints, r_slot, v_heads, v_head, thread);
      }
      cp_async_wait<1>();
      fence_proxy_async();
      mbar_arrive(smem_addr(&s.v_full));
      cp_async_wait<0>();
      fence_proxy_async();
      mbar_arrive(smem_addr(&s.grads_full));

      prefetch_rows(args, Item(args, fresh(step)), thread);
      mbar_wait(smem_addr(&s.grads_full), parity);
      value_gradient(smem_addr(s.y), vectors.beta, args.dv + first, v_heads * kHeadDim, rows, thread);
      warp_arrive(s.grads_empty, lane);
    }
    if (step > 0) finish_gates(s, args, step - 1, Strip(128 + fresh(producer_thread)));
    if (Item(args, fresh(step)).work >= works) break;
    thread = fresh(producer_thread);
    {
      const auto [work, j] = Item(args, fresh(step));
      const Chunk chunk = args.plan.chunk(work / args.heads);
      const int head = work % args.heads, i = thread % kChunk;
      float norm = 0.f;
      if (i < chunk.rows)
        norm = (thread < kChunk ? args.rq : args.rk)[head * int64_t(args.plan.total) + chunk.token + i];
      mbar_wait(smem_addr(&s.rows_empty), parity ^ 1);
      if (j == 0) {
        const int batch = chunk.token / args.plan.tokens_per_batch;
        const int token = chunk.token - batch * args.plan.tokens_per_batch;
        load_tile(smem_addr(s.q), first_row(args.q, batch, token, head), args.q.token_stride, chunk.rows, thread);
        load_tile(smem_addr(s.k), first_row(args.k, batch, token, head), args.k.token_stride, chunk.rows, thread);
      }
      (thread < kChunk ? s.rq : s.rk)[i] = norm;
      cp_async_commit();
    }
    make_decays(s, args, step, Strip(128 + fresh(producer_thread)));
    cp_async_wait<0>();
    mbar_arrive(smem_addr(&s.rows_full));
  }
}

// ---- delta: D, and the gradients of the chunk's two matrices of pairs ------------------------------------------------

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
  const int works = args.plan.chunk_count() * args.heads, v_heads = args.heads * args.group;
  const uint32_t delta = smem_addr(s.v);
  constexpr int kPanel = kChunk * kPanelRowBytes;
  for (int step = 0;; ++step) {
    const auto [work, j] = Item(args, fresh(step));
    if (work < works) {
      const Chunk chunk = args.plan.chunk(work / args.heads);
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
        if ((me.lane & 3) == 0 && row < chunk.rows && !dead[h])
          args.dbeta[int64_t(chunk.token + row) * v_heads + work % args.heads * args.group + j] = dot[h] / beta[h];
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
    if (step > 0) finish_gates(s, args, step - 1, Strip(fresh(thread)));
    if (Item(args, fresh(step)).work >= works) break;
    make_decays(s, args, step, Strip(fresh(thread)));
  }
}

// ---- channels ------------------------------------------------------------------------------------------------------

// dO S: the state's part of dq^, and the start of db.
__device__ __forceinline__ void read_part(Sums& sums, const float (&acc)[32], const Tree& tree, float scale,
                                          const Strip& me) {
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    __syncwarp();
    uint32_t q[4];
    load_block(q, tree.q, block, me);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      float b[4];
      load_decays(b, tree, 2 * block + p, me);
      const float2 rq = pair_at(tree.rq, me.token(2 * block + p));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = 4 * (2 * block + p) + 2 * h;
        const uint32_t x = q[2 * p + h];
        const float grow[2] = {ex2(b[2 * h]), ex2(b[2 * h + 1])};
        const uint32_t qg = pack_bf16(scale * rq.x * bf16_lo(x) * grow[0], scale * rq.y * bf16_hi(x) * grow[1]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          sums.q[i + e] = fmaf(scale * grow[e], acc[i + e], sums.q[i + e]);
          sums.b[i + e] = half_of(qg, e) * acc[i + e];
        }
      }
    }
  }
}

// Y S: what the state gives to k^ in its query role.
__device__ __forceinline__ void erase_part(Sums& sums, const float (&acc)[32], const Tree& tree, const float* beta,
                                           const Strip& me) {
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
      const float2 rk = pair_at(tree.rk, me.token(octet)), weight = pair_at(beta, me.token(octet));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t x = k[2 * p + h];
        const float grow[2] = {ex2(b[2 * h]), ex2(b[2 * h + 1])};
        const uint32_t kg = pack_bf16(bf16_lo(x) * rk.x * grow[0], bf16_hi(x) * rk.y * grow[1]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = 4 * octet + 2 * h + e;
          const float erased = -part_of(weight, e) * acc[i];
          sums.k[i] = fmaf(grow[e], erased, sums.k[i]);
          sums.b[i] = fmaf(half_of(kg, e), erased, sums.b[i]);
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

// dx = r (dx^ - x^ dot), or dx^ where the rows weren't normalised: over the warp's channels of the tile, and on to memory.
__device__ __forceinline__ void store_channels(uint32_t tile, const float (&acc)[32], const float* norm,
                                               const float* dot, bool l2norm, __nv_bfloat16* out, int row_stride,
                                               int rows, const Strip& me) {
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    uint32_t x[4];
    load_block(x, tile, block, me);
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      const int i = 8 * block + 2 * w, token = me.token(2 * block + (w >> 1));
      float d[2] = {acc[i], acc[i + 1]};
      if (l2norm) {
        const float2 r = pair_at(norm, token), t = pair_at(dot, token);
        d[0] = r.x * (d[0] - r.x * bf16_lo(x[w]) * t.x), d[1] = r.y * (d[1] - r.y * bf16_hi(x[w]) * t.y);
      }
      x[w] = pack_bf16(d[0], d[1]);
    }
    stmatrix_trans(frag_address_trans<kChunk>(tile, me.channel0, block, me.lane), x);
  }
  __syncwarp();
  const int row = me.lane >> 1, group = me.channel0 / 8 + (me.lane & 1);
  out += int64_t(row) * row_stride + group * 8;
  tile += group_offset<kChunk>(row, group);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint4 x = ld_shared_16(tile + 16 * i * kPanelRowBytes);
    if (row + 16 * i < rows) *reinterpret_cast<uint4*>(out + int64_t(16 * i) * row_stride) = x;
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
#pragma unroll
    for (int d = 16; d >= 1; d >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (me.lane == 0) s.dead_dots[me.thread >> 5][i] = sum;
  }
}

// dbeta of dead rows, the totals of q^ . dq^ and k^ . dk^, from what the warps left.
__device__ __forceinline__ void finish_sums(OutShared& s, const OutArgs& args, const OutVectors& vectors,
                                            const Chunk& chunk, int chunk_index, int v_head, int thread) {
  const int v_heads = args.heads * args.group, token = thread % kChunk, what = thread / kChunk;
  if (what < 3) {
    if (what == 0 && !(vectors.dead[token >> 5] >> (token & 31) & 1)) return;
    const float (*parts)[kChunk] = what == 0 ? s.dead_dots : what == 1 ? s.q_dots : s.k_dots;
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < 8; ++w) sum += parts[w][token];
    if (what == 1) s.q_dot[token] = sum;
    else if (what == 2) s.k_dot[token] = sum;
    else args.dbeta[int64_t(chunk.token + token) * v_heads + v_head] = vectors.residual[token] + sum;
  }
}

__device__ __forceinline__ void out_channels(OutShared& s, const OutArgs& args, int thread) {
  const int works = args.plan.chunk_count() * args.heads;
  int step = 0;
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
      // All waits come first: what follows is one basic block, whose sums the compiler won't leave half made for later.
      mbar_wait(smem_addr(&s.s_full), parity);
      mbar_wait(smem_addr(&s.grads_full), parity);
      mbar_wait(smem_addr(&s.r_full), parity);
      mbar_wait(smem_addr(&s.delta_full), parity);
      mbar_wait(smem_addr(&s.pairs_full[set]), set_parity);
      mbar_wait(smem_addr(&s.rows_full), parity);
      mbar_wait(smem_addr(&s.decays_full[thread >> 5]), parity);
      float edge[2];
      {
        const uint32_t panel = (me.channel0 >> 6) * (kHeadDim * kPanelRowBytes);  // the warpgroup's channels in S and R
        float acc[32];
        wgmma_fence();
        gemm_ss<Major::MN, kHeadDim, Major::K, kChunk, 8>(acc, smem_addr(s.s) + panel, smem_addr(s.grad), false);
        wgmma_commit();
        wgmma_wait<0>();
        pin(acc);
        me = Strip(fresh(thread));
        read_part(sums, acc, tree, args.scale, me);
        wgmma_fence();
        gemm_ss<Major::MN, kHeadDim, Major::K, kChunk, 8>(acc, smem_addr(s.s) + panel, smem_addr(s.y), false);
        wgmma_commit();
        wgmma_wait<0>();
        pin(acc);
        warp_arrive(s.grads_empty, me.lane);
        me = Strip(fresh(thread));
        erase_part(sums, acc, tree, vectors.beta, me);
        float dots[2];
        state_dots(dots, smem_addr(s.s), smem_addr(s.r), me);
        warp_arrive(s.s_empty, me.lane);
        wgmma_fence();
        gemm_ss<Major::MN, kHeadDim, Major::K, kChunk, 8>(acc, smem_addr(s.r) + panel, smem_addr(s.v), false);
        wgmma_commit();
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
      if (vectors.dead[0] | vectors.dead[1]) dead_rows(s, vectors, tree, me);
      fence_proxy_async();
      warp_arrive(s.pairs_empty[set], me.lane);

      me = Strip(fresh(thread));
      const int warp = me.thread >> 5, chunk_index = fresh(work) / args.heads, head = fresh(work) % args.heads;
      const int v_head = head * args.group + j;
      const bool last = j + 1 == args.group;
      const Chunk chunk = args.plan.chunk(chunk_index);
      // What every token's decay gets is the last token's own, over which all of them sum.
      if (me.t == 3) sums.b[4 * kOctets - 3] += edge[0], sums.b[4 * kOctets - 1] += edge[1];
      __syncwarp();
#pragma unroll
      for (int o = 0; o < kOctets; ++o)
        s.decays[o][me.thread] = make_float4(sums.b[4 * o], sums.b[4 * o + 1], sums.b[4 * o + 2], sums.b[4 * o + 3]);
      warp_arrive(s.db_full[warp], me.lane);
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
      finish_sums(s, args, vectors, chunk, chunk_index, v_head, me.thread);
      if (last) {
        bar_sync(kChannelBarrier, 256);
        me = Strip(fresh(thread));
        const int64_t row = (int64_t(chunk.token) * args.heads + head) * kHeadDim;
#pragma unroll 1
        for (int i = 0; i < 2; ++i) {
          float x[32];
#pragma unroll
          for (int n = 0; n < 32; ++n) x[n] = i ? sums.k[n] : sums.q[n];
          store_channels(smem_addr(i ? s.k : s.q), x, i ? s.rk : s.rq, i ? s.k_dot : s.q_dot, args.l2norm,
                         (i ? args.dk : args.dq) + row, args.heads * kHeadDim, chunk.rows, me);
        }
      }
      warp_arrive(s.rows_empty, me.lane);
    }
  }
}

static __global__ void __launch_bounds__(kOutThreads, 1) out_kernel(const __grid_constant__ OutArgs args) {
  extern __shared__ __align__(1024) uint8_t raw[];
  OutShared& s = *reinterpret_cast<OutShared*>(raw);
  if (threadIdx.x == 0) {
    for (int i = 0; i < 2; ++i) {
      mbar_init(smem_addr(&s.kg_full[i]), 1);
      mbar_init(smem_addr(&s.pairs_full[i]), 128);
      mbar_init(smem_addr(&s.pairs_empty[i]), 8 * kWarpArrivals);
      mbar_init(smem_addr(&s.a_log_full[i]), 8 * kWarpArrivals);
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
    for (int i = 0; i < 8; ++i) {
      mbar_init(smem_addr(&s.decays_full[i]), kWarpArrivals);
      mbar_init(smem_addr(&s.db_full[i]), kWarpArrivals);
    }
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
      out_channels(s, args, threadIdx.x);
      break;
    case 2:
      registers_shrink<kDeltaRegisters>();
      out_delta(s, args, thread);
      break;
    default: registers_shrink<kProducerRegisters>(); out_produce(s, args, thread);
  }
}

}  // namespace cake::kda
