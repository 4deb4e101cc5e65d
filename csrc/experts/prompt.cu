// choose, place: the experts that the rows of a prompt choose, and a copy of each row for each of
// its experts, with the copies for an expert next to each other. One warp per row.
//
// Which of an expert's places a row gets depends on the order of the warps, but no result depends
// on it.
//
// Compiled with the macros of choice.cuh.

#include "common/overlap.cuh"
#include "experts/choice.cuh"

constexpr int THREADS = 256;
constexpr int ROWS = THREADS / 32;  // of a thread block

struct Params {
  const ELEMENT* logits;  // (rows, EXPERTS)
  const ELEMENT* x;       // (rows, width)
  float* shares;          // (rows, CHOSEN)
  uint32_t* choices;      // (rows, CHOSEN): expert << 16 | index among the expert's rows
  int* counts;            // (EXPERTS): rows of each expert; 0 before choose
  int* places;            // (rows, CHOSEN)
  int* ends;              // (EXPERTS): end of the places of each expert
  ELEMENT* copies;        // (places, width)
  int rows;               // at most 65,536
  int width;              // a multiple of 8
};

extern "C" __global__ void __launch_bounds__(THREADS)
    choose(const __grid_constant__ Params params) {
  const int row = blockIdx.x * ROWS + threadIdx.x / 32, lane = threadIdx.x % 32;
  let_next_begin();
  wait_for_previous();
  if (row >= params.rows) return;
  const Choice choice = choice_of(params.logits + static_cast<int64_t>(row) * EXPERTS, lane);
  if (lane >= CHOSEN) return;
  const int at = row * CHOSEN + lane;
  params.shares[at] = choice.share;
  params.choices[at] = choice.expert << 16 | atomicAdd(&params.counts[choice.expert], 1);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    place(const __grid_constant__ Params params) {
  __shared__ int firsts[EXPERTS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row = blockIdx.x * ROWS + warp;
  let_next_begin();
  wait_for_previous();
  if (warp == 0) {
    int place = 0;
    for (int start = 0; start < EXPERTS; start += 32) {
      const int expert = start + lane, rows = expert < EXPERTS ? params.counts[expert] : 0;
      const int rows_to = sum_to(rows, lane);
      if (expert < EXPERTS) {
        firsts[expert] = place + rows_to - rows;
        if (blockIdx.x == 0) params.ends[expert] = place + rows_to;
      }
      place += __shfl_sync(~0u, rows_to, 31);
    }
  }
  __syncthreads();
  if (row >= params.rows) return;
  int mine = 0;
  if (lane < CHOSEN) {
    const uint32_t choice = params.choices[row * CHOSEN + lane];
    mine = firsts[choice >> 16] + (choice & 0xffff);
    params.places[row * CHOSEN + lane] = mine;
  }
  int places[CHOSEN];
#pragma unroll
  for (int k = 0; k < CHOSEN; ++k) places[k] = __shfl_sync(~0u, mine, k);
  const int64_t width = params.width;
  for (int at = lane * 8; at < width; at += 32 * 8) {
    const uint4 eight = load16(params.x + row * width + at);
#pragma unroll
    for (int k = 0; k < CHOSEN; ++k)
      *reinterpret_cast<uint4*>(params.copies + places[k] * width + at) = eight;
  }
}
