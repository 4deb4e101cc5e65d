// Float32 arithmetic on 16-bit elements, rounded at the points where transformers' modules round.
//
// Compiled with: ELEMENT (__half, __nv_bfloat16).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/types.cuh"

__device__ __forceinline__ float2 unpacked(uint32_t two, __nv_bfloat16) {
  return {__uint_as_float(two << 16), __uint_as_float(two & 0xffff0000)};
}

__device__ __forceinline__ float2 unpacked(uint32_t two, __half) {
  return __half22float2(*reinterpret_cast<const __half2*>(&two));
}

// Conversions of pairs are several times as fast as those of single numbers.
__device__ __forceinline__ float rounded(float x, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(x, 0.0f);
  return unpacked(*reinterpret_cast<const uint32_t*>(&pair), __nv_bfloat16()).x;
}

__device__ __forceinline__ float rounded(float x, __half) {
  return __low2float(__floats2half2_rn(x, 0.0f));
}

__device__ __forceinline__ float rounded(float x) { return rounded(x, ELEMENT()); }

// A normalized element of a row times the norm's weight. `centered`: the weight is added to 1, and
// the result is rounded once.
__device__ __forceinline__ ELEMENT weighted(float x, float weight, bool centered) {
  return ELEMENT(centered ? x * (1.0f + weight) : rounded(x) * weight);
}

// silu(gate) * up of products that are not yet rounded.
__device__ __forceinline__ float gated(float gate, float up) {
  gate = rounded(gate);
  return rounded(gate / (1.0f + __expf(-gate))) * rounded(up);
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
