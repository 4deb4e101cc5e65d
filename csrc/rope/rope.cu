// rope: rotary position embedding of the query and key heads of one token per row, in place, after
// the RMSNorm of each head if the model has it. One warp per head.
//
// Channels i and i + TURNED / 2 are rotated together; those from TURNED on are only normalized.
// Rounding is the same as in separate operations.
//
// Compiled with: HEAD_DIM and TURNED (multiples of 64), CENTERED (1: weights of norms are added to
// 1, and the result is rounded once), ELEMENT (__half, __nv_bfloat16), WARPS.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/overlap.cuh"
#include "common/types.cuh"

constexpr int EACH = HEAD_DIM / 32;  // channels of a lane
constexpr int HALF = TURNED / 64;    // half of the rotated channels of a lane

struct Params {
  ELEMENT* heads;             // (rows, row_stride): query heads, then key heads
  const ELEMENT* query_norm;  // (HEAD_DIM), or null; key_norm likewise
  const ELEMENT* key_norm;
  const ELEMENT* cosine;      // (rows, TURNED); sine likewise
  const ELEMENT* sine;
  int64_t row_stride;         // elements
  int query_heads, all_heads;
  int query_step;             // heads from one query head to the next: 2 if a gate comes after it
  float epsilon;              // epsilon of the norms
};

__device__ __forceinline__ float rounded(float x) { return static_cast<float>(ELEMENT(x)); }

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    rope(const __grid_constant__ Params params) {
  const int head = blockIdx.x * WARPS + threadIdx.x / 32, lane = threadIdx.x % 32;
  let_next_begin();
  const int queries = params.query_heads;
  const int place = head < queries ? head * params.query_step
                                   : queries * params.query_step + head - queries;
  ELEMENT* at = params.heads + blockIdx.y * params.row_stride + place * HEAD_DIM;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * TURNED;
  const ELEMENT* norm = head < queries ? params.query_norm : params.key_norm;
  const bool normed = norm != nullptr;
  // All reads are issued together, before any write: each wait for L2 counts.
  ELEMENT read[EACH], weight[EACH], cosine[2 * HALF], sine[2 * HALF];
#pragma unroll
  for (int i = 0; i < EACH; ++i) weight[i] = normed ? norm[i * 32 + lane] : ELEMENT(1.0f);
  wait_for_previous();
  if (head >= params.all_heads) return;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    read[i] = at[i * 32 + lane];
    if (i < 2 * HALF) {
      cosine[i] = params.cosine[row + i * 32 + lane];
      sine[i] = params.sine[row + i * 32 + lane];
    }
  }
  float x[EACH], sum = 0.0f;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    x[i] = static_cast<float>(read[i]);
    sum = fmaf(x[i], x[i], sum);
  }
  if (normed) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    const float scale = rsqrtf(sum / HEAD_DIM + params.epsilon);
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const float by = static_cast<float>(weight[i]);
      x[i] = rounded(CENTERED ? x[i] * scale * (1.0f + by) : rounded(x[i] * scale) * by);
    }
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (i >= 2 * HALF) {
      at[i * 32 + lane] = ELEMENT(x[i]);
      continue;
    }
    const float turned = i < HALF ? -x[i + HALF] : x[i - HALF];
    at[i * 32 + lane] = ELEMENT(rounded(x[i] * static_cast<float>(cosine[i])) +
                                rounded(turned * static_cast<float>(sine[i])));
  }
}
