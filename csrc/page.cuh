// The bytes of a page: the twin of oscar_mm/cache/layout.py, which explains them.
//
// Compiled with: HEAD_DIM (64 or 128), KEY_GROUP, VALUE_GROUP, SCALING (0 none, 1 per head, 2 shared).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "types.cuh"

constexpr int PAGE_TOKENS = 128;
constexpr int BLOCK_TOKENS = 32;
constexpr int TILE = 16;  // tokens, or channels, of one matrix fragment
constexpr int TILES = PAGE_TOKENS / TILE;
constexpr int CHANNEL_TILES = HEAD_DIM / TILE;
constexpr int KEY_GROUPS = PAGE_TOKENS / KEY_GROUP;
constexpr int VALUE_GROUPS = HEAD_DIM / VALUE_GROUP;

template <int BITS>
struct Page {
  static constexpr int CODES = PAGE_TOKENS * HEAD_DIM * BITS / 8;
  static constexpr int TILE_CODES = CODES / TILES;       // bytes of the codes of 16 tokens
  static constexpr int LANE_WORDS = TILE_CODES / 32 / 4;  // 32-bit words of them per lane

  static constexpr int key_codes = 0;
  static constexpr int key_scales = key_codes + CODES;
  static constexpr int key_zeros = key_scales + KEY_GROUPS * HEAD_DIM * 2;
  static constexpr int norms = key_zeros + KEY_GROUPS * HEAD_DIM * 2;  // if SCALING == 1
  static constexpr int value_codes = norms + (SCALING == 1 ? PAGE_TOKENS * 2 : 0);
  static constexpr int value_scales = value_codes + CODES;
  static constexpr int value_zeros = value_scales + VALUE_GROUPS * PAGE_TOKENS * 2;
  static constexpr int head_bytes = value_zeros + VALUE_GROUPS * PAGE_TOKENS * 2;
  static constexpr int shared_bytes = SCALING == 2 ? PAGE_TOKENS * 2 : 0;

  __host__ __device__ static constexpr int page_bytes(int kv_heads) {
    return kv_heads * head_bytes + shared_bytes;
  }
};

// A code of BITS bits masked in place, in either half of a word, is a float16 subnormal:
// code * 2^(BITS * place) * 2^-24. The places of a byte, lowest first:
template <int BITS>
__device__ constexpr uint32_t place_mask(int place) {
  return ((1u << BITS) - 1u) * 0x00010001u << (BITS * place);
}
constexpr float SUBNORMAL = 16777216.0f;  // 2^24

// Channel of row `row` (0..7) of half `half` of value tile `tile`. The order is the one in which
// 16-byte loads of plain values arrive after an 8 x 8 transposition, so that packed pages and
// 16-bit blocks add up in the same registers.
__device__ constexpr int value_channel(int tile, int half, int row) {
  return 32 * (tile >> 1) + 8 * (row >> 1) + 2 * (2 * (tile & 1) + half) + (row & 1);
}
