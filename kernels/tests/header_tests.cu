// Each function runs one primitive of kernels/include/cake on one CTA, for the tests beside this file.
#include "cake/frag.cuh"
#include "cake/host.cuh"
#include "cake/tri.cuh"
#include "cake/warp_tri.cuh"

namespace cake::tests {

using namespace cake::host;

// A plain [rows][columns] matrix into a tile.
template <int kRows>
__device__ void fill_tile(uint32_t tile, const __nv_bfloat16* src, int columns) {
  for (int i = threadIdx.x; i < kRows * columns / 8; i += blockDim.x) {
    const int row = i / (columns / 8), group = i % (columns / 8);
    st_shared_16(tile + group_offset<kRows>(row, group),
                 *reinterpret_cast<const uint4*>(src + row * columns + group * 8));
  }
}

enum class From { kRegisters, kSharedK, kSharedMN };

// D[64][N] = A B. A is given as [64][K], or as [K][64] when it is read MN-major; B as [N][K], or as [K][N].
template <From kFromA, Major kMajorB, int N, int K>
__global__ void __launch_bounds__(128) product_kernel(const __nv_bfloat16* a, const __nv_bfloat16* b, float* d) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const uint32_t tile_a = smem_addr(raw), tile_b = tile_a + kTokenTileBytes;
  constexpr int kRowsA = kFromA == From::kSharedMN ? K : 64;
  constexpr int kRowsB = kMajorB == Major::K ? N : K;
  fill_tile<kRowsA>(tile_a, a, 64 * K / kRowsA);
  fill_tile<kRowsB>(tile_b, b, N * K / kRowsB);
  fence_proxy_async();
  __syncthreads();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  float acc[N / 2];
  if constexpr (kFromA == From::kRegisters) {
    uint32_t f[K / 16][4];
    for (int s = 0; s < K / 16; ++s) ldmatrix(f[s], frag_address<64>(tile_a, 16 * warp, s, lane));
    pin(f);
    wgmma_fence();
    gemm_rs<kMajorB, kRowsB, K / 16>(acc, f, tile_b, false);
  } else {
    wgmma_fence();
    gemm_ss<kFromA == From::kSharedK ? Major::K : Major::MN, kRowsA, kMajorB, kRowsB, K / 16>(acc, tile_a, tile_b,
                                                                                              false);
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(acc);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) d[(16 * warp + lane / 4 + 8 * ((i >> 1) & 1)) * N + acc_column(i, lane)] = acc[i];
}

template <From kFromA, Major kMajorB, int N, int K>
void run_product(TensorView a, TensorView b, TensorView d, int64_t stream) {
  launch("wgmma_product", product_kernel<kFromA, kMajorB, N, K>, dim3(1), 128, kTokenTileBytes + kStateTileBytes,
         stream_of(stream), static_cast<const __nv_bfloat16*>(a.data_ptr()),
         static_cast<const __nv_bfloat16*>(b.data_ptr()), static_cast<float*>(d.data_ptr()));
}

template <From kFromA, Major kMajorB>
void run_size(int64_t n, int64_t k, TensorView a, TensorView b, TensorView d, int64_t stream) {
  if (n == 64 && k == 64) run_product<kFromA, kMajorB, 64, 64>(a, b, d, stream);
  else if (n == 64) run_product<kFromA, kMajorB, 64, 128>(a, b, d, stream);
  else if (k == 64) run_product<kFromA, kMajorB, 128, 64>(a, b, d, stream);
  else run_product<kFromA, kMajorB, 128, 128>(a, b, d, stream);
}

// from_a: 0 registers, 1 shared K-major, 2 shared MN-major; mn_major_b: whether B is [K][N].
void wgmma_product(int64_t from_a, bool mn_major_b, TensorView a, TensorView b, TensorView d, int64_t stream) {
  DeviceGuard guard(a.device().device_id);
  const int64_t n = d.size(1), k = from_a == 2 ? a.size(0) : a.size(1);
  if (from_a == 0)
    (mn_major_b ? run_size<From::kRegisters, Major::MN> : run_size<From::kRegisters, Major::K>)(n, k, a, b, d, stream);
  else if (from_a == 1)
    (mn_major_b ? run_size<From::kSharedK, Major::MN> : run_size<From::kSharedK, Major::K>)(n, k, a, b, d, stream);
  else (mn_major_b ? run_size<From::kSharedMN, Major::MN> : run_size<From::kSharedMN, Major::K>)(n, k, a, b, d, stream);
}

// A [64][128] in registers, B [N][128], N = 8, 16 or 32.
void narrow_product(TensorView a, TensorView b, TensorView d, int64_t stream) {
  DeviceGuard guard(a.device().device_id);
  const int64_t n = d.size(1);
  const auto run = n == 8    ? run_product<From::kRegisters, Major::K, 8, 128>
                   : n == 16 ? run_product<From::kRegisters, Major::K, 16, 128>
                             : run_product<From::kRegisters, Major::K, 32, 128>;
  run(a, b, d, stream);
}

// x = lower triangle of (I + strictly lower triangle of l)^-1, [64][64] fp32.
static __global__ void __launch_bounds__(128) invert_kernel(const float* l, float* x) {
  __shared__ float sl[64 * kTriStride], sx[64 * kTriStride];
  for (int i = threadIdx.x; i < 64 * 64; i += 128) {
    const int row = i / 64, column = i % 64;
    sl[row * kTriStride + column] = row > column ? l[i] : 0.f;
    sx[row * kTriStride + column] = __int_as_float(0x7fc00000);  // what is never written must never be read
  }
  __syncthreads();
  invert_unit_lower(sx, sl, threadIdx.x, [] { __syncthreads(); });
  __syncthreads();
  for (int i = threadIdx.x; i < 64 * 64; i += 128) x[i] = i / 64 >= i % 64 ? sx[(i / 64) * kTriStride + i % 64] : 0.f;
}

void invert(TensorView l, TensorView x, int64_t stream) {
  DeviceGuard guard(l.device().device_id);
  launch("invert", invert_kernel, dim3(1), 128, 0, stream_of(stream), dense_f32(l, "l", {64, 64}),
         dense_f32(x, "x", {64, 64}));
}

// The same by one warp: x in bf16, all of it.
static __global__ void __launch_bounds__(32) invert_by_warp_kernel(const float* l, __nv_bfloat16* x) {
  alignas(128) __shared__ uint8_t tile[kSquareTileBytes];
  __shared__ WarpTriShared shared;
  const int lane = threadIdx.x;
  zero_fill<32>(smem_addr(tile), kSquareTileBytes, lane);
  invert_unit_lower(shared, smem_addr(tile), lane, [&](int i, int c, float (&n)[4]) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int row = 16 * i + (lane >> 2) + 8 * (e >> 1), column = 8 * c + 2 * (lane & 3) + (e & 1);
      n[e] = row > column ? -l[64 * row + column] : 0.f;
    }
  });
  __syncwarp();
  for (int i = lane; i < 64 * 8; i += 32)
    *reinterpret_cast<uint4*>(x + 8 * i) = ld_shared_16(smem_addr(tile) + group_offset<kChunk>(i / 8, i % 8));
}

void invert_by_warp(TensorView l, TensorView x, int64_t stream) {
  DeviceGuard guard(l.device().device_id);
  launch("invert_by_warp", invert_by_warp_kernel, dim3(1), 32, 0, stream_of(stream), dense_f32(l, "l", {64, 64}),
         dense_bf16(x, "x", {64, 64}));
}

// Reads [64 tokens][128] as the transposed fragments that a state warp uses, checks that their places are the
// documented ones (y receives value(row, column) from there), and writes them back transposed over the tile (z).
static __global__ void __launch_bounds__(256) transpose_kernel(const __nv_bfloat16* x, float* y, __nv_bfloat16* z) {
  __shared__ __align__(1024) uint8_t raw[kTokenTileBytes];
  const uint32_t tile = smem_addr(raw);
  fill_tile<64>(tile, x, 128);
  __syncthreads();
  const int lane = threadIdx.x & 31, channel0 = 16 * (threadIdx.x >> 5);
  uint32_t f[4][4];
  for (int s = 0; s < 4; ++s) ldmatrix_trans(f[s], frag_address_trans<64>(tile, channel0, s, lane));
#pragma unroll
  for (int s = 0; s < 4; ++s)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int channel = channel0 + lane / 4 + 8 * (j & 1), token = 16 * s + 2 * (lane & 3) + 8 * (j >> 1);
      y[channel * 64 + token] = bf16_lo(f[s][j]);
      y[channel * 64 + token + 1] = bf16_hi(f[s][j]);
      f[s][j] = pack_bf16(2.f * bf16_lo(f[s][j]), 2.f * bf16_hi(f[s][j]));
    }
  for (int s = 0; s < 4; ++s) stmatrix_trans(frag_address_trans<64>(tile, channel0, s, lane), f[s]);
  __syncthreads();
  for (int i = threadIdx.x; i < 64 * 16; i += 256)
    *reinterpret_cast<uint4*>(z + i * 8) = ld_shared_16(tile + group_offset<64>(i / 16, i % 16));
}

void transpose_channels(TensorView x, TensorView y, TensorView z, int64_t stream) {
  DeviceGuard guard(x.device().device_id);
  launch("transpose_channels", transpose_kernel, dim3(1), 256, 0, stream_of(stream), dense_bf16(x, "x", {64, 128}),
         dense_f32(y, "y", {128, 64}), dense_bf16(z, "z", {64, 128}));
}

// The tile of one head's 64 tokens from `token` on, by one thread: as it lies in shared memory to `seen`, and back to another
// tensor.
static __global__ void __launch_bounds__(128)
    copy_tile_kernel(const __grid_constant__ TileMap from, const __grid_constant__ TileMap to, __nv_bfloat16* seen,
                     int batch, int token, int head) {
  extern __shared__ __align__(1024) uint8_t raw[];
  __shared__ __align__(8) uint64_t landed;
  const uint32_t tile = smem_addr(raw), bar = smem_addr(&landed);
  if (threadIdx.x == 0) {
    mbar_init(bar, 1);
    mbar_init_fence();
    mbar_arrive_expect_tx(bar, kTokenTileBytes);
    load_tile<2>(tile, from, head, token, batch, bar);
  }
  __syncthreads();
  mbar_wait(bar, 0);
  for (int i = threadIdx.x; i < 64 * 16; i += 128)
    *reinterpret_cast<uint4*>(seen + i * 8) = ld_shared_16(tile + group_offset<64>(i / 16, i % 16));
  if (threadIdx.x == 0) {
    store_tile<2>(to, head, token, batch, tile);
    bulk_commit();
    bulk_wait();
  }
}

// x, y: [B, T, H, 128]; seen: [64, 128]. `elsewhere`: whether maps are made for other addresses and follow afterwards.
void copy_tile(TensorView x, TensorView y, TensorView seen, int64_t batch, int64_t token, int64_t head, bool elsewhere,
               int64_t stream) {
  DeviceGuard guard(x.device().device_id);
  const auto map = [&](const TensorView& tensor, const char* name) {
    auto rows = const_rows(tensor, name, {x.size(0), x.size(1), x.size(2), kHeadDim});
    const void* data = rows.data;
    if (elsewhere) rows.data = reinterpret_cast<const __nv_bfloat16*>(nowhere(3));
    TileMap made = tile_map(rows, x.size(0), x.size(1), x.size(2));
    if (elsewhere) {
      made.data = data;
      made.readdress();
    }
    return made;
  };
  launch("copy_tile", copy_tile_kernel, dim3(1), 128, kTokenTileBytes, stream_of(stream), map(x, "x"), map(y, "y"),
         dense_bf16(seen, "seen", {64, 128}), int(batch), int(token), int(head));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(wgmma_product, wgmma_product);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(narrow_product, narrow_product);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(invert, invert);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(invert_by_warp, invert_by_warp);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(transpose_channels, transpose_channels);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(copy_tile, copy_tile);

}  // namespace cake::tests
