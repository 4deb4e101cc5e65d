// Weights in 16 bits (ELEMENT), or in FP8 (e4m3) with a float scale for each block of 128 columns.
//
// Compiled with: ELEMENT (__half, __nv_bfloat16), FP8 (1: WEIGHT is a code; 0 or undefined: it is
// ELEMENT).
#pragma once

#include "common/rounding.cuh"

#ifndef FP8
#define FP8 0
#endif

#if FP8
using WEIGHT = uint8_t;
#else
using WEIGHT = ELEMENT;
#endif

constexpr int SCALE_COLUMNS = 128;

// Convert the two codes in the low 16 bits to halves, which represent all of them.
__device__ __forceinline__ uint32_t halves_of(uint32_t codes) {
#if __CUDA_ARCH__ >= 890
  uint32_t halves;
  asm("{ .reg .b16 two; cvt.u16.u32 two, %1; cvt.rn.f16x2.e4m3x2 %0, two; }"
      : "=r"(halves)
      : "r"(codes));
  return halves;
#else
  // The exponent of a half is 8 larger.
  const uint32_t apart = __byte_perm(codes, 0, 0x1404);
  const uint32_t scaled = (apart & 0x80008000) | (apart >> 1 & 0x3f803f80);
  const __half2 two = __hmul2(*reinterpret_cast<const __half2*>(&scaled), __float2half2_rn(256.0f));
  return *reinterpret_cast<const uint32_t*>(&two);
#endif
}

// Convert the two codes in the low 16 bits to elements, without rounding.
__device__ __forceinline__ uint32_t elements_of(uint32_t codes, __half) { return halves_of(codes); }

__device__ __forceinline__ uint32_t elements_of(uint32_t codes, __nv_bfloat16) {
  const float2 two = unpacked(halves_of(codes), __half());
  const __nv_bfloat162 pair = __floats2bfloat162_rn(two.x, two.y);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
