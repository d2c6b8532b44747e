// What the host entries share about the gate.
#pragma once

#include "cake/host.cuh"
#include "kda_gate.cuh"

namespace cake::kda {

// `kind`: 0 g is the log decay, 1 standard, 2 bounded.
inline GateArgs gate_args(int64_t kind, const host::Optional<host::TensorView>& a_log,
                          const host::Optional<host::TensorView>& bias, double bound, int64_t v_heads) {
  GateArgs args{};
  args.kind = static_cast<GateKind>(kind);
  args.bound = static_cast<float>(bound);
  if (a_log.has_value()) {
    args.a_log_bf16 = host::is_bfloat16(*a_log);
    args.a_log = host::dense<void>(*a_log, "A_log", args.a_log_bf16 || host::is_float32(*a_log), {v_heads});
  }
  if (bias.has_value()) {
    args.bias_bf16 = host::is_bfloat16(*bias);
    args.bias = host::dense<void>(*bias, "dt_bias", args.bias_bf16 || host::is_float32(*bias), {v_heads, 128});
  }
  return args;
}

}  // namespace cake::kda
