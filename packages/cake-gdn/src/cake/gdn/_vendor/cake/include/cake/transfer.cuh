// Pre-scans of segments, whatever the op. What a segment does to the state is an affine map, S_out = M S_in + B, and a CTA
// walks one of its two parts for one v head: B is the op's walk from a zero state (from the sequence's own where no segment
// comes before), M the same walk of the unit matrix with v = 0. The adjoint R_in = M^T R_out + B is the adjoint walk from zero.
//
// Where a segment's decay is below a threshold, M is taken to be 0, and what comes before the last chunks whose decay reaches
// it can't be seen in B: the walk begins there. An op says how far that is: `reach(faded)` is a number of chunks, counted from
// the segment's end (forward) or start (backward), all of them where `faded` comes back false. Every warp of a call's CTAs must
// find the same.
//
// M is chained over segments, so its operands in registers are sums of two bf16.
#pragma once

#include "walk.cuh"

namespace cake {

struct TransferMaps {
  float* m;  // [segments, HV, K, K]; forward
  int* live;  // [segments, HV]: whether M isn't 0; written forward, read backward
};

// Whether this CTA has a part of a segment's map to walk, and over which chunks: it changes `walk`. CTAs that share a part, of
// `parts`, split what is to be written of an M of 0.
template <typename Reach>
__device__ __forceinline__ bool begin_transfer(const TransferMaps& maps, const Plan& plan, int v_heads, Walk& walk,
                                               bool map, int part, int parts, Reach reach) {
  const Segment segment = plan.segment(walk.index);
  if (!segment.followed || (map && !segment.opens) || unneeded(walk, segment)) return false;
  bool faded;
  const int count = reach(faded);
  const int64_t row = int64_t(walk.index) * v_heads + walk.v_head;
  if (!map) {
    if (part == 0 && threadIdx.x == 0) maps.live[row] = segment.opens && !faded;
    walk.first = walk.chunks - count, walk.chunks = count;
    return true;
  }
  if (!faded) return true;
  float4* m = reinterpret_cast<float4*>(maps.m + row * kHeadDim * kHeadDim);
  for (int i = threadIdx.x + part * blockDim.x; i < kHeadDim * kHeadDim / 4; i += parts * blockDim.x)
    m[i] = make_float4(0.f, 0.f, 0.f, 0.f);
  return false;
}

// The same of the adjoint's B. The forward has decided which maps vanish. A last segment has none: it may begin late by its own
// decay.
template <typename Reach>
__device__ __forceinline__ bool begin_adj_transfer(const TransferMaps& maps, const Plan& plan, int v_heads, Walk& walk,
                                                   Reach reach) {
  const Segment segment = plan.segment(walk.index);
  if (!segment.opens || unneeded(walk, segment)) return false;
  bool faded;
  const int count = reach(faded);
  if (segment.followed) faded = maps.live[int64_t(walk.index) * v_heads + walk.v_head] == 0;
  if (faded) walk.chunks = count;
  return true;
}

// Rows `row0` and on, of a warp, of the unit matrix.
__device__ __forceinline__ void unit_state(float (&state)[64], int row0, int lane) {
#pragma unroll
  for (int i = 0; i < 64; ++i) state[i] = acc_column(i, lane) == row0 + (lane >> 2) + 8 * ((i >> 1) & 1) ? 1.f : 0.f;
}

// One chunk of the walk of M, transposed, with the op's tiles `erased` (what reads the state), `t` and `written`:
//
//   U^T = S^T erased^T      D^T = weigh(U^T) T^T      S^T = decay(S^T) + place(D^T) written
//
// `loaded` waits for the tiles, `helped` for what the functions that change an accumulator in place read.
template <typename Loaded, typename Helped, typename Weigh, typename Decay, typename Place>
__device__ __forceinline__ void map_chunk(float (&state)[64], uint32_t erased, uint32_t t, uint32_t written,
                                          Loaded loaded, Helped helped, Weigh weigh, Decay decay, Place place) {
  float u[32], d[32];
  {
    uint32_t high[8][4], low[8][4];
    to_two_frags(high, low, state);
    loaded();
    pin(high);
    pin(low);
    wgmma_fence();
    gemm_rs<Major::K, kChunk, 8>(u, high, erased, false);
    gemm_rs<Major::K, kChunk, 8>(u, low, erased, true);
    wgmma_commit();
    helped();
    wgmma_wait<0>();
    pin(u);
  }
  uint32_t high[4][4], low[4][4];
  weigh(u);
  to_two_frags(high, low, u);
  pin(high);
  pin(low);
  wgmma_fence();
  gemm_rs<Major::K, kChunk, 4>(d, high, t, false);
  gemm_rs<Major::K, kChunk, 4>(d, low, t, true);
  wgmma_commit();
  wgmma_wait<0>();
  pin(d);

  decay(state);
  place(d);
  to_two_frags(high, low, d);
  pin(high);
  pin(low);
  wgmma_fence();
  gemm_rs<Major::MN, kChunk, 4>(state, high, written, true);
  gemm_rs<Major::MN, kChunk, 4>(state, low, written, true);
  wgmma_commit();
  wgmma_wait<0>();
  pin(state);
}

}  // namespace cake
