// A ring of shared-memory stages between a producer and its consumers.
#pragma once

#include "ptx.cuh"

namespace cake {

// A warp arrives as one: its elected lane, after __syncwarp, for what all its lanes did. A race checker may not carry the
// order of __syncwarp into another lane's arrival, so a build for it lets every lane arrive.
#ifdef CAKE_EVERY_LANE_ARRIVES
constexpr int kWarpArrivals = 32;
#else
constexpr int kWarpArrivals = 1;
#endif

__device__ __forceinline__ void warp_arrive(uint64_t& bar, int lane) {
  __syncwarp();
  if (lane < kWarpArrivals) mbar_arrive(smem_addr(&bar));
}

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
  // After so many steps: with two stages it isn't worth a register.
  __device__ __forceinline__ static RingState after(int steps) {
    return {steps % kStages, static_cast<uint32_t>(steps / kStages) & 1};
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
  // By whole warps: `consumers` counts kWarpArrivals for each.
  __device__ __forceinline__ void signal_empty(const RingState<kStages>& s, int lane) {
    warp_arrive(empty[s.stage], lane);
  }
};

}  // namespace cake
