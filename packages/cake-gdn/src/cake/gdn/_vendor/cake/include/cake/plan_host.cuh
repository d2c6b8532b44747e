// Host entries that make a call's tables: each op exports them under its own name.
#pragma once

#include <algorithm>

#include "host.cuh"
#include "plan.cuh"

namespace cake::host {

// Writes the tables of `n` sequences into `words`. Boundaries: `kind` 0 batch rows of equal length, 1 a host array
// (`host_boundaries` points at n + 1 int32, read during the call), 2 int32 and 3 int64 on the device. 4 more than 1 or 2: the
// sequences are segments, and kInnerBoundary is added to every boundary behind which a sequence goes on.
inline void make_plan(TensorView words, int64_t kind, int64_t host_boundaries, Optional<TensorView> device_boundaries,
                      int64_t n, int64_t chunk_capacity, int64_t total, int64_t tokens_per_batch, int64_t stream) {
  DeviceGuard guard(words.device().device_id);
  const bool cut = kind >= 4;
  if (cut) kind -= 4;
  if (kind < 0 || kind > Boundaries::kInt64 || (cut && kind != Boundaries::kInline && kind != Boundaries::kInt32))
    TVM_FFI_THROW(ValueError) << "unknown kind of boundaries " << kind << (cut ? " of segments" : "");
  const Plan plan = plan_of(words, n, chunk_capacity, total, tokens_per_batch, cut);
  Boundaries boundaries{};
  boundaries.kind = static_cast<Boundaries::Kind>(kind);
  boundaries.cut = cut;
  if (kind == Boundaries::kInline) {
    const int* values = reinterpret_cast<const int*>(host_boundaries);
    if (n + 1 > kInlineBoundaries)
      TVM_FFI_THROW(ValueError) << "at most " << kInlineBoundaries - 1 << " sequences fit a launch, got " << n;
    for (int64_t i = 0; i <= n; ++i) boundaries.values[i] = values[i];
  } else if (kind != Boundaries::kUniform) {
    boundaries.device = device_boundaries.value().data_ptr();
  }
  launch("plan", plan_kernel, dim3(1), kPlanThreads, 0, stream_of(stream), boundaries, plan);
}

inline void launch_cut_plan(TensorView words, TensorView boundaries, int64_t n, int64_t sequences, int64_t length,
                            const Choice& choice, int64_t chunk_capacity, int64_t total, int64_t tokens_per_batch,
                            int64_t stream) {
  DeviceGuard guard(words.device().device_id);
  const Plan plan = plan_of(words, n, chunk_capacity, total, tokens_per_batch, true, sequences);
  if (boundaries.ndim() != 1 || boundaries.size(0) != sequences + 1 || length < 1)
    TVM_FFI_THROW(ValueError) << "boundaries must be [" << sequences + 1 << "] and length at least 1, got "
                              << shape_text(boundaries) << " and " << length;
  Boundaries given{};
  given.kind = is_int32(boundaries) ? Boundaries::kInt32 : Boundaries::kInt64;
  given.device = boundaries.data_ptr();
  launch("cut_plan", cut_plan_kernel, dim3(1), kPlanThreads, 0, stream_of(stream), given, plan,
         static_cast<int>(sequences), static_cast<int>(length), choice);
}

// Writes the tables of `n` segments, a bound, of `sequences` sequences cut on the device; see cut_plan_kernel.
inline void make_cut_plan(TensorView words, TensorView boundaries, int64_t n, int64_t sequences, int64_t length,
                          int64_t chunk_capacity, int64_t total, int64_t tokens_per_batch, int64_t stream) {
  launch_cut_plan(words, boundaries, n, sequences, length, Choice{}, chunk_capacity, total, tokens_per_batch, stream);
}

// The same with a choice of lengths: `host_choice` points at the words of a `Choice`, read during the call.
inline void make_chosen_plan(TensorView words, TensorView boundaries, int64_t n, int64_t sequences, int64_t host_choice,
                             int64_t chunk_capacity, int64_t total, int64_t tokens_per_batch, int64_t stream) {
  const Choice& choice = *reinterpret_cast<const Choice*>(host_choice);
  if (sequences > kChosenSequences || choice.count < 1 || choice.count > kChosenLengths)
    TVM_FFI_THROW(ValueError) << "a choice must be of 1 to " << kChosenLengths << " lengths for at most "
                              << kChosenSequences << " sequences, got " << choice.count << " for " << sequences;
  for (int i = 0; i < choice.count; ++i)
    if (choice.lengths[i] < 1) TVM_FFI_THROW(ValueError) << "lengths must be at least 1, got " << choice.lengths[i];
  launch_cut_plan(words, boundaries, n, sequences, 1, choice, chunk_capacity, total, tokens_per_batch, stream);
}

// Copies host boundaries too many for one launch into `device` (int32), `count` of them from index `first` on.
static __global__ void boundaries_kernel(const __grid_constant__ Boundaries boundaries, int* device, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) device[i] = boundaries.values[i];
}

inline void copy_boundaries(TensorView device, int64_t host_boundaries, int64_t count, int64_t stream) {
  DeviceGuard guard(device.device().device_id);
  int* out = dense<int>(device, "boundaries", is_int32(device), {count});
  const int* values = reinterpret_cast<const int*>(host_boundaries);
  for (int64_t first = 0; first < count; first += kInlineBoundaries) {
    Boundaries part{};
    const int size = static_cast<int>(std::min<int64_t>(kInlineBoundaries, count - first));
    for (int i = 0; i < size; ++i) part.values[i] = values[first + i];
    launch("boundaries", boundaries_kernel, dim3(1), 256, 0, stream_of(stream), part, out + first, size);
  }
}

}  // namespace cake::host
