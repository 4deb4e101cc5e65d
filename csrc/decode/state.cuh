// What a warp gathers of one segment, and its rescaling.
#pragma once

#include "common/codes.cuh"
#include "common/mma.cuh"
#include "common/page.cuh"

constexpr int COLUMNS = 8;
constexpr int KSTEPS = HEAD_DIM / TILE;

// Queries as operand B: of a lane's two channels the high parts and the low parts, float16 pairs.
using QueryParts = uint2[KSTEPS][2][32];

// Largest value of a query's parts. As large as float16 allows, so that low parts are not lost
// below its smallest numbers: scales of keys by channel go into the query, and those of normalized
// keys are at most 4, others any.
constexpr float QUERY_RANGE = SCALING || STREAM ? 8192.0f : 1.0f;

// Columns 2 quad and 2 quad + 1 of a fragment's eight; rows of `out` are channels (value_channel),
// in units of out_unit: those of the codes that are added up there.
struct State {
  float maximum[2];
  float sums[4];  // by column: of probability * zero of the first value group, of probability
  float out[CHANNEL_TILES][4];

  __device__ __forceinline__ void clear() {
    maximum[0] = maximum[1] = -INFINITY;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      sums[c] = 0.0f;
#pragma unroll
      for (int tile = 0; tile < CHANNEL_TILES; ++tile) out[tile][c] = 0.0f;
    }
  }
};

// What State::out of a channel tile and half is to be multiplied by; LOW: of the codes of values.
template <int LOW>
__device__ __forceinline__ constexpr float out_unit(int tile, int half) {
  return SUBNORMAL / (1 << (LOW * bit_place<LOW>(tile, half)));
}

// Take `next`, each lane's largest score of its two columns, to the maximum over the warp and the
// past, and rescale the state to it. Columns that see nothing yet keep the maximum -infinity, and
// `next` is then 0, so that differences from it are defined.
__device__ __forceinline__ void raise_maximum(State& state, float (&next)[2]) {
  float factor[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    next[c] = fmaxf(next[c], state.maximum[c]);
#pragma unroll
    for (int lane = 4; lane < 32; lane *= 2)
      next[c] = fmaxf(next[c], __shfl_xor_sync(~0u, next[c], lane));
    factor[c] = next[c] == state.maximum[c] ? 1.0f : exp2_fast(state.maximum[c] - next[c]);
  }
  if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      state.sums[c] *= factor[c & 1];
#pragma unroll
      for (int tile = 0; tile < CHANNEL_TILES; ++tile) state.out[tile][c] *= factor[c & 1];
    }
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    state.maximum[c] = next[c];
    if (next[c] == -INFINITY) next[c] = 0.0f;
  }
}
