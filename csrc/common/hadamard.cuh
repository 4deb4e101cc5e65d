// Normalized Hadamard transform of a vector of HEAD_DIM elements by the lanes of a warp
// (quant/basis.py).
#pragma once

#include "common/page.cuh"

constexpr int PER_LANE = HEAD_DIM / 32;
static_assert((HEAD_DIM & (HEAD_DIM - 1)) == 0, "a Hadamard transform has a power of two");

// 1 / sqrt(size) of a power of two: halved for each factor of 4, which is exact.
__device__ constexpr float hadamard_norm(int size) {
  return size == 1 ? 1.0f : size == 2 ? 0.70710678118654752f : 0.5f * hadamard_norm(size / 4);
}
constexpr float HADAMARD_NORM = hadamard_norm(HEAD_DIM);

// Channel of element i of a lane, if all 32 lanes have a part of the vector.
__device__ __forceinline__ int channel_of(int i, int lane) { return i * 32 + lane; }

// The transform without its factor, over COUNT elements per lane and the lanes FIRST, 2 FIRST, ...
// up to END / 2 apart. (The result is the same for any assignment of channel bits to lanes and
// elements.)
template <int COUNT, int FIRST, int END>
__device__ __forceinline__ void butterflies(float (&x)[COUNT], int lane) {
#pragma unroll
  for (int step = 1; step < COUNT; step *= 2)
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (!(i & step)) {
        const float a = x[i], b = x[i + step];
        x[i] = a + b, x[i + step] = a - b;
      }
#pragma unroll
  for (int step = FIRST; step < END; step *= 2) {
    const float sign = lane & step ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) x[i] = fmaf(x[i], sign, __shfl_xor_sync(~0u, x[i], step));
  }
}

template <int COUNT = PER_LANE, int FIRST = 1, int END = 32>
__device__ __forceinline__ void hadamard(float (&x)[COUNT], int lane) {
  butterflies<COUNT, FIRST, END>(x, lane);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) x[i] *= HADAMARD_NORM;
}
