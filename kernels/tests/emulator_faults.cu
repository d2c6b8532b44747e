// Two small kernels, right ones and with one mistake: what the emulator has to notice.
#include "cake/frag.cuh"
#include "cake/host.cuh"
#include "cake/pipe.cuh"

namespace cake::tests {

using namespace cake::host;

enum Fault {
  kNone,
  kNoArrival,       // one of two consumers doesn't say that it has read a stage
  kTwoArrivals,     // it says so twice
  kFullTwice,       // the producer arrives once more than it should
  kNoFullWait,      // consumers read without waiting for the copy
  kNoEmptyWait,     // the producer doesn't wait for the consumers
  kNoWarpSync,      // a lane reads what another one hasn't written yet
  kNoCopyWait,      // an asynchronous copy is read without waiting for it
  kLanesApart,      // half a warp shuffles
  kPastTheEnd,      // a store behind the CTA's memory
  kOverwritten,     // an operand is overwritten before the products are done
};

struct PipeShared {
  alignas(16) float stages[2][64], exchanged[64], bias[64];
  Ring<2> ring;
};

// out[tile][i] = in[tile][i] + in[tile][i ^ 1] + bias[i]: warp 2 copies tiles of 64 into a ring, warps 0 and 1 read them.
static __global__ void __launch_bounds__(96)
    pipe_kernel(const float* in, const float* bias, float* out, int tiles, Fault fault) {
  extern __shared__ __align__(1024) uint8_t raw[];
  PipeShared& s = *reinterpret_cast<PipeShared*>(raw);
  const int thread = threadIdx.x, lane = thread & 31;
  if (thread == 0) {
    s.ring.init(1, 2 * kWarpArrivals);
    mbar_init_fence();
  }
  __syncthreads();
  RingState<2> state;
  if (thread >= 64) {
    for (int tile = 0; tile < tiles && lane == 0; ++tile, state.advance()) {
      const uint32_t bar = smem_addr(s.ring.full + state.stage);
      if (fault != kNoEmptyWait) s.ring.wait_empty(state);
      mbar_arrive_expect_tx(bar, sizeof(s.stages[0]));
      if (fault == kFullTwice) mbar_arrive(bar);
      bulk_load(smem_addr(s.stages[state.stage]), in + 64 * tile, sizeof(s.stages[0]), bar);
    }
    return;
  }
  if (thread < 16) cp_async_16(smem_addr(s.bias + 4 * thread), bias + 4 * thread, true);
  cp_async_commit();
  if (fault != kNoCopyWait) cp_async_wait<0>();
  bar_sync(1, 64);
  for (int tile = 0; tile < tiles; ++tile, state.advance()) {
    if (fault != kNoFullWait) s.ring.wait_full(state);
    s.exchanged[thread] = s.stages[state.stage][thread];
    if (fault != kNoWarpSync) __syncwarp();
    out[64 * tile + thread] = s.exchanged[thread] + s.exchanged[thread ^ 1] + s.bias[thread];
    if (fault != kNoArrival || thread < 32) s.ring.signal_empty(state, lane);
    if (fault == kTwoArrivals && thread < 32) s.ring.signal_empty(state, lane);
  }
  if (fault == kLanesApart && lane < 16) out[thread] += __shfl_xor_sync(0xffffffffu, out[thread], 1);
  if (fault == kPastTheEnd) st_shared_4(smem_addr(raw) + sizeof(PipeShared) + 4 * thread, 0);
  if (fault == kNoCopyWait) cp_async_wait<0>();
}

// d[64][64] = a a^T.
static __global__ void __launch_bounds__(128) square_kernel(const __nv_bfloat16* a, float* d, Fault fault) {
  extern __shared__ __align__(1024) uint8_t raw[];
  const uint32_t tile = smem_addr(raw);
  const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
  for (int i = thread; i < 64 * 8; i += 128)
    st_shared_16(tile + group_offset<64>(i / 8, i % 8), *reinterpret_cast<const uint4*>(a + 8 * i));
  fence_proxy_async();
  __syncthreads();
  float acc[32];
#pragma unroll
  for (int i = 0; i < 32; ++i) acc[i] = 0.f;
  pin(acc);
  wgmma_fence();
  gemm_ss<Major::K, 64, Major::K, 64, 4>(acc, tile, tile, true);
  wgmma_commit();
  if (fault == kOverwritten) {
    __syncthreads();
    zero_fill<128>(tile, kSquareTileBytes, thread);
  }
  wgmma_wait<0>();
  pin(acc);
#pragma unroll
  for (int i = 0; i < 32; ++i) d[(16 * warp + lane / 4 + 8 * ((i >> 1) & 1)) * 64 + acc_column(i, lane)] = acc[i];
}

void run_pipe(TensorView in, TensorView bias, TensorView out, int64_t fault, int64_t stream) {
  const int64_t tiles = in.size(0);
  launch("pipe", pipe_kernel, dim3(1), 96, sizeof(PipeShared), stream_of(stream), dense_f32(in, "in", {tiles, 64}),
         dense_f32(bias, "bias", {64}), dense_f32(out, "out", {tiles, 64}), static_cast<int>(tiles),
         static_cast<Fault>(fault));
}

void run_square(TensorView a, TensorView d, int64_t fault, int64_t stream) {
  launch("square", square_kernel, dim3(1), 128, kSquareTileBytes, stream_of(stream), dense_bf16(a, "a", {64, 64}),
         dense_f32(d, "d", {64, 64}), static_cast<Fault>(fault));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_pipe, run_pipe);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(run_square, run_square);

}  // namespace cake::tests
