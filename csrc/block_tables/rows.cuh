// Properties of a batch's rows that the kernels of block tables use.
#pragma once

#include "common/page_tokens.cuh"
#include "common/types.cuh"

constexpr int MAX_ROWS = 4096;

__device__ __forceinline__ int ceil_div(int x, int y) { return (x + y - 1) / y; }

// Set before[row] to the sum of amount(row) over all previous rows, and before[rows] to the total.
// Called by one warp.
template <class Amount>
__device__ __forceinline__ void sums_before(int* before, int rows, int lane, const Amount& amount) {
  int sum = 0;
  for (int first = 0; first < rows; first += 32) {
    const int row = first + lane;
    const int own = row < rows ? amount(row) : 0;
    int upto = own;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(~0u, upto, step);
      if (lane >= step) upto += other;
    }
    if (row < rows) before[row] = sum + upto - own;
    sum += __shfl_sync(~0u, upto, 31);
  }
  if (lane == 0) before[rows] = sum;
}
