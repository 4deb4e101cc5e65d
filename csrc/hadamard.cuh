// Normalized Hadamard transform of one vector of HEAD_DIM by one warp (quant/rotation.py).
#pragma once

#include "page.cuh"

constexpr int PER_LANE = HEAD_DIM / 32;

// Channel of element i of a lane. (The transform is the same for any assignment of the channels'
// bits to lanes and elements.)
__device__ __forceinline__ int channel_of(int i, int lane) { return i * 32 + lane; }

__device__ __forceinline__ void hadamard(float (&x)[PER_LANE], int lane) {
#pragma unroll
  for (int step = 1; step < PER_LANE; step *= 2)
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      if (!(i & step)) {
        float a = x[i], b = x[i + step];
        x[i] = a + b, x[i + step] = a - b;
      }
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i)
      x[i] = fmaf(x[i], sign, __shfl_xor_sync(~0u, x[i], step));
  }
  constexpr float NORM = HEAD_DIM == 128 ? 0.08838834764831845f : 0.125f;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) x[i] *= NORM;
}
