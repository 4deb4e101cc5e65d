// Copies of the items of a thread block to its shared memory.
#pragma once

#include "common/copy.cuh"
#include "decode/items.cuh"
#include "decode/shared.cuh"

// Copy an item to the buffer of a turn (the number of an item of this thread block).
__device__ __forceinline__ void request(const Params& params, Shared& shared,
                                        const Assignment& part, int item, int2 entry,
                                        uint32_t turn, int lane) {
  const int buffer = turn % BUFFERS;
  uint64_t* barrier = &shared.full[buffer];
  uint8_t* target = shared.buffers[buffer];
  if (item > part.tiles) {
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
    copy_end(barrier);
  } else {
    // Each lane copies a token's key, or its value.
    const int token = lane % TILE;
    copy_rows<ROW_BYTES, 2 * TILE>(target,
                                   row_of(params, part, item, entry.x, lane / TILE, token),
                                   token < entry.y, barrier, lane);
  }
  if (lane == 0) {
    shared.uses[buffer] = entry.y;
    store_release(&shared.turns[buffer], turn);
  }
}

// Fill the buffers [begin, end) with a segment's first items, after all earlier items have been
// attended to: the new tokens, the stored ones, or both.
__device__ __forceinline__ void request_first(const Params& params, Shared& shared,
                                              const Assignment& part, uint32_t taken, bool added,
                                              bool stored, int warp, int lane, int begin = 0,
                                              int end = BUFFERS) {
  const Run run = run_of(part);
  for (int i = warp; i < min(BUFFERS, run.last - run.first); i += WARPS) {
    const int item = run.first + i;
    if (RECORDS_IN_BUFFERS) {
      const int buffer = (taken + i) % BUFFERS;
      if (buffer < begin || buffer >= end) continue;
    }
    if (item ? stored : added)
      request(params, shared, part, item, entry_of(params, part, item, lane), taken + i, lane);
  }
}
