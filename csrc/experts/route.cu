// route: the experts that rows choose, with the rows of an expert next to each other. One thread
// block; each warp takes one row at a time.
//
// Which of an expert's places a row gets depends on the order of the warps, but no result depends
// on it.
//
// Compiled with: COLUMNS (maximum rows of a group), and the macros of choice.cuh.

#include "common/overlap.cuh"
#include "experts/choice.cuh"
#include "experts/groups.cuh"

constexpr int THREADS = 1024;

struct Params {
  const ELEMENT* logits;  // (rows, EXPERTS)
  float* shares;          // (rows, CHOSEN)
  int* places;            // (rows, CHOSEN)
  int* rows_of;           // (places)
  Group* groups;          // at most EXPERTS + places / COLUMNS
  int* count;             // number of groups
  int rows;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    route(const __grid_constant__ Params params) {
  extern __shared__ uint32_t choices[];  // (rows, CHOSEN): expert << 16 | index among its rows
  __shared__ int counts[EXPERTS], firsts[EXPERTS];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  for (int i = thread; i < EXPERTS; i += THREADS) counts[i] = 0;
  let_next_begin();
  wait_for_previous();
  __syncthreads();

  for (int row = warp; row < params.rows; row += THREADS / 32) {
    const Choice choice = choice_of(params.logits + row * EXPERTS, lane);
    if (lane >= CHOSEN) continue;
    const int at = row * CHOSEN + lane;
    params.shares[at] = choice.share;
    choices[at] = choice.expert << 16 | atomicAdd(&counts[choice.expert], 1);
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
