// Running state of a warp for one segment, and its rescaling.
#pragma once

#include "common/codes.cuh"
#include "common/mma.cuh"
#include "common/page.cuh"

constexpr int COLUMNS = 8;
constexpr int KSTEPS = HEAD_DIM / TILE;
constexpr int ROW_BYTES = HEAD_DIM * 2;  // of a token in 16-bit precision: its key, or its value

// Whether columns 4 to 7 repeat the queries of 0 to 3 and attend to the other half of a tile's
// tokens: each score is then computed once. Their states are added at the end (join_columns).
constexpr bool SPLIT = STREAM && NARROW;

// Query columns that differ; if NARROW, columns 4 to 7 of a fragment repeat them.
constexpr int USED_COLUMNS = NARROW ? COLUMNS / 2 : COLUMNS;

// Queries as operand B, or for stream pages as operand A: high parts and low parts of a lane's two
// channels of each half, in pairs of float16.
#if STREAM
using QueryParts = uint2[KSTEPS][4 * USED_COLUMNS][2];
#else
using QueryParts = uint2[KSTEPS][2][32];
#endif

// For stream pages, they are also stored as 16-bit integers, in two bytes each: operand B of a
// product with codes as bytes, the high bytes of its two registers and the low bytes
// (attend_stream.cuh).
constexpr int FIXED_STEPS = SPLIT ? KSTEPS : KSTEPS / 2;
using FixedParts = uint4[FIXED_STEPS][32];
constexpr float FIXED_UNIT = 4.0f;  // integers per unit of a query's parts

// Largest value of a query's parts. It is as large as float16 allows, so that low parts do not fall
// below the smallest float16: key scales per channel are multiplied into the query; they are at
// most 4 for normalized keys, and unbounded for others. For stream pages the largest integer is 127
// * 256.
constexpr float QUERY_RANGE = STREAM ? 127.0f * 256.0f / FIXED_UNIT : SCALING ? 8192.0f : 1.0f;

// Queries of a segment, balanced and rotated, in shared memory.
struct Queries {
  alignas(16) QueryParts parts;
#if STREAM
  alignas(16) FixedParts fixed;
  float total[COLUMNS];  // sums, in units of codes

  // High and low bytes of a step, as operand B.
  __device__ __forceinline__ uint4 operands(int step, int lane) const { return fixed[step][lane]; }
#endif
  float unit[COLUMNS];  // factor of the scores, in log2
};

// Columns 2 quad and 2 quad + 1 of a fragment's eight; rows of `out` are channels (value_channel),
// in units of out_unit: those of the codes that are summed there.
struct State {
  float maximum[2];
  float sums[4];  // by column: probability * zero of the first value group; probability
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

// Factor of State::out for a channel tile and half; LOW: bits of the first plane of value codes.
template <int LOW>
__device__ __forceinline__ constexpr float out_unit(int tile, int half) {
  return SUBNORMAL / (1 << (LOW * bit_place<LOW>(tile, half)));
}

// With SPLIT: add the states of columns 4 to 7 to those of 0 to 3; both then have the sums.
__device__ __forceinline__ void join_columns(State& state) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    state.sums[c] += __shfl_xor_sync(~0u, state.sums[c], 2);
#pragma unroll
    for (int tile = 0; tile < CHANNEL_TILES; ++tile)
      state.out[tile][c] += __shfl_xor_sync(~0u, state.out[tile][c], 2);
  }
}

// Convert State::out from units of pages to outputs: with SPLIT, join the columns, then add the part
// of the values' zeros.
template <int LOW>
__device__ __forceinline__ void complete_state(State& state) {
  if (SPLIT) join_columns(state);
#pragma unroll
  for (int tile = 0; tile < CHANNEL_TILES; ++tile)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      state.out[tile][c] *= out_unit<LOW>(tile, c >> 1);
      if (tile < VALUE_GROUP / TILE) state.out[tile][c] += state.sums[c & 1];
    }
}

// Raise `next`, each lane's largest score of its two columns, to the maximum over the warp and all
// earlier items, and rescale the state to it. Rescaling is rare, because most pages have no larger
// score than those before. Columns that have attended to nothing keep the maximum -infinity; `next`
// is then finite, so that differences from it are defined.
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
