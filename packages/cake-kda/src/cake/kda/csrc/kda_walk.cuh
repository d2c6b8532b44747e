// What the two serial walks (kda_scan forward, kda_adj backward) share: warp roles, shared memory, and the producer.
//
// A CTA walks one sequence and v head with all 128 channels of V, or with half of them where there are few of these: its
// kHalves state warpgroups hold 64 rows each of the transposed state in fp32 registers and never meet. Every value of a
// state's row depends on that row alone, so both forms give the same bits. The last warpgroup (producer) loads stages and
// stores what comes back in them. kda_prep has left the chunk's operands in memory as images of swizzled tiles, whose rows
// past the chunk's end are zero, so one thread starts their copies. Only x (v forward, dO backward) comes row by row. A
// state warp owns 16 channels of V: it alone reads them from x, so it leaves its output there without a barrier, and the
// producer sends whole rows to memory before it fills the stage again.
#pragma once

#include "cake/pipe.cuh"
#include "cake/walk.cuh"

namespace cake::kda {

constexpr int kStages = 2;
constexpr int kStateRegisters = 232, kProducerRegisters = 40;
static_assert(2 * kStateRegisters + kProducerRegisters <= 512, "a lane slot has 512 registers");

struct WalkArgs {
  View<const __nv_bfloat16> x;  // [B, T, HV, 128]: v or dO
  Scalars beta;  // [B, T, HV]
  Plan plan;
  const __nv_bfloat16 *qg, *kg, *kr;  // tile images [chunks, HV, 64, 128]
  const __nv_bfloat16 *p, *t;  // tile images [chunks, HV, 64, 64]
  const float* last;  // [chunks, HV, 128]: 2^b_C
  View<__nv_bfloat16> out;  // [B, T, HV, 128]: o, contiguous, or Y; may be null
  __nv_bfloat16* states;  // tape images [slots, HV, 128, 128]; may be null
  const float* edge_in;  // [N, HV, K, V] or null: initial state, or gradient of the final state
  const float* inner;  // [segments, HV, K, V] of a call that is cut, else null: the states where segments meet
  float* edge_out;  // [N, HV, K, V] or null: final state, or gradient of the initial state
  int v_heads;
  bool edge_slots;  // whether the tape has a slot for the sequence's edge too
};

template <int kHalves>
struct WalkShared {
  struct Stage {
    alignas(1024) uint8_t kg[kTokenTileBytes];
    alignas(1024) uint8_t qg[kTokenTileBytes];
    alignas(1024) uint8_t kr[kTokenTileBytes];
    alignas(1024) uint8_t x[kHalves * kSquareTileBytes];
    alignas(1024) uint8_t p[kSquareTileBytes];
    alignas(1024) uint8_t t[kSquareTileBytes];
    alignas(16) float last[kHeadDim];
    float beta[kChunk];
  };
  Stage stages[kStages];
  alignas(1024) uint8_t state[kHalves * kStateTileBytes / 2];  // the tape's image on its way out
  Ring<kStages> ring;
};
static_assert(sizeof(WalkShared<2>) <= 232448, "an SM gives a CTA 227 KB");

template <int kHalves>
constexpr int kWalkThreads = (kHalves + 1) * 128;

// What a CTA walks; `channel` is its first channel of V.
struct KdaWalk : Walk {
  int channel;

  // Place of a chunk's images.
  __device__ __forceinline__ int64_t image(int chunk, int v_heads) const {
    return int64_t(sequence.chunk_base + chunk) * v_heads + v_head;
  }
};

// CTAs of one sequence and v head.
template <int kHalves>
constexpr int kWalkCtas = 2 / kHalves;

template <int kHalves>
__device__ __forceinline__ KdaWalk kda_walk_of(const WalkArgs& args, int block) {
  constexpr int kCtas = kWalkCtas<kHalves>;
  return {walk_of(args.plan, args.v_heads, 1, block / kCtas), block % kCtas * 64};
}

template <int kHalves>
__device__ __forceinline__ void walk_init(WalkShared<kHalves>& s) {
  if (threadIdx.x == 0) {
    // A loading thread arrives once for its copies and once for its beta.
    s.ring.init(2 * 128, kHalves * 4 * kWarpArrivals);
    mbar_init_fence();
  }
  __syncthreads();
}

// `kValues`: whether x is loaded. A forward walk without output reads neither Qg nor P.
template <int kHalves, bool kForward, bool kOutput, bool kValues = true>
__device__ __forceinline__ void produce(WalkShared<kHalves>& s, const WalkArgs& args, const KdaWalk& walk, int thread) {
  constexpr int kGroups = 8 * kHalves;
  constexpr bool kScores = kOutput || !kForward;
  constexpr int kBulkBytes = (kScores ? 3 : 2) * kTokenTileBytes + (kScores ? 2 : 1) * kSquareTileBytes + kHeadDim * 4;
  const int tokens = args.plan.tokens_per_batch;
  const int row_stride = kForward ? args.v_heads * kHeadDim : static_cast<int>(args.out.token_stride);
  // The thread's token's beta, fetched a chunk ahead; 0 past the end.
  const auto beta_of = [&](int i) {
    if (i >= walk.chunks) return 0.f;
    const int chunk = walk.chunk(i, kForward);
    return thread < walk.rows(chunk) ? args.beta.at(walk.token(chunk) + thread, tokens, walk.v_head) : 0.f;
  };
  float beta = beta_of(0);
  RingState<kStages> at;
  for (int i = 0; i < walk.chunks + (kOutput ? kStages : 0); ++i, at.advance()) {
    auto& stage = s.stages[at.stage];
    const uint32_t full = smem_addr(s.ring.full + at.stage);
    const int done = i - kStages, chunk = walk.chunk(i, kForward);
    if (i < walk.chunks || done >= 0) s.ring.wait_empty(at);
    if (i < walk.chunks && thread == 0) {
      const int64_t image = walk.image(chunk, args.v_heads);
      mbar_expect_tx(full, kBulkBytes);
      bulk_load(smem_addr(stage.kg), args.kg + image * (kChunk * kHeadDim), kTokenTileBytes, full);
      bulk_load(smem_addr(stage.t), args.t + image * (kChunk * kChunk), kSquareTileBytes, full);
      if constexpr (kScores) {
        bulk_load(smem_addr(stage.qg), args.qg + image * (kChunk * kHeadDim), kTokenTileBytes, full);
        bulk_load(smem_addr(stage.p), args.p + image * (kChunk * kChunk), kSquareTileBytes, full);
      }
      bulk_load(smem_addr(stage.kr), args.kr + image * (kChunk * kHeadDim), kTokenTileBytes, full);
      bulk_load(smem_addr(stage.last), args.last + image * kHeadDim, kHeadDim * 4, full);
    }
    if (kOutput && done >= 0) {  // what this stage held last has been used, and its output lies in x
      const int before = walk.chunk(done, kForward), token = walk.token(before);
      __nv_bfloat16* out = kForward ? args.out.data + int64_t(token) * row_stride + walk.v_head * kHeadDim
                                    : args.out.row(token, tokens, walk.v_head);
      store_output<kGroups, 128>(smem_addr(stage.x), out + walk.channel, row_stride, walk.rows(before), thread);
    }
    if (i < walk.chunks) {
      if constexpr (kValues)
        load_rows<kGroups, 128>(smem_addr(stage.x), args.x.row(walk.token(chunk), tokens, walk.v_head) + walk.channel,
                                args.x.token_stride, walk.rows(chunk), thread);
      cp_async_mbar_arrive(full);
      if (thread < kChunk) stage.beta[thread] = beta;
      mbar_arrive(full);
      beta = beta_of(i + 1);
    }
  }
}

}  // namespace cake::kda
