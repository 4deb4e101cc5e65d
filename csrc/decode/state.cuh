// What a warp gathers of one segment, and its rescaling.
#pragma once

#include "common/codes.cuh"
#include "common/mma.cuh"
#include "common/page.cuh"

constexpr int COLUMNS = 8;
constexpr int KSTEPS = HEAD_DIM / TILE;

// Whether columns 4 to 7 have the queries of 0 to 3 again, and see the other half of a tile's tokens:
// scores are then computed once each. Their states are added up at the end (join_columns).
constexpr bool SPLIT = STREAM && NARROW;

// Queries as operand B, or of stream pages as operand A: of a lane's two channels of each half the
// high parts and the low parts, float16 pairs.
#if STREAM
using QueryParts = uint2[KSTEPS][32][2];
#else
using QueryParts = uint2[KSTEPS][2][32];
#endif

// Of stream pages they are integers of 16 bits too, in two bytes each: operand B of a product of codes
// as bytes, the high bytes of its two registers and the low ones (attend_stream.cuh).
constexpr int FIXED_STEPS = SPLIT ? KSTEPS : KSTEPS / 2;
using FixedParts = uint4[FIXED_STEPS][32];
constexpr float FIXED_UNIT = 4.0f;  // of them in one of a query's parts

// Largest value of a query's parts. As large as float16 allows, so that low parts are not lost
// below its smallest numbers: scales of keys by channel go into the query, and those of normalized
// keys are at most 4, others any. Of stream pages the largest integer is 127 * 256.
constexpr float QUERY_RANGE = STREAM ? 127.0f * 256.0f / FIXED_UNIT : SCALING ? 8192.0f : 1.0f;

// Queries of a segment, balanced and rotated, in shared memory.
struct Queries {
  alignas(16) QueryParts parts;
#if STREAM
  alignas(16) FixedParts fixed;
  float total[COLUMNS];  // sums, in units of codes
#endif
  float unit[COLUMNS];  // what scores are to be multiplied by, in log2
};

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

// With SPLIT: what columns 4 to 7 gathered added to 0 to 3, and the same in both.
__device__ __forceinline__ void join_columns(State& state) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    state.sums[c] += __shfl_xor_sync(~0u, state.sums[c], 2);
#pragma unroll
    for (int tile = 0; tile < CHANNEL_TILES; ++tile)
      state.out[tile][c] += __shfl_xor_sync(~0u, state.out[tile][c], 2);
  }
}

// Take `next`, each lane's largest score of its two columns, to the maximum over the warp and the
// past, and rescale the state to it: seldom, as most pages have no larger score than those before.
// Columns that see nothing yet keep the maximum -infinity, and `next` is then a number, so that
// differences from it are defined.
__device__ __forceinline__ void raise_maximum(State& state, float (&next)[2]) {
  if (__any_sync(~0u, next[0] > state.maximum[0] || next[1] > state.maximum[1])) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      next[c] = fmaxf(next[c], state.maximum[c]);
#pragma unroll
      for (int lane = SPLIT ? 2 : 4; lane < 32; lane *= 2)
        next[c] = fmaxf(next[c], __shfl_xor_sync(~0u, next[c], lane));
      const float factor =
          next[c] == state.maximum[c] ? 1.0f : exp2_fast(state.maximum[c] - next[c]);
      state.maximum[c] = next[c];
#pragma unroll
      for (int row = c; row < 4; row += 2) {
        state.sums[row] *= factor;
#pragma unroll
        for (int tile = 0; tile < CHANNEL_TILES; ++tile) state.out[tile][row] *= factor;
      }
    }
  }
#pragma unroll
  for (int c = 0; c < 2; ++c) next[c] = fmaxf(state.maximum[c], -1e30f);
}
