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

// Convert four codes to halves, which represent all of them.
__device__ __forceinline__ uint2 halves_of(uint32_t codes) {
  uint2 halves;
#if __CUDA_ARCH__ >= 890
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
      : "=r"(halves.x), "=r"(halves.y)
      : "r"(codes));
#else
  // The exponent of a half is 8 larger.
  const uint32_t apart[2] = {__byte_perm(codes, 0, 0x1404), __byte_perm(codes, 0, 0x3424)};
  uint32_t found[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t scaled = (apart[i] & 0x80008000) | (apart[i] >> 1 & 0x3f803f80);
    const __half2 two =
        __hmul2(*reinterpret_cast<const __half2*>(&scaled), __float2half2_rn(256.0f));
    found[i] = *reinterpret_cast<const uint32_t*>(&two);
  }
  halves = {found[0], found[1]};
#endif
  return halves;
}

// Convert four codes to elements, without rounding.
__device__ __forceinline__ uint2 elements_of(uint32_t codes, __half) { return halves_of(codes); }

__device__ __forceinline__ uint2 elements_of(uint32_t codes, __nv_bfloat16) {
  const uint2 halves = halves_of(codes);
  const float2 low = unpacked(halves.x, __half()), high = unpacked(halves.y, __half());
  const __nv_bfloat162 first = __floats2bfloat162_rn(low.x, low.y);
  const __nv_bfloat162 second = __floats2bfloat162_rn(high.x, high.y);
  return {*reinterpret_cast<const uint32_t*>(&first), *reinterpret_cast<const uint32_t*>(&second)};
}

// Bits of an element.
template <class T>
struct Format;

template <>
struct Format<__half> {
  using Pair = __half2;
  static constexpr bool HALF = true;
  static constexpr uint32_t BIAS = 15, MANTISSA = 10, LARGEST = BIAS + 14;
};

template <>
struct Format<__nv_bfloat16> {
  using Pair = __nv_bfloat162;
  static constexpr bool HALF = false;
  static constexpr uint32_t BIAS = 127, MANTISSA = 7, LARGEST = 2 * BIAS - 1;
};

template <class To, class From>
__device__ __forceinline__ To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From), "the same bits");
  return *reinterpret_cast<const To*>(&from);
}

#if WEIGHT_BITS == 4
// Scale and zero point of INT4 codes.
struct Group4 {
  using Pair = Format<ELEMENT>::Pair;
  SCALE scale;
  Pair zero;

  __device__ __forceinline__ Group4(SCALE scale, uint32_t zero) : scale(scale) {
    this->zero = Pair(ELEMENT(static_cast<float>(zero)), ELEMENT(static_cast<float>(zero)));
  }

  // Convert the codes in the last four bits of both halves of a word, rounding once.
  __device__ __forceinline__ uint32_t weights(uint32_t word) const {
    // 2^MANTISSA plus a code is a number whose last bits are the code.
    constexpr uint32_t UNITS = (Format<ELEMENT>::BIAS + Format<ELEMENT>::MANTISSA)
                               << Format<ELEMENT>::MANTISSA;
    constexpr uint32_t BOTH = UNITS * 0x00010001u;
    // (word & 0x000f000f) | BOTH, in one instruction.
    uint32_t codes;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(codes) : "r"(word), "n"(0x000f000f), "r"(BOTH));
    const Pair exact = __hsub2(__hsub2(bits_as<Pair>(codes), bits_as<Pair>(BOTH)), zero);
#if FLOAT_SCALES
    const float2 two = unpacked(bits_as<uint32_t>(exact), ELEMENT());
    return bits_as<uint32_t>(Pair(ELEMENT(two.x * scale), ELEMENT(two.y * scale)));
#else
    return bits_as<uint32_t>(__hmul2(exact, Pair(scale, scale)));
#endif
  }
};
#endif
