// Records: states of warps by column, their sums, and the output.
#pragma once

#include "common/hadamard.cuh"
#include "decode/params.cuh"

constexpr int PART = USED_COLUMNS * RECORD;  // floats of the records of a warp or thread block
static_assert(PART % 4 == 0);

// Store a warp's state as records.
__device__ __forceinline__ void store_state(float (*records)[RECORD], const State& state,
                                            int lane) {
  const int group = lane >> 2, quad = lane & 3;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    if (2 * quad >= USED_COLUMNS) continue;
    float* column = records[2 * quad + (c & 1)];
#pragma unroll
    for (int tile = 0; tile < CHANNEL_TILES; ++tile)
      column[value_channel(tile, c >> 1, group)] = state.out[tile][c];
    if (group == 0 && c >= 2) {
      column[HEAD_DIM] = state.sums[c];
      column[HEAD_DIM + 1] = state.maximum[c & 1];
    }
  }
}

// Add records to a warp's state.
__device__ __forceinline__ void add_state(const float (*records)[RECORD], State& state, int lane) {
  const int group = lane >> 2, quad = lane & 3;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float* column = records[(2 * quad + c) % USED_COLUMNS];
    const float other = column[HEAD_DIM + 1];
    const float next = fmaxf(state.maximum[c], other);
    const float ours = next == -INFINITY ? 0.0f : exp2_fast(state.maximum[c] - next);
    const float theirs = next == -INFINITY ? 0.0f : exp2_fast(other - next);
    state.maximum[c] = next;
    state.sums[2 + c] = state.sums[2 + c] * ours + column[HEAD_DIM] * theirs;
#pragma unroll
    for (int tile = 0; tile < CHANNEL_TILES; ++tile)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& x = state.out[tile][2 * half + c];
        x = x * ours + column[value_channel(tile, half, group)] * theirs;
      }
  }
}

// Sum of records, in order.
struct Column {
  float x[PER_LANE];
  float total, maximum;

  __device__ __forceinline__ void clear() {
    total = 0.0f, maximum = -INFINITY;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) x[i] = 0.0f;
  }

  // Up to 32 records, PART floats apart. Each lane reads the maximum and sum of one record, and all
  // lanes read the outputs.
  __device__ __forceinline__ void add(const float* records, int count, int lane) {
    float top = -INFINITY, sum = 0.0f;
    if (lane < count) {
      sum = records[lane * PART + HEAD_DIM];
      top = records[lane * PART + HEAD_DIM + 1];
    }
    float next = fmaxf(top, maximum);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) next = fmaxf(next, __shfl_xor_sync(~0u, next, step));
    if (__all_sync(~0u, next == -INFINITY)) return;  // a vote, so that lanes do not diverge
    const float mine = exp2_fast(top - next), before = exp2_fast(maximum - next);
    sum *= mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    total = total * before + sum;
    maximum = next;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) x[i] *= before;
#pragma unroll 4
    for (int i = 0; i < count; ++i) {
      const float factor = __shfl_sync(~0u, mine, i);
#pragma unroll
      for (int j = 0; j < PER_LANE; ++j)
        x[j] = fmaf(factor, records[i * PART + channel_of(j, lane)], x[j]);
    }
  }
};

// Rotate a column's output back.
__device__ __forceinline__ void rotate_back(float (&x)[PER_LANE], int lane) {
#if ROTATE
  hadamard(x, lane);
#endif
}

// Write one column's output: x is its sum over all items, total the sum of the weights.
__device__ __forceinline__ void write_column(const Params& params, const Assignment& part,
                                             int column, const float (&x)[PER_LANE], float total,
                                             int lane) {
  column += part.column_tile * COLUMNS;
  const int token = column / params.group, head = column % params.group;
  ELEMENT* row =
      params.output +
      ((static_cast<int64_t>(part.sequence) * params.tokens + token) * params.kv_heads *
           params.group +
       part.head * params.group + head) *
          HEAD_DIM;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) row[channel_of(i, lane)] = ELEMENT(__fdividef(x[i], total));
}
