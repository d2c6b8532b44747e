// The functions of the device headers that consist of inline PTX. The headers' copies that the emulator compiles have these
// in their place: same names, same arguments.
#pragma once

#include "cuda_bf16.h"
#include "cuda_runtime.h"

namespace cake::emulator {

template <typename T>
T load(uint32_t addr) {
  T x;
  std::memcpy(&x, shared(addr, sizeof(T), sizeof(T)), sizeof(T));
  return x;
}
template <typename T>
void store(uint32_t addr, T x) {
  std::memcpy(shared(addr, sizeof(T), sizeof(T)), &x, sizeof(T));
}

inline float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.f, x) : x; }

}  // namespace cake::emulator

namespace cake {

// ---- ptx.cuh -----------------------------------------------------------------------------------------------------

template <typename T>
T fresh(T x) {
  return x;
}

inline void mbar_init(uint32_t bar, uint32_t arrivals) { emulator::mbarrier_init(bar, arrivals); }
inline void mbar_init_fence() {}
inline void mbar_arrive(uint32_t bar) { emulator::mbarrier_arrive(bar); }
inline void mbar_expect_tx(uint32_t bar, uint32_t bytes) { emulator::mbarrier_expect(bar, bytes); }
inline void mbar_arrive_expect_tx(uint32_t bar, uint32_t bytes) {
  emulator::mbarrier_expect(bar, bytes);
  emulator::mbarrier_arrive(bar);
}
inline void mbar_wait(uint32_t bar, uint32_t parity) { emulator::mbarrier_wait(bar, parity); }

inline void bar_sync(int id, int threads) { emulator::named_barrier(id, threads); }
inline void fence_proxy_async() {}

inline void cp_async_16(uint32_t dst, const void* src, bool valid) { emulator::copy_async(dst, src, valid); }
inline void cp_async_commit() { emulator::copy_async_commit(); }
template <int kPending>
void cp_async_wait() {
  emulator::copy_async_wait(kPending);
}
inline void cp_async_mbar_arrive(uint32_t bar) { emulator::copy_async_arrive(bar); }
inline void bulk_load(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  emulator::bulk_load(dst, src, bytes, bar);
}
inline void bulk_store(void* dst, uint32_t src, uint32_t bytes) { emulator::bulk_store(dst, src, bytes); }
inline void tensor_load(uint32_t dst, const void* map, int column, int head, int token, int batch, uint32_t bar) {
  emulator::tensor_load(dst, map, {column, head, token, batch}, bar);
}
inline void tensor_store(const void* map, int column, int head, int token, int batch, uint32_t src) {
  emulator::tensor_store(map, {column, head, token, batch}, src);
}
inline void bulk_commit() { emulator::bulk_commit(); }
inline void bulk_wait_read() { emulator::bulk_wait(); }
inline void bulk_wait() { emulator::bulk_wait(); }
inline void prefetch_l2(const void*) {}

inline void ldmatrix(uint32_t (&r)[4], uint32_t addr) { emulator::load_matrices(r, addr, false); }
inline void ldmatrix_trans(uint32_t (&r)[4], uint32_t addr) { emulator::load_matrices(r, addr, true); }
inline void stmatrix(uint32_t addr, const uint32_t (&r)[4]) { emulator::store_matrices(r, addr, false); }
inline void stmatrix_trans(uint32_t addr, const uint32_t (&r)[4]) { emulator::store_matrices(r, addr, true); }

inline void st_global_16(void* p, uint4 v) { *static_cast<uint4*>(p) = v; }
inline void st_global_8(void* p, uint32_t x, uint32_t y) { *static_cast<uint2*>(p) = uint2{x, y}; }
inline void st_global_float(void* p, bool is_bf16, float x) {
  if (is_bf16) *static_cast<__nv_bfloat16*>(p) = __float2bfloat16_rn(x);
  else *static_cast<float*>(p) = x;
}
inline void st_global_16_if(bool there, void* p, uint4 v) {
  if (there) st_global_16(p, v);
}
inline uint4 ld_shared_16(uint32_t addr) { return emulator::load<uint4>(addr); }
inline uint2 ld_shared_8(uint32_t addr) { return emulator::load<uint2>(addr); }
inline uint32_t ld_shared_4(uint32_t addr) { return emulator::load<uint32_t>(addr); }
inline uint32_t ld_shared_2(uint32_t addr) { return emulator::load<uint16_t>(addr); }
inline void st_shared_16(uint32_t addr, uint4 v) { emulator::store(addr, v); }
inline void st_shared_4(uint32_t addr, uint32_t v) { emulator::store(addr, v); }
inline void st_shared_2(uint32_t addr, uint32_t v) { emulator::store(addr, static_cast<uint16_t>(v)); }

inline float ex2(float x) { return emulator::flushed(exp2f(emulator::flushed(x))); }
inline float rcp(float x) { return emulator::flushed(1.f / emulator::flushed(x)); }
inline float max_nan(float x, float y) { return x != x || y != y ? NAN : fmaxf(x, y); }
inline float min_nan(float x, float y) { return x != x || y != y ? NAN : fminf(x, y); }
inline uint32_t pack_bf16(float lo, float hi) {
  return __float2bfloat16_rn(lo).bits | uint32_t(__float2bfloat16_rn(hi).bits) << 16;
}

inline void mma_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulator::multiply_bf16(d, a, b0, b1);
}
inline void mma_bf16(float (&d)[4], const uint32_t (&a)[2], uint32_t b) {
  const uint32_t wide[4] = {a[0], a[1], 0, 0};
  emulator::multiply_bf16(d, wide, b, 0);
}

template <int kRegisters>
void registers_grow() {}
template <int kRegisters>
void registers_shrink() {}

// ---- tri.cuh -----------------------------------------------------------------------------------------------------

inline void mma_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulator::multiply_tf32(d, a, b);
}

// ---- wgmma.cuh ---------------------------------------------------------------------------------------------------

inline void wgmma_fence() {}
inline void wgmma_commit() { emulator::warpgroup_commit(); }
template <int kPending>
void wgmma_wait() {
  emulator::warpgroup_wait(kPending);
}
template <int n>
void pin(float (&)[n]) {}
template <int n>
void pin(uint32_t (&)[n][4]) {}

template <int kTransB, int n>
void wgmma_k16(float (&d)[n], const uint32_t (&a)[4], uint64_t b, int accumulate) {
  emulator::warpgroup_multiply(d, n, a, 0, b, false, kTransB, accumulate);
}
template <int kTransA, int kTransB, int n>
void wgmma_k16(float (&d)[n], uint64_t a, uint64_t b, int accumulate) {
  emulator::warpgroup_multiply(d, n, nullptr, a, b, kTransA, kTransB, accumulate);
}

}  // namespace cake
