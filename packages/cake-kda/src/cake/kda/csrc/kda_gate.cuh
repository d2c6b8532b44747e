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
constexpr float kSaturated = 1e4f;  // a sigmoid is 0 or 1, and its slope 0, long before

enum class GateKind : int { kNone, kStandard, kBounded };

struct GateArgs {
  GateKind kind;
  const void *a_log, *bias;  // [HV], [HV, 128]; null: 0
  bool a_log_bf16, bias_bf16;
  float bound;

  // As they lie in memory. Converted where they are used, by `value`: the load is on its way until then.
  static __device__ __forceinline__ uint32_t bits(const void* p, bool is_bf16, int i) {
    if (p == nullptr) return 0;
    return is_bf16 ? static_cast<const uint16_t*>(p)[i] : static_cast<const uint32_t*>(p)[i];
  }
  static __device__ __forceinline__ float value(uint32_t bits, bool is_bf16) {
    return __uint_as_float(is_bf16 ? bits << 16 : bits);
  }
  __device__ __forceinline__ uint32_t a_log_bits(int v_head) const { return bits(a_log, a_log_bf16, v_head); }
  __device__ __forceinline__ uint32_t bias_bits(int v_head, int channel) const {
    return bits(bias, bias_bf16, v_head * 128 + channel);
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

  __device__ __forceinline__ Gate(const GateArgs& args, float a_log) : kind(args.kind), bound(args.bound) {
    rate = kind == GateKind::kBounded ? ex2(min_nan(a_log, kMostLogRate) * kLog2E) : a_log * kLog2E;
  }
};

// -exp(A_log) softplus(x) without its sign: softplus(x) = e^min(x, 0) part, so that exp(A_log) and what underflows of softplus
// meet in one exponent. part is log1p(y) / y below 0, with y = e^-|x|, and log1p(y) + x above. No branch: a thread has many
// of these in flight.
struct Softplus {
  float y, power, part;  // power: e^(A_log + min(x, 0))

  // rate: A_log in log2, and what else the power is to be multiplied with.
  __device__ __forceinline__ Softplus(float x, float rate) {
    y = ex2(-fabsf(x) * kLog2E);
    float ratio = fmaf(y, -8.3711529e-3f, 4.3493900e-2f);  // log1p(y) / y to 2.2e-7 on [0, 1]
    ratio = fmaf(y, ratio, -1.0685003e-1f);
    ratio = fmaf(y, ratio, 1.7687477e-1f);
    ratio = fmaf(y, ratio, -2.4474774e-1f);
    ratio = fmaf(y, ratio, 3.3271930e-1f);
    ratio = fmaf(y, ratio, -4.9997175e-1f);
    ratio = fmaf(y, ratio, 0.99999976f);
    power = ex2(fmaf(fminf(x, 0.f), kLog2E, rate));
    part = x < 0.f ? ratio : fmaf(y, ratio, x);
  }
};

// log2(e) max(log decay, -88).
__device__ __forceinline__ float log2_decay(float raw, float bias, const Gate& gate) {
  float step = raw * kLog2E;
  if (gate.kind == GateKind::kStandard) {
    const Softplus softplus(raw + bias, gate.rate + kLog2Log2E);
    step = -softplus.power * softplus.part;
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
    const Softplus softplus(x, gate.rate);
    const float g = -softplus.power * softplus.part;
    const bool ends = g <= kLeastGate;
    return {ends ? 0.f : -softplus.power * rcp(1.f + softplus.y) * d_log, ends ? 0.f : g * d_log};
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
