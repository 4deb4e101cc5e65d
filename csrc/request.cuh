// The items of a thread block, and their copies to shared memory.
#pragma once

#include "copy.cuh"
#include "params.cuh"

// The items of a segment that this thread block attends to, [first, last).
struct Run {
  int first, last;
};

__device__ __forceinline__ Run run_of(const Assignment& part) {
  return {max(part.begin - part.start, 0), min(part.end - part.start, part.items())};
}

// The table's entry of an item; of item 0, the new tokens, there is none.
__device__ __forceinline__ int2 entry_of(const Params& params, const Assignment& part, int item) {
  if (item == 0) return {0, params.tokens};
  return params.items[static_cast<int64_t>(part.sequence) * params.item_stride + item - 1];
}

constexpr int ROW_BYTES = HEAD_DIM * 2;

// Copy an item to the buffer of a turn (the number of an item of this thread block).
__device__ __forceinline__ void request(const Params& params, Shared& shared,
                                        const Assignment& part, int item, int2 entry,
                                        uint32_t turn, int lane) {
  const int buffer = turn % BUFFERS;
  uint64_t* barrier = &shared.full[buffer];
  uint8_t* target = shared.buffers[buffer];
  if (item > part.halves) {
    const bool second = HAS_B && entry.y >> 16;
    const int bytes = second ? PageB::head_bytes : PageA::head_bytes;
    const int64_t page_bytes =
        second ? PageB::page_bytes(params.kv_heads) : PageA::page_bytes(params.kv_heads);
    const uint8_t* page = (second ? params.pages_b : params.pages_a) + entry.x * page_bytes;
    copy_begin(barrier, bytes + PageA::shared_bytes, lane);
    copy_piece(target, page + static_cast<int64_t>(part.head) * bytes, bytes, barrier, lane);
    if constexpr (SCALING == 2)
      copy_piece(target + HEAD_BYTES, page + static_cast<int64_t>(params.kv_heads) * bytes,
                 PageA::shared_bytes, barrier, lane);
  } else if (item > 0) {
    constexpr int BYTES = TILE * ROW_BYTES;
    const int64_t block = static_cast<int64_t>(entry.x >> 1) * 2 * params.kv_heads + part.head;
    const uint8_t* keys = reinterpret_cast<const uint8_t*>(params.blocks) +
                          (block * BLOCK_TOKENS + (entry.x & 1) * TILE) * ROW_BYTES;
    const uint8_t* values =
        keys + static_cast<int64_t>(params.kv_heads) * BLOCK_TOKENS * ROW_BYTES;
    copy_begin(barrier, 2 * BYTES, lane);
    copy_piece(target, keys, BYTES, barrier, lane);
    copy_piece(target + BYTES, values, BYTES, barrier, lane);
  } else {
    const ELEMENT* keys =
        params.keys + part.sequence * params.key_stride[0] + part.head * params.key_stride[1];
    const ELEMENT* values = params.values + part.sequence * params.value_stride[0] +
                            part.head * params.value_stride[1];
    copy_begin(barrier, 2 * params.tokens * ROW_BYTES, lane);
    for (int token = 0; token < params.tokens; ++token) {
      uint8_t* row = target + token * ROW_BYTES;
      copy_piece(row, reinterpret_cast<const uint8_t*>(keys + token * params.key_stride[2]),
                 ROW_BYTES, barrier, lane);
      copy_piece(row + TILE * ROW_BYTES,
                 reinterpret_cast<const uint8_t*>(values + token * params.value_stride[2]),
                 ROW_BYTES, barrier, lane);
    }
  }
  copy_end(barrier);
  if (lane == 0) store_release(&shared.holds[buffer], turn);
}

// Fill the buffers with a segment's first items; all earlier items have been attended to.
__device__ __forceinline__ void request_first(const Params& params, Shared& shared,
                                              const Assignment& part, uint32_t taken, int warp,
                                              int lane) {
  const Run run = run_of(part);
  for (int i = warp; i < min(BUFFERS, run.last - run.first); i += WARPS)
    request(params, shared, part, run.first + i, entry_of(params, part, run.first + i), taken + i,
            lane);
}
