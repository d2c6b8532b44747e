// Host entry of kda_adj.
#include "kda_adj.cuh"

#include "kda_walk_host.cuh"

namespace cake::kda {

void kda_adj(TensorView grad, TensorView beta, TensorView plan, int64_t n, int64_t sequences, int64_t chunk_capacity,
             TensorView qg, TensorView kg, TensorView kr, TensorView p, TensorView t, TensorView last,
             Optional<TensorView> dht, Optional<TensorView> leaving, TensorView y, Optional<TensorView> dh0,
             TensorView states, bool edge_slots, int64_t stream) {
  const int device = grad.device().device_id;
  DeviceGuard guard(device);
  const WalkArgs args = walk_args(grad, beta, plan, n, sequences, leaving.has_value(), chunk_capacity, qg, kg, kr, p, t,
                                  last, dht, leaving, y, dh0, states, edge_slots);
  launch_walk("kda_adj", adj_kernel<2>, adj_kernel<1>, args, int64_t(args.plan.n) * args.v_heads, device, stream);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_adj, kda_adj);

}  // namespace cake::kda
