// What the warpgroups of gdn_out share: its arguments, its shared memory, decays, and places of results. Names: gdn_out.cuh.
#pragma once

#include "cake/frag.cuh"
#include "cake/pipe.cuh"
#include "cake/rows.cuh"
#include "cake/seq.cuh"
#include "gdn_beta.cuh"

namespace cake::gdn {

constexpr int kOutThreads = 512;
constexpr int kQueryRegisters = 152, kEraseRegisters = 160, kDeltaRegisters = 160, kOutProducerRegisters = 40;
static_assert(kQueryRegisters + kEraseRegisters + kDeltaRegisters + kOutProducerRegisters == 512, "of a lane slot");

enum OutBarrier { kDeltaBarrier = 1, kProducerBarrier = 2 };

// Results that lie as the host has it. dv holds Z when the kernel begins: what differs is written.
enum OutResult { kDq, kDk, kDv, kDbeta, kDg, kOutResults };

struct OutArgs {
  View<const __nv_bfloat16> q, k, v, grad;  // [B, T, H or HV, 128]; grad = dO
  Scalars beta;
  Plan plan;
  const __nv_bfloat16* t;  // [HV, total, 64]
  const float *b, *rq, *rk;  // [HV, total], [H, total]
  const __nv_bfloat16 *states, *adjoints;  // images [slots, HV, 128, 128]
  bool states_edge, adjoints_edge;  // whether the tapes have the sequences' edge slots
  View<void> results[kOutResults];  // dq, dk, dv [B, T, H or HV, 128] bf16; dbeta, dg [B, T, HV] fp32 or bf16
  bool dbeta_bf16, dg_bf16;
  int heads, group;
  float scale;
  bool l2norm;

  __device__ __forceinline__ __nv_bfloat16* rows(OutResult result, int64_t place) const {
    return static_cast<__nv_bfloat16*>(results[result].data) + place;
  }
};

// Per token and v head; two sets, for the v head in work and the next.
struct alignas(16) OutVectors {
  float b[kChunk], grown[kChunk], read[kChunk], rest[kChunk], beta[kChunk];  // b, 2^b, s 2^b, 2^(b_C - b)
  float decay;  // 2^b_C
};

// Parts of db and dg: q^ . dq^, e, k^ . (...), and per-warp parts of <S, R> and of the sum of 2^(b_C - b) k^ . (D R^T); and
// Z . W where dbeta comes of sums.
struct OutDots {
  float query[kChunk], erase[kChunk], residual[kChunk], key[kChunk];
  float state[4], written[4];
  int small[4];  // whether 16 rows have one whose dbeta comes of sums
};

// Where a pair's results begin, and how many rows they have. Those of its v head j lie j head strides further.
struct OutPlace {
  int64_t first[kOutResults];
  int rows;
};

// q^ and k^ of a pair; dq and dk on their way out.
struct OutPairTiles {
  alignas(1024) uint8_t q[kTokenTileBytes], k[kTokenTileBytes];
};

struct OutShared {
  OutPairTiles pairs[2];
  alignas(1024) uint8_t s[kStateTileBytes], r[kStateTileBytes];
  alignas(1024) uint8_t v[kTokenTileBytes], grad[kTokenTileBytes], z[kTokenTileBytes], t[kSquareTileBytes];
  union {
    struct {
      alignas(1024) uint8_t delta[kTokenTileBytes];  // beta W, then D
      alignas(1024) uint8_t dp[kSquareTileBytes], dl[kSquareTileBytes];
    };
    float4 key[16][128];  // at the end of a group: warpgroup 2's part of dk^, in thread-private slots
  };
  OutVectors vectors[2];
  OutDots dots[2];
  float rq[2][kChunk], rk[2][kChunk];
  OutPlace places[2];
  alignas(8) uint64_t pair_full[2], pair_empty[2];  // q^, k^, rq, rk
  uint64_t values_full, values_empty;  // v, t, vectors
  uint64_t grads_full, grads_empty;  // grad, z
  uint64_t s_full, s_empty, r_full, r_empty;
  uint64_t delta_full, products_full;  // D; dP and dL
  uint64_t dots_full;  // of a v head, whose products are all made by then
  uint64_t key_full, key_empty;
};
static_assert(sizeof(OutShared) <= 232448, "an SM gives a CTA 227 KB");

// ---- what the computing warpgroups share -------------------------------------------------------------------------

__device__ __forceinline__ int pairs_of_cta(const OutArgs& args) {
  const int works = args.plan.chunk_count() * args.heads;
  return blockIdx.x < works ? (works - 1 - int(blockIdx.x)) / int(gridDim.x) + 1 : 0;
}

// G_ij, zero above the diagonal, and on it when kStrict.
template <bool kStrict>
__device__ __forceinline__ void decays(float (&g)[32], const OutVectors& vectors, const Lane& me) {
  const float b[2] = {vectors.b[me.row(0)], vectors.b[me.row(1)]};
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const int column = me.column(c);
    const float2 bc = *reinterpret_cast<const float2*>(vectors.b + column);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int least = me.row(h) - (kStrict ? 1 : 0), n = 4 * c + 2 * h;
      g[n] = column <= least ? ex2(b[h] - bc.x) : 0.f;
      g[n + 1] = column + 1 <= least ? ex2(b[h] - bc.y) : 0.f;
    }
  }
}

// Where a result of row r of a pair's v head j lies.
__device__ __forceinline__ int64_t place_of(const OutArgs& args, OutResult result, const OutPlace& place, int j,
                                            int r) {
  const View<void>& view = args.results[result];
  return place.first[result] + j * view.head_stride + r * view.token_stride;
}

}  // namespace cake::gdn
