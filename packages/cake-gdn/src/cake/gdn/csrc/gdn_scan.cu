// Host entry of gdn_scan.
#include "gdn_scan.cuh"

#include "gdn_walk_host.cuh"

namespace cake::gdn {

void gdn_scan(TensorView q, TensorView k, TensorView v, TensorView beta, TensorView plan, int64_t n, int64_t sequences,
              int64_t chunk_capacity, TensorView t, TensorView b, TensorView rk, Optional<TensorView> initial_state,
              Optional<TensorView> entering, Optional<TensorView> o, Optional<TensorView> final_state,
              Optional<TensorView> states, bool edge_slots, double scale, bool l2norm, int64_t stream) {
  DeviceGuard guard(q.device().device_id);
  const WalkArgs args =
      walk_args(o.has_value() ? q : Optional<TensorView>{}, k, v, beta, plan, n, sequences, entering.has_value(),
                chunk_capacity, t, b, rk, initial_state, entering, o, final_state, states, edge_slots, scale, l2norm);
  if (o.has_value()) dense_bf16(o.value(), "o", {v.size(0), v.size(1), v.size(2), kHeadDim});
  const auto kernel = o.has_value() ? (states.has_value() ? scan_kernel<true, true> : scan_kernel<true, false>)
                                    : (states.has_value() ? scan_kernel<false, true> : scan_kernel<false, false>);
  launch("gdn_scan", kernel, dim3(n * args.v_heads), kWalkThreads, sizeof(WalkShared), stream_of(stream), args);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gdn_scan, gdn_scan);

}  // namespace cake::gdn
