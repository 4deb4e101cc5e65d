// The items of a segment, and where they are stored.
#pragma once

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

// The key (side 0) or value (side 1) of one token of an item in 16-bit precision.
__device__ __forceinline__ const uint8_t* row_of(const Params& params, const Assignment& part,
                                                 int item, int slot, int side, int token) {
  const ELEMENT* row;
  if (item > 0) {
    const int64_t place = static_cast<int64_t>(slot) * 2 + side;
    row = params.recent + (place * params.kv_heads + part.head) * HEAD_DIM;
  } else {
    const int64_t* stride = side ? params.value_stride : params.key_stride;
    row = (side ? params.values : params.keys) + part.sequence * stride[0] +
          part.head * stride[1] + token * stride[2];
  }
  return reinterpret_cast<const uint8_t*>(row);
}
