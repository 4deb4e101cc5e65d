// rope: rotary position embedding of the query and key heads of one token per row, in place, after
// the RMSNorm of each head if the model has it. 16 lanes per head, each with four consecutive
// channels of every 64.
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

constexpr int LANES = 16;             // per head
constexpr int CHUNK = 4 * LANES;      // channels, four per lane
constexpr int CHUNKS = HEAD_DIM / CHUNK;
constexpr int TURNED_CHUNKS = TURNED / CHUNK;
constexpr int OTHER = LANES / 2;      // lanes from a channel to the one 32 further, within a chunk

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

struct alignas(8) Four {
  ELEMENT of[4];
};

__device__ __forceinline__ Four four_at(const ELEMENT* vector, int chunk, int lane) {
  return *reinterpret_cast<const Four*>(vector + chunk * CHUNK + lane * 4);
}

// The four channels of the lane that has those 32 channels before or after.
__device__ __forceinline__ Four of_other(const Four& four) {
  union {
    Four four;
    uint2 words;
  } x = {four};
  x.words.x = __shfl_xor_sync(~0u, x.words.x, OTHER);
  x.words.y = __shfl_xor_sync(~0u, x.words.y, OTHER);
  return x.four;
}

__device__ __forceinline__ float rounded(float x) { return static_cast<float>(ELEMENT(x)); }

// Sum of squares of a head. A lane adds the channels that are 32 apart, of two of its four: this
// order of additions does not depend on how many channels a lane reads at once.
__device__ __forceinline__ float sum_of_squares(const Four (&read)[CHUNKS], int lane) {
  float sums[2] = {};
  const bool upper = lane >= OTHER;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    const Four other = of_other(read[i]);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const Four &low = half ? other : read[i], &high = half ? read[i] : other;
        const float x = static_cast<float>(upper ? high.of[2 + j] : low.of[j]);
        sums[j] = fmaf(x, x, sums[j]);
      }
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
#pragma unroll
    for (int step = OTHER / 2; step > 0; step /= 2)
      sums[j] += __shfl_xor_sync(~0u, sums[j], step);
    sums[j] += __shfl_xor_sync(~0u, sums[j], OTHER);
  }
  return sums[0] + sums[1];
}

// The channels with which those of a chunk are rotated.
__device__ __forceinline__ Four partner_of(const Four (&x)[CHUNKS], const Four (&others)[CHUNKS],
                                           int chunk, int lane) {
  constexpr int AWAY = TURNED_CHUNKS / 2;
  if constexpr (TURNED_CHUNKS % 2 == 0) return x[(chunk + AWAY) % TURNED_CHUNKS];
  Four partner;
#pragma unroll
  for (int j = 0; j < 4; ++j)
    partner.of[j] = lane < OTHER ? others[(chunk + AWAY) % TURNED_CHUNKS].of[j]
                                 : others[(chunk + AWAY + 1) % TURNED_CHUNKS].of[j];
  return partner;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    rope(const __grid_constant__ Params params) {
  const int place = (blockIdx.x * WARPS * 32 + threadIdx.x) / LANES, lane = threadIdx.x % LANES;
  const int head = min(place, params.all_heads - 1), queries = params.query_heads;
  let_next_begin();
  const int at = head < queries ? head * params.query_step
                                : queries * params.query_step + head - queries;
  ELEMENT* target = params.heads + blockIdx.y * params.row_stride + at * HEAD_DIM;
  const int64_t row = static_cast<int64_t>(blockIdx.y) * TURNED;
  const ELEMENT* norm = head < queries ? params.query_norm : params.key_norm;
  const bool normed = norm != nullptr;
  // All reads are issued together, before any write: each wait for L2 counts.
  Four x[CHUNKS], weight[CHUNKS], cosine[CHUNKS], sine[CHUNKS];
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i)
    if (normed) weight[i] = four_at(norm, i, lane);
  wait_for_previous();
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    x[i] = four_at(target, i, lane);
    if (i < TURNED_CHUNKS) {
      cosine[i] = four_at(params.cosine + row, i, lane);
      sine[i] = four_at(params.sine + row, i, lane);
    }
  }
  // Either all heads have a norm or none.
  if (normed) {
    const float scale = rsqrtf(sum_of_squares(x, lane) / HEAD_DIM + params.epsilon);
#pragma unroll
    for (int i = 0; i < CHUNKS; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float each = static_cast<float>(x[i].of[j]) * scale;
        const float by = static_cast<float>(weight[i].of[j]);
        x[i].of[j] = ELEMENT(CENTERED ? each * (1.0f + by) : rounded(each) * by);
      }
  }
  Four others[CHUNKS];
  if constexpr (TURNED_CHUNKS % 2)
#pragma unroll
    for (int i = 0; i < TURNED_CHUNKS; ++i) others[i] = of_other(x[i]);
  if (place >= params.all_heads) return;
#pragma unroll
  for (int i = 0; i < CHUNKS; ++i) {
    Four result = x[i];
    if (i < TURNED_CHUNKS) {
      const Four partner = partner_of(x, others, i, lane);
      const bool first = i * CHUNK + lane * 4 < TURNED / 2;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float other = static_cast<float>(partner.of[j]), turned = first ? -other : other;
        result.of[j] =
            ELEMENT(rounded(static_cast<float>(x[i].of[j]) * static_cast<float>(cosine[i].of[j])) +
                    rounded(turned * static_cast<float>(sine[i].of[j])));
      }
    }
    *reinterpret_cast<Four*>(target + i * CHUNK + lane * 4) = result;
  }
}
