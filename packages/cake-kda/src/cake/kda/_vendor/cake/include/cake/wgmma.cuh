// Hopper's warpgroup matrix product, D[64, N] (+)= A[64, K] B[K, N], bf16 in, fp32 out, on the tiles of tile.cuh.
//
// A comes from registers (Frag) or shared memory, B from shared memory. Either shared operand may be
//   Major::K   its rows are M or N, its 64-wide panels run along K;
//   Major::MN  its rows are K, its 64-wide panels run along M or N (the transposed use of the same tile).
// An accumulator of N columns is float[N / 2]: element i of a lane sits in
//   row 16 * warp + lane / 4 + 8 * ((i >> 1) & 1),  column 8 * (i >> 2) + 2 * (lane % 4) + (i & 1).
// Order: fence, products, commit, wait, then touch the registers. kernels/tests/test_wgmma.cu proves every form used.
#pragma once

#include "tile.cuh"

namespace cake {

enum class Major { K, MN };

// Before the first product of a batch, and whenever registers that it reads were written by ordinary code.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Keeps the compiler from moving reads of a register array above the wait that completes it.
template <int n>
__device__ __forceinline__ void pin(float (&r)[n]) {
#pragma unroll
  for (int i = 0; i < n; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

template <int n>
__device__ __forceinline__ void pin(uint32_t (&r)[n][4]) {
#pragma unroll
  for (int i = 0; i < n; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(r[i][j])::"memory");
}

template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// ---- one k16 step ----------------------------------------------------------------------------------------------

#define CAKE_ACC8(i)                                                                                          \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

// Of 8, 16 and 32 columns, whose tiles fill no panel along N: B is K-major.
template <int kTransB>
__device__ __forceinline__ void wgmma_k16(float (&d)[4], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  static_assert(kTransB == 0, "a narrow B is K-major");
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %9, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, 0;\n}\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

template <int kTransB>
__device__ __forceinline__ void wgmma_k16(float (&d)[8], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  static_assert(kTransB == 0, "a narrow B is K-major");
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %13, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7"
      "}, {%8, %9, %10, %11}, %12, p, 1, 1, 0;\n}\n"
      : CAKE_ACC8(0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

template <int kTransB>
__device__ __forceinline__ void wgmma_k16(float (&d)[16], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  static_assert(kTransB == 0, "a narrow B is K-major");
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15"
      "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}\n"
      : CAKE_ACC8(0), CAKE_ACC8(8)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

template <int kTransB>
__device__ __forceinline__ void wgmma_k16(float (&d)[32], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31"
      "}, {%32, %33, %34, %35}, %36, p, 1, 1, %38;\n}\n"
      : CAKE_ACC8(0), CAKE_ACC8(8), CAKE_ACC8(16), CAKE_ACC8(24)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
}

template <int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_k16(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31"
      "}, %32, %33, p, 1, 1, %35, %36;\n}\n"
      : CAKE_ACC8(0), CAKE_ACC8(8), CAKE_ACC8(16), CAKE_ACC8(24)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB));
}

template <int kTransB>
__device__ __forceinline__ void wgmma_k16(float (&d)[64], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63"
      "}, {%64, %65, %66, %67}, %68, p, 1, 1, %70;\n}\n"
      : CAKE_ACC8(0), CAKE_ACC8(8), CAKE_ACC8(16), CAKE_ACC8(24), CAKE_ACC8(32), CAKE_ACC8(40), CAKE_ACC8(48),
        CAKE_ACC8(56)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate), "n"(kTransB));
}

template <int kTransA, int kTransB>
__device__ __forceinline__ void wgmma_k16(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, "
      "%8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, "
      "%24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, "
      "%40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, "
      "%56, %57, %58, %59, %60, %61, %62, %63"
      "}, %64, %65, p, 1, 1, %67, %68;\n}\n"
      : CAKE_ACC8(0), CAKE_ACC8(8), CAKE_ACC8(16), CAKE_ACC8(24), CAKE_ACC8(32), CAKE_ACC8(40), CAKE_ACC8(48),
        CAKE_ACC8(56)
      : "l"(a), "l"(b), "r"(accumulate), "n"(kTransA), "n"(kTransB));
}

#undef CAKE_ACC8

// ---- operands in shared memory -----------------------------------------------------------------------------------

// Descriptor of k16 step `step` of an operand that lies in a Tile<kRows, cols> at `tile`.
template <Major kMajor, int kRows>
__device__ __forceinline__ uint64_t operand(uint32_t tile, int step) {
  constexpr uint32_t kPanel = kRows * kPanelRowBytes;
  // K-major: 16 columns = 32 bytes inside a panel, four steps to a panel. MN-major: 16 rows of 128 bytes.
  const uint32_t offset = kMajor == Major::K ? (step / 4) * kPanel + (step % 4) * 32 : step * 16 * kPanelRowBytes;
  // The leading offset is the panel stride along M or N; a K-major operand ignores it.
  constexpr uint64_t kLayout = (uint64_t(1) << 62) | (uint64_t(kAtomBytes >> 4) << 32) |
                               (uint64_t(kMajor == Major::K ? 1 : (kPanel >> 4)) << 16);
  return kLayout | ((tile + offset) >> 4);
}

// Operand addresses are taken afresh at every call: descriptors hoisted out of loops cost more registers than they save.

// D (+)= A B over kSteps k16 steps. A: register fragments. B: a tile of kRowsB rows.
template <Major kMajorB, int kRowsB, int kSteps, int n>
__device__ __forceinline__ void gemm_rs(float (&d)[n], const uint32_t (&a)[kSteps][4], uint32_t b, bool accumulate) {
  b = fresh(b);
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    wgmma_k16<kMajorB == Major::MN>(d, a[s], operand<kMajorB, kRowsB>(b, s), accumulate || s > 0);
}

// D (+)= A B over kSteps k16 steps, both operands in shared memory.
template <Major kMajorA, int kRowsA, Major kMajorB, int kRowsB, int kSteps, int n>
__device__ __forceinline__ void gemm_ss(float (&d)[n], uint32_t a, uint32_t b, bool accumulate) {
  a = fresh(a), b = fresh(b);
#pragma unroll
  for (int s = 0; s < kSteps; ++s)
    wgmma_k16<kMajorA == Major::MN, kMajorB == Major::MN>(d, operand<kMajorA, kRowsA>(a, s),
                                                          operand<kMajorB, kRowsB>(b, s), accumulate || s > 0);
}

}  // namespace cake
