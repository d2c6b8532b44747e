// The kernels that make the tables of seq.cuh, one block each: of boundaries as they are, or cut into segments on the device.
#pragma once

#include "seq.cuh"

namespace cake {

constexpr int kInlineBoundaries = 1000;  // boundaries that fit into one launch's parameters
constexpr int kInnerBoundary = 1 << 30;  // added to one where a sequence is cut

struct Boundaries {
  enum Kind { kUniform, kInline, kInt32, kInt64 } kind;
  bool cut;  // the sequences are segments; kInline or kInt32
  const void* device;  // kInt32, kInt64
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

// What the plan of a call that is cut here chooses from, and the time that it takes things to take (`Choice` and `Cost` of
// cake.core.segments). No lengths: there is nothing to choose.
constexpr int kChosenSequences = 15, kChosenLengths = 4;

struct Choice {
  int count, least_cut;  // lengths; a call whose sequences are all shorter isn't cut
  int heads, processors;
  int lengths[kChosenLengths];
  int start, scan, adjoint, transfer, adjoint_transfer, merge_start, merge, merge_octet, half, full;  // ns, but half
};

// When the last processor is done with each lane's `count` items of `chunks` chunks: the longest first, to the first free. By a
// whole warp, for at most 30 lanes' items: a lane holds the processors that are busy until the same time.
__device__ __forceinline__ int makespan(int chunks, int count, int processors, int start, int rate, int lane) {
  constexpr unsigned kAll = 0xffffffffu;
  int busy = 0, free = lane == 0 ? processors : 0;
  while (true) {
    const int longest = __reduce_max_sync(kAll, count > 0 ? chunks : -1);
    if (longest < 0) return __reduce_max_sync(kAll, free > 0 ? busy : 0);
    int left = __reduce_add_sync(kAll, count > 0 && chunks == longest ? count : 0);
    if (chunks == longest) count = 0;
    while (left > 0) {
      const int soonest = __reduce_min_sync(kAll, free > 0 ? busy : INT32_MAX);
      const int holder = __ffs(__ballot_sync(kAll, free > 0 && busy == soonest)) - 1;
      const int room = __ffs(__ballot_sync(kAll, free == 0)) - 1;
      const int there = __shfl_sync(kAll, free, holder), taken = min(there, left);
      if (lane == holder) free -= taken;
      if (lane == (taken == there ? holder : room)) busy = soonest + start + longest * rate, free = taken;
      left -= taken;
    }
  }
}

// Time of a part of a call (scan, adjoint, pre-scan, adjoint pre-scan) whose sequence lane / 2 has `chunks` chunks, in segments
// of at most `length`; lane % 2: its shorter ones.
__device__ __forceinline__ int part_time(const Choice& choice, int part, int chunks, int length, int lane) {
  const int segments = chunks > 0 ? (chunks - 1) / length + 1 : 0;
  const int size = chunks / max(segments, 1), longer = chunks % max(segments, 1);
  const bool shorter = lane % 2 != 0;
  int count = shorter ? segments - longer : longer;  // walks
  if (part >= 2 && segments < 2) {
    count = 0;
  } else if (part == 2) {  // M and B, but of the first segment no M, and nothing of the last
    const int maps = max(2 * longer - 1, 0);
    count = shorter ? 2 * segments - 3 - maps : maps;
  } else if (part == 3) {  // B of all but the first
    const int maps = max(longer - 1, 0);
    count = shorter ? segments - 1 - maps : maps;
  }
  count *= choice.heads;
  int rate = part == 0   ? choice.scan
             : part == 1 ? choice.adjoint
             : part == 2 ? choice.transfer / 2
                         : choice.adjoint_transfer / 2;
  if (choice.half && 2 * __reduce_add_sync(0xffffffffu, count) <= choice.processors)
    count *= 2, rate = rate * choice.half / 100;
  const int total = __reduce_add_sync(0xffffffffu, shorter ? 0 : chunks);
  const int time = makespan(size + !shorter, count, choice.processors, choice.start, rate, lane);
  return part >= 2 ? time : max(time, total * choice.heads * choice.full / choice.processors);
}

// Time of the merges of both directions.
__device__ __forceinline__ int merge_time(const Choice& choice, int chunks, int length, int lane) {
  const int segments = chunks > 0 && lane % 2 == 0 ? (chunks - 1) / length + 1 : 0;
  const int chains = __popc(__ballot_sync(0xffffffffu, segments > 1)) * choice.heads;
  const int steps = __reduce_max_sync(0xffffffffu, segments) - 1;
  if (steps < 1) return 0;
  const int octets = chains <= 8 ? 1 : chains <= 16 ? 2 : chains <= 33 ? 4 : 8;
  return 2 * (choice.merge_start + steps * ((choice.merge + octets * choice.merge_octet) / 2));
}

// Longer than any sequence: it stays whole.
constexpr int kWhole = 1 << 28;

constexpr int kCutParts = 4;

// Of no cut and of each length, in shared memory.
struct CutTimes {
  int parts[kChosenLengths + 1][kCutParts], merges[kChosenLengths + 1];
};

// Most chunks of a segment, by all threads of a block: the cut whose walks, pre-scans and merges are done first, if that saves
// more than a twentieth of none. `chunks`: of sequence lane / 2, the same in every warp.
__device__ __forceinline__ int chosen_length(CutTimes& times, const Choice& choice, int chunks) {
  const int lane = threadIdx.x & 31, option = threadIdx.x / 32 / kCutParts, part = threadIdx.x / 32 % kCutParts;
  if (option <= choice.count) {
    const int length = option == 0 ? kWhole : choice.lengths[option - 1];
    const int time = part_time(choice, part, chunks, length, lane), merge = merge_time(choice, chunks, length, lane);
    if (lane == 0) times.parts[option][part] = time, times.merges[option] = merge;
  }
  const int longest = __reduce_max_sync(0xffffffffu, chunks);
  const int total = __reduce_add_sync(0xffffffffu, lane % 2 == 0 ? chunks : 0);
  __syncthreads();
  int best = kWhole, limit = 0;
  for (int i = 0; i <= choice.count; ++i) {
    const int at = i == 0 ? 0 : choice.count + 1 - i;  // whole, then the longest segments first
    int time = times.merges[at];
    for (int n = 0; n < kCutParts; ++n) time += times.parts[at][n];
    if (i == 0) limit = time - time / 20;
    else if (choice.lengths[at - 1] < longest && time < limit) best = choice.lengths[at - 1], limit = time;
    // No cut makes less of the walks themselves.
    if (i == 0 && int64_t(total) * choice.heads * (choice.scan + choice.adjoint) / choice.processors >= limit) break;
  }
  return longest < choice.least_cut ? kWhole : best;
}

// The same for a call that is cut here: segments of at most `length` chunks, or as chosen, of `sequences` sequences with
// boundaries on the device, kInt32 or kInt64, as few as do and of equal size (longer ones first).
static __global__ void __launch_bounds__(kPlanThreads)
    cut_plan_kernel(const __grid_constant__ Boundaries boundaries, Plan plan, int sequences, int length,
                    const __grid_constant__ Choice choice) {
  __shared__ int warp_chunks[32], warp_segments[32], lengths[kSortedSequences];
  __shared__ CutTimes times;
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const auto span = [&](int i) {
    const int token = clamp_token(boundary(boundaries, i, 0), 0, plan.total);
    return make_int2(token, clamp_token(boundary(boundaries, i + 1, 0), token, plan.total) - token);
  };
  if (choice.count > 0) length = chosen_length(times, choice, lane / 2 < sequences ? (span(lane / 2).y + 63) / 64 : 0);
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
