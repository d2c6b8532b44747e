// Host entry of gdn_adj.
#include "gdn_adj.cuh"

#include "gdn_walk_host.cuh"

namespace cake::gdn {

void gdn_adj(TensorView q, TensorView k, TensorView grad, TensorView beta, TensorView plan, int64_t n,
             int64_t sequences, int64_t chunk_capacity, TensorView t, TensorView b, TensorView rk,
             Optional<TensorView> dht, Optional<TensorView> leaving, TensorView y, Optional<TensorView> dh0,
             TensorView states, TensorView rq, bool edge_slots, double scale, bool l2norm, int64_t stream) {
  DeviceGuard guard(q.device().device_id);
  WalkArgs args = walk_args(q, k, grad, beta, plan, n, sequences, leaving.has_value(), chunk_capacity, t, b, rk, dht,
                            leaving, y, dh0, states, edge_slots, scale, l2norm);
  args.rq = dense_f32(rq, "rq", {q.size(2), q.size(0) * q.size(1)});
  launch("gdn_adj", adj_kernel, dim3(n * args.v_heads), kWalkThreads, sizeof(WalkShared), stream_of(stream), args);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gdn_adj, gdn_adj);

}  // namespace cake::gdn
