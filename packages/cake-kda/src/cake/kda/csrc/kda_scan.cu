// Host entry of kda_scan.
#include "kda_scan.cuh"

#include "kda_walk_host.cuh"

namespace cake::kda {

template <bool kOutput, bool kTape>
static void scan(const WalkArgs& args, int device, int64_t stream) {
  launch_walk("kda_scan", scan_kernel<2, kOutput, kTape>, scan_kernel<1, kOutput, kTape>, args,
              int64_t(args.plan.n) * args.v_heads, device, stream);
}

void kda_scan(TensorView v, TensorView beta, TensorView plan, int64_t n, int64_t sequences, int64_t chunk_capacity,
              TensorView qg, TensorView kg, TensorView kr, TensorView p, TensorView t, TensorView last,
              Optional<TensorView> initial_state, Optional<TensorView> entering, Optional<TensorView> o,
              Optional<TensorView> final_state, Optional<TensorView> states, bool edge_slots, int64_t stream) {
  const int device = v.device().device_id;
  DeviceGuard guard(device);
  const WalkArgs args = walk_args(v, beta, plan, n, sequences, entering.has_value(), chunk_capacity, qg, kg, kr, p, t,
                                  last, initial_state, entering, o, final_state, states, edge_slots);
  if (o.has_value()) dense_bf16(o.value(), "o", {v.size(0), v.size(1), v.size(2), kHeadDim});
  const auto run = o.has_value() ? (states.has_value() ? scan<true, true> : scan<true, false>)
                                 : (states.has_value() ? scan<false, true> : scan<false, false>);
  run(args, device, stream);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_scan, kda_scan);

}  // namespace cake::kda
