// combine: sum of the outputs of a row's experts, times their shares, and the residual stream. One
// thread block per row.
//
// Compiled with: CHOSEN (experts of a row), ELEMENT (__half, __nv_bfloat16).

#include "common/overlap.cuh"
#include "common/rounding.cuh"

constexpr int THREADS = 256;

struct Params {
  const ELEMENT* found;     // (places, width)
  const float* shares;      // (rows, CHOSEN)
  const int* places;        // (rows, CHOSEN)
  const ELEMENT* residual;  // (rows, width)
  ELEMENT* output;          // (rows, width)
  int width;                // a multiple of 8
};

extern "C" __global__ void __launch_bounds__(THREADS)
    combine(const __grid_constant__ Params params) {
  const int64_t row = blockIdx.x, width = params.width;
  let_next_begin();
  wait_for_previous();
  int places[CHOSEN];
  float shares[CHOSEN];
#pragma unroll
  for (int k = 0; k < CHOSEN; ++k) {
    places[k] = params.places[row * CHOSEN + k];
    shares[k] = params.shares[row * CHOSEN + k];
  }
  for (int at = threadIdx.x * 8; at < width; at += THREADS * 8) {
    const uint4 residual = load16(params.residual + row * width + at);
    float sums[8] = {};
#pragma unroll
    for (int k = 0; k < CHOSEN; ++k) {
      const uint4 eight = load16(params.found + places[k] * width + at);
      const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 two = unpacked(words[j], ELEMENT());
        sums[2 * j] += rounded(two.x * shares[k]);
        sums[2 * j + 1] += rounded(two.y * shares[k]);
      }
    }
    const uint32_t words[4] = {residual.x, residual.y, residual.z, residual.w};
    uint4 eight;
    ELEMENT* output = reinterpret_cast<ELEMENT*>(&eight);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = unpacked(words[j], ELEMENT());
      output[2 * j] = ELEMENT(rounded(sums[2 * j]) + two.x);
      output[2 * j + 1] = ELEMENT(rounded(sums[2 * j + 1]) + two.y);
    }
    *reinterpret_cast<uint4*>(params.output + row * width + at) = eight;
  }
}
