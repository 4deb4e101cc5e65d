// The items of a thread block, and their copies to shared memory.
#pragma once

#include "common/copy.cuh"
#include "decode/params.cuh"

// The items of a segment that this thread block attends to, [first, last).
struct Run {
  int first, last;
};

__device__ __forceinline__ Run run_of(const Assignment& part) {
  return {max(part.begin - part.start, 0), min(part.end - part.start, part.items())};
}

// Table entry of an item. A page: its entry in the table. Tokens in 16-bit precision: {slot,
// tokens}, where lanes l and l + 16 have the slot of the l-th token. The new tokens: {0, tokens}.
__device__ __forceinline__ int2 entry_of(const Params& params, const Assignment& part, int item,
                                         int lane) {
  if (item == 0) return {0, params.tokens};
  if (item > part.tiles)
    return params.items[static_cast<int64_t>(part.sequence) * params.item_stride + item - 1 -
                        part.tiles];
  const int first = (item - 1) * TILE;
  const int tokens = min(params.counts[part.sequence].x - first, TILE), token = lane % TILE;
  int2 entry = {0, tokens};
  if (token < tokens)
    entry.x = params.recents[static_cast<int64_t>(part.sequence) * params.recent_stride + first +
                             token];
  return entry;
}

constexpr int ROW_BYTES = HEAD_DIM * 2;

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
  } else {
    // Each lane copies a token's keys, or its values.
    const int side = lane / TILE, token = lane % TILE;
    const ELEMENT* row;
    if (item > 0) {
      const int64_t place = static_cast<int64_t>(entry.x) * 2 + side;
      row = params.recent + (place * params.kv_heads + part.head) * HEAD_DIM;
    } else {
      const int64_t* stride = side ? params.value_stride : params.key_stride;
      row = (side ? params.values : params.keys) + part.sequence * stride[0] +
            part.head * stride[1] + token * stride[2];
    }
    copy_begin(barrier, 2 * entry.y * ROW_BYTES, lane);
    copy_rows<ROW_BYTES>(target, reinterpret_cast<const uint8_t*>(row), token < entry.y, barrier,
                         lane);
  }
  copy_end(barrier);
  if (lane == 0) {
    shared.uses[buffer] = entry.y;
    store_release(&shared.turns[buffer], turn);
  }
}

// Fill the buffers with a segment's first items, after all earlier items have been attended to: the
// new tokens, the stored ones, or both.
__device__ __forceinline__ void request_first(const Params& params, Shared& shared,
                                              const Assignment& part, uint32_t taken, bool added,
                                              bool stored, int warp, int lane) {
  const Run run = run_of(part);
  for (int i = warp; i < min(BUFFERS, run.last - run.first); i += WARPS) {
    const int item = run.first + i;
    if (item ? stored : added)
      request(params, shared, part, item, entry_of(params, part, item, lane), taken + i, lane);
  }
}
