// route: the experts that rows choose, and the rows of an expert next to each other. A warp takes a
// row at a time; one thread block.
//
// Which of an expert's places a row gets depends on which warp is first, and no result on that.
//
// Compiled with: CHOSEN (experts of a row, at most 32), EXPERTS (at most 65,535), NORMALIZE (1:
// shares add up to 1), COLUMNS (rows of a group at most), ELEMENT (__half, __nv_bfloat16).

#include "common/overlap.cuh"
#include "experts/groups.cuh"
#include "experts/logits.cuh"

constexpr int THREADS = 1024;
constexpr int EACH = (EXPERTS + 31) / 32;  // logits of a lane

struct Params {
  const ELEMENT* logits;  // (rows, EXPERTS)
  float* shares;          // (rows, CHOSEN)
  int* places;            // (rows, CHOSEN)
  int* rows_of;           // (places)
  Group* groups;          // at most EXPERTS + places / COLUMNS
  int* count;             // of groups
  int rows;
};

// The sum of all lanes up to this one.
__device__ __forceinline__ int sum_to(int x, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(~0u, x, step);
    if (lane >= step) x += below;
  }
  return x;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    route(const __grid_constant__ Params params) {
  extern __shared__ uint32_t choices[];  // (rows, CHOSEN): expert << 16 | which of the expert's rows
  __shared__ int counts[EXPERTS], firsts[EXPERTS];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  for (int i = thread; i < EXPERTS; i += THREADS) counts[i] = 0;
  let_next_begin();
  wait_for_previous();
  __syncthreads();

  for (int row = warp; row < params.rows; row += THREADS / 32) {
    const unsigned short* bits = reinterpret_cast<const unsigned short*>(params.logits);
    uint32_t keys[EACH], mine = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int expert = i * 32 + lane;
      keys[i] = expert < EXPERTS ? key_of(bits[row * EXPERTS + expert], expert) : 0;
    }
    float largest = 0.0f, sum = 0.0f;
#pragma unroll 1
    for (int choice = 0; choice < CHOSEN; ++choice) {
      uint32_t top = 0;
#pragma unroll
      for (int i = 0; i < EACH; ++i) top = max(top, keys[i]);
      top = __reduce_max_sync(~0u, top);
      if (choice == 0) {
        largest = logit_of(top);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
          if (i * 32 + lane < EXPERTS) sum += expf(logit_of(keys[i]) - largest);
      }
      if (lane == choice) mine = top;
#pragma unroll
      for (int i = 0; i < EACH; ++i)
        if (keys[i] == top) keys[i] = 0;
    }
    sum = warp_sum(sum);
    const float share = lane < CHOSEN ? expf(logit_of(mine) - largest) / sum : 0.0f;
    const float all = warp_sum(share);
    if (lane >= CHOSEN) continue;
    const int expert = 0xffff - (mine & 0xffff), at = row * CHOSEN + lane;
    params.shares[at] = rounded(NORMALIZE ? share / all : share);
    choices[at] = expert << 16 | atomicAdd(&counts[expert], 1);
  }
  __syncthreads();

  if (warp == 0) {
    int place = 0, group = 0;
    for (int start = 0; start < EXPERTS; start += 32) {
      const int expert = start + lane, rows = expert < EXPERTS ? counts[expert] : 0;
      const int parts = (rows + COLUMNS - 1) / COLUMNS;
      const int rows_to = sum_to(rows, lane), parts_to = sum_to(parts, lane);
      const int first = place + rows_to - rows;
      if (expert < EXPERTS) firsts[expert] = first;
      for (int i = 0; i < parts; ++i)
        params.groups[group + parts_to - parts + i] = {expert, first + i * COLUMNS,
                                                       min(COLUMNS, rows - i * COLUMNS), 0};
      place += __shfl_sync(~0u, rows_to, 31);
      group += __shfl_sync(~0u, parts_to, 31);
    }
    if (lane == 0) *params.count = group;
  }
  __syncthreads();
  for (int i = thread; i < params.rows * CHOSEN; i += THREADS) {
    const int place = firsts[choices[i] >> 16] + (choices[i] & 0xffff);
    params.places[i] = place;
    params.rows_of[place] = i / CHOSEN;
  }
}
