// Host entries of gdn_transfer.
#include "gdn_transfer.cuh"

#include <limits>

#include "gdn_walk_host.cuh"

namespace cake::gdn {

static float least_of(const Optional<double>& least) {
  return least.has_value() ? static_cast<float>(least.value() * 1.4426950408889634)
                           : -std::numeric_limits<float>::infinity();
}

// `least`: natural log of the decay below which a map counts as 0; without it none does. `m`, `live`: see TransferMaps.
void gdn_transfer(TensorView k, TensorView v, TensorView beta, TensorView plan, int64_t n, int64_t sequences,
                  int64_t chunk_capacity, TensorView t, TensorView b, TensorView rk, Optional<TensorView> initial_state,
                  TensorView out, TensorView m, TensorView live, Optional<double> least, int64_t stream) {
  DeviceGuard guard(k.device().device_id);
  TransferArgs args{};
  args.walk = walk_args({}, k, v, beta, plan, n, sequences, true, chunk_capacity, t, b, rk, initial_state, {}, {}, {},
                        {}, true, 1.0, true);
  const int64_t v_heads = args.walk.v_heads;
  args.walk.edge_out = dense_f32(out, "b", {n, v_heads, kHeadDim, kHeadDim});
  args.maps.m = dense_f32(m, "m", {n, v_heads, kHeadDim, kHeadDim});
  args.maps.live = dense<int>(live, "live", is_int32(live), {n, v_heads});
  args.least = least_of(least);
  launch("gdn_transfer", transfer_kernel, dim3(2 * n * v_heads), kWalkThreads, sizeof(WalkShared), stream_of(stream),
         args);
}

void gdn_adj_transfer(TensorView q, TensorView k, TensorView grad, TensorView beta, TensorView plan, int64_t n,
                      int64_t sequences, int64_t chunk_capacity, TensorView t, TensorView b, TensorView rk,
                      Optional<TensorView> dht, TensorView out, TensorView live, Optional<double> least, double scale,
                      bool l2norm, int64_t stream) {
  DeviceGuard guard(q.device().device_id);
  TransferArgs args{};
  args.walk = walk_args(q, k, grad, beta, plan, n, sequences, true, chunk_capacity, t, b, rk, dht, {}, {}, {}, {}, true,
                        scale, l2norm);
  const int64_t v_heads = args.walk.v_heads;
  args.walk.edge_out = dense_f32(out, "b", {n, v_heads, kHeadDim, kHeadDim});
  args.maps.live = dense<int>(live, "live", is_int32(live), {n, v_heads});
  args.least = least_of(least);
  launch("gdn_adj_transfer", adj_transfer_kernel, dim3(n * v_heads), kWalkThreads, sizeof(WalkShared),
         stream_of(stream), args);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gdn_transfer, gdn_transfer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(gdn_adj_transfer, gdn_adj_transfer);

}  // namespace cake::gdn
