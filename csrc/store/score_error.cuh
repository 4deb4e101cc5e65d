// Codes of a key that lower the error of its scores (oscar_mm/quant/score_error.py, in PyTorch).
//
// Compiled with, besides page.cuh's: SCORE_CHANGES (most codes of a key that change) and SCORE_FLOOR
// (part of the mean energy that every channel has besides its own).
#pragma once

#include "common/hadamard.cuh"
#include "store/fit.cuh"

// The weights of channels: from the energy of those that a lane has of a balanced key and of its
// center, neither of them rotated. COUNT channels of each of four lanes; the channel in RoPE's pair
// is half of them away.
template <int COUNT>
__device__ __forceinline__ void score_weights(float (&energy)[COUNT]) {
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < COUNT / 2; ++i) {
    energy[i] += energy[i + COUNT / 2];
    total += energy[i];
  }
  const float floor = SCORE_FLOOR * (sum_of_lanes<1, 4>(total) * (2.0f / HEAD_DIM));
#pragma unroll
  for (int i = 0; i < COUNT / 2; ++i) {
    energy[i] += floor;
    energy[i + COUNT / 2] = energy[i];
  }
}

// Change codes. x: the rotated values that they stand for; weights: of score_weights; both are
// written over. shared: (32, COUNT + 1) of the warp.
template <int BITS, int COUNT>
__device__ __forceinline__ void lower_score_error(RawCodes<BITS, true>& raw, float (&x)[COUNT],
                                                  float (&weights)[COUNT], const Fit& fit,
                                                  float* shared, int lane) {
  constexpr int STEPS = (1 << BITS) - 1;
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    x[i] = fmaf(static_cast<float>(raw.code(i)), fit.scale, fit.zero) - x[i];
  hadamard<COUNT, 1, 4>(x, lane);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) x[i] *= weights[i];
  hadamard<COUNT, 1, 4>(x, lane);
  // H D H has the number i ^ j of HADAMARD_NORM * (H D) in its row i and column j.
  hadamard<COUNT, 1, 4>(weights, lane);
  __syncwarp();
#pragma unroll
  for (int i = 0; i < COUNT; ++i) shared[lane * (COUNT + 1) + i] = weights[i] * HADAMARD_NORM;
  __syncwarp();
  const float curvature = shared[(lane & ~3) * (COUNT + 1)] * fit.scale;
#pragma unroll 1
  for (int change = 0; change < SCORE_CHANGES; ++change) {
    // Half of the gain by a unit of the scale: a product has the sign and order of the gain's.
    float best = 0.0f;
    int chosen = -1;  // element, lane, up
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const bool up = !(x[i] > 0.0f);
      const float gain = fmaf(2.0f, fabsf(x[i]), -curvature);
      if (gain > best && raw.code(i) != (up ? STEPS : 0)) best = gain, chosen = i * 8 + up;
    }
    if (!(fit.scale > 0.0f)) chosen = -1;
    if (chosen < 0) best = 0.0f;
    else chosen += 2 * (lane & 3);
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      const float other = __shfl_xor_sync(~0u, best, step);
      const int which = __shfl_xor_sync(~0u, chosen, step);
      if (other > best || (other == best && which > chosen)) best = other, chosen = which;
    }
    if (!__any_sync(~0u, chosen >= 0)) return;
    if (chosen >= 0) {
      const int element = chosen / 8, owner = chosen / 2 % 4, sign = chosen % 2 ? 1 : -1;
      if (owner == (lane & 3)) raw.change(element, sign);
      const float by = sign * fit.scale;
      const float* row = shared + (lane ^ owner) * (COUNT + 1);
#pragma unroll
      for (int i = 0; i < COUNT; ++i) x[i] = fmaf(by, row[i ^ element], x[i]);
    }
  }
}
