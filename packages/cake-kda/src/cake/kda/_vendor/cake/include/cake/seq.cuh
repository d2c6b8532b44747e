// Which tokens a chunk holds: the tables that the plan kernel makes from the boundaries, on the device.
//
// Tokens are numbered through the flattened batch, t = batch * tokens_per_batch + i; sequences are consecutive
// ranges of them, cut into chunks of 64 that restart at each sequence.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "ptx.cuh"

namespace cake {

// Four-dimensional view [batch, token, head, channel] of a tensor whose channels are contiguous; strides in elements.
template <typename T>
struct View {
  T* data;
  int64_t batch_stride, token_stride, head_stride;

  __device__ __forceinline__ int64_t place(int token, int tokens_per_batch, int head) const {
    const int batch = token / tokens_per_batch;
    return batch * batch_stride + (token - batch * tokens_per_batch) * token_stride + head * head_stride;
  }
  __device__ __forceinline__ T* row(int token, int tokens_per_batch, int head) const {
    return data + place(token, tokens_per_batch, head);
  }
  View<void> untyped() const { return {data, batch_stride, token_stride, head_stride}; }
};

// fp32 or bf16 scalars per token and head.
struct Scalars {
  View<const void> view;
  bool is_bf16;

  // A value as it lies in memory, by `place`. Converted where it is used, by `value`: the load is on its way until then.
  __device__ __forceinline__ uint32_t bits(int64_t place) const {
    return is_bf16 ? static_cast<const uint16_t*>(view.data)[place] : static_cast<const uint32_t*>(view.data)[place];
  }
  __device__ __forceinline__ float value(uint32_t bits) const { return __uint_as_float(is_bf16 ? bits << 16 : bits); }
  __device__ __forceinline__ float at(int token, int tokens_per_batch, int head) const {
    return value(bits(view.place(token, tokens_per_batch, head)));
  }
};

// Writes one of the like.
__device__ __forceinline__ void put_scalar(const View<void>& to, bool is_bf16, int64_t place, float x) {
  st_global_float(static_cast<uint8_t*>(to.data) + (place << (is_bf16 ? 1 : 2)), is_bf16, x);
}

struct Chunk {
  int token;     // first token
  int rows;      // 1..64
  int sequence;
  int index;     // within the sequence
  bool last;     // of the sequence
};

struct Sequence {
  int token;       // first token
  int length;
  int chunk_base;  // chunks of the sequences before it
  int slot_base;   // inner chunk boundaries of the sequences before it
};

// Of a call that is cut, what a segment is to its neighbours: which sequence it belongs to, whether the state that enters it
// comes from a segment before it, and whether one follows. Its "sequences" are the segments then.
struct Segment {
  int sequence;
  bool opens, followed;
};

// The plan's tables in one int32 allocation: [4] counts, [n][4] sequences, [chunks][4] chunks, [n] order, and if the call is
// cut [n] segments. Where the cut was made on the device, n is a bound, segments that aren't needed are empty and lie between
// two others, and [sequences + 1][2] runs follow: the first segment and the first chunk of each sequence.
struct Plan {
  int* data;
  int n, chunk_capacity, total, tokens_per_batch;

  static constexpr int kHeader = 4;
  __host__ __device__ static int64_t words(int64_t n, int64_t chunks, bool cut = false) {
    return kHeader + (cut ? 6 : 5) * n + 4 * chunks;
  }
  __host__ __device__ int* runs() const { return data + words(n, chunk_capacity, true); }

  __device__ __forceinline__ int4* sequences() const { return reinterpret_cast<int4*>(data + kHeader); }
  __device__ __forceinline__ int4* chunks() const { return reinterpret_cast<int4*>(data + kHeader) + n; }
  // Sequences by falling length: long ones start first. No value depends on it.
  __device__ __forceinline__ int* order() const { return data + kHeader + 4 * (n + chunk_capacity); }
  __device__ __forceinline__ int* segments() const { return order() + n; }
  __device__ __forceinline__ int chunk_count() const { return __ldg(data); }

  __device__ __forceinline__ Sequence sequence(int i) const {
    const int4 s = __ldg(sequences() + i);
    return {s.x, s.y, s.z, s.w};
  }
  __device__ __forceinline__ Segment segment(int i) const {
    const int s = __ldg(segments() + i);
    return {s >> 2, (s & 2) != 0, (s & 1) != 0};
  }
  __device__ __forceinline__ Chunk chunk(int i) const {
    const int4 c = __ldg(chunks() + i);
    return {c.x, c.y & 0xff, c.z, c.w, (c.y >> 8) != 0};
  }
};

// Where the state that enters a chunk lies on the tape, or -1: with `edge` every chunk has a slot; without, only
// those that follow another (the first one's state is zero). The adjoint state that leaves a chunk mirrors it.
__device__ __forceinline__ int state_slot(const Sequence& s, int chunk, bool edge) {
  if (edge) return s.chunk_base + chunk;
  return chunk == 0 ? -1 : s.slot_base + chunk - 1;
}
__device__ __forceinline__ int adjoint_slot(const Sequence& s, int chunk, bool last, bool edge) {
  if (edge) return s.chunk_base + chunk;
  return last ? -1 : s.slot_base + chunk;
}

// ---- the plan kernel -------------------------------------------------------------------------------------------

constexpr int kInlineBoundaries = 1000;  // boundaries that fit into one launch's parameters
constexpr int kInnerBoundary = 1 << 30;  // added to one where a sequence is cut

struct Boundaries {
  enum Kind { kUniform, kInline, kInt32, kInt64 } kind;
  bool cut;                     // the sequences are segments; kInline or kInt32
  const void* device;           // kInt32, kInt64
  int values[kInlineBoundaries];  // kInline: all n + 1
};

__device__ __forceinline__ int64_t boundary(const Boundaries& b, int i, int tokens_per_batch) {
  switch (b.kind) {
    case Boundaries::kUniform: return static_cast<int64_t>(i) * tokens_per_batch;
    case Boundaries::kInline: return b.values[i];
    case Boundaries::kInt32: return static_cast<const int*>(b.device)[i];
    default: return static_cast<const int64_t*>(b.device)[i];
  }
}

__device__ __forceinline__ int clamp_token(int64_t token, int least, int most) {
  return static_cast<int>(token < least ? least : token > most ? most : token);
}

constexpr int kPlanThreads = 1024;
constexpr int kSortedSequences = 1024;  // up to here `order` is by falling length, above it is the identity

// One block. Boundaries that were never checked on the host are clamped into 0..total and made monotone, so that a
// wrong one can't lead outside the tensors.
static __global__ void __launch_bounds__(kPlanThreads)
    plan_kernel(const __grid_constant__ Boundaries boundaries, Plan plan) {
  __shared__ int warp_chunks[32], warp_slots[32], warp_firsts[32], lengths[kSortedSequences];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  int chunk_base = 0, slot_base = 0, first_base = 0;  // firsts: segments that begin a sequence
  for (int first = 0; first < plan.n; first += kPlanThreads) {
    const int i = first + tid;
    int token = 0, length = 0, opens = 0, followed = 0;
    if (i < plan.n) {
      int64_t start = boundary(boundaries, i, plan.tokens_per_batch);
      int64_t end = boundary(boundaries, i + 1, plan.tokens_per_batch);
      if (boundaries.cut) {
        opens = (start & kInnerBoundary) != 0, followed = (end & kInnerBoundary) != 0;
        start &= ~kInnerBoundary, end &= ~kInnerBoundary;
      }
      token = clamp_token(start, 0, plan.total);
      length = clamp_token(end, token, plan.total) - token;
      if (i < kSortedSequences) lengths[i] = length;
    }
    const int chunks = (length + 63) / 64, slots = max(chunks - 1, 0);
    int c = chunks, s = slots, f = 1 - opens;
    for (int d = 1; d < 32; d <<= 1) {
      const int cu = __shfl_up_sync(0xffffffffu, c, d), su = __shfl_up_sync(0xffffffffu, s, d);
      const int fu = __shfl_up_sync(0xffffffffu, f, d);
      if (lane >= d) c += cu, s += su, f += fu;
    }
    if (lane == 31) warp_chunks[warp] = c, warp_slots[warp] = s, warp_firsts[warp] = f;
    __syncthreads();
    int total_chunks = 0, total_slots = 0, total_firsts = 0;
    for (int w = 0; w < 32; ++w) {
      if (w == warp) c += total_chunks, s += total_slots, f += total_firsts;
      total_chunks += warp_chunks[w], total_slots += warp_slots[w], total_firsts += warp_firsts[w];
    }
    if (i < plan.n) {
      plan.sequences()[i] = make_int4(token, length, chunk_base + c - chunks, slot_base + s - slots);
      if (boundaries.cut) plan.segments()[i] = (first_base + f - 1) << 2 | opens << 1 | followed;
    }
    chunk_base += total_chunks, slot_base += total_slots, first_base += total_firsts;
    __syncthreads();
  }
  const int count = min(chunk_base, plan.chunk_capacity);
  if (tid == 0) plan.data[0] = count;
  for (int i = tid; i < count; i += kPlanThreads) {
    int lo = 0, hi = plan.n - 1;  // the last sequence whose chunks start at or before i
    while (lo < hi) {
      const int mid = (lo + hi + 1) / 2;
      if (plan.sequences()[mid].z <= i) lo = mid;
      else hi = mid - 1;
    }
    const int4 s = plan.sequences()[lo];
    const int index = i - s.z, rows = min(s.y - index * 64, 64);
    plan.chunks()[i] = make_int4(s.x + index * 64, rows | ((index * 64 + 64 >= s.y) << 8), lo, index);
  }
  for (int i = tid; i < plan.n; i += kPlanThreads) {
    int rank = i;
    if (plan.n <= kSortedSequences) {
      rank = 0;
      for (int j = 0; j < plan.n; ++j) rank += lengths[j] > lengths[i] || (lengths[j] == lengths[i] && j < i);
    }
    plan.order()[rank] = i;
  }
}

// The same for a call that is cut here: segments of at most `length` chunks of `sequences` sequences with boundaries on the
// device, kInt32 or kInt64, as few as do and of equal size (longer ones first).
static __global__ void __launch_bounds__(kPlanThreads)
    cut_plan_kernel(const __grid_constant__ Boundaries boundaries, Plan plan, int sequences, int length) {
  __shared__ int warp_chunks[32], warp_segments[32], lengths[kSortedSequences];
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const auto span = [&](int i) {
    const int token = clamp_token(boundary(boundaries, i, 0), 0, plan.total);
    return make_int2(token, clamp_token(boundary(boundaries, i + 1, 0), token, plan.total) - token);
  };
  int2* runs = reinterpret_cast<int2*>(plan.runs());
  int chunk_base = 0, segment_base = 0;
  for (int first = 0; first < sequences; first += kPlanThreads) {
    const int i = first + tid;
    const int chunks = i < sequences ? (span(i).y + 63) / 64 : 0;
    const int segments = i < sequences ? max((chunks + length - 1) / length, 1) : 0;
    int c = chunks, s = segments;
    for (int d = 1; d < 32; d <<= 1) {
      const int cu = __shfl_up_sync(0xffffffffu, c, d), su = __shfl_up_sync(0xffffffffu, s, d);
      if (lane >= d) c += cu, s += su;
    }
    if (lane == 31) warp_chunks[warp] = c, warp_segments[warp] = s;
    __syncthreads();
    int total_chunks = 0, total_segments = 0;
    for (int w = 0; w < 32; ++w) {
      if (w == warp) c += total_chunks, s += total_segments;
      total_chunks += warp_chunks[w], total_segments += warp_segments[w];
    }
    if (i < sequences) runs[i] = make_int2(min(segment_base + s - segments, plan.n), chunk_base + c - chunks);
    chunk_base += total_chunks, segment_base += total_segments;
    __syncthreads();
  }
  // Boundaries that don't ascend from 0 to T could ask for more of either than there is room for: they must not lead outside
  // the tensors.
  const int count = min(chunk_base, plan.chunk_capacity), made = min(segment_base, plan.n);
  if (tid == 0) plan.data[0] = count, runs[sequences] = make_int2(made, count);
  __syncthreads();
  for (int i = tid; i < plan.n; i += kPlanThreads) {
    int4 s = make_int4(plan.total, 0, count, 0);
    int segment = 3;
    if (i < made) {
      int lo = 0, hi = sequences - 1;  // the last sequence whose segments start at or before i: each has one
      while (lo < hi) {
        const int mid = (lo + hi + 1) / 2;
        if (runs[mid].x <= i) lo = mid;
        else hi = mid - 1;
      }
      const int2 whole = span(lo), run = runs[lo];
      const int chunks = (whole.y + 63) / 64, parts = max((chunks + length - 1) / length, 1), part = i - run.x;
      const int size = chunks / parts, longer = chunks % parts;
      const int start = part * size + min(part, longer), own = size + (part < longer);
      s = make_int4(whole.x + start * 64, max(min(whole.y - start * 64, own * 64), 0), min(run.y + start, count), 0);
      segment = lo << 2 | (part > 0) << 1 | (part + 1 < parts);
    }
    plan.sequences()[i] = s;
    plan.segments()[i] = segment;
    if (i < kSortedSequences) lengths[i] = s.y;
  }
  __syncthreads();
  for (int i = tid; i < count; i += kPlanThreads) {
    int lo = 0, hi = max(made - 1, 0);  // the last segment whose chunks start at or before i
    while (lo < hi) {
      const int mid = (lo + hi + 1) / 2;
      if (plan.sequences()[mid].z <= i) lo = mid;
      else hi = mid - 1;
    }
    const int4 s = plan.sequences()[lo];
    const int index = i - s.z, token = min(s.x + index * 64, plan.total - 1);
    const int rows = max(min(min(s.y - index * 64, 64), plan.total - token), 1);
    plan.chunks()[i] = make_int4(token, rows | ((index * 64 + 64 >= s.y) << 8), lo, index);
  }
  for (int i = tid; i < plan.n; i += kPlanThreads) {
    int rank = i;
    if (plan.n <= kSortedSequences) {
      rank = 0;
      for (int j = 0; j < plan.n; ++j) rank += lengths[j] > lengths[i] || (lengths[j] == lengths[i] && j < i);
    }
    plan.order()[rank] = i;
  }
}

}  // namespace cake
