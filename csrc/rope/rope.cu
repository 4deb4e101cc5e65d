// rope: rotary position embedding of the query and key heads of one token per row, in place, after
// the RMSNorm of each head if the model has it. One warp per head.
//
// Channels i and i + HEAD_DIM / 2 are rotated together. Rounding is the same as in separate
// operations.
//
// Compiled with: HEAD_DIM (a multiple of 64), ELEMENT (__half, __nv_bfloat16), WARPS.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/overlap.cuh"
#include "common/types.cuh"

constexpr int HALF = HEAD_DIM / 2, PAIRS = HALF / 32;

struct Params {
  ELEMENT* heads;             // (rows, row_stride): query heads, then key heads
  const ELEMENT* query_norm;  // (HEAD_DIM), or null; key_norm likewise
  const ELEMENT* key_norm;
  const ELEMENT* cosine;      // (rows, HEAD_DIM); sine likewise
  const ELEMENT* sine;
  int64_t row_stride;         // elements
  int query_heads, all_heads;
  float epsilon;              // epsilon of the norms
};

__device__ __forceinline__ float rounded(float x) { return static_cast<float>(ELEMENT(x)); }

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    rope(const __grid_constant__ Params params) {
  const int head = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  let_next_begin();
  ELEMENT* at = params.heads + blockIdx.y * params.row_stride + head * HEAD_DIM;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * HEAD_DIM;
  const ELEMENT* norm = head < params.query_heads ? params.query_norm : params.key_norm;
  const bool normed = norm != nullptr;
  // All reads are issued together, before any write: each wait for L2 counts.
  ELEMENT read[2][PAIRS], weight[2][PAIRS], cosine[2][PAIRS], sine[2][PAIRS];
#pragma unroll
  for (int side = 0; side < 2; ++side)
#pragma unroll
    for (int i = 0; i < PAIRS; ++i)
      weight[side][i] = normed ? norm[side * HALF + i * 32 + lane] : ELEMENT(1.0f);
  wait_for_previous();
  if (head >= params.all_heads) return;
#pragma unroll
  for (int side = 0; side < 2; ++side)
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const int channel = side * HALF + i * 32 + lane;
      read[side][i] = at[channel];
      cosine[side][i] = params.cosine[row + channel];
      sine[side][i] = params.sine[row + channel];
    }
  float x[2][PAIRS], sum = 0.0f;
#pragma unroll
  for (int side = 0; side < 2; ++side)
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      x[side][i] = static_cast<float>(read[side][i]);
      sum = fmaf(x[side][i], x[side][i], sum);
    }
  if (normed) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    const float scale = rsqrtf(sum / HEAD_DIM + params.epsilon);
#pragma unroll
    for (int side = 0; side < 2; ++side)
#pragma unroll
      for (int i = 0; i < PAIRS; ++i)
        x[side][i] = rounded(rounded(x[side][i] * scale) * static_cast<float>(weight[side][i]));
  }
#pragma unroll
  for (int side = 0; side < 2; ++side)
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const float turned = side ? x[0][i] : -x[1][i];
      at[side * HALF + i * 32 + lane] =
          ELEMENT(rounded(x[side][i] * static_cast<float>(cosine[side][i])) +
                  rounded(turned * static_cast<float>(sine[side][i])));
    }
}
