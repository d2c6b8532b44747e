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

}  // namespace cake
