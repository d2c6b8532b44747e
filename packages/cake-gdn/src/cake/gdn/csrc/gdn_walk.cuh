// What the two serial walks (gdn_scan forward, gdn_adj backward) share: one CTA per (sequence, v head), its warp
// roles, shared memory, the producer, the helper warpgroup that makes P, and the state's traffic.
//
// Warpgroups: 0 and 1 hold the transposed state, 64 rows of V each, in fp32 registers and never meet; 2 (helper) runs
// a chunk ahead and makes P_ij = s r_q,i r_k,j 2^(b_i - b_j) q_i . k_j (i >= j) and the row factors; 3 (producer) loads
// stages and stores what comes back in them. Per chunk a stage holds k, q, x (v forward, dO backward) and T. A state
// warp owns 16 channels of V: it alone reads them from x, so it leaves its output there without a barrier, and the producer
// sends whole rows to memory before it fills the stage again.
#pragma once

#include "cake/frag.cuh"
#include "cake/pipe.cuh"
#include "cake/walk.cuh"
#include "gdn_beta.cuh"

namespace cake::gdn {

enum class Role { kState0, kState1, kHelper, kProducer };

constexpr int kWalkThreads = 512;
constexpr int kStages = 3, kHelperStages = 2;
constexpr int kStateRegisters = 208, kHelperRegisters = 64, kProducerRegisters = 32;
static_assert(2 * kStateRegisters + kHelperRegisters + kProducerRegisters == 512, "a lane slot has 512 registers");

enum NamedBarrier { kHelperBarrier = 1 };

struct WalkArgs {
  View<const __nv_bfloat16> q, k, x;  // [B, T, H or HV, 128]; x is v or dO
  Scalars beta;  // [B, T, HV]
  Plan plan;
  const __nv_bfloat16* t;  // [HV, total, 64]
  const float *b, *rq, *rk;  // [HV, total], [H, total]
  View<__nv_bfloat16> out;  // [B, T, HV, 128]: o or Z; may be null
  __nv_bfloat16* states;  // tape images [slots, HV, 128, 128]; may be null
  const float* edge_in;  // [N, HV, K, V] or null: initial state, or gradient of the final state
  const float* inner;  // [segments, HV, K, V] of a call that is cut, else null: the states where segments meet
  float* edge_out;  // [N, HV, K, V] or null: final state, or gradient of the initial state
  int v_heads, group;
  float scale;
  bool edge_slots;  // whether the tape has a slot for the sequence's edge too
};

// Row factors of a chunk, made by the helper; which they are differs by direction.
struct alignas(16) Factors {
  float a[kChunk], b[kChunk], c[kChunk], d[kChunk];
  float decay;  // 2^b_C
};

// What P needs of a token: two neighbours' are 16 bytes.
struct TokenRow {
  float b, rk;
};

struct WalkStage {
  alignas(1024) uint8_t k[kTokenTileBytes];
  alignas(1024) uint8_t q[kTokenTileBytes];
  alignas(1024) uint8_t x[kTokenTileBytes];
  alignas(1024) uint8_t t[kSquareTileBytes];
};

struct WalkShared {
  WalkStage stages[kStages];
  alignas(1024) uint8_t p[kHelperStages][kSquareTileBytes];
  alignas(1024) uint8_t state[kStateTileBytes];  // the tape's image on its way out
  Factors factors[kHelperStages];
  alignas(16) TokenRow rows[kHelperStages][kChunk];  // the helper's own
  float rq[kHelperStages][kChunk];
  Ring<kStages> ring;  // producer -> state warps and helper
  Ring<kHelperStages> helped;  // helper -> state warps
};
static_assert(sizeof(WalkShared) <= 232448, "an SM gives a CTA 227 KB");

// `kScores`: whether the helper makes P; else it reads no stage and q isn't loaded.
template <bool kScores>
__device__ __forceinline__ void walk_init(WalkShared& s, int thread) {
  if (thread == 0) {
    s.ring.init(128, (8 + (kScores ? 4 : 0)) * kWarpArrivals);  // 128 loading threads; 8 state warps, 4 helper warps
    s.helped.init(128, 8 * kWarpArrivals);
    mbar_init_fence();
  }
  __syncthreads();
}

// ---- producer --------------------------------------------------------------------------------------------------

// `kValues`: whether x is loaded.
template <bool kForward, bool kOutput, bool kScores, bool kValues>
__device__ __forceinline__ void produce(WalkShared& s, const WalkArgs& args, const Walk& walk, int thread) {
  const int tokens = args.plan.tokens_per_batch;
  const int row_stride = kForward ? args.v_heads * kHeadDim : static_cast<int>(args.out.token_stride);
  RingState<kStages> at, landed;
  // Two chunks are on their way at a time: a chunk is announced once the next one's copies have been started. The copies
  // are ordinary writes, so each thread waits for its own and fences before wgmma may read them.
  for (int i = 0; i < walk.chunks + kStages; ++i, at.advance()) {
    WalkStage& stage = s.stages[at.stage];
    const int done = i - kStages;
    if (i < walk.chunks || (kOutput && done >= 0)) s.ring.wait_empty(at);
    if (kOutput && done >= 0) {  // what this stage held last has been used, and its output lies in x
      const int chunk = walk.chunk(done, kForward);
      const int token = walk.token(chunk);
      __nv_bfloat16* out = kForward ? args.out.data + int64_t(token) * row_stride + walk.v_head * kHeadDim
                                    : args.out.row(token, tokens, walk.v_head);
      store_output(smem_addr(stage.x), out, row_stride, walk.rows(chunk), thread);
    }
    if (i < walk.chunks) {
      const int chunk = walk.chunk(i, kForward), token = walk.token(chunk), rows = walk.rows(chunk);
      load_rows<16, 128>(smem_addr(stage.k), args.k.row(token, tokens, walk.head), args.k.token_stride, rows, thread);
      if constexpr (kScores)
        load_rows<16, 128>(smem_addr(stage.q), args.q.row(token, tokens, walk.head), args.q.token_stride, rows, thread);
      if constexpr (kValues)
        load_rows<16, 128>(smem_addr(stage.x), args.x.row(token, tokens, walk.v_head), args.x.token_stride, rows,
                           thread);
      load_rows<8, 128>(smem_addr(stage.t), args.t + (int64_t(walk.v_head) * args.plan.total + token) * kChunk, kChunk,
                        rows, thread);
    }
    cp_async_commit();
    if (i > 0 && i <= walk.chunks) {
      cp_async_wait<1>();
      fence_proxy_async();
      s.ring.signal_full(landed);
      landed.advance();
    }
  }
}

// ---- helper ----------------------------------------------------------------------------------------------------

// A token's scalars, or what a row past the end needs: b repeats the last one, so that 2^(b_C - b) stays 1, the rest is 0.
struct TokenScalars {
  float b = 0.f, rq = 0.f, rk = 0.f;
  uint32_t beta = 0;

  // `beta_first`: place of the sequence's first beta.
  __device__ __forceinline__ void load(const WalkArgs& args, const Walk& walk, int64_t beta_first, int chunk,
                                       int thread) {
    const int64_t total = args.plan.total;
    const int token = walk.token(chunk), rows = walk.rows(chunk);
    b = args.b[walk.v_head * total + token + min(thread, rows - 1)];
    const bool valid = thread < rows;
    beta = valid ? args.beta.bits(beta_first + (chunk * kChunk + thread) * args.beta.view.token_stride) : 0;
    rq = valid ? args.rq[walk.head * total + token + thread] : 0.f;
    rk = valid ? args.rk[walk.head * total + token + thread] : 0.f;
  }
};

template <bool kForward, bool kScores>
__device__ __forceinline__ void help(WalkShared& s, const WalkArgs& args, const Walk& walk, int thread) {
  const int lane = thread & 31;
  const int64_t beta_first = args.beta.view.place(walk.sequence.token, args.plan.tokens_per_batch, walk.v_head);
  RingState<kStages> at;
  RingState<kHelperStages> out;
  TokenScalars now;
  if (thread < kChunk && walk.chunks > 0) now.load(args, walk, beta_first, walk.chunk(0, kForward), thread);
  for (int i = 0; i < walk.chunks; ++i, at.advance(), out.advance()) {
    Factors& f = s.factors[out.stage];
    float p[32];
    if constexpr (kScores) {
      s.ring.wait_full(at);
      WalkStage& stage = s.stages[at.stage];
      wgmma_fence();
      gemm_ss<Major::K, kChunk, Major::K, kChunk, 8>(p, smem_addr(stage.q), smem_addr(stage.k), false);
      wgmma_commit();
    }
    s.helped.wait_empty(out);
    TokenRow* rows = s.rows[out.stage];
    if (fresh(thread) < kChunk) {
      rows[fresh(thread)] = {now.b, now.rk};
      s.rq[out.stage][fresh(thread)] = args.scale * now.rq;
    }
    bar_sync(kHelperBarrier, 128);  // and before these rows are written again, two chunks on, there is another
    if (fresh(thread) < kChunk) {
      const int token = fresh(thread);
      const float last = rows[kChunk - 1].b, grown = ex2(now.b), rest = ex2(last - now.b);
      const float beta = args.beta.value(now.beta);
      if constexpr (kForward) {
        f.a[token] = beta;  // W = a v - b (k S)
        f.b[token] = beta * grown * now.rk;
        f.c[token] = args.scale * grown * now.rq;  // O = c (q S) + P D
        f.d[token] = rest * now.rk;  // S += (d D)^T k
      } else {
        f.a[token] = rest * now.rk;  // dD = a (k R) + P^T dO
        f.b[token] = args.scale * grown * now.rq;  // R += (b dO)^T q
        f.c[token] = -beta * grown * now.rk;  // R += (c Y)^T k
        f.d[token] = row_factor(beta);  // Z = d Y
      }
      if (token == 0) f.decay = ex2(last);
      // The next chunk's are on their way while this one's P is made.
      if (i + 1 < walk.chunks) now.load(args, walk, beta_first, walk.chunk(i + 1, kForward), token);
    }
    if constexpr (!kScores) {
      s.helped.signal_full(out);
      continue;
    }
    const int here = fresh(lane), row0 = 16 * (fresh(thread) >> 5);  // nothing that depends on them is worth a register
    float b_row[2], scale[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + (here >> 2) + 8 * h;
      b_row[h] = rows[row].b, scale[h] = s.rq[out.stage][row];
    }
    wgmma_wait<0>();
    pin(p);
    s.ring.signal_empty(at, lane);
    uint32_t scores[4][4] = {};
    // All of them before the first is stored: a load behind a store to shared memory waits for it.
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (16 * j > row0) continue;  // above the diagonal
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int c = 2 * j + n, column = 8 * c + 2 * (here & 3);
        const float4 pair = *reinterpret_cast<const float4*>(rows + column);  // b and rk of two tokens
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = row0 + (here >> 2) + 8 * h;
          const float x = row >= column ? scale[h] * pair.y * p[4 * c + 2 * h] * ex2(b_row[h] - pair.x) : 0.f;
          const float y = row >= column + 1 ? scale[h] * pair.w * p[4 * c + 2 * h + 1] * ex2(b_row[h] - pair.z) : 0.f;
          scores[j][2 * n + h] = pack_bf16(x, y);
        }
      }
    }
    const uint32_t tile = smem_addr(s.p[out.stage]);
#pragma unroll
    for (int j = 0; j < 4; ++j) stmatrix(frag_address<kChunk>(tile, row0, j, here), scores[j]);
    fence_proxy_async();
    s.helped.signal_full(out);
  }
}

}  // namespace cake::gdn
