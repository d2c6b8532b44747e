// The producer of kda_out: loads, and makes dv.
#pragma once

#include "kda_out_shared.cuh"

namespace cake::kda {

// Of loops over rows, which are short for the sake of the kernel's size.
constexpr int kRowUnroll = 2;

// A chunk's first row in a view.
template <typename T>
__device__ __forceinline__ int64_t place_of(const View<T>& x, int batch, int token, int head) {
  return batch * x.batch_stride + token * x.token_stride + head * x.head_stride;
}

template <typename T>
__device__ __forceinline__ T* first_row(const View<T>& x, int batch, int token, int head) {
  return x.data + place_of(x, batch, token, head);
}

__device__ __forceinline__ void load_tile(uint32_t tile, const View<const __nv_bfloat16>& x, int batch, int token,
                                          int head, int rows, int thread) {
  load_rows<16, 128, kRowUnroll>(tile, first_row(x, batch, token, head), x.token_stride, rows, thread);
}

// dv = beta Y.
__device__ __forceinline__ void value_gradient(uint32_t y, const float* beta, __nv_bfloat16* dv, int64_t row_stride,
                                               int rows, int thread) {
  int row = thread / 16;
  y += group_offset<kChunk>(row, thread % 16);
  dv += row * row_stride + thread % 16 * 8;
#pragma unroll kRowUnroll
  for (int i = 0; i < 8; ++i, row += 8, y += 8 * kPanelRowBytes, dv += 8 * row_stride) {
    if (row >= rows) continue;
    *reinterpret_cast<uint4*>(dv) = scaled(ld_shared_16(y), beta[row]);
  }
}

__device__ __forceinline__ void out_produce(OutShared& s, const OutArgs& args, int thread) {
  const int v_heads = args.heads * args.group, lane = thread & 31;
  const int works = args.plan.chunk_count() * args.heads;
  int step = 0;
  for (int work = blockIdx.x; work < works; work += gridDim.x) {
    const Chunk chunk = args.plan.chunk(work / args.heads);
    const Sequence sequence = args.plan.sequence(chunk.sequence);
    const int s_slot = state_slot(sequence, chunk.index, args.states_edge);
    const int r_slot = adjoint_slot(sequence, chunk.index, chunk.last, args.adjoints_edge);
    const int head = work % args.heads, rows = chunk.rows;
    const int batch = chunk.token / args.plan.tokens_per_batch,
              token = chunk.token - batch * args.plan.tokens_per_batch;
#pragma unroll 1
    for (int j = 0; j < args.group; ++j, ++step) {
      const int v_head = head * args.group + j, set = step & 1;
      const uint32_t parity = step & 1, set_parity = (step >> 1) & 1;
      const int64_t dv = place_of(args.results[kDv], batch, token, v_head);
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
      load_tile(smem_addr(s.v), args.v, batch, token, v_head, rows, thread);
      cp_async_commit();
      const uint32_t a_log = args.gate.a_log_bits(v_head), bias = args.gate.bias_bits(v_head, thread);
      mbar_wait(smem_addr(&s.grads_empty), parity ^ 1);
      load_rows<16, 128, kRowUnroll>(smem_addr(s.y), args.rows(kDv, dv), args.results[kDv].token_stride, rows, thread);
      load_tile(smem_addr(s.grad), args.grad, batch, token, v_head, rows, thread);
      cp_async_commit();
      if (thread < kChunk) {
        vectors.beta[thread] = beta;
        const uint32_t dead = __ballot_sync(0xffffffffu, thread < rows && fabsf(beta) < kLeastBeta);
        if (lane == 0) vectors.dead[thread >> 5] = dead;
      }
      vectors.bias[thread] = GateArgs::value(bias, args.gate.bias_bf16);
      if (thread == 0) {
        vectors.a_log = GateArgs::value(a_log, args.gate.a_log_bf16), vectors.rows = rows;
        vectors.gates = place_of(args.g, batch, token, v_head);
      }
      if (thread < kOutResults)
        vectors.first[thread] = place_of(args.results[thread], batch, token, thread < kDv ? head : v_head);
      mbar_wait(smem_addr(&s.r_empty), parity ^ 1);
      load_state(smem_addr(s.r), s.r_full, args.adjoints, r_slot, v_heads, v_head, thread);
      cp_async_wait<1>();
      fence_proxy_async();
      mbar_arrive(smem_addr(&s.v_full));
      cp_async_wait<0>();
      fence_proxy_async();
      mbar_arrive(smem_addr(&s.grads_full));

      // What may only be loaded when the v head in work is done lies in L2 by then.
      if (thread / 2 < rows) {
        const int row = thread / 2, half = thread % 2 * (kHeadDim / 2);
        if (j == 0) {
          prefetch_l2(first_row(args.q, batch, token, head) + row * args.q.token_stride + half);
          prefetch_l2(first_row(args.k, batch, token, head) + row * args.k.token_stride + half);
        }
        const int64_t g = batch * args.g.batch_stride + token * args.g.token_stride + v_head * args.g.head_stride;
        const uint8_t* p = static_cast<const uint8_t*>(args.g.data);
        p += (g + row * args.g.token_stride + half) * (args.g_bf16 ? 2 : 4);
        prefetch_l2(p);
        if (!args.g_bf16) prefetch_l2(p + 128);
      }
      mbar_wait(smem_addr(&s.grads_full), parity);
      value_gradient(smem_addr(s.y), vectors.beta, args.rows(kDv, dv), args.results[kDv].token_stride, rows, thread);
      warp_arrive(s.grads_empty, lane);
      float norm = 0.f;
      if (thread % kChunk < rows)
        norm = (thread < kChunk ? args.rq : args.rk)[head * int64_t(args.plan.total) + chunk.token + thread % kChunk];
      mbar_wait(smem_addr(&s.rows_empty), parity ^ 1);
      if (j == 0) {
        load_tile(smem_addr(s.q), args.q, batch, token, head, rows, thread);
        load_tile(smem_addr(s.k), args.k, batch, token, head, rows, thread);
      }
      const int slot = fresh(thread);  // no register for where it lies
      (slot < kChunk ? s.rq : s.rk)[slot % kChunk] = norm;
      cp_async_commit();
      cp_async_wait<0>();
      mbar_arrive(smem_addr(&s.rows_full));
    }
  }
}

}  // namespace cake::kda
