// From the states of warps and the parts of thread blocks to the output of a segment.
#pragma once

#include "decode/records.cuh"
#include "decode/shared.cuh"

static_assert(WARPS >= COLUMNS, "one warp per column");

// Whether this thread block is the last to write its part of a segment.
__device__ __forceinline__ bool is_last_of(const Params& params, Shared& shared,
                                           const Assignment& part, int parts) {
  __syncthreads();
  if (threadIdx.x == 0) {
    // Also releases the thread block's writes before the barrier.
    int before;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(params.arrivals + part.index)
                 : "memory");
    shared.is_last = before == parts - 1;
    if (shared.is_last) params.arrivals[part.index] = 0;
  }
  __syncthreads();
  return shared.is_last;
}

// Copy the used columns of some thread blocks' parts to shared memory; called by all threads. L1 is
// bypassed, because other thread blocks wrote them.
__device__ __forceinline__ void copy_parts(float* target, const float* source, int count,
                                           int columns) {
  const int used = (columns * RECORD + 3) / 4 * 4;
  for (int part = threadIdx.x / 32; part < count; part += WARPS)
    for (int i = part * PART + threadIdx.x % 32 * 4; i < part * PART + used; i += 128)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(target + i)),
                   "l"(source + i)
                   : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
}

// Write the segment's output, or this thread block's part of it; the last thread block adds the
// parts.
//
// The same instructions add warps' states and thread blocks' parts, one warp per column, because at
// short contexts most of the time is spent fetching instructions. So parts go through shared
// memory, through `buffers` unless the next segment's pages are being loaded into it.
__device__ __forceinline__ void finish_segment(const Params& params, Shared& shared,
                                               const Assignment& part, bool goes_on, int warp,
                                               int lane) {
  int first = shared.part.first, parts = shared.part.parts;
  if (!parts) {
    first = shared.part.worker(part.start);
    parts = shared.part.worker(part.start + part.items() - 1) - first + 1;
  }
  const int columns =
      min(COLUMNS, params.group * params.tokens - part.column_tile * COLUMNS);
  // Along the work list, segment or thread block changes from part to part, so their sum identifies
  // a part.
  float* partials = params.partials + static_cast<int64_t>(part.index) * PART;
  float* records = records_of(shared)[0][0];
  int count = SLOTS, added = 0;  // records in shared memory; parts copied there so far
  bool is_part = parts > 1;
  Column sum;
  sum.clear();
#pragma unroll 1
  while (true) {
    if (warp < columns)
#pragma unroll 1
      for (int i = 0; i < count; i += 32)
        sum.add(records + i * PART + warp * RECORD, min(count - i, 32), lane);
    if (is_part) {
      if (warp < columns) {
        float* record = partials + static_cast<int64_t>(blockIdx.x) * PART + warp * RECORD;
#pragma unroll
        for (int i = 0; i < PER_LANE; ++i) record[channel_of(i, lane)] = sum.x[i];
        if (lane == 0) record[HEAD_DIM] = sum.total, record[HEAD_DIM + 1] = sum.maximum;
      }
      if (!is_last_of(params, shared, part, parts)) return;
      is_part = false;
      sum.clear();
      partials += static_cast<int64_t>(first) * PART;
    } else if (parts == 1 || added == parts) {
      break;
    } else {
      __syncthreads();
    }
    if (!goes_on) records = reinterpret_cast<float*>(shared.buffers);
    count = min(goes_on ? SLOTS : static_cast<int>(sizeof(shared.buffers) / (PART * 4)),
                parts - added);
    copy_parts(records, partials + added * PART, count, columns);
    added += count;
  }
  if (warp < columns) {
    rotate_back(sum.x, lane);
    write_column(params, part, warp, sum.x, sum.total, lane);
  }
}
