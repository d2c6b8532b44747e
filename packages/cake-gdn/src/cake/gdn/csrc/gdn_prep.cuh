// gdn_prep: everything of a chunk that needs no state. One warp per (chunk, q/k head), looping over its v heads.
//
//   r_i   = 1 / sqrt(|k_i|^2 + eps)                              1 without L2 norm
//   b_i   = sum_{j<=i} max(g_j, -88) / ln 2                      inclusive, restarted at the chunk
//   L_ij  = beta_i (k_i . k_j) r_i r_j 2^(b_i - b_j)             i > j
//   T     = (I + L)^-1                                           stored as bf16
//
// k . k^T is made once per q/k head, of the raw keys (exact products of bf16), and its norms are applied to the result; its
// diagonal are their squares. Nothing passes from warp to warp: what hides a warp's latencies are the other warps, few
// enough for each to have many loads on their way.
// The clamp at -88 is exact in fp32 (e^-88 is at its underflow) and keeps b small enough to subtract.
#pragma once

#include "cake/seq.cuh"
#include "cake/warp_tri.cuh"

namespace cake::gdn {

struct PrepArgs {
  View<const __nv_bfloat16> k;  // [B, T, H, 128]
  Scalars g, beta;  // [B, T, HV]
  Plan plan;
  __nv_bfloat16* t;  // [HV, total, 64]
  float* b;  // [HV, total]
  float* rk;  // [H, total]
  int heads, group;  // H, HV / H
  bool l2norm;
};

constexpr int kPrepWarpsPerSm = 8;

struct PrepShared {
  alignas(128) uint8_t t[kSquareTileBytes];
  float b[kChunk], beta[kChunk];
  WarpTriShared tri;
  float4 gram[12][32];  // k k^T but for its diagonal blocks, as its accumulators: there are no registers for it
};

// Rows of 32 channels: row 8 n + lane / 4 of the chunk in word n, 8 channels to a lane. mma may take the channels in any order
// that is the same on both sides: these words are its operands as they are, k16 steps of words x, y and z, w.
struct Rows32 {
  uint4 row[8];

  __device__ __forceinline__ void load(const __nv_bfloat16* x, int64_t stride, int rows, int lane) {
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int i = min(8 * n + (lane >> 2), rows - 1);  // past the end, anything finite: beta is 0 there
      row[n] = __ldg(reinterpret_cast<const uint4*>(x + i * stride + 8 * (lane & 3)));
    }
  }
};

// Rows 16 i and on as operands A. `none` is 0: where ptxas knows that nothing is computed, it gathers the words anew for every
// product.
struct RowOperands {
  uint32_t a[2][4];

  __device__ __forceinline__ RowOperands(const Rows32& x, int i, uint32_t none) {
    const uint4 &upper = x.row[2 * i], &lower = x.row[2 * i + 1];
    a[0][0] = upper.x ^ none, a[0][1] = lower.x ^ none, a[0][2] = upper.y ^ none, a[0][3] = lower.y ^ none;
    a[1][0] = upper.z ^ none, a[1][1] = lower.z ^ none, a[1][2] = upper.w ^ none, a[1][3] = lower.w ^ none;
  }
};

// d += these rows times a row of the chunk in each column.
__device__ __forceinline__ void add_products(float (&d)[4], const RowOperands& x, const uint4& column) {
  mma_bf16(d, x.a[0], column.x, column.y);
  mma_bf16(d, x.a[1], column.z, column.w);
}

// Reciprocal norms of the rows whose squares are the diagonal of a block of 16, of which its upper left and lower right quarters
// are given: for rows lane / 4 + 8 h, and for columns 8 h + 2 (lane % 4) and the next.
struct Norms {
  float row[2] = {1.f, 1.f}, column[2][2] = {{1.f, 1.f}, {1.f, 1.f}};

  __device__ __forceinline__ void set(const float (&left)[4], const float (&right)[4], int lane) {
    const bool odd = (lane >> 2) & 1;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float square = h == 0 ? (odd ? left[1] : left[0]) : (odd ? right[3] : right[2]);
      const float own = rsqrtf(square + kNormEps);  // of this lane's row, where lane % 4 is half the row
      row[h] = __shfl_sync(0xffffffffu, own, (lane & ~3) | (lane >> 3));
#pragma unroll
      for (int e = 0; e < 2; ++e) column[h][e] = __shfl_sync(0xffffffffu, own, 9 * (lane & 3) + 4 * e);
    }
  }
};

// To 64 consecutive floats.
__device__ __forceinline__ void store_norms(float* out, const Norms (&x)[4], int rows, int lane) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const int n = lane & 3, row = 16 * i + 8 * n + (lane >> 2);
    const float value = n == 0 ? x[i].row[0] : n == 1 ? x[i].row[1] : n == 2 ? x[i + 1].row[0] : x[i + 1].row[1];
    if (row < rows) out[row] = value;
  }
}

// Place of a tile of k k^T: block row i, 8 columns c.
__host__ __device__ constexpr int gram_tile(int i, int c) { return i * (i + 1) + c; }

static __global__ void __launch_bounds__(32, kPrepWarpsPerSm) prep_kernel(const __grid_constant__ PrepArgs args) {
  extern __shared__ __align__(128) uint8_t raw[];
  PrepShared& s = *reinterpret_cast<PrepShared*>(raw);
  const int chunk_index = blockIdx.x / args.heads, head = blockIdx.x % args.heads;
  if (chunk_index >= args.plan.chunk_count()) return;  // capacity is an upper bound when boundaries are on the device
  const Chunk chunk = args.plan.chunk(chunk_index);
  const int lane = threadIdx.x;
  const int tokens = args.plan.tokens_per_batch;
  const int64_t total = args.plan.total;
  const uint32_t tile = smem_addr(s.t), none = static_cast<uint32_t>(args.heads) >> 31;
  zero_fill<32>(tile, kSquareTileBytes, lane);  // above the diagonal it stays so

  // ---- gates, of which a lane has tokens lane and lane + 32: the first v head's before the keys, which they would wait for ----
  const int first = head * args.group, end = first + args.group;
  const bool valid[2] = {lane < chunk.rows, lane + 32 < chunk.rows};
  const int64_t gate_at = args.g.view.place(chunk.token + lane, tokens, 0);
  const int64_t beta_at = args.beta.view.place(chunk.token + lane, tokens, 0);
  uint32_t gate[2] = {}, beta[2] = {};  // as they lie in memory, on their way while the v head before is computed
  const auto load_gates = [&](int v_head) {
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (valid[h]) {
        gate[h] = args.g.bits(gate_at + v_head * args.g.view.head_stride + 32 * h * args.g.view.token_stride);
        beta[h] = args.beta.bits(beta_at + v_head * args.beta.view.head_stride + 32 * h * args.beta.view.token_stride);
      }
  };
  load_gates(first);

  const __nv_bfloat16* k = args.k.row(chunk.token, tokens, head);
#pragma unroll
  for (int n = 0; n < 4; ++n) {  // all of it at once, whatever there are registers for
    const int i = 16 * n + (lane >> 1);
    if (i < chunk.rows) prefetch_l2(k + i * args.k.token_stride + 64 * (lane & 1));
  }
  // ---- normalised k k^T on and below the diagonal, once for the group ----
  float gram[20][4] = {};
  {
    Rows32 rows[2];
    rows[0].load(k, args.k.token_stride, chunk.rows, lane);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (c < 3) rows[(c + 1) & 1].load(k + 32 * (c + 1), args.k.token_stride, chunk.rows, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const RowOperands x(rows[c & 1], i, none);
#pragma unroll
        for (int n = 0; n < 2 * i + 2; ++n) add_products(gram[gram_tile(i, n)], x, rows[c & 1].row[n]);
      }
    }
    Norms norms[4];
    if (args.l2norm) {
#pragma unroll
      for (int i = 0; i < 4; ++i) norms[i].set(gram[gram_tile(i, 2 * i)], gram[gram_tile(i, 2 * i + 1)], lane);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int n = 0; n < 2 * i + 2; ++n)
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int e = 0; e < 2; ++e)
              gram[gram_tile(i, n)][2 * h + e] *= norms[i].row[h] * norms[n / 2].column[n & 1][e];
    }
#pragma unroll
    for (int i = 1; i < 4; ++i)
#pragma unroll
      for (int n = 0; n < 2 * i; ++n) {
        const auto& x = gram[gram_tile(i, n)];
        s.gram[i * (i - 1) + n][lane] = make_float4(x[0], x[1], x[2], x[3]);
      }
    store_norms(args.rk + head * total + chunk.token, norms, chunk.rows, lane);
  }

  // ---- the group's v heads ----
#pragma unroll 1
  for (int v_head = first; v_head < end; ++v_head) {
    float decay[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) decay[h] = valid[h] ? max_nan(args.g.value(gate[h]), kLeastGate) * kLog2E : 0.f;
#pragma unroll
    for (int d = 1; d < 32; d <<= 1)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float up = __shfl_up_sync(0xffffffffu, decay[h], d);
        if (lane >= d) decay[h] += up;
      }
    decay[1] += __shfl_sync(0xffffffffu, decay[0], 31);
    __syncwarp();  // T before is on its way
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      s.b[32 * h + lane] = decay[h], s.beta[32 * h + lane] = -args.beta.value(beta[h]);
      if (valid[h]) args.b[v_head * total + chunk.token + 32 * h + lane] = decay[h];
    }
    __syncwarp();
    if (v_head + 1 < end) load_gates(v_head + 1);  // while this one's inverse is made

    const int here = fresh(lane);  // nothing that depends on it is worth a register across the loop
    invert_unit_lower(s.tri, tile, here, [&](int i, int c, float (&x)[4]) {
      const int column = 8 * c + 2 * (here & 3);
      const float2 b = *reinterpret_cast<const float2*>(s.b + column);
      float4 kept;
      if (c < 2 * i) kept = s.gram[i * (i - 1) + c][here];
      const float* product = c < 2 * i ? &kept.x : gram[gram_tile(i, c)];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = 16 * i + 8 * h + (here >> 2);
        const float b_row = s.b[row], beta_row = s.beta[row];
        const float* g = product + 2 * h;
        x[2 * h] = c < 2 * i + h || row > column ? beta_row * g[0] * ex2(b_row - b.x) : 0.f;
        x[2 * h + 1] = c < 2 * i + h || row > column + 1 ? beta_row * g[1] * ex2(b_row - b.y) : 0.f;
      }
    });
    __syncwarp();

    // ---- T: 8 lanes write a row ----
    __nv_bfloat16* out = fresh(args.t + (v_head * total + chunk.token) * kChunk + 8 * here);
    const uint32_t from = tile + group_offset<kChunk>(here >> 3, here & 7);
    const int rows = chunk.rows - (here >> 3);
#pragma unroll
    for (int n = 0; n < 16; n += 4) {
      uint4 x[4];
#pragma unroll
      for (int m = n; m < n + 4; ++m) x[m - n] = ld_shared_16((from ^ (m & 1) << 6) + m * 4 * kPanelRowBytes);
#pragma unroll
      for (int m = n; m < n + 4; ++m)
        if (4 * m < rows) st_global_16(out + m * 4 * kChunk, x[m - n]);
    }
  }
}

}  // namespace cake::gdn
