// The gate of a channel: from what the caller gives to the log decay, and back. All in fp32, as in _gates.py.
//
//   none      log decay = raw
//   standard  log decay = -exp(A_log) softplus(x)               x = raw + dt_bias
//   bounded   log decay = bound sigmoid(u), u = exp(A_log) x    A_log at most 30, or missing: 0
//
// A log decay below -88 counts as -88, where the gate's own gradients end. No number gives an infinity or a NaN.
#pragma once

#include "cake/tile.cuh"

namespace cake::kda {

constexpr float kLog2Log2E = 0.5287663729448977f;
constexpr float kMostLogRate = 30.f;
constexpr float kSaturated = 1e4f;     // a sigmoid is 0 or 1, and its slope 0, long before
constexpr float kLinearBelow = -17.f;  // there log(softplus(x)) = x

enum class GateKind : int { kNone, kStandard, kBounded };

struct GateArgs {
  GateKind kind;
  const void *a_log, *bias;  // [HV], [HV, 128]; null: 0
  bool a_log_bf16, bias_bf16;
  float bound;

  static __device__ __forceinline__ float load(const void* p, bool is_bf16, int i) {
    if (p == nullptr) return 0.f;
    return is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(p)[i]) : static_cast<const float*>(p)[i];
  }
  __device__ __forceinline__ float bias_of(int v_head, int channel) const {
    return load(bias, bias_bf16, v_head * 128 + channel);
  }
};

// A v head's gate.
struct Gate {
  GateKind kind;
  float rate;  // standard: A_log / ln 2; bounded: exp(A_log)
  float bound;

  // The same, of a kind that the compiler knows.
  template <GateKind kKind>
  __device__ __forceinline__ Gate of_kind() const {
    Gate gate = *this;
    gate.kind = kKind;
    return gate;
  }

  __device__ __forceinline__ Gate(const GateArgs& args, int v_head) : kind(args.kind), bound(args.bound) {
    const float a_log = GateArgs::load(args.a_log, args.a_log_bf16, v_head);
    rate = kind == GateKind::kBounded ? ex2(min_nan(a_log, kMostLogRate) * kLog2E) : a_log * kLog2E;
  }
};

// softplus(x) and its logarithm. log1p(y) = 2 artanh(y / (2 + y)) keeps its digits where y = e^-|x| is small.
struct Softplus {
  float value, log2, sigmoid;

  __device__ __forceinline__ explicit Softplus(float x) {
    const float within = fmaxf(x, kLinearBelow);  // no branch: a thread has many of these in flight
    const float y = ex2(-fabsf(within) * kLog2E), z = y * rcp(2.f + y), w = z * z;
    float series = fmaf(w, 1.f / 13, 1.f / 11);
    series = fmaf(w, series, 1.f / 9);
    series = fmaf(w, series, 1.f / 7);
    series = fmaf(w, series, 1.f / 5);
    series = fmaf(w, series, 1.f / 3);
    series = fmaf(w, series, 1.f);
    value = fmaf(2.f * z, series, fmaxf(x, 0.f));
    log2 = fmaf(x - within, kLog2E, __log2f(value));
    sigmoid = (x < 0.f ? y : 1.f) * rcp(1.f + y);
  }
};

// log2(e) max(log decay, -88).
__device__ __forceinline__ float log2_decay(float raw, float bias, const Gate& gate) {
  float step = raw * kLog2E;
  if (gate.kind == GateKind::kStandard) {
    step = -ex2(gate.rate + kLog2Log2E + Softplus(raw + bias).log2);
  } else if (gate.kind == GateKind::kBounded) {
    step = gate.bound * kLog2E * rcp(1.f + ex2(-gate.rate * kLog2E * (raw + bias)));
  }
  return max_nan(step, kLeastGate * kLog2E);
}

// Gradients of the raw gate and, this value's share, of A_log, from that of the log decay. No branch, as in Softplus.
struct GateGradient {
  float raw, a_log;
};

__device__ __forceinline__ GateGradient gate_backward(float raw, float bias, float d_log, const Gate& gate) {
  const float x = raw + bias;
  if (gate.kind == GateKind::kStandard) {
    const Softplus softplus(x);
    const float g = -ex2(gate.rate + softplus.log2);
    const float weighted = g > kLeastGate ? g * d_log : 0.f;
    return {x < kLinearBelow ? weighted : weighted * softplus.sigmoid * rcp(softplus.value), weighted};
  }
  if (gate.kind == GateKind::kBounded) {
    const float u = fminf(fmaxf(gate.rate * x, -kSaturated), kSaturated);
    const float y = ex2(-fabsf(u) * kLog2E), s = rcp(1.f + y);  // sigmoid(|u|); sigmoid(-|u|) = y s
    const bool counts = gate.bound * (u < 0.f ? y * s : s) > kLeastGate;
    const float slope = counts ? gate.bound * y * s * s * d_log : 0.f;
    return {slope * gate.rate, slope * u};
  }
  return {d_log, 0.f};
}

}  // namespace cake::kda
