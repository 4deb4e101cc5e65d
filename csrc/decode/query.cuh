// Queries of a segment.
#pragma once

#include "common/hadamard.cuh"
#include "decode/attend_stream.cuh"
#include "decode/params.cuh"

// The query column of a fragment's column.
__device__ __forceinline__ int query_column(int column) {
  return NARROW ? column % (COLUMNS / 2) : column;
}

// Number of tokens of an item that the lane's columns attend to: new tokens are causal, and with
// SPLIT, half of the columns only repeat the others.
__device__ __forceinline__ void visible_tokens(int (&visible)[2], const Params& params,
                                               const Assignment& part, int item, int lane) {
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int column = 2 * (lane & 3) + c;
    visible[c] = TILE;
    if (item == 0)
      visible[c] = (part.column_tile * COLUMNS + query_column(column)) / params.group + 1;
    if (SPLIT && column >= COLUMNS / 2) visible[c] = 0;
  }
}

// The query of a column, which is at most the last one; its channels in order.
__device__ __forceinline__ const ELEMENT* query_of(const Params& params, const Assignment& part,
                                                   int column) {
  column = min(part.column_tile * COLUMNS + column, params.group * params.tokens - 1);
  const int token = column / params.group, head = column % params.group;
  return params.queries + part.sequence * params.query_stride[0] +
         (part.head * params.group + head) * params.query_stride[1] +
         token * params.query_stride[2];
}

// Store two channels of a column's query, from `channel` on.
__device__ __forceinline__ void store_pair(Queries& queries, int place, int channel, float even,
                                           float odd) {
  const uint32_t high = packed(even, odd, __half());
  const float2 rounded = __half22float2(*reinterpret_cast<const __half2*>(&high));
  uint32_t low = packed(even - rounded.x, odd - rounded.y, __half());
  const int step = channel / TILE, half = channel / 8 % 2, at = 4 * place + channel / 2 % 4;
#if STREAM
  if (place < USED_COLUMNS) queries.parts[step][at][half] = {high, low};
  store_fixed(queries.fixed, place, channel, even, odd);
#else
  if (NARROW && place < COLUMNS / 2) low = 0;  // it is in columns 4 to 7
  queries.parts[step][half][at] = {high, low};
#endif
}

// Queries of 32 / LANES columns of a fragment, from `first` on: LANES lanes have a column each. They
// are fetched before the first pages are requested, because they would otherwise arrive after the
// pages.
template <int LANES>
struct Query {
  static constexpr int PAIRS = HEAD_DIM / LANES / 2;
  struct alignas(4) Pair {
    ELEMENT even, odd;
  };
  Pair plain[PAIRS];
  float2 sigma[PAIRS];

  // First channel of pair i of a lane.
  __device__ static __forceinline__ int channel_of(int i, int lane) {
    return i * 2 * LANES + 2 * (lane % LANES);
  }

  __device__ __forceinline__ void fetch(const Params& params, const Assignment& part, int first,
                                        int lane) {
    const ELEMENT* row = query_of(params, part, query_column(first + lane / LANES));
#pragma unroll
    for (int i = 0; i < PAIRS; ++i)
      plain[i] = *reinterpret_cast<const Pair*>(row + channel_of(i, lane));
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      sigma[i] = {1.0f, 1.0f};
      // Computed here, not before the loop, because the compiler then uses fewer registers.
      if (params.sigma != nullptr)
        sigma[i] = *reinterpret_cast<const float2*>(
            params.sigma + part.sequence * params.sigma_row_stride +
            part.head * params.sigma_head_stride + channel_of(i, lane));
    }
  }

  // Store the queries balanced, rotated, and scaled to [-QUERY_RANGE, QUERY_RANGE], in two parts.
  template <class Q>
  __device__ __forceinline__ void store(Q& queries, float scaling, int first,
                                        int lane) const {
    const int place = first + lane / LANES;
    float x[2 * PAIRS];
    float largest = 0.0f, total = 0.0f;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      x[2 * i] = static_cast<float>(plain[i].even) * sigma[i].x;
      x[2 * i + 1] = static_cast<float>(plain[i].odd) * sigma[i].y;
    }
#if ROTATE
    hadamard<2 * PAIRS, 1, LANES>(x, lane);
#endif
#pragma unroll
    for (int i = 0; i < 2 * PAIRS; ++i) largest = fmaxf(largest, fabsf(x[i]));
#pragma unroll
    for (int step = 1; step < LANES; step *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
#if STREAM
    const float reach = fmaxf(largest, 1e-30f);  // so that its inverse is a float32 too
#else
    // A power of two whose inverse is a float32 too.
    const float reach = exp2f(largest > 0.0f ? fmaxf(ceilf(log2f(largest)), -126.0f) : 0.0f);
#endif
    // No exact division, whose rare cases are branches; a power of two stays one.
    const float by = STREAM ? __fdividef(QUERY_RANGE, reach) : QUERY_RANGE / reach;
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const float even = x[2 * i] * by, odd = x[2 * i + 1] * by;
      const int channel = channel_of(i, lane);
      if (STREAM) total += even + odd;
      store_pair(queries, place, channel, even, odd);
    }
#if STREAM
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) total += __shfl_xor_sync(~0u, total, step);
#endif
    if (lane % LANES) return;
    // With several columns at once, columns 4 to 7 get the numbers of the columns that they repeat.
#pragma unroll
    for (int column = place; column < COLUMNS; column += LANES < 32 ? USED_COLUMNS : COLUMNS) {
#if STREAM
      queries.total[column] = total / SUBNORMAL;
#endif
      queries.unit[column] = reach * (1.0f / QUERY_RANGE) * scaling * LOG2E * SUBNORMAL;
    }
  }
};
