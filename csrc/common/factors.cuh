// Factors of products on matrix units: rows of x, normalized and in the type in which quantized
// weights are multiplied, and INT4 codes as halves.
//
// Compiled with the macros of weights.cuh.
#pragma once

#include "common/mma.cuh"
#include "common/weights.cuh"

// Conversion of consecutive elements of a row of x to factors: halves, times a power of two with
// which the largest is about 2^14. Elements smaller by more than 2^24 lose bits; infinities and NaN
// remain. With INT4, factors of odd pairs are 16 times as small.
struct Conversion {
  using Pair = typename Format<ELEMENT>::Pair;
  static constexpr uint32_t BIAS = Format<ELEMENT>::BIAS, MANTISSA = Format<ELEMENT>::MANTISSA;
  uint32_t exponent;  // of the power

  // largest: elements that include this lane's element of the largest magnitude; LANES lanes share
  // them.
  template <int LANES>
  __device__ __forceinline__ static Conversion of(uint32_t largest) {
    uint32_t bits = max(largest & 0xffff, largest >> 16);
    if (LANES == 32) {
      bits = __reduce_max_sync(~0u, bits);
    } else {
#pragma unroll
      for (int step = 1; step < LANES; step *= 2)
        bits = max(bits, __shfl_xor_sync(~0u, bits, step));
    }
    return {min(2 * BIAS + 14 - (bits >> MANTISSA), Format<ELEMENT>::LARGEST)};
  }

  __device__ __forceinline__ static uint32_t larger(uint32_t x, uint32_t y) {
    return bits_as<uint32_t>(__hmax2(__habs2(bits_as<Pair>(x)), __habs2(bits_as<Pair>(y))));
  }

  __device__ __forceinline__ uint32_t factors(uint32_t pair, bool odd) const {
    const uint32_t power = exponent - (WEIGHT_BITS == 4 && odd ? 4 : 0);
    const uint32_t both = power * (0x00010001 << MANTISSA);
    const uint32_t scaled = bits_as<uint32_t>(__hmul2(bits_as<Pair>(pair), bits_as<Pair>(both)));
    if (Format<ELEMENT>::HALF) return scaled;
    const float2 two = unpacked(scaled, ELEMENT());
    return packed(two.x, two.y, __half());
  }

  // Return the number by which products must be multiplied.
  __device__ __forceinline__ float undo() const {
    return __uint_as_float((127 + BIAS - exponent) << 23);
  }
};

#if WEIGHT_BITS == 4
// Halves of eight INT4 codes, in pairs of consecutive elements. A code is a half's last bits, or those
// four bits further left in odd pairs: as a half, 2^-24 of it, or 2^-20.
__device__ __forceinline__ uint4 halves_of_word(uint32_t word) {
  const uint32_t next = word >> 8;
  return {word & 0x000f000f, word & 0x00f000f0, next & 0x000f000f, next & 0x00f000f0};
}
#endif

// Sum of the squares of a pair of elements.
__device__ __forceinline__ float squared(uint32_t pair) {
  const float2 two = unpacked(pair, ELEMENT());
  return fmaf(two.x, two.x, two.y * two.y);
}

// A pair of elements of a row, normalized: times the row's scale and the norm's weight.
__device__ __forceinline__ uint32_t normed(uint32_t x, uint32_t by, float scale) {
  const float2 two = unpacked(x, ELEMENT()), other = unpacked(by, ELEMENT());
  return packed(rounded(two.x * scale) * other.x, rounded(two.y * scale) * other.y, ELEMENT());
}
