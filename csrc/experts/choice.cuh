// Choice of a row's experts by its router's logits.
//
// Compiled with: CHOSEN (experts of a row, at most 32), EXPERTS (at most 65,535), NORMALIZE (1:
// shares add up to 1), ELEMENT (__half, __nv_bfloat16).
#pragma once

#include "experts/logits.cuh"

struct Choice {
  int expert;
  float share;  // as an ELEMENT
};

// Lane k of a warp gets the k-th choice of a row of EXPERTS logits, the most likely first; lanes
// from CHOSEN on get nothing meaningful.
__device__ __forceinline__ Choice choice_of(const ELEMENT* logits, int lane) {
  constexpr int EACH = (EXPERTS + 31) / 32;  // logits per lane
  const unsigned short* bits = reinterpret_cast<const unsigned short*>(logits);
  uint32_t keys[EACH], mine = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int expert = i * 32 + lane;
    keys[i] = expert < EXPERTS ? key_of(bits[expert], expert) : 0;
  }
  float largest = 0.0f, sum = 0.0f;
#pragma unroll 1
  for (int choice = 0; choice < CHOSEN; ++choice) {
    uint32_t top = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) top = max(top, keys[i]);
    top = __reduce_max_sync(~0u, top);
    if (choice == 0) {
      largest = logit_of(top);
#pragma unroll
      for (int i = 0; i < EACH; ++i)
        if (i * 32 + lane < EXPERTS) sum += expf(logit_of(keys[i]) - largest);
    }
    if (lane == choice) mine = top;
#pragma unroll
    for (int i = 0; i < EACH; ++i)
      if (keys[i] == top) keys[i] = 0;
  }
  sum = warp_sum(sum);
  const float share = lane < CHOSEN ? expf(logit_of(mine) - largest) / sum : 0.0f;
  const float all = warp_sum(share);
  return {static_cast<int>(0xffff - (mine & 0xffff)), rounded(NORMALIZE ? share / all : share)};
}

// Sum over all lanes up to and including this one.
__device__ __forceinline__ int sum_to(int x, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(~0u, x, step);
    if (lane >= step) x += below;
  }
  return x;
}
