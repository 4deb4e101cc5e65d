// rms_norm: x / sqrt(mean(x^2) + epsilon) * weight, between launches of linear_rows and
// linear_cluster: meanwhile, the weights of the next launch are loading (overlap.cuh). One thread
// block per row.
//
// CENTERED: the weight is added to 1, and the result is rounded once.
//
// Compiled with: ELEMENT (__half, __nv_bfloat16), CENTERED.

#include "common/overlap.cuh"
#include "common/rounding.cuh"

constexpr int THREADS = 512;
constexpr int EACH = 4;  // times 8 elements per thread: rows have up to THREADS * EACH * 8

struct Params {
  const ELEMENT* x;       // (rows, width)
  const ELEMENT* weight;  // (width)
  ELEMENT* output;        // (rows, width)
  int width;              // a multiple of 8
  float epsilon;
};

extern "C" __global__ void __launch_bounds__(THREADS)
    rms_norm(const __grid_constant__ Params params) {
  __shared__ float sums[THREADS / 32];
  const int thread = threadIdx.x, width = params.width;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * width;
  uint4 x[EACH], weight[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = (i * THREADS + thread) * 8;
    if (at < width) weight[i] = load16(params.weight + at);
  }
  let_next_begin();
  wait_for_previous();
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = (i * THREADS + thread) * 8;
    if (at < width) x[i] = load16(params.x + row + at);
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if ((i * THREADS + thread) * 8 >= width) continue;
    const uint32_t words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = unpacked(words[j], ELEMENT());
      squares = fmaf(two.x, two.x, fmaf(two.y, two.y, squares));
    }
  }
  squares = warp_sum(squares);
  if (thread % 32 == 0) sums[thread / 32] = squares;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < THREADS / 32; ++warp) sum += sums[warp];
  const float scale = rsqrtf(sum / width + params.epsilon);
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int at = (i * THREADS + thread) * 8;
    if (at >= width) continue;
    const uint32_t words[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
    const uint32_t by[4] = {weight[i].x, weight[i].y, weight[i].z, weight[i].w};
    uint4 eight;
    ELEMENT* found = reinterpret_cast<ELEMENT*>(&eight);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = unpacked(words[j], ELEMENT()), other = unpacked(by[j], ELEMENT());
      found[2 * j] = weighted(two.x * scale, other.x, CENTERED);
      found[2 * j + 1] = weighted(two.y * scale, other.y, CENTERED);
    }
    *reinterpret_cast<uint4*>(params.output + row + at) = eight;
  }
}
