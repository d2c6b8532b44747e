// The gates of kda_out: the summed decays of a v head from its raw gates, and dg from the gradient of these sums. A warp has its
// own channels, half of the tokens at a time: 16 values in flight to a thread hide their latencies, and code for more of them
// would not fit into an SM's instruction cache beside the rest.
#pragma once

#include "kda_out_shared.cuh"

namespace cake::kda {

// The gates of a chunk's v head, as a thread sees them.
struct GateHead {
  Gate gate;
  float bias[2];
  int rows;  // from the thread's first token on
  int64_t place;  // in g, at the thread's first token and channel

  __device__ __forceinline__ GateHead(const OutArgs& args, const OutVectors& vectors, const Strip& me)
      : gate(args.gate, vectors.a_log), rows(vectors.rows - me.token(0)) {
#pragma unroll
    for (int h = 0; h < 2; ++h) bias[h] = vectors.bias[me.channel(h)];
    place = vectors.gates + me.token(0) * args.g.token_stride + me.channel(0);
  }
};

constexpr int kHalf = 4;  // octets

// Raw gates of half a chunk, on their way from memory: index 4 o + 2 h + e; or words of bf16 of two neighbouring channels,
// index 2 o + h, of which the lanes of the two take one each, of one token each.
template <typename T>
struct RawGates {
  static constexpr bool kPairs = sizeof(T) == 2;
  uint32_t words[kPairs ? 2 * kHalf : 4 * kHalf] = {};

  __device__ __forceinline__ void load(const OutArgs& args, const GateHead& head, int half, const Strip& me) {
    const T* g = static_cast<const T*>(args.g.data);
    const int64_t stride = args.g.token_stride;
    const int odd = me.lane >> 2 & 1, rows = head.rows - half * (8 * kHalf);
    int64_t p = head.place + half * (8 * kHalf * stride) + (kPairs ? odd * (stride - 1) : 0);
#pragma unroll
    for (int o = 0; o < kHalf; ++o, p = fresh(p + 8 * stride)) {
      if constexpr (kPairs) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
          words[2 * o + h] = 8 * o + odd < rows ? *reinterpret_cast<const uint32_t*>(g + p + 8 * h) : 0u;
      } else {
#pragma unroll
        for (int c = 0; c < 4; ++c)
          words[4 * o + c] = 8 * o + (c & 1) < rows ? __float_as_uint(g[p + (c & 1) * stride + 8 * (c >> 1)]) : 0u;
      }
    }
  }

  __device__ __forceinline__ void values(float (&x)[4 * kHalf], const Strip& me) const {
    if constexpr (kPairs) {
      const bool odd = me.lane >> 2 & 1;
#pragma unroll
      for (int i = 0; i < 2 * kHalf; ++i) {
        const uint32_t mine = words[i], other = __shfl_xor_sync(0xffffffffu, mine, 4);
        x[2 * i] = odd ? bf16_hi(other) : bf16_lo(mine);
        x[2 * i + 1] = odd ? bf16_hi(mine) : bf16_lo(other);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4 * kHalf; ++i) x[i] = __uint_as_float(words[i]);
    }
  }
};

// The summed decays of a v head. `raw`: of the first half.
template <GateKind kKind, typename T>
__device__ __forceinline__ void make_decays(OutShared& s, const OutArgs& args, const GateHead& head, RawGates<T>& raw,
                                            const Strip& me) {
  float before[2] = {0.f, 0.f};
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    float x[4 * kHalf];
    raw.values(x, me);
    if (half == 0) raw.load(args, head, 1, me);
    const Gate gate = head.gate.of_kind<kKind>();
#pragma unroll
    for (int i = 0; i < 4 * kHalf; ++i) x[i] = log2_decay(x[i], head.bias[i >> 1 & 1], gate);
    const int rows = head.rows - half * (8 * kHalf);
#pragma unroll
    for (int o = 0; o < kHalf; ++o) {
      float b[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) b[c] = 8 * o + (c & 1) < rows ? x[4 * o + c] : 0.f;
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
      s.decays[half * kHalf + o][me.thread] = make_float4(b[0], b[1], b[2], b[3]);
    }
  }
  __syncwarp();
}

// What dt_bias of the thread's two channels and A_log get.
struct GateSums {
  float bias[2] = {0.f, 0.f}, a_log = 0.f;
};

// d, the gradient of the log decays, becomes that of the raw gates x.
template <GateKind kKind>
__device__ __forceinline__ void raw_gradients(GateSums& sums, float (&d)[4 * kHalf], const float (&x)[4 * kHalf],
                                              const GateHead& head, int rows) {
  const Gate gate = head.gate.of_kind<kKind>();
#pragma unroll
  for (int o = kHalf - 1; o >= 0; --o)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float& mine = d[4 * o + c];
      const bool there = 8 * o + (c & 1) < rows;
      const GateGradient grad = gate_backward(x[4 * o + c], head.bias[c >> 1], there ? mine : 0.f, gate);
      mine = grad.raw;
      sums.bias[c >> 1] += grad.raw, sums.a_log += grad.a_log;
    }
}

template <typename T>
__device__ __forceinline__ void store_gates(const float (&d)[4 * kHalf], const OutArgs& args, int64_t p, int rows,
                                            const Strip& me) {
  const int64_t stride = args.results[kDg].token_stride;
  const int odd = me.lane >> 2 & 1;
  T* dg = static_cast<T*>(args.results[kDg].data);
  if constexpr (sizeof(T) == 2) p += odd * (stride - 1);
#pragma unroll
  for (int o = 0; o < kHalf; ++o, p = fresh(p + 8 * stride)) {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float lo = d[4 * o + 2 * h], hi = d[4 * o + 2 * h + 1];
        const float other = __shfl_xor_sync(0xffffffffu, odd ? lo : hi, 4);
        const uint32_t pair = odd ? pack_bf16(other, hi) : pack_bf16(lo, other);
        if (8 * o + odd < rows) *reinterpret_cast<uint32_t*>(dg + p + 8 * h) = pair;
      }
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (8 * o + (c & 1) < rows) dg[p + (c & 1) * stride + 8 * (c >> 1)] = d[4 * o + c];
    }
  }
}

// dg of a v head from its db, which lies in the decays' place: the gradient of the log decays is the sum from each token to
// the chunk's end, then comes the gate's backward. `raw`: of the second half.
template <GateKind kKind, typename T>
__device__ __forceinline__ void finish_gates(OutShared& s, const OutArgs& args, const OutVectors& vectors,
                                             const GateHead& head, RawGates<T>& raw, int chunk_index, int v_head,
                                             const Strip& me) {
  const int v_heads = args.heads * args.group;
  const int64_t stride = args.results[kDg].token_stride;
  const int64_t out = vectors.first[kDg] + me.token(0) * stride + me.channel(0);
  float after[2] = {0.f, 0.f};
  GateSums sums;
#pragma unroll 1
  for (int half = 1; half >= 0; --half) {
    float x[4 * kHalf], d[4 * kHalf];
#pragma unroll
    for (int o = kHalf - 1; o >= 0; --o) {
      const float4 slot = s.decays[half * kHalf + o][me.thread];
      const float of[4] = {slot.x, slot.y, slot.z, slot.w};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float later = of[2 * h] + of[2 * h + 1];
#pragma unroll
        for (int n = 1; n < 4; n <<= 1) {
          const float down = __shfl_down_sync(0xffffffffu, later, n, 4);
          if (me.t + n < 4) later += down;
        }
        const float higher = __shfl_down_sync(0xffffffffu, later, 1, 4);
        d[4 * o + 2 * h + 1] = after[h] + ((me.t < 3 ? higher : 0.f) + of[2 * h + 1]);
        d[4 * o + 2 * h] = after[h] + later;
        after[h] += __shfl_sync(0xffffffffu, later, 0, 4);
      }
    }
    raw.values(x, me);
    if (half == 1 && kKind != GateKind::kNone) raw.load(args, head, 0, me);
    const int rows = head.rows - half * (8 * kHalf);
    if constexpr (kKind != GateKind::kNone) raw_gradients<kKind>(sums, d, x, head, rows);
    store_gates<T>(d, args, out + half * (8 * kHalf * stride), rows, me);
  }
  if (args.partials == nullptr) return;
  float* row = args.partials + (int64_t(chunk_index) * v_heads + v_head) * kPartial;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = row_sum(sums.bias[h]);
    if (me.t == 0) row[1 + me.channel(h)] = sum;
  }
  const float a_log = warp_sum(sums.a_log);
  if (me.lane == 0) s.a_log[me.thread >> 5] = a_log;
}

}  // namespace cake::kda
