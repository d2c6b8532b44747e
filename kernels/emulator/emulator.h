// Runs a kernel on a CPU, one CTA after the other, each thread of a CTA as a fiber.
//
// A fiber runs until it has to wait: at a barrier, or at an instruction that its whole warp takes part in. Then another one
// goes on, so all of a CTA's threads run on one thread of the CPU and no access races with another. What is asynchronous on
// the GPU (copies, products of warpgroups) happens at some moment between its start and the wait that it is due at. Which
// moment, and which fiber goes on, is the schedule's choice:
//   even   late: a copy lands, and a product is made, when its wait would otherwise never end, and the first warp that can
//          go on does: in the order of their numbers (0), or in one that is drawn for each CTA;
//   odd    at random: some of it happens at once, and all warps go on by turns.
// A kernel whose waits are complete gives the same bits under all of them. One that waits for what nobody will do is
// reported with what each warp waits for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace cake::emulator {

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

extern dim3 threadIdx, blockIdx, blockDim, gridDim;
extern int multiprocessors;  // that host entries are told of

// Runs `kernel` for every thread of every CTA. Returns what went wrong, or nothing.
std::string launch(dim3 grid, int threads, int shared_bytes, const std::function<void()>& kernel);

// ---- of the fiber that runs ----------------------------------------------------------------------------------------

uint8_t* shared_memory();  // the CTA's dynamic shared memory, 1024-byte aligned, 0xff when a CTA begins
// Where `bytes` at a shared-memory address lie; what leaves the CTA's memory or isn't aligned to `alignment` ends the launch.
uint8_t* shared(uint32_t address, uint32_t bytes, uint32_t alignment);
int lane();

void named_barrier(int id, int threads);

void mbarrier_init(uint32_t bar, uint32_t arrivals);
void mbarrier_expect(uint32_t bar, uint32_t bytes);
void mbarrier_arrive(uint32_t bar);
void mbarrier_wait(uint32_t bar, uint32_t parity);

void copy_async(uint32_t to, const void* from, bool valid);  // 16 bytes; zeros if not valid
void copy_async_commit();
void copy_async_wait(int pending);
void copy_async_arrive(uint32_t bar);  // once this thread's copies so far have landed
void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t bar);
void bulk_store(void* to, uint32_t from, uint32_t bytes);
// Boxes of a tensor of four dimensions, swizzled as in tile.cuh; `map` as cuda.h has it.
void tensor_load(uint32_t to, const void* map, const int (&at)[4], uint32_t bar);
void tensor_store(const void* map, const int (&at)[4], uint32_t from);
void bulk_commit();
void bulk_wait();

// ---- of whole warps ------------------------------------------------------------------------------------------------

void sync_warp();
uint32_t exchange(uint32_t value, int source);
uint32_t ballot(bool predicate);
void load_matrices(uint32_t (&r)[4], uint32_t address, bool transposed);
void store_matrices(const uint32_t (&r)[4], uint32_t address, bool transposed);

// d[16][8] += a[16][k] b[k][8] of bf16 (k = 16) or fp32 with tf32's mantissa (k = 8), fragments as in the PTX manual.
void multiply_bf16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
void multiply_tf32(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

// A warp's share of wgmma, D[16][2 n] (+)= A[16][16] B[16][2 n]: `d` is n floats, `a` a fragment or null, then `descriptor`
// describes A. The sum is made at the wait at the latest, so `d` must live until then.
void warpgroup_multiply(float* d, int n, const uint32_t* a, uint64_t descriptor, uint64_t b, bool a_transposed,
                        bool b_transposed, bool accumulate);
void warpgroup_commit();
void warpgroup_wait(int pending);

}  // namespace cake::emulator
