// A router's logits as integers with the same order.
//
// Compiled with: ELEMENT (__half, __nv_bfloat16).
#pragma once

#include "common/rounding.cuh"

// An integer for each logit of a row, in the order of the logits; among equal logits, the first has
// the larger integer. NaN is above or below all numbers, so that there are always CHOSEN largest.
__device__ __forceinline__ uint32_t key_of(unsigned short bits, int expert) {
  const uint32_t ordered = bits & 0x8000 ? ~bits & 0xffff : bits | 0x8000;
  return ordered << 16 | (0xffff - expert);
}

__device__ __forceinline__ float logit_of(uint32_t key) {
  const uint32_t ordered = key >> 16;
  const unsigned short bits = ordered & 0x8000 ? ordered & 0x7fff : ~ordered & 0xffff;
  return static_cast<float>(*reinterpret_cast<const ELEMENT*>(&bits));
}
