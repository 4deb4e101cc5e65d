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

__device__ __forceinline__ float rounded(float x) { return static_cast<float>(ELEMENT(x)); }

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
