// Where a token's beta is too small for anything that the token writes to be seen in fp32 beside what others do.
//
// The backward's walk leaves Z = m Y of each token, Y the adjoint of its delta. With m = beta that is the token's dv; where
// beta is too small to divide dbeta by, m is 1, and dv is 0.
#pragma once

namespace cake::gdn {

constexpr float kLeastBeta = 0x1p-60f;

__device__ __forceinline__ bool writes(float beta) { return fabsf(beta) >= kLeastBeta; }
__device__ __forceinline__ float row_factor(float beta) { return writes(beta) ? beta : 1.f; }

}  // namespace cake::gdn
