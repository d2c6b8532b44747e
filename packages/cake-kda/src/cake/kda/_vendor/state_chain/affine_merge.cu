// Host entry of affine_merge.
#include "affine_merge.cuh"

#include "cake/host.cuh"

namespace cake::state_chain {

using namespace cake::host;

template <int kColumns, bool kTransposed>
static void launch_build(const MergeArgs& args, int64_t grid, cudaStream_t stream) {
  launch("affine_merge", merge_kernel<kColumns, kTransposed>, dim3(grid), kMergeThreads,
         sizeof(MergeShared<kColumns, kTransposed>), stream, args);
}

template <bool kTransposed>
static void launch_width(const MergeArgs& args, int64_t grid, int64_t width, cudaStream_t stream) {
  switch (width) {
    case 8: return launch_build<8, kTransposed>(args, grid, stream);
    case 16: return launch_build<16, kTransposed>(args, grid, stream);
    case 32: return launch_build<32, kTransposed>(args, grid, stream);
    case 64: return launch_build<64, kTransposed>(args, grid, stream);
    default: TVM_FFI_THROW(ValueError) << "columns must be 8, 16, 32 or 64, got " << width;
  }
}

static MergeArgs merge_args(const TensorView& b, const TensorView& m, const Optional<TensorView>& live,
                            const TensorView& out) {
  MergeArgs args{};
  if (b.ndim() != 4 || (b.size(3) != 128 && b.size(3) != 256))
    TVM_FFI_THROW(ValueError) << "b must be [tiles, HV, 128, 128 or 256], got " << shape_text(b);
  const int64_t heads = b.size(1), columns = b.size(3);
  args.b = dense_f32(b, "b", {b.size(0), heads, kState, columns});
  args.m = dense_f32(m, "m", {m.size(0), heads, kState, kState});
  args.out = dense_f32(out, "out", {out.size(0), heads, kState, columns});
  if (live.has_value()) args.live = dense<int>(live.value(), "live", is_int32(live.value()), {m.size(0), heads});
  args.heads = static_cast<int>(heads);
  args.columns = static_cast<int>(columns);
  return args;
}

static void launch_merge(const MergeArgs& args, int64_t chains, int64_t width, bool transposed, int64_t stream) {
  const int64_t grid = chains * args.heads * (args.columns / (width > 0 ? width : 1));
  const auto run = transposed ? launch_width<true> : launch_width<false>;
  run(args, grid, width, stream_of(stream));
}

// `chains` chains; `table` points at host int32 read during the call: first[chains + 1], then (b, m, out) of each of
// first[chains] steps. `width`: columns of a block.
void affine_merge(TensorView b, TensorView m, Optional<TensorView> live, TensorView out, int64_t table, int64_t chains,
                  int64_t width, bool transposed, int64_t stream) {
  DeviceGuard guard(b.device().device_id);
  MergeArgs args = merge_args(b, m, live, out);
  const int* values = reinterpret_cast<const int*>(table);
  if (chains < 1 || chains > kMostChains)
    TVM_FFI_THROW(ValueError) << "a launch takes 1 to " << kMostChains << " chains, got " << chains;
  const int steps = values[chains];
  if (steps < chains || steps > kMostSteps)
    TVM_FFI_THROW(ValueError) << "a launch takes " << chains << " to " << kMostSteps << " steps, got " << steps;
  for (int64_t i = 0; i <= chains; ++i) args.first[i] = values[i];
  for (int i = 0; i < steps; ++i) {
    const int* step = values + chains + 1 + 3 * i;
    if (step[0] < 0 || step[0] >= b.size(0) || step[1] < -1 || step[1] >= m.size(0) || step[2] < -1 ||
        step[2] >= out.size(0))
      TVM_FFI_THROW(ValueError) << "step " << i << " leaves its tensors: tiles " << step[0] << " and " << step[1]
                                << ", row " << step[2];
    args.steps[i] = {step[0], step[1], step[2]};
  }
  launch_merge(args, chains, width, transposed, stream);
}

// The chains of `sequences` sequences that were cut on the device: `plan` holds their tables, of `n` segments.
void affine_merge_runs(TensorView b, TensorView m, TensorView live, TensorView out, TensorView plan, int64_t n,
                       int64_t chunk_capacity, int64_t sequences, int64_t width, bool transposed, int64_t stream) {
  DeviceGuard guard(b.device().device_id);
  MergeArgs args = merge_args(b, m, live, out);
  if (b.size(0) != n || m.size(0) != n || out.size(0) != n)
    TVM_FFI_THROW(ValueError) << "b, m and out must have " << n << " tiles, got " << b.size(0) << ", " << m.size(0)
                              << " and " << out.size(0);
  args.runs = plan_of(plan, n, chunk_capacity, 0, 0, true, sequences).runs();
  launch_merge(args, sequences, width, transposed, stream);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(affine_merge, affine_merge);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(affine_merge_runs, affine_merge_runs);

}  // namespace cake::state_chain
