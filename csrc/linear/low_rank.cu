// low_rank: what LoRA adapters add to products: y = products + between B^T, where between is x A^T,
// with 0 in the ranks that a row does not use. Then the residual stream is added to y, or two
// products become silu(gate) * up.
//
// Compiled with: ROWS (at most), GATED (1: the first half of the outputs are the gate's), ELEMENT
// (__half, __nv_bfloat16).

#include "common/overlap.cuh"
#include "common/rounding.cuh"

constexpr int THREADS = 64;
constexpr int SIDES = GATED ? 2 : 1;

struct Params {
  const ELEMENT* products;  // (rows, SIDES * outputs)
  const ELEMENT* between;   // (rows, ranks), ranks a multiple of 8
  const ELEMENT* up;        // (SIDES * outputs, ranks)
  const uint8_t* idle;      // (rows, mask_ranks), of which rank % mask_ranks counts: 1 if the row
                            // does not use the rank; or null
  const ELEMENT* residual;  // (rows, outputs) to be added, or null
  ELEMENT* output;          // (rows, outputs)
  int64_t products_stride, between_stride, idle_stride;  // between rows, in elements
  int rows, outputs, ranks, mask_ranks;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    low_rank(const __grid_constant__ Params params) {
  extern __shared__ __align__(16) float factors[];  // (ROWS, ranks)
  const int output = blockIdx.x * THREADS + threadIdx.x, ranks = params.ranks;
  const ELEMENT* up[SIDES];
#pragma unroll
  for (int side = 0; side < SIDES; ++side) {
    const int64_t row = side * params.outputs + min(output, params.outputs - 1);
    up[side] = params.up + row * ranks;
    for (int at = 0; at < ranks; at += 64)
      asm volatile("prefetch.global.L2 [%0];" ::"l"(up[side] + at));
  }
  let_next_begin();
  wait_for_previous();
  for (int i = threadIdx.x; i < ROWS * ranks; i += THREADS) {
    const int row = i / ranks, rank = i % ranks;
    factors[i] = 0.0f;
    if (row >= params.rows) continue;
    if (params.idle != nullptr && params.idle[row * params.idle_stride + rank % params.mask_ranks])
      continue;
    factors[i] = static_cast<float>(params.between[row * params.between_stride + rank]);
  }
  __syncthreads();
  if (output >= params.outputs) return;

  float sums[SIDES][ROWS] = {};
#pragma unroll 2
  for (int at = 0; at < ranks; at += 8) {
    float weights[SIDES][8];
#pragma unroll
    for (int side = 0; side < SIDES; ++side) {
      const uint4 eight = load16(up[side] + at);
      const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 two = unpacked(words[i], ELEMENT());
        weights[side][2 * i] = two.x, weights[side][2 * i + 1] = two.y;
      }
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int i = 0; i < 8; ++i)
#pragma unroll
        for (int side = 0; side < SIDES; ++side)
          sums[side][row] = fmaf(weights[side][i], factors[row * ranks + at + i], sums[side][row]);
  }
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    if (row >= params.rows) break;
    const ELEMENT* const products = params.products + row * params.products_stride + output;
    const int64_t place = static_cast<int64_t>(row) * params.outputs + output;
    float y = rounded(static_cast<float>(products[0]) + sums[0][row]);
    if (GATED) {
      const float other = static_cast<float>(products[(SIDES - 1) * params.outputs]);
      y = gated(y, other + sums[SIDES - 1][row]);
    }
    if (params.residual != nullptr) y += static_cast<float>(params.residual[place]);
    params.output[place] = ELEMENT(y);
  }
}
