// A ring of shared-memory stages between a producer and its consumers.
#pragma once

#include "ptx.cuh"

namespace cake {

// `full` and `empty` are arrays of kStages mbarriers. Producer: wait_empty, fill, signal full. Consumer: wait_full,
// use, signal empty. Both walk the ring with their own state. A fresh mbarrier's preceding phase counts as complete, so the
// producer, whose parity starts flipped, finds every stage empty on its first round.
template <int kStages>
struct RingState {
  int stage = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

template <int kStages>
struct Ring {
  alignas(8) uint64_t full[kStages], empty[kStages];

  __device__ __forceinline__ void init(int producers, int consumers) {
    for (int i = 0; i < kStages; ++i) {
      mbar_init(smem_addr(full + i), producers);
      mbar_init(smem_addr(empty + i), consumers);
    }
  }
  __device__ __forceinline__ void wait_full(const RingState<kStages>& s) {
    mbar_wait(smem_addr(full + s.stage), s.parity);
  }
  __device__ __forceinline__ void wait_empty(const RingState<kStages>& s) {
    mbar_wait(smem_addr(empty + s.stage), s.parity ^ 1);
  }
  __device__ __forceinline__ void signal_full(const RingState<kStages>& s) { mbar_arrive(smem_addr(full + s.stage)); }
  __device__ __forceinline__ void signal_empty(const RingState<kStages>& s) { mbar_arrive(smem_addr(empty + s.stage)); }
};

}  // namespace cake
