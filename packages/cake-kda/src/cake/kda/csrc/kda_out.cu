// Host entries of kda_out and kda_reduce.
#include "kda_out.cuh"

#include <algorithm>

#include "kda_gate_host.cuh"
#include "kda_reduce.cuh"

namespace cake::kda {

using namespace cake::host;

// g or a tensor of its kind: [B, T, HV, 128], fp32 or bf16, whose rows can be copied 16 bytes at a time.
static View<void> gate_rows(const TensorView& x, const char* name, std::initializer_list<int64_t> shape) {
  if (!is_float32(x) && !is_bfloat16(x)) TVM_FFI_THROW(TypeError) << name << " must be float32 or bfloat16";
  check_shape(x, name, shape);
  const int64_t most = is_bfloat16(x) ? 8 : 4;
  const bool aligned = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0 && x.stride(0) % most == 0 &&
                       x.stride(1) % most == 0 && x.stride(2) % most == 0;
  if (x.stride(3) != 1 || !aligned)
    TVM_FFI_THROW(ValueError) << name << " must have contiguous channels and 16-byte aligned rows";
  return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

template <typename T>
static auto kernel_of(GateKind kind) {
  return kind == GateKind::kNone       ? out_kernel<GateKind::kNone, T>
         : kind == GateKind::kStandard ? out_kernel<GateKind::kStandard, T>
                                       : out_kernel<GateKind::kBounded, T>;
}

// `y`: what kda_adj left, which becomes dv in place. `ctas`: how many persistent CTAs share the work; no value depends on it.
void kda_out(TensorView q, TensorView k, TensorView v, TensorView g, int64_t gate_kind, Optional<TensorView> a_log,
             Optional<TensorView> bias, double bound, TensorView grad, TensorView y, TensorView beta, TensorView plan,
             int64_t n, int64_t chunk_capacity, TensorView kg, TensorView t, TensorView rq, TensorView rk,
             TensorView states, TensorView adjoints, bool states_edge, bool adjoints_edge, TensorView dq, TensorView dk,
             TensorView dbeta, TensorView dg, Optional<TensorView> partials, double scale, bool l2norm, int64_t ctas,
             int64_t stream) {
  DeviceGuard guard(q.device().device_id);
  const int64_t batch = q.size(0), tokens = q.size(1), heads = q.size(2), v_heads = v.size(2), total = batch * tokens;
  OutArgs args{};
  args.q = const_rows(q, "q", {batch, tokens, heads, kHeadDim});
  args.k = const_rows(k, "k", {batch, tokens, heads, kHeadDim});
  args.v = const_rows(v, "v", {batch, tokens, v_heads, kHeadDim});
  args.grad = const_rows(grad, "do", {batch, tokens, v_heads, kHeadDim});
  args.g = as_const(gate_rows(g, "g", {batch, tokens, v_heads, kHeadDim}));
  args.g_bf16 = is_bfloat16(g);
  args.gate = gate_args(gate_kind, a_log, bias, bound, v_heads);
  args.beta = scalars(beta, "beta", {batch, tokens, v_heads});
  args.plan = plan_of(plan, n, chunk_capacity, total, tokens);
  args.kg = dense_bf16(kg, "kg", {chunk_capacity, v_heads, kChunk, kHeadDim});
  args.t = dense_bf16(t, "t", {chunk_capacity, v_heads, kChunk, kChunk});
  args.rq = dense_f32(rq, "rq", {heads, total});
  args.rk = dense_f32(rk, "rk", {heads, total});
  args.states = tape_images(states, "states", v_heads, chunk_capacity);
  args.adjoints = tape_images(adjoints, "adj_states", v_heads, chunk_capacity);
  args.states_edge = states_edge;
  args.adjoints_edge = adjoints_edge;
  args.results[kDq] = writable_rows(dq, "dq", {batch, tokens, heads, kHeadDim}).untyped();
  args.results[kDk] = writable_rows(dk, "dk", {batch, tokens, heads, kHeadDim}).untyped();
  args.results[kDv] = writable_rows(y, "y", {batch, tokens, v_heads, kHeadDim}).untyped();
  args.results[kDbeta] = scalar_rows(dbeta, "dbeta", {batch, tokens, v_heads});
  args.dbeta_bf16 = is_bfloat16(dbeta);
  if (is_bfloat16(dg) != args.g_bf16) TVM_FFI_THROW(TypeError) << "dg must be of g's dtype";
  args.results[kDg] = gate_rows(dg, "dg", {batch, tokens, v_heads, kHeadDim});
  if (partials.has_value()) args.partials = dense_f32(*partials, "partials", {chunk_capacity, v_heads, kPartial});
  args.heads = static_cast<int>(heads);
  args.group = static_cast<int>(v_heads / heads);
  args.scale = static_cast<float>(scale);
  args.l2norm = l2norm;
  const int64_t grid = std::min(ctas, chunk_capacity * heads);
  const auto kernel = args.g_bf16 ? kernel_of<__nv_bfloat16>(args.gate.kind) : kernel_of<float>(args.gate.kind);
  launch("kda_out", kernel, dim3(grid), kOutThreads, sizeof(OutShared), stream_of(stream), args);
}

void kda_reduce(TensorView partials, TensorView da_log, TensorView dbias, int64_t stream) {
  DeviceGuard guard(partials.device().device_id);
  const int64_t chunks = partials.size(0), v_heads = partials.size(1);
  const float* x = dense_f32(partials, "partials", {chunks, v_heads, kPartial});
  float* a_log = dense_f32(da_log, "da_log", {v_heads});
  float* bias = dense_f32(dbias, "dbias", {v_heads, kHeadDim});
  launch("kda_reduce", reduce_kernel, dim3(v_heads, kReduceBlocks), kReduceThreads, 0, stream_of(stream), x,
         static_cast<int>(chunks), a_log, bias);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_out, kda_out);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(kda_reduce, kda_reduce);

}  // namespace cake::kda
