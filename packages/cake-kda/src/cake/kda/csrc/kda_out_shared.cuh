// What the roles of kda_out are given and what they share.
#pragma once

#include "cake/pipe.cuh"
#include "cake/rows.cuh"
#include "cake/seq.cuh"
#include "kda_gate.cuh"
#include "kda_tree.cuh"

namespace cake::kda {

constexpr int kOutThreads = 512;
constexpr int kChannelRegisters = 200, kDeltaRegisters = 72, kProducerRegisters = 40;
static_assert(2 * kChannelRegisters + kDeltaRegisters + kProducerRegisters == 512, "of a lane slot");
constexpr float kLeastBeta = 0x1p-60f;
constexpr int kPartial = 1 + kHeadDim;  // floats of a row of partial sums

enum OutBarrier { kChannelBarrier = 1, kDeltaBarrier = 2 };

// Results that lie as the host has it. dv holds Y when the kernel begins; dg is of g's type.
enum OutResult { kDq, kDk, kDv, kDbeta, kDg, kOutResults };

struct OutArgs {
  View<const __nv_bfloat16> q, k, v, grad;  // [B, T, H or HV, 128]; grad = dO
  View<const void> g;  // [B, T, HV, 128]
  bool g_bf16;
  GateArgs gate;
  Scalars beta;
  Plan plan;
  const __nv_bfloat16 *kg, *t;  // images [chunks, HV, 64, 128] and [chunks, HV, 64, 64]
  const float *rq, *rk;  // [H, total]
  const __nv_bfloat16 *states, *adjoints;  // images [slots, HV, 128, 128]
  bool states_edge, adjoints_edge;  // whether the tapes have the sequences' edge slots
  View<void> results[kOutResults];  // [B, T, H or HV, 128]; dbeta [B, T, HV], fp32 or bf16
  bool dbeta_bf16;
  float* partials;  // [chunk capacity, HV, 129], or null without a gate
  int heads, group;
  float scale;
  bool l2norm;

  __device__ __forceinline__ __nv_bfloat16* rows(OutResult result, int64_t place) const {
    return static_cast<__nv_bfloat16*>(results[result].data) + place;
  }
};

// Per token and v head; two sets, since warpgroup 2 is a v head ahead.
struct alignas(16) OutVectors {
  float beta[kChunk], diagonal[kChunk];  // the latter: of dA
  float residual[kChunk];  // Y . W
  int64_t first[kOutResults];  // where its results begin
  int64_t gates;  // and its gates
  float bias[kHeadDim], a_log;  // of these
  int rows;
  uint32_t dead[2];  // a bit for each row; -Y_i . D_j of such a row i lies in column i of dL, above the diagonal
};

struct OutShared {
  alignas(1024) uint8_t s[kStateTileBytes], r[kStateTileBytes];
  // Kg of a v head, and after it dA and dL.
  struct {
    alignas(1024) uint8_t da[kSquareTileBytes], dn[kSquareTileBytes];
  } pairs[2];
  alignas(1024) uint8_t v[kTokenTileBytes];  // then beta W, then D
  alignas(1024) uint8_t grad[kTokenTileBytes], y[kTokenTileBytes];
  alignas(1024) uint8_t q[kTokenTileBytes], k[kTokenTileBytes];  // then dq and dk on their way out
  alignas(1024) uint8_t t[kSquareTileBytes];
  alignas(16) Decays decays;
  OutVectors vectors[2];
  float rq[kChunk], rk[kChunk];
  float dead_dots[8][kChunk], q_dots[8][kChunk], k_dots[8][kChunk];  // by warp; the latter q^ . dq^ and k^ . dk^
  float q_dot[kChunk], k_dot[kChunk];
  float a_log[8];
  alignas(8) uint64_t kg_full[2], pairs_full[2], pairs_empty[2];  // Kg and t; dA, dL and vectors
  uint64_t s_full, s_empty, r_full, r_empty, t_empty;
  uint64_t v_full, v_empty;
  uint64_t grads_full, grads_empty;  // grad, y, beta
  uint64_t rows_full, rows_empty;  // q, k, rq, rk
  uint64_t delta_full;  // D
};
static_assert(sizeof(OutShared) <= 232448, "an SM gives a CTA 227 KB");

__device__ __forceinline__ void put_dbeta(const OutArgs& args, const OutVectors& vectors, int row, float x) {
  const View<void>& out = args.results[kDbeta];
  put_scalar(out, args.dbeta_bf16, vectors.first[kDbeta] + row * out.token_stride, x);
}

}  // namespace cake::kda
