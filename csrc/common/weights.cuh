// Weights in 16 bits (ELEMENT), in FP8 (e4m3) with a scale for each block of 128 columns, or in INT4
// with a scale and a zero point for each group of a row (oscar_mm/weights).
//
// Compiled with: ELEMENT (__half, __nv_bfloat16), WEIGHT_BITS (16, 8, 4; 16 if undefined),
// FLOAT_SCALES (with INT4; 1: scales are floats; 0: they are ELEMENTs).
#pragma once

#include "common/rounding.cuh"

#ifndef WEIGHT_BITS
#define WEIGHT_BITS 16
#endif

#if WEIGHT_BITS == 16
using WEIGHT = ELEMENT;
#else
using WEIGHT = uint8_t;
#endif
#if WEIGHT_BITS == 4 && !FLOAT_SCALES
using SCALE = ELEMENT;
#else
using SCALE = float;
#endif

constexpr int SCALE_COLUMNS = 128;  // of FP8

// Bytes of that many weights of a row.
__host__ __device__ constexpr int weight_bytes(int elements) { return elements * WEIGHT_BITS / 8; }

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

// Convert codes 2i and 2i + 1 of a word of INT4 codes, minus their zero point, without rounding.
// `zero` is made by `zero_of`: 1024 (128) plus a code is a half (bfloat16) whose last bits are the
// code.
__device__ __forceinline__ uint32_t zero_of(uint32_t zero, __half) {
  return 0x64006400 | zero * 0x00010001;
}

__device__ __forceinline__ uint32_t zero_of(uint32_t zero, __nv_bfloat16) {
  return 0x43004300 | zero * 0x00010001;
}

__device__ __forceinline__ uint32_t elements_of(uint32_t word, int i, uint32_t zero, __half) {
  const uint32_t codes = (word >> 4 * i & 0x000f000f) | 0x64006400;
  const __half2 two = __hsub2(*reinterpret_cast<const __half2*>(&codes),
                              *reinterpret_cast<const __half2*>(&zero));
  return *reinterpret_cast<const uint32_t*>(&two);
}

__device__ __forceinline__ uint32_t elements_of(uint32_t word, int i, uint32_t zero,
                                                __nv_bfloat16) {
  const uint32_t codes = (word >> 4 * i & 0x000f000f) | 0x43004300;
  const __nv_bfloat162 two = __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&codes),
                                     *reinterpret_cast<const __nv_bfloat162*>(&zero));
  return *reinterpret_cast<const uint32_t*>(&two);
}
