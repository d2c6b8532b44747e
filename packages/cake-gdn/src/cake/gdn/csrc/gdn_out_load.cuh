// Warpgroup 3 of gdn_out: loads, and normalises q and k of the pair to come.
#pragma once

#include "gdn_out_shared.cuh"

namespace cake::gdn {

// Starts the copies of q and k of this CTA's pair number `turn`.
__device__ __forceinline__ void load_pair(OutShared& s, const OutArgs& args, int work, int turn, int thread) {
  const Chunk chunk = args.plan.chunk(work / args.heads);
  const int head = work % args.heads, tokens = args.plan.tokens_per_batch, set = turn & 1;
  const int64_t first = int64_t(head) * args.plan.total + chunk.token;
  OutPairTiles& tiles = s.pairs[set];
  mbar_wait(smem_addr(&s.pair_empty[set]), ((turn >> 1) & 1) ^ 1);
  load_rows<16, 128>(smem_addr(tiles.q), args.q.row(chunk.token, tokens, head), args.q.token_stride, chunk.rows,
                     thread);
  load_rows<16, 128>(smem_addr(tiles.k), args.k.row(chunk.token, tokens, head), args.k.token_stride, chunk.rows,
                     thread);
  cp_async_commit();
  if (thread < kChunk) {
    s.rq[set][thread] = thread < chunk.rows ? args.rq[first + thread] : 0.f;
    s.rk[set][thread] = thread < chunk.rows ? args.rk[first + thread] : 0.f;
  }
  if (thread < kOutResults)
    s.places[set].first[thread] =
        args.results[thread].place(chunk.token, tokens, thread < kDv ? head : head * args.group);
  if (thread == 0) s.places[set].rows = chunk.rows;
}

// Makes q^ and k^ of them, when this thread's copies have landed.
__device__ __forceinline__ void normalise_pair(OutShared& s, const OutArgs& args, int turn, int thread) {
  const int set = turn & 1;
  bar_sync(kProducerBarrier, 128);  // rq and rk
  if (args.l2norm) {
    normalise(smem_addr(s.pairs[set].q), s.rq[set], thread);
    normalise(smem_addr(s.pairs[set].k), s.rk[set], thread);
  }
  fence_proxy_async();
  mbar_arrive(smem_addr(&s.pair_full[set]));
}

__device__ __forceinline__ void out_produce(OutShared& s, const OutArgs& args, int thread) {
  const int tokens = args.plan.tokens_per_batch, v_heads = args.heads * args.group;
  const int64_t total = args.plan.total;
  const int works = args.plan.chunk_count() * args.heads;
  int step = 0, turn = 0;  // v heads and pairs so far
  bool loading_pair = false;
  if (blockIdx.x < works) {
    load_pair(s, args, blockIdx.x, 0, thread);
    cp_async_wait<0>();
    normalise_pair(s, args, 0, thread);
  }
  for (int work = blockIdx.x; work < works; work += gridDim.x, ++turn) {
    const Chunk chunk = args.plan.chunk(work / args.heads);
    const Sequence sequence = args.plan.sequence(chunk.sequence);
    const int token = chunk.token, rows = chunk.rows;
    const int s_slot = state_slot(sequence, chunk.index, args.states_edge);
    const int r_slot = adjoint_slot(sequence, chunk.index, chunk.last, args.adjoints_edge);
    int v_head = work % args.heads * args.group;
    for (int j = 0; j < args.group; ++j, ++step, ++v_head) {
      const uint32_t parity = step & 1;
      OutVectors& vectors = s.vectors[parity];
      // In the order in which the previous v head lets go of them.
      mbar_wait(smem_addr(&s.s_empty), parity ^ 1);
      load_state(smem_addr(s.s), s.s_full, args.states, s_slot, v_heads, v_head, thread);
      float b = 0.f, last = 0.f, beta = 0.f;  // on their way while the copies are started
      if (thread < kChunk) {
        b = args.b[v_head * total + token + min(fresh(thread), rows - 1)];
        last = args.b[v_head * total + token + rows - 1];
        if (thread < rows) beta = args.beta.at(token + thread, tokens, v_head);
      }
      mbar_wait(smem_addr(&s.values_empty), parity ^ 1);
      load_rows<16, 128>(smem_addr(s.v), args.v.row(fresh(token), tokens, v_head), args.v.token_stride, rows,
                         fresh(thread));
      load_rows<8, 128>(smem_addr(s.t), args.t + (v_head * total + token) * kChunk, kChunk, rows, fresh(thread));
      cp_async_commit();
      mbar_wait(smem_addr(&s.grads_empty), parity ^ 1);
      load_rows<16, 128>(smem_addr(s.z), args.rows(kDv, args.results[kDv].place(fresh(token), tokens, v_head)),
                         args.results[kDv].token_stride, rows, fresh(thread));
      load_rows<16, 128>(smem_addr(s.grad), args.grad.row(fresh(token), tokens, v_head), args.grad.token_stride, rows,
                         fresh(thread));
      cp_async_commit();
      mbar_wait(smem_addr(&s.r_empty), parity ^ 1);
      load_state(smem_addr(s.r), s.r_full, args.adjoints, r_slot, v_heads, v_head, thread);
      if (thread < kChunk) {
        const float grown = ex2(b);
        vectors.b[thread] = b, vectors.grown[thread] = grown, vectors.read[thread] = args.scale * grown;
        vectors.rest[thread] = ex2(last - b);
        vectors.beta[thread] = beta;
        if (thread == 0) vectors.decay = ex2(last);
      }
      if (loading_pair && j == 0) {  // a pair since the v head before, which was its pair's only one: this one's
        cp_async_wait<2>();
        normalise_pair(s, args, turn, thread);
      }
      cp_async_wait<1>();
      fence_proxy_async();
      mbar_arrive(smem_addr(&s.values_full));
      cp_async_wait<0>();
      fence_proxy_async();
      mbar_arrive(smem_addr(&s.grads_full));
      if (loading_pair && j > 0) normalise_pair(s, args, turn + 1, thread);
      loading_pair = j == 0 && work + gridDim.x < works;
      if (loading_pair) load_pair(s, args, work + gridDim.x, turn + 1, thread);
    }
  }
}

}  // namespace cake::gdn
