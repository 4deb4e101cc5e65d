// Where an output's row of weights is, among the matrices of a launch.
//
// Compiled with: GATED (1: weights[0] is the gate's, weights[1] the other's), ELEMENT. Params has the
// matrices as weights[3], (outputs[i], width) each.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "types.cuh"

constexpr int SIDES = GATED ? 2 : 1;

// Which of the matrices an output's row is in, and which row.
struct Place {
  int matrix, row;

  template <class Params>
  __device__ __forceinline__ Place(const Params& params, int output, int side)
      : matrix(side), row(output) {
    if (GATED) return;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (matrix == i && row >= params.outputs[i]) row -= params.outputs[i], ++matrix;
  }

  template <class Params>
  __device__ __forceinline__ const ELEMENT* weights(const Params& params) const {
    return params.weights[matrix] + static_cast<int64_t>(row) * params.width;
  }
};
