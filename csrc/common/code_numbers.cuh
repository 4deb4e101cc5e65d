// Conversion of numbers to codes and scales.
#pragma once

#include <cuda_fp16.h>

#include "common/types.cuh"

// Added to a number from 0 to 2^22, it rounds the number to an integer (ties to even) in the low
// bits.
constexpr float ROUND = 12582912.0f;
constexpr uint32_t ROUND_BITS = 0x4b400000u;  // as an integer

__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The number as a page stores it.
__device__ __forceinline__ float as_half(float x) { return __half2float(__float2half_rn(x)); }
