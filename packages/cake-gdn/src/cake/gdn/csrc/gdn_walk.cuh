// What the two serial walks (gdn_scan forward, gdn_adj backward) share: one CTA per (sequence, v head), its warp
// roles, shared memory, the warps that load, that make P and the factors, and the state's traffic.
//
// Warpgroups: 0 and 1 hold the transposed state, 64 rows of V each, in fp32 registers and never meet; 2 (scores) runs
// a chunk ahead and makes P_ij = s r_q,i r_k,j 2^(b_i - b_j) q_i . k_j (i >= j); of 3 two warps (producer) load stages and
// store what comes back in them, and two (factors), a token a thread, make what rows and columns are multiplied by. Per chunk
// a stage holds k, q, x (v forward, dO backward) and T. A state warp owns 16 channels of V: it alone reads them from x, so it
// leaves its output there without a barrier, and the producer sends it to memory before it fills the stage again.
#pragma once

#include "cake/frag.cuh"
#include "cake/pipe.cuh"
#include "cake/tile_map.cuh"
#include "cake/walk.cuh"
#include "gdn_beta.cuh"

namespace cake::gdn {

enum class Role { kState0, kState1, kScores, kProducer };

constexpr int kWalkThreads = 512;
constexpr int kStages = 3, kHelperStages = 2;
constexpr int kStateRegisters = 208, kScoresRegisters = 64, kProducerRegisters = 32;
static_assert(2 * kStateRegisters + kScoresRegisters + kProducerRegisters == 512, "a lane slot has 512 registers");
constexpr int kProducerThreads = 64;

enum NamedBarrier { kProducerBarrier = 1 };

struct WalkArgs {
  View<const __nv_bfloat16> q, k, x;  // [B, T, H or HV, 128]; x is v or dO
  Scalars beta;  // [B, T, HV]
  Plan plan;
  const __nv_bfloat16* t;  // [HV, total, 64]
  const float *b, *rk;  // [HV, total], [H, total]
  float* rq;  // [H, total] or null: where the norms of q go
  View<__nv_bfloat16> out;  // [B, T, HV, 128]: o or Z; may be null
  __nv_bfloat16* states;  // tape images [slots, HV, 128, 128]; may be null
  const float* edge_in;  // [N, HV, K, V] or null: initial state, or gradient of the final state
  const float* inner;  // [segments, HV, K, V] of a call that is cut, else null: the states where segments meet
  float* edge_out;  // [N, HV, K, V] or null: final state, or gradient of the initial state
  int v_heads, group;
  float scale;
  bool l2norm;
  bool edge_slots;  // whether the tape has a slot for the sequence's edge too
  TileMap q_tiles, k_tiles, x_tiles, t_tiles, out_tiles;  // of q, k, x, t and out

  void readdress() {
    q_tiles.readdress(), k_tiles.readdress(), x_tiles.readdress(), t_tiles.readdress(), out_tiles.readdress();
  }
};

// Factors of a chunk's rows and columns; which they are differs by direction.
struct alignas(16) Factors {
  float a[kChunk], b[kChunk], c[kChunk], d[kChunk];
  float decay;  // 2^b_C
};

// What P needs of a token: two neighbours' are 16 bytes.
struct alignas(8) TokenRow {
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
  alignas(16) TokenRow rows[kHelperStages][kChunk];  // from factors to scores
  Walk walk;  // for roles that have no registers for it
  int64_t beta_first;  // place of the sequence's first beta
  Ring<kStages> ring;  // producer -> everyone else
  Ring<kHelperStages> scalars;  // factors -> scores
  Ring<kHelperStages> helped;  // factors and scores -> state warps
};
static_assert(sizeof(WalkShared) <= 232448, "an SM gives a CTA 227 KB");

// What a walk needs: P, of which q is a part; x; and whether rows go out in place of x.
template <bool kForward_, bool kScores_, bool kValues_, bool kOutput_>
struct WalkKind {
  static constexpr bool kForward = kForward_, kScores = kScores_, kValues = kValues_, kOutput = kOutput_;
};

template <typename Kind>
__device__ __forceinline__ void walk_init(WalkShared& s, const WalkArgs& args, const Walk& walk, int thread) {
  if (thread == 0) {
    s.walk = walk;
    s.beta_first = args.beta.view.place(walk.sequence.token, args.plan.tokens_per_batch, walk.v_head);
    s.ring.init(1, (8 + (Kind::kScores ? 4 : 0)) * kWarpArrivals);  // warps that read a stage
    s.scalars.init(kChunk, 4 * kWarpArrivals);
    s.helped.init(kChunk + (Kind::kScores ? 128 : 0), 8 * kWarpArrivals);
    mbar_init_fence();
  }
  __syncthreads();
}

// ---- producer --------------------------------------------------------------------------------------------------

// Where a chunk has all its tokens one thread asks for whole tiles; else all threads copy rows, which is seldom enough to be
// short rather than fast.
template <typename Kind>
__device__ __forceinline__ void produce(WalkShared& s, const WalkArgs& args, const Walk& walk, int thread) {
  const int tokens = args.plan.tokens_per_batch;
  RingState<kStages> at;
#pragma unroll 1
  for (int i = 0; i < walk.chunks + kStages; ++i, at.advance()) {
    WalkStage& stage = s.stages[at.stage];
    const int done = i - kStages;
    if (i < walk.chunks || (Kind::kOutput && done >= 0)) s.ring.wait_empty(at);
    if (Kind::kOutput && done >= 0) {  // what this stage held last has been used, and its output lies in x
      const int chunk = walk.chunk(done, Kind::kForward), token = walk.token(chunk), rows = walk.rows(chunk);
      if (rows < kChunk) {
        store_output<16, kProducerThreads, 1>(smem_addr(stage.x), args.out.row(token, tokens, walk.v_head),
                                              args.out.token_stride, rows, thread);
        bar_sync(kProducerBarrier, kProducerThreads);  // before thread 0 may have x filled
      } else if (thread == 0) {
        store_tile<2>(args.out_tiles, walk.v_head, token % tokens, token / tokens, smem_addr(stage.x));
        bulk_commit();
      }
    }
    if (i >= walk.chunks) continue;
    const int chunk = walk.chunk(i, Kind::kForward), token = walk.token(chunk), rows = walk.rows(chunk);
    const uint32_t full = smem_addr(s.ring.full + at.stage);
    const uint32_t k = smem_addr(stage.k), q = smem_addr(stage.q), x = smem_addr(stage.x), t = smem_addr(stage.t);
    if (rows < kChunk) {
      if (thread == 0) bulk_wait_read();
      bar_sync(kProducerBarrier, kProducerThreads);  // x has been stored
      load_rows<16, kProducerThreads, 1>(k, args.k.row(token, tokens, walk.head), args.k.token_stride, rows, thread);
      if constexpr (Kind::kScores)
        load_rows<16, kProducerThreads, 1>(q, args.q.row(token, tokens, walk.head), args.q.token_stride, rows, thread);
      if constexpr (Kind::kValues)
        load_rows<16, kProducerThreads, 1>(x, args.x.row(token, tokens, walk.v_head), args.x.token_stride, rows,
                                           thread);
      load_rows<8, kProducerThreads, 1>(t, args.t + (int64_t(walk.v_head) * args.plan.total + token) * kChunk, kChunk,
                                        rows, thread);
      cp_async_commit();
      cp_async_wait<0>();
      fence_proxy_async();
      bar_sync(kProducerBarrier, kProducerThreads);
      if (thread == 0) mbar_arrive(full);
    } else if (thread == 0) {
      const int batch = token / tokens, first = token % tokens;
      mbar_arrive_expect_tx(full, (1 + Kind::kScores + Kind::kValues) * kTokenTileBytes + kSquareTileBytes);
      load_tile<2>(k, args.k_tiles, walk.head, first, batch, full);
      if constexpr (Kind::kScores) load_tile<2>(q, args.q_tiles, walk.head, first, batch, full);
      load_tile<1>(t, args.t_tiles, walk.v_head, token, 0, full);
      if constexpr (Kind::kValues) {
        bulk_wait_read();  // x has been stored
        load_tile<2>(x, args.x_tiles, walk.v_head, first, batch, full);
      }
    }
  }
  if (Kind::kOutput && thread == 0) bulk_wait();  // shared memory must outlive the copies
}

// ---- factors ---------------------------------------------------------------------------------------------------

// A token's scalars, or what a row past the end needs: b repeats the last one, so that 2^(b_C - b) stays 1, the rest is 0.
struct TokenScalars {
  float b = 0.f, last = 0.f, rk = 0.f;
  uint32_t beta = 0;

  // `beta_first`: place of the sequence's first beta.
  __device__ __forceinline__ void load(const WalkArgs& args, const Walk& walk, int64_t beta_first, int chunk, int row) {
    const int64_t total = args.plan.total;
    const int token = walk.token(chunk), rows = walk.rows(chunk);
    const float* decays = args.b + walk.v_head * total + token;
    b = decays[min(row, rows - 1)], last = decays[rows - 1];
    const bool valid = row < rows;
    beta = valid ? args.beta.bits(beta_first + (chunk * kChunk + row) * args.beta.view.token_stride) : 0;
    rk = valid ? args.rk[walk.head * total + token + row] : 0.f;
  }
};

// `row`: the thread's token in each chunk.
template <typename Kind>
__device__ __forceinline__ void make_factors(WalkShared& s, const WalkArgs& args, const Walk& walk, int row) {
  TokenScalars now;
  if (walk.chunks > 0) now.load(args, walk, s.beta_first, walk.chunk(0, Kind::kForward), row);
#pragma unroll 1
  for (int i = 0; i < walk.chunks; ++i) {
    const auto out = RingState<kHelperStages>::after(i);
    if constexpr (Kind::kScores) {
      s.scalars.wait_empty(out);
      s.rows[out.stage][row] = {now.b, now.rk};
      s.scalars.signal_full(out);
    }
    s.helped.wait_empty(out);
    Factors& f = s.factors[out.stage];
    const float beta = args.beta.value(now.beta), erase = beta * ex2(now.b) * now.rk;
    const float write = ex2(now.last - now.b) * now.rk;
    if constexpr (Kind::kForward) {
      f.a[row] = beta;  // W = a v - b (k S)
      f.b[row] = erase;
      f.d[row] = write;  // S += (d D)^T k
    } else {
      f.a[row] = write;  // dD = a (k R) + P^T dO
      f.c[row] = -erase;  // R += (c Y)^T k
      f.d[row] = row_factor(beta);  // Z = d Y
    }
    if (row == 0) f.decay = ex2(now.last);
    s.helped.signal_full(out);
    // The next chunk's are on their way for a step.
    if (i + 1 < walk.chunks) now.load(args, walk, s.beta_first, walk.chunk(i + 1, Kind::kForward), fresh(row));
  }
}

// ---- scores ----------------------------------------------------------------------------------------------------

// 1 / |q| of rows row0 + lane / 4 + 8 h.
__device__ __forceinline__ void query_norms(float (&norm)[2], uint32_t q, int row0, int lane) {
  float sum[2][2] = {};
#pragma unroll
  for (int first = 0; first < 8; first += 2) {
    uint32_t x[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) ldmatrix(x[i], frag_address<kChunk>(q, row0, first + i, lane));
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float low = bf16_lo(x[i][j]), high = bf16_hi(x[i][j]);
        sum[j & 1][0] = fmaf(low, low, sum[j & 1][0]), sum[j & 1][1] = fmaf(high, high, sum[j & 1][1]);
      }
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) norm[h] = rsqrtf(row_sum(sum[h][0] + sum[h][1]) + kNormEps);
}

// P, and what else has a norm of q in it.
template <typename Kind>
__device__ __forceinline__ void make_scores(WalkShared& s, const WalkArgs& args, const Walk& walk, int thread) {
  RingState<kStages> at;
#pragma unroll 1
  for (int i = 0; i < walk.chunks; ++i, at.advance()) {
    const auto out = RingState<kHelperStages>::after(i);
    WalkStage& stage = s.stages[at.stage];
    float p[32], scale[2] = {1.f, 1.f};
    s.ring.wait_full(at);
    wgmma_fence();
    gemm_ss<Major::K, kChunk, Major::K, kChunk, 8>(p, smem_addr(stage.q), smem_addr(stage.k), false);
    wgmma_commit();
    // Nothing that depends on the thread's place is worth a register beside P.
    const int lane = fresh(thread) & 31, row0 = 16 * (fresh(thread) >> 5);
    if (args.l2norm) query_norms(scale, smem_addr(stage.q), row0, lane);
    if (args.rq && walk.v_head % args.group == 0 && (lane & 3) == 0) {  // one of a group's v heads leaves them
      const int chunk = walk.chunk(i, Kind::kForward);
      float* norms = args.rq + walk.head * int64_t(args.plan.total) + walk.token(chunk);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (const int row = row0 + (lane >> 2) + 8 * h; row < walk.rows(chunk)) norms[row] = scale[h];
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) scale[h] *= args.scale;

    s.scalars.wait_full(out);
    const TokenRow* rows = s.rows[out.stage];
    const int here = fresh(thread) & 31, first = 16 * (fresh(thread) >> 5) + (here >> 2);
    const float b_row[2] = {rows[first].b, rows[first + 8].b};
    s.helped.wait_empty(out);
    if ((here & 3) == 0) {
      Factors& f = s.factors[out.stage];
      float* reads = Kind::kForward ? f.c : f.b;  // O = c (q S) + P D, R += (b dO)^T q
      reads[first] = scale[0] * ex2(b_row[0]), reads[first + 8] = scale[1] * ex2(b_row[1]);
    }
    wgmma_wait<0>();
    pin(p);
    s.ring.signal_empty(at, here);
    uint32_t scores[4][4] = {};
    // All of them before the first is stored: a load behind a store to shared memory waits for it.
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (16 * j > first) continue;  // above the diagonal
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int c = 2 * j + n, column = 8 * c + 2 * (here & 3);
        const float4 pair = *reinterpret_cast<const float4*>(rows + column);  // b and rk of two tokens
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = first + 8 * h;
          const float x = row >= column ? scale[h] * pair.y * p[4 * c + 2 * h] * ex2(b_row[h] - pair.x) : 0.f;
          const float y = row >= column + 1 ? scale[h] * pair.w * p[4 * c + 2 * h + 1] * ex2(b_row[h] - pair.z) : 0.f;
          scores[j][2 * n + h] = pack_bf16(x, y);
        }
      }
    }
    s.scalars.signal_empty(out, here);
    const uint32_t tile = smem_addr(s.p[out.stage]);
#pragma unroll
    for (int j = 0; j < 4; ++j) stmatrix(frag_address<kChunk>(tile, 16 * (fresh(thread) >> 5), j, here), scores[j]);
    fence_proxy_async();
    s.helped.signal_full(out);
  }
}

// The roles of a CTA; `states` walks what a state warp holds.
template <typename Kind, typename States>
__device__ __forceinline__ void walk_roles(WalkShared& s, const WalkArgs& args, const Walk& walk, States states) {
  walk_init<Kind>(s, args, walk, threadIdx.x);
  const Role role = static_cast<Role>(threadIdx.x / 128);
  if (role == Role::kProducer) {
    registers_shrink<kProducerRegisters>();
    const int thread = threadIdx.x % 128;
    if (thread < kProducerThreads) produce<Kind>(s, args, s.walk, thread);
    else make_factors<Kind>(s, args, s.walk, thread - kProducerThreads);
  } else if (role == Role::kScores) {
    registers_shrink<kScoresRegisters>();
    if constexpr (Kind::kScores) make_scores<Kind>(s, args, s.walk, threadIdx.x % 128);
  } else {
    registers_grow<kStateRegisters>();
    states();
  }
}

}  // namespace cake::gdn
