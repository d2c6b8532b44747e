// Host entries of kda_transfer.
#include "kda_transfer.cuh"

#include <cmath>

#include "kda_walk_host.cuh"

namespace cake::kda {

static float least_of(const Optional<double>& least) {
  return least.has_value() ? static_cast<float>(std::exp(least.value())) : -1.f;
}

// `least`: natural log of the decay below which a map counts as 0; without it none does. `m`, `live`: see TransferMaps.
void kda_transfer(TensorView v, TensorView beta, TensorView plan, int64_t n, int64_t sequences, int64_t chunk_capacity,
                  TensorView qg, TensorView kg, TensorView kr, TensorView p, TensorView t, TensorView last,
                  Optional<TensorView> initial_state, TensorView out, TensorView m, TensorView live,
                  Optional<double> least, int64_t stream) {
  const int device = v.device().device_id;
  DeviceGuard guard(device);
  TransferArgs args{};
  args.walk = walk_args(v, beta, plan, n, sequences, true, chunk_capacity, qg, kg, kr, p, t, last, initial_state, {},
                        {}, {}, {}, true);
  const int64_t v_heads = args.walk.v_heads;
  args.walk.edge_out = dense_f32(out, "b", {n, v_heads, kHeadDim, kHeadDim});
  args.maps.m = dense_f32(m, "m", {n, v_heads, kHeadDim, kHeadDim});
  args.maps.live = dense<int>(live, "live", is_int32(live), {n, v_heads});
  args.least = least_of(least);
  launch_walk("kda_transfer", transfer_kernel<2>, transfer_kernel<1>, args, 2 * n * v_heads, device, stream);
}

void kda_adj_transfer(TensorView grad, TensorView beta, TensorView plan, int64_t n, int64_t sequences,
                      int64_t chunk_capacity, TensorView qg, TensorView kg, TensorView kr, TensorView p, TensorView t,
                      TensorView last, Optional<TensorView> dht, TensorView out, TensorView live,
                      Optional<double> least, int64_t stream) {
  const int device = grad.device().device_id;
  DeviceGuard guard(device);
  TransferArgs args{};
  args.walk = walk_args(grad, beta, plan, n, sequences, true, chunk_capacity, qg, kg, kr, p, t, last, dht, {}, {}, {},
                        {}, true);
  const int64_t v_heads = args.walk.v_heads;
  args.walk.edge_out = dense_f32(out, "b", {n, v_heads, kHeadDim, kHeadDim});
  args.maps.live = dense<int>(live, "live", is_int32(live), {n, v_heads});
  args.least = least_of(least);
  launch_walk("kda_adj_transfer", adj_transfer_kernel<2>, adj_transfer_kernel<1>, args, n * v_heads, device, stream);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_transfer, kda_transfer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_adj_transfer, kda_adj_transfer);

}  // namespace cake::kda
