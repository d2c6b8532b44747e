// Shared-memory tiles: bf16 [rows][columns] cut into panels of 64 columns, rows of 128 bytes, 128-byte swizzle.
//
// A Tile<R, C> is C / 64 panels of R * 128 bytes, aligned to 1024 bytes. The 16-byte group `column / 8` of a row
// sits at group (column / 8) ^ (row % 8): the layout that wgmma reads (wgmma.cuh) and that is free of bank conflicts
// for ldmatrix and stmatrix. States on the tape are stored in global memory as images of such tiles.
#pragma once

#include "ptx.cuh"

namespace cake {

constexpr int kChunk = 64;           // tokens
constexpr int kHeadDim = 128;        // K = V
constexpr int kPanelRowBytes = 128;  // 64 bf16
constexpr int kAtomBytes = 1024;     // 8 swizzled rows
constexpr int kTokenTileBytes = kChunk * kHeadDim * 2;     // [64][128]: two panels
constexpr int kSquareTileBytes = kChunk * kChunk * 2;      // [64][64]: one panel
constexpr int kStateTileBytes = kHeadDim * kHeadDim * 2;   // [128][128]: two panels

constexpr float kNormEps = 1e-6f;    // 1 / |x| is 1 / sqrt(|x|^2 + eps)
constexpr float kLeastGate = -88.f;  // a log decay below it counts as it: e^-88 is at fp32's underflow
constexpr float kLog2E = 1.4426950408889634f;

// Byte offset of the 16-byte group `group` (8 columns; 8 groups to a panel) of a row.
template <int kRows>
__device__ __forceinline__ uint32_t group_offset(int row, int group) {
  return (group >> 3) * (kRows * kPanelRowBytes) + row * kPanelRowBytes + (((group & 7) ^ (row & 7)) << 4);
}

// Byte offset of an even column (a bf16 pair).
template <int kRows>
__device__ __forceinline__ uint32_t pair_offset(int row, int column) {
  return group_offset<kRows>(row, column >> 3) + ((column & 7) << 1);
}

// Starts the copy of `rows` rows of kGroups * 8 bf16 into a 64-row tile; rows past the end become zeros.
// `thread` of kThreads consecutive threads; `row_stride` in elements. `kUnroll`: copies to a turn of the loop, few where
// the code has to be short.
template <int kGroups, int kThreads, int kUnroll = kChunk * kGroups / kThreads>
__device__ __forceinline__ void load_rows(uint32_t tile, const __nv_bfloat16* src, int64_t row_stride, int rows,
                                          int thread) {
  constexpr int kRowsAtOnce = kThreads / kGroups;
  static_assert(kRowsAtOnce % 4 == 0, "a thread must keep its place in the swizzle, or swap between two");
  int row = thread / kGroups;
  const int group = thread % kGroups;
  uint32_t dst = tile + group_offset<kChunk>(row, group);
  src += row * row_stride + group * 8;
#pragma unroll kUnroll
  for (int i = 0; i < kChunk / kRowsAtOnce; ++i) {
    cp_async_16(dst, src, row < rows);
    dst += kRowsAtOnce * kPanelRowBytes;
    if (kRowsAtOnce % 8 != 0) dst ^= 4 << 4;  // rows that differ by 4 swizzle apart by 4 groups
    src += kRowsAtOnce * row_stride;
    row += kRowsAtOnce;
  }
}

// Zero-fills `bytes` of shared memory.
template <int kThreads>
__device__ __forceinline__ void zero_fill(uint32_t dst, int bytes, int thread) {
  for (int i = thread * 16; i < bytes; i += kThreads * 16) st_shared_16(dst + i, make_uint4(0, 0, 0, 0));
}

}  // namespace cake
