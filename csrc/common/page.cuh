// Byte layout of a page: the twin of oscar_mm/pages/layout.py and pages/codecs/groups.py, which
// explain it.
//
// Compiled with: HEAD_DIM (64, 128, 256 or 512), KEY_GROUP, VALUE_GROUP, SCALING (0 none, 1 per
// head, 2 shared), STREAM (0: keys have scales per channel, for KEY_GROUP tokens; 1: per token),
// CENTER (1: a page has a center; keys whose scale has its sign bit set are relative to it).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/page_tokens.cuh"
#include "common/types.cuh"

constexpr int TILE = 16;  // tokens, or channels, of a matrix fragment
constexpr int TILES = PAGE_TOKENS / TILE;
constexpr int CHANNEL_TILES = HEAD_DIM / TILE;
constexpr int KEY_GROUPS = STREAM ? 1 : PAGE_TOKENS / KEY_GROUP;  // of tokens
constexpr int VALUE_GROUPS = HEAD_DIM / VALUE_GROUP;
static_assert(STREAM ? KEY_GROUP == HEAD_DIM && SCALING == 0 : !CENTER, "no such pages");

// Codes of a page's keys, or of its values. Codes of 3 bits are stored in two planes: the low two
// bits, then the high bit.
template <int BITS>
struct CodeBytes {
  static constexpr int WIDTH = BITS;
  static constexpr int LOW = BITS == 3 ? 2 : BITS;  // bits of the first plane
  static constexpr int ALL = PAGE_TOKENS * HEAD_DIM * BITS / 8;
  static constexpr int TILE_BYTES = TILE * HEAD_DIM * LOW / 8;  // of 16 tokens, in the first plane
  static constexpr int WORDS = TILE_BYTES / 32 / 4;             // their 32-bit words per lane
  static constexpr int HIGH = TILES * TILE_BYTES;               // where the second plane begins
  static constexpr int HIGH_TILE_BYTES = TILE * HEAD_DIM / 8;
  static constexpr int HIGH_WORDS = HIGH_TILE_BYTES / 32 / 4;
};

template <int OF_KEYS, int OF_VALUES>
struct Page {
  using Keys = CodeBytes<OF_KEYS>;
  using Values = CodeBytes<OF_VALUES>;
  static constexpr int KEY_SCALES = (STREAM ? PAGE_TOKENS : KEY_GROUPS * HEAD_DIM) * 2;  // bytes
  static constexpr int VALUE_SCALES = VALUE_GROUPS * PAGE_TOKENS * 2;

  static constexpr int center = 0;  // if CENTER
  static constexpr int key_codes = center + (CENTER ? HEAD_DIM * 2 : 0);
  static constexpr int key_scales = key_codes + Keys::ALL;
  static constexpr int key_zeros = key_scales + KEY_SCALES;
  static constexpr int norms = key_zeros + KEY_SCALES;  // if SCALING == 1
  static constexpr int value_codes = norms + (SCALING == 1 ? PAGE_TOKENS * 2 : 0);
  static constexpr int value_scales = value_codes + Values::ALL;
  static constexpr int value_zeros = value_scales + VALUE_SCALES;
  static constexpr int head_bytes = value_zeros + VALUE_SCALES;
  static constexpr int shared_bytes = SCALING == 2 ? PAGE_TOKENS * 2 : 0;

  __host__ __device__ static constexpr int page_bytes(int kv_heads) {
    return kv_heads * head_bytes + shared_bytes;
  }
};

// A code that is masked in place, in either half of a word, is a subnormal float16:
// code * 2^(LOW * place) * 2^-24, where LOW is the number of bits of the first plane.
constexpr float SUBNORMAL = 16777216.0f;  // 2^24

// Channel of row `row` (0..7) of half `half` of value tile `tile`. It is the order in which 16-byte
// loads of unpacked values arrive after an 8 x 8 transposition, so that packed pages and 16-bit
// tokens are accumulated in the same registers.
__device__ constexpr int value_channel(int tile, int half, int row) {
  return 32 * (tile >> 1) + 8 * (row >> 1) + 2 * (2 * (tile & 1) + half) + (row & 1);
}
