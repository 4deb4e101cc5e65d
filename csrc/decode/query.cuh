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

// Channel of element i of a lane: in pairs, because two channels are stored together.
__device__ __forceinline__ int paired_channel(int i, int lane) {
  return i / 2 * 64 + 2 * lane + i % 2;
}

// Queries of COUNT columns of a fragment, from `first` on. They are fetched before the first pages
// are requested, because they would otherwise arrive after the pages.
template <int COUNT>
struct Query {
  // Whether columns 4 to 7 are stored with the columns that they repeat.
  static constexpr bool REPEATS = SPLIT && COUNT > 1;
  ELEMENT plain[COUNT][PER_LANE];
  float sigma[PER_LANE];

  __device__ __forceinline__ void fetch(const Params& params, const Assignment& part, int first,
                                        int lane) {
#pragma unroll
    for (int column = 0; column < COUNT; ++column) {
      const ELEMENT* row = query_of(params, part, query_column(first + column));
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) plain[column][i] = row[paired_channel(i, lane)];
    }
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      sigma[i] = 1.0f;
      // Computed here, not before the loop, because the compiler then uses fewer registers.
      if (params.sigma != nullptr)
        sigma[i] = params.sigma[part.sequence * params.sigma_row_stride +
                                part.head * params.sigma_head_stride + paired_channel(i, lane)];
    }
  }

  // Store the queries balanced, rotated, and scaled to [-QUERY_RANGE, QUERY_RANGE], in two parts.
  __device__ __forceinline__ void store(Queries& queries, float scaling, int first,
                                        int lane) const {
#pragma unroll
    for (int column = 0; column < COUNT; ++column)
      store_column(queries, plain[column], scaling, first + column, lane);
  }

  __device__ __forceinline__ void store_column(Queries& queries, const ELEMENT (&query)[PER_LANE],
                                               float scaling, int place, int lane) const {
    float x[PER_LANE];
    float largest = 0.0f, total = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) x[i] = static_cast<float>(query[i]) * sigma[i];
#if ROTATE
    hadamard(x, lane);
#endif
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) largest = fmaxf(largest, fabsf(x[i]));
#pragma unroll
    for (int step = 1; step < 32; step *= 2)
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
#if STREAM
    const float reach = fmaxf(largest, 1e-30f);  // so that its inverse is a float32 too
#else
    // A power of two, likewise.
    const float reach = exp2f(largest > 0.0f ? fmaxf(ceilf(log2f(largest)), -126.0f) : 0.0f);
#endif
    const float by = QUERY_RANGE / reach;
#pragma unroll
    for (int i = 0; i < PER_LANE; i += 2) {
      const float even = x[i] * by, odd = x[i + 1] * by;
      const int channel = paired_channel(i, lane);
      const uint32_t high = packed(even, odd, __half());
      const float2 rounded = __half22float2(*reinterpret_cast<const __half2*>(&high));
      uint32_t low = packed(even - rounded.x, odd - rounded.y, __half());
      const int step = channel / TILE, half = channel / 8 % 2, at = 4 * place + channel / 2 % 4;
#if STREAM
      total += even + odd;
      if (place < USED_COLUMNS) queries.parts[step][at][half] = {high, low};
      store_fixed(queries.fixed, place, channel, even, odd);
      if (REPEATS) store_fixed(queries.fixed, place + COLUMNS / 2, channel, even, odd);
#else
      if (NARROW && place < COLUMNS / 2) low = 0;  // it is in columns 4 to 7
      queries.parts[step][half][at] = {high, low};
#endif
    }
#if STREAM
#pragma unroll
    for (int step = 1; step < 32; step *= 2) total += __shfl_xor_sync(~0u, total, step);
#endif
#pragma unroll
    for (int copy = 0; copy <= REPEATS; ++copy) {
      const int column = place + copy * COLUMNS / 2;
#if STREAM
      if (lane == 0) queries.total[column] = total / SUBNORMAL;
#endif
      if (lane == 0) queries.unit[column] = reach / QUERY_RANGE * scaling * LOG2E * SUBNORMAL;
    }
  }
};
