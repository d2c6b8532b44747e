// What the backward divides by a token's beta, and where it is too small for that.
//
// The adjoint walk leaves Z = m Y of each token, Y the adjoint of its delta. With m = beta that is the token's dv. Where beta is
// so small that nothing the token writes could be seen in fp32 beside what others do, m is 1, and dv is 0.
#pragma once

namespace cake::gdn {

constexpr float kLeastBeta = 0x1p-60f;  // that a token writes with
constexpr float kLeastDivisor = 0x1p-40f;  // whose square divides in fp32
constexpr int kManyTokens = 16;  // of a chunk, over which roundings average

__device__ __forceinline__ bool writes(float beta) { return fabsf(beta) >= kLeastBeta; }

// Whether dbeta may be Z . D / beta^2, which has the roundings of beta W and D in it, in a chunk of so many tokens.
__device__ __forceinline__ bool divides(float beta, int tokens) {
  return tokens >= kManyTokens && fabsf(beta) >= kLeastDivisor;
}

__device__ __forceinline__ float row_factor(float beta) { return writes(beta) ? beta : 1.f; }

}  // namespace cake::gdn
