// Compiled with: GRAIN, and the macros of matrices.cuh.
#pragma once

#include "linear/matrices.cuh"

// GRAIN outputs of one matrix, or with a gate of both, whose weights are copied together.
struct Grain {
  int matrix = 0, row;  // of the first output
  int output;           // index of the first among all outputs

  __device__ __forceinline__ Grain(const Matrices& matrices, int grain)
      : row(grain * GRAIN), output(row) {
    if (GATED) return;
#pragma unroll
    for (int i = 0; i < MATRICES - 1; ++i) {
      const int rows = (matrices.outputs[i] + GRAIN - 1) / GRAIN * GRAIN;
      if (matrix == i && row >= rows) row -= rows, output += matrices.outputs[i] - rows, ++matrix;
    }
  }
};
