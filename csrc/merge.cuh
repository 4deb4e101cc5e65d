// From the states of warps and the parts of thread blocks to the output of a segment.
#pragma once

#include "hadamard.cuh"
#include "params.cuh"

// Put a warp's state where finish_segment finds it.
__device__ __forceinline__ void give_state(Shared& shared, const State& state, int warp, int lane) {
  const int group = lane >> 2, quad = lane & 3;
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    float* column = shared.merge[warp][2 * quad + (c & 1)];
#pragma unroll
    for (int tile = 0; tile < CHANNEL_TILES; ++tile)
      column[value_channel(tile, c >> 1, group)] = state.out[tile][c];
    if (group == 0 && c >= 2) {
      column[HEAD_DIM] = state.sums[c];
      column[HEAD_DIM + 1] = state.maximum[c & 1];
    }
  }
}

// Add to a warp's state the one that give_state put at a slot.
__device__ __forceinline__ void take_state(const Shared& shared, State& state, int slot, int lane) {
  const int group = lane >> 2, quad = lane & 3;
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float* column = shared.merge[slot][2 * quad + c];
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

// From shared memory, or from global memory where other thread blocks wrote: not through L1.
template <bool GLOBAL, typename T>
__device__ __forceinline__ T read(const T* source) {
  if constexpr (GLOBAL)
    return __ldcg(source);
  else
    return *source;
}

// Sum of some records at a time, `stride` floats apart, in their order. All of their loads are
// independent: each lane takes one record's maximum and sum, and all take the outputs.
struct Column {
  float x[PER_LANE];
  float total, maximum;

  __device__ __forceinline__ void clear() {
    total = 0.0f, maximum = -INFINITY;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) x[i] = 0.0f;
  }

  // AT_ONCE: at least `count`, at most 32.
  template <bool GLOBAL, int AT_ONCE>
  __device__ __forceinline__ void add(const float* records, int stride, int count, int lane) {
    float top = -INFINITY, sum = 0.0f, rows[AT_ONCE][PER_LANE];
    if (lane < count) {
      sum = read<GLOBAL>(records + lane * stride + HEAD_DIM);
      top = read<GLOBAL>(records + lane * stride + HEAD_DIM + 1);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
      for (int j = 0; j < PER_LANE; ++j)
        rows[i][j] = i < count ? read<GLOBAL>(records + i * stride + channel_of(j, lane)) : 0.0f;
    float next = fmaxf(top, maximum);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) next = fmaxf(next, __shfl_xor_sync(~0u, next, step));
    if (next == -INFINITY) return;
    const float mine = exp2_fast(top - next), before = exp2_fast(maximum - next);
    sum *= mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    total = total * before + sum;
    maximum = next;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) x[i] *= before;
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const float factor = __shfl_sync(~0u, mine, i);
#pragma unroll
      for (int j = 0; j < PER_LANE; ++j) x[j] = fmaf(factor, rows[i][j], x[j]);
    }
  }
};

// One column's output, rotated back: x is its sum over all items, total that of the weights.
__device__ __forceinline__ void write_column(const Params& params, const Assignment& part,
                                             int column, float (&x)[PER_LANE], float total,
                                             int lane) {
  column += part.column_tile * COLUMNS;
  const int token = column / params.group, head = column % params.group;
  if (token >= params.tokens) return;
#if ROTATE
  hadamard(x, lane);
#endif
  ELEMENT* row =
      params.output +
      ((static_cast<int64_t>(part.sequence) * params.tokens + token) * params.kv_heads *
           params.group +
       part.head * params.group + head) *
          HEAD_DIM;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) row[channel_of(i, lane)] = ELEMENT(x[i] / total);
}

// Write the segment's output, or this thread block's part of it; the last to come adds the parts.
__device__ __forceinline__ void finish_segment(const Params& params, Shared& shared,
                                               const Assignment& part, int warp,
                                               int lane) {
  int first, parts = part.parts;
  if (parts) {
    first = part.first;
  } else {
    first = part.worker(part.start);
    parts = part.worker(part.start + part.items() - 1) - first + 1;
  }
  constexpr int PART = COLUMNS * RECORD, AT_ONCE = 24;
  Column sum;
  for (int column = warp; column < COLUMNS; column += WARPS) {
    sum.clear();
    sum.add<false, SLOTS>(shared.merge[0][column], PART, SLOTS, lane);
    if (parts == 1) {
      write_column(params, part, column, sum.x, sum.total, lane);
      continue;
    }
    // Along the line segment and thread block never both stay, so their sum names a part.
    float* record =
        params.partials + static_cast<int64_t>(part.index + blockIdx.x) * PART + column * RECORD;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) record[channel_of(i, lane)] = sum.x[i];
    if (lane == 0) record[HEAD_DIM] = sum.total, record[HEAD_DIM + 1] = sum.maximum;
  }
  if (parts == 1) return;
  __syncthreads();
  if (threadIdx.x == 0) {
    // Takes along what the whole thread block wrote before the barrier.
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(params.arrivals + part.index)
                 : "memory");
    shared.is_last = before == parts - 1;
  }
  __syncthreads();
  if (!shared.is_last) return;
  if (threadIdx.x == 0) params.arrivals[part.index] = 0;
  const float* records = params.partials + static_cast<int64_t>(part.index + first) * PART;
  for (int column = warp; column < COLUMNS; column += WARPS) {
    sum.clear();
    for (int done = 0; done < parts; done += AT_ONCE)
      sum.add<true, AT_ONCE>(records + static_cast<int64_t>(done) * PART + column * RECORD, PART,
                             min(parts - done, AT_ONCE), lane);
    write_column(params, part, column, sum.x, sum.total, lane);
  }
}
