// The matrices of a launch, the row of weights of an output, and the final operations on its
// products.
//
// Compiled with: GATED (1: weights[0] is the gate's, weights[1] the other's), ELEMENT (__half,
// __nv_bfloat16), WEIGHT_BITS and FLOAT_SCALES (weights.cuh).
#pragma once

#include "common/weights.cuh"

constexpr int SIDES = GATED ? 2 : 1;  // rows of weights per output
constexpr int MATRICES = 4;           // at most

struct Matrices {
  const WEIGHT* weights[MATRICES];   // (outputs[i], width)
  const SCALE* scales[MATRICES];     // FP8: (outputs[i] >> shifts[i], width / 128), rounded up;
                                     // INT4: (outputs[i], width >> group_shift), at least one
  const uint8_t* zeros[MATRICES];    // INT4: like the scales
  const ELEMENT* biases[MATRICES];   // (outputs[i]), or null
  const ELEMENT* residual;           // (rows, total) to be added, or null
  ELEMENT* output;                   // (rows, total)
  int outputs[MATRICES];
  int shifts[MATRICES];              // FP8: log2 of the rows of a scale
  int total, width;
  int group_shift;                   // INT4: log2 of the columns of a group; 31: as wide as the
                                     // matrix
};

// Matrix and row of an output's weights.
struct WeightRow {
  int matrix, row;

  __device__ __forceinline__ WeightRow(const Matrices& matrices, int output, int side)
      : matrix(side), row(output) {
    if (GATED) return;
#pragma unroll
    for (int i = 0; i < MATRICES - 1; ++i)
      if (matrix == i && row >= matrices.outputs[i]) row -= matrices.outputs[i], ++matrix;
  }

  __device__ __forceinline__ const WEIGHT* weights(const Matrices& matrices) const {
    const int units = weight_bytes(matrices.width) / sizeof(WEIGHT);
    return matrices.weights[matrix] + static_cast<int64_t>(row) * units;
  }

  // FP8: the scales of the row.
  __device__ __forceinline__ const SCALE* scales(const Matrices& matrices) const {
    const int columns = (matrices.width + SCALE_COLUMNS - 1) / SCALE_COLUMNS;
    return matrices.scales[matrix] + static_cast<int64_t>(row >> matrices.shifts[matrix]) * columns;
  }

  // INT4: groups of a row, and index of the row's first in scales and zeros.
  __device__ __forceinline__ static int groups_of(const Matrices& matrices) {
    return max(matrices.width >> matrices.group_shift, 1);
  }

  __device__ __forceinline__ int64_t groups(const Matrices& matrices) const {
    return static_cast<int64_t>(row) * groups_of(matrices);
  }

  // INT4: bring scales and zeros of the row to the L2 cache.
  __device__ __forceinline__ void prefetch_groups(const Matrices& matrices) const {
    const char* places[2] = {
        reinterpret_cast<const char*>(matrices.scales[matrix] + groups(matrices)),
        reinterpret_cast<const char*>(matrices.zeros[matrix] + groups(matrices))};
    const int bytes[2] = {groups_of(matrices) * int(sizeof(SCALE)), groups_of(matrices)};
    for (int i = 0; i < 2; ++i)
      for (int at = 0; at < bytes[i]; at += 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(places[i] + at));
  }

  __device__ __forceinline__ float bias(const Matrices& matrices) const {
    const ELEMENT* biases = matrices.biases[matrix];
    return biases != nullptr ? static_cast<float>(biases[row]) : 0.0f;
  }
};

// Return a finished output: silu(gate) * up of two products, or one product plus its bias; plus the
// residual, which is 0 if there is none.
__device__ __forceinline__ ELEMENT finished(const Matrices& matrices,
                                            const float (&products)[SIDES], float bias,
                                            float residual) {
  float y = rounded(products[0] + bias);
  if (GATED) y = gated(products[0], products[SIDES - 1]);
  if (matrices.residual != nullptr) y += residual;
  return ELEMENT(y);
}

// Finish the output at index `at` of (rows, total).
__device__ __forceinline__ void finish(const Matrices& matrices, int64_t at,
                                       const float (&products)[SIDES], float bias, float residual) {
  matrices.output[at] = finished(matrices, products, bias, residual);
}
