// What the serial walks share: which sequence and head a CTA walks, the state that its warps hold, and the state's traffic.
//
// A CTA walks one (sequence, v head), or a segment of one where a call is cut. Two warpgroups hold the transposed state, S^T
// (or R^T) with 64 rows of V each, as fp32 accumulators and never meet. A state warp owns 16 channels of V: it alone reads
// them from the tile x of a stage (v forward, dO backward), so it leaves its output there without a barrier.
#pragma once

#include "frag.cuh"
#include "seq.cuh"

namespace cake {

struct Walk {
  Sequence sequence;
  int index, chunks, v_head, head;
  int first = 0;  // chunks before the walk's own, of a pre-scan that begins late

  // Chunk visited at step i, with `forward` order or its mirror.
  __device__ __forceinline__ int chunk(int i, bool forward) const { return first + (forward ? i : chunks - 1 - i); }
  __device__ __forceinline__ int token(int chunk) const { return sequence.token + chunk * kChunk; }
  __device__ __forceinline__ int rows(int chunk) const { return min(sequence.length - chunk * kChunk, kChunk); }
};

__device__ __forceinline__ Walk walk_of(const Plan& plan, int v_heads, int group, int block) {
  Walk w;
  w.index = plan.order()[block / v_heads];
  w.sequence = plan.sequence(w.index);
  w.chunks = (w.sequence.length + kChunk - 1) / kChunk;
  w.v_head = block % v_heads;
  w.head = w.v_head / group;
  return w;
}

// Whether a segment is one of those that a cut on the device had room for and no need of: then there is nothing to do.
__device__ __forceinline__ bool unneeded(const Walk& walk, const Segment& segment) {
  return walk.sequence.length == 0 && segment.opens;
}

// Where a walk's first state comes from and where its last one goes, fp32 [K, V]; null: zero, and nowhere.
struct Edges {
  const float* in;
  float* out;
};

// `own_in`, `own_out`: [N, HV, K, V], the sequences' own states (initial and final ones, or their gradients). `inner`: null,
// or of a call that is cut the states where its segments meet, [segments, HV, K, V].
template <bool kForward>
__device__ __forceinline__ Edges edges_of(const Plan& plan, const Walk& walk, int v_heads, const float* own_in,
                                          const float* inner, float* own_out) {
  constexpr int kState = kHeadDim * kHeadDim;
  const int64_t row = int64_t(walk.index) * v_heads + walk.v_head;
  if (!inner) return {own_in ? own_in + row * kState : nullptr, own_out ? own_out + row * kState : nullptr};
  const Segment segment = plan.segment(walk.index);
  const int64_t own = int64_t(segment.sequence) * v_heads + walk.v_head;
  const bool enters = kForward ? segment.opens : segment.followed, leaves = kForward ? segment.followed : segment.opens;
  return {enters   ? inner + row * kState
          : own_in ? own_in + own * kState
                   : nullptr,
          own_out && !leaves ? own_out + own * kState : nullptr};
}

// The same of a pre-scan: it starts from a state of its sequence's own or from zero, and leaves what it finds in row
// `walk.index` of `out`, [segments, HV, K, V]. A walk of a part of the segment starts from zero.
template <bool kForward>
__device__ __forceinline__ Edges transfer_edges(const Plan& plan, const Walk& walk, int v_heads, const float* own_in,
                                                float* out) {
  constexpr int kState = kHeadDim * kHeadDim;
  const Segment segment = plan.segment(walk.index);
  const bool enters = kForward ? segment.opens : segment.followed;
  const bool whole = walk.chunks * kChunk >= walk.sequence.length;
  const int64_t own = int64_t(segment.sequence) * v_heads + walk.v_head;
  return {own_in && whole && !enters ? own_in + own * kState : nullptr,
          out + (int64_t(walk.index) * v_heads + walk.v_head) * kState};
}

// Of a walk with such arguments or, `kTransfer`, of its pre-scan.
template <bool kForward, bool kTransfer, typename Args>
__device__ __forceinline__ Edges edges_of(const Args& args, const Walk& walk) {
  return kTransfer ? transfer_edges<kForward>(args.plan, walk, args.v_heads, args.edge_in, args.edge_out)
                   : edges_of<kForward>(args.plan, walk, args.v_heads, args.edge_in, args.inner, args.edge_out);
}

// Sends the output that the state warps left in a stage's x to memory, rows of kGroups * 8 bf16. kThreads threads, as in
// load_rows; each moves the 16-byte groups that it loads.
template <int kGroups, int kThreads, int kUnroll = kChunk * kGroups / (2 * kThreads), typename Stride>
__device__ __forceinline__ void store_output(uint32_t x, __nv_bfloat16* out, Stride row_stride, int rows, int thread) {
  constexpr int kRowsAtOnce = kThreads / kGroups;
  static_assert(kRowsAtOnce % 4 == 0, "a thread must keep its place in the swizzle, or swap between two");
  int row = thread / kGroups;
  const int group = thread % kGroups;
  out += int64_t(row) * row_stride + group * 8;
  x += group_offset<kChunk>(row, group);
#pragma unroll kUnroll
  for (int i = 0; i < kChunk / kRowsAtOnce; i += 2) {
    const uint32_t y = (kRowsAtOnce % 8 != 0 ? x ^ (4 << 4) : x) + kRowsAtOnce * kPanelRowBytes;
    const uint4 a = ld_shared_16(x), b = ld_shared_16(y);
    if (row < rows) st_global_16(out, a);
    if (row + kRowsAtOnce < rows) st_global_16(out + kRowsAtOnce * row_stride, b);
    row += 2 * kRowsAtOnce, out += 2 * kRowsAtOnce * row_stride, x += 2 * kRowsAtOnce * kPanelRowBytes;
  }
}

// ---- the state of a state warpgroup: S^T[64 V rows][128 K], an accumulator ---------------------------------------

// From or to fp32 [K, V] of one sequence and head. `row0`: the warp's first V row.
__device__ __forceinline__ void load_edge(float (&state)[64], const float* edge, int row0, int lane) {
#pragma unroll
  for (int i = 0; i < 64; ++i)
    state[i] = edge ? edge[acc_column(i, lane) * kHeadDim + row0 + (lane >> 2) + 8 * ((i >> 1) & 1)] : 0.f;
}

__device__ __forceinline__ void store_edge(float* edge, const float (&state)[64], int row0, int lane) {
#pragma unroll
  for (int i = 0; i < 64; ++i)
    edge[acc_column(i, lane) * kHeadDim + row0 + (lane >> 2) + 8 * ((i >> 1) & 1)] = state[i];
}

// Sends the bf16 state to the tape: 16 rows of this warp through its own part of a staging tile of kRows rows. `row0`: the
// warp's first row of that tile, which holds rows `first` and on of the image.
template <int kRows = kHeadDim>
__device__ __forceinline__ void store_state(uint32_t staging, __nv_bfloat16* image, const uint32_t (&f)[8][4], int row0,
                                            int lane, int first = 0) {
  if (lane == 0) bulk_wait_read();  // the previous chunk's copy has left the staging tile
  __syncwarp();
#pragma unroll
  for (int s = 0; s < 8; ++s) stmatrix(frag_address<kRows>(staging, row0, s, lane), f[s]);
  fence_proxy_async();
  __syncwarp();
  if (lane == 0) {
    uint8_t* rows = reinterpret_cast<uint8_t*>(image) + (first + row0) * kPanelRowBytes;
    staging += row0 * kPanelRowBytes;
#pragma unroll
    for (int panel = 0; panel < 2; ++panel)
      bulk_store(rows + panel * kHeadDim * kPanelRowBytes, staging + panel * kRows * kPanelRowBytes,
                 16 * kPanelRowBytes);
    bulk_commit();
  }
}

// Leaves this warp's 16 channels of a transposed result in the same channels of the tile `x`.
__device__ __forceinline__ void leave_channels(uint32_t x, const uint32_t (&f)[4][4], int channel0, int lane) {
#pragma unroll
  for (int s = 0; s < 4; ++s) stmatrix_trans(frag_address_trans<kChunk>(x, channel0, s, lane), f[s]);
}

}  // namespace cake
