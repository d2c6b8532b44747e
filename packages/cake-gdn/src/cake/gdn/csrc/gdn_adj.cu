// Host entry of gdn_adj.
#include "gdn_adj.cuh"

#include "gdn_walk_host.cuh"

namespace cake::gdn {

void gdn_adj(TensorView q, TensorView k, TensorView grad, TensorView beta, TensorView plan, int64_t n,
             int64_t sequences, int64_t chunk_capacity, TensorView t, TensorView b, TensorView rq, TensorView rk,
             Optional<TensorView> dht, Optional<TensorView> leaving, TensorView y, Optional<TensorView> dh0,
             TensorView states, bool edge_slots, double scale, int64_t stream) {
  DeviceGuard guard(q.device().device_id);
  const WalkArgs args = walk_args(q, k, grad, beta, plan, n, sequences, leaving.has_value(), chunk_capacity, t, b, rq,
                                  rk, dht, leaving, y, dh0, states, edge_slots, scale);
  launch("gdn_adj", adj_kernel, dim3(n * args.v_heads), kWalkThreads, sizeof(WalkShared), stream_of(stream), args);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gdn_adj, gdn_adj);

}  // namespace cake::gdn
