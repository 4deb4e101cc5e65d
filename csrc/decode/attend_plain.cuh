// Attention of one warp to up to 16 tokens in 16-bit precision: stored tokens, or the new ones.
#pragma once

#include "common/hadamard.cuh"
#include "common/mma.cuh"
#include "common/page.cuh"
#include "decode/state.cuh"

// Scores of TILE tokens, whose keys are in shared memory.
//
// Lane (group, quad) loads 16 bytes of token rows group and group + 8: channels 32 i + 8 quad +
// 0..7 for run i. The contraction is independent of the order of channels, so they are used in load
// order (fragment columns 2 quad, 2 quad + 1 and + 8 of two k-steps), with the queries in the same
// order.
//
// query: of column `group`.
__device__ __forceinline__ void plain_scores(float (&scores)[4], const uint8_t* keys,
                                             const ELEMENT* query, int lane) {
  const int group = lane >> 2, quad = lane & 3;
  keys += group * ROW_BYTES + quad * 16;
#pragma unroll
  for (int c = 0; c < 4; ++c) scores[c] = 0.0f;
#pragma unroll
  for (int run = 0; run < HEAD_DIM / 32; ++run) {
    const uint4 low = load16(keys + run * 64), high = load16(keys + 8 * ROW_BYTES + run * 64);
    const uint4 four = load16(query + 32 * run + 8 * quad);
    mma(scores, low.x, high.x, low.y, high.y, four.x, four.y, ELEMENT());
    mma(scores, low.z, high.z, low.w, high.w, four.z, four.w, ELEMENT());
  }
}

// Attend to TILE tokens, whose values are in shared memory.
//
// visible[c]: number of tokens that the lane's columns attend to (new tokens are causal).
// State::out is in the units of unpacked values here; settle_plain converts it to those of pages.
__device__ __forceinline__ void attend_plain(State& state, float (&scores)[4],
                                             const uint8_t* values, int tokens, float unit,
                                             const int (&visible)[2], int lane) {
  const int group = lane >> 2;
  values += group * ROW_BYTES + (lane & 3) * 16;
  float next[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const int token = group + (c & 2) * 4;
    scores[c] = token < min(tokens, visible[c & 1]) ? scores[c] * unit : -INFINITY;
    next[c & 1] = fmaxf(next[c & 1], scores[c]);
  }
  raise_maximum(state, next);
#pragma unroll
  for (int c = 0; c < 4; ++c) scores[c] = exp2_fast(scores[c] - next[c & 1]);
  const uint32_t weights[2] = {transposed(packed(scores[0], scores[1], ELEMENT())),
                               transposed(packed(scores[2], scores[3], ELEMENT()))};
  const uint32_t ones = packed(1.0f, 1.0f, ELEMENT());
  mma(state.sums, 0, ones, 0, ones, weights[0], weights[1], ELEMENT());
#pragma unroll
  for (int run = 0; run < HEAD_DIM / 32; ++run) {
    // Places after the last token were never written: 0 * NaN is not 0.
    uint4 rows_of[2] = {};
    if (group < tokens) rows_of[0] = load16(values + run * 64);
    if (group + 8 < tokens) rows_of[1] = load16(values + 8 * ROW_BYTES + run * 64);
    const uint32_t low[4] = {rows_of[0].x, rows_of[0].y, rows_of[0].z, rows_of[0].w};
    const uint32_t high[4] = {rows_of[1].x, rows_of[1].y, rows_of[1].z, rows_of[1].w};
#pragma unroll
    for (int i = 0; i < 2; ++i)
      mma(state.out[2 * run + i], transposed(low[2 * i]), transposed(low[2 * i + 1]),
          transposed(high[2 * i]), transposed(high[2 * i + 1]), weights[0], weights[1], ELEMENT());
  }
}

// Convert State::out from unpacked values to the coordinates and units of pages: rotate, divide.
template <int LOW>
__device__ __forceinline__ void settle_plain(State& state, int lane) {
#if ROTATE
  // Channel bits (value_channel): tile >> 1 and tile & 1, half in registers; row in lane bits 2..4.
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    float x[2 * CHANNEL_TILES];
#pragma unroll
    for (int i = 0; i < 2 * CHANNEL_TILES; ++i) x[i] = state.out[i >> 1][(i & 1) * 2 + c];
    butterflies<2 * CHANNEL_TILES, 4, 32>(x, lane);
#pragma unroll
    for (int i = 0; i < 2 * CHANNEL_TILES; ++i) state.out[i >> 1][(i & 1) * 2 + c] = x[i];
  }
#endif
  constexpr float NORM = ROTATE ? HADAMARD_NORM : 1.0f;
#pragma unroll
  for (int tile = 0; tile < CHANNEL_TILES; ++tile)
#pragma unroll
    for (int c = 0; c < 4; ++c)
      state.out[tile][c] *= NORM / out_unit<LOW>(tile, c >> 1);
}
