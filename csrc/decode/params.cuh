// Parameters of decode and the work of a thread block.
#pragma once

#include "common/page.cuh"
#include "decode/state.cuh"

constexpr int THREADS = (BY_WARPS > WARPS ? BY_WARPS : WARPS) * 32;
constexpr float LOG2E = 1.4426950408889634f;
constexpr int HAS_B = KEY_BITS_B != 0;
using PageA = Page<KEY_BITS_A, VALUE_BITS_A>;
using PageB = Page<HAS_B ? KEY_BITS_B : KEY_BITS_A, HAS_B ? VALUE_BITS_B : VALUE_BITS_A>;
constexpr int HEAD_BYTES = PageA::head_bytes > PageB::head_bytes ? PageA::head_bytes
                                                                 : PageB::head_bytes;
constexpr int BUFFER_BYTES = HEAD_BYTES + PageA::shared_bytes;
static_assert(BUFFER_BYTES >= 2 * TILE * ROW_BYTES, "a buffer holds 16 tokens in 16 bit");
// Floats of a partial: output, sum of weights, maximum, and one of padding, so that the stores of
// store_state have no bank conflicts.
constexpr int RECORD = HEAD_DIM + 3;

struct Params;

// The work of a thread block (oscar_mm/ops/decode_tables.py): its part [begin, end) of the work
// list, and the segment in which the part begins.
struct alignas(16) Assignment {
  int begin, end;
  int length, workers;  // of the work list; thread blocks that share it
  int sequence, head, column_tile, index;
  int start;            // of the segment on the list
  int tiles, pages;     // of the sequence: tiles of up to 16 16-bit tokens, pages of 128
  int first, parts;     // thread blocks of the segment, if each has one segment; else parts is 0
  int gap;              // empty places of the list after a segment, if parts is 0
  int by_warps;         // whether warps divide the list (by_warps.cuh), not thread blocks

  __device__ int items() const { return 1 + tiles + pages; }

  // Start of the next segment, if the thread block's part continues.
  __device__ int next() const { return start + items() + gap; }

  // Thread block of a position of the work list.
  __device__ int worker(uint32_t position) const {
    return ((position + 1) * workers - 1) / static_cast<uint32_t>(length);
  }

  // Move on to the next segment.
  __device__ __forceinline__ void advance(const Params& params);
};

struct Work {
  Assignment block;
  // If each warp has one segment: the segment of the thread block's first warp. Here `length` is
  // the number of warps of a thread block that work, `workers` the number of those of all thread
  // blocks, `first` the segment's first warp, and `parts` the maximum number of items of a warp;
  // begin, end, start, gap and by_warps are 0. If warps straddle segments, parts is 0.
  Assignment warp;
};

struct Params {
  const ELEMENT* queries;  // (batch, query heads, tokens, HEAD_DIM), strides in elements
  const ELEMENT* keys;     // (batch, KV heads, tokens, HEAD_DIM) of the new tokens
  const ELEMENT* values;
  ELEMENT* output;         // (batch, tokens, query heads, HEAD_DIM) contiguous
  const uint8_t* pages_a;  // (slots, page_bytes)
  const uint8_t* pages_b;
  const ELEMENT* recent;   // (slots, 2, KV heads, HEAD_DIM)
  const int* recents;      // (batch, recent_stride): slots of tokens in 16-bit precision
  const int2* items;       // (batch, item_stride): pages {slot, stop + (start << 8) + (second format
                           // ? 1 << 16 : 0)}: tokens [start, stop) of a page are in use
  const int2* counts;      // (batch): tokens in 16-bit precision, pages
  const Work* assignments;  // (thread blocks)
  const float* sigma;      // (batch or 1, KV heads or 1, HEAD_DIM) or null
  float* partials;         // (segments + thread blocks, or warps; USED_COLUMNS, RECORD)
  int* arrivals;           // (segments), zero before and after
  int64_t query_stride[3];
  int64_t key_stride[3];
  int64_t value_stride[3];
  int batch, kv_heads, group, tokens, recent_stride, item_stride;
  int sigma_row_stride, sigma_head_stride;  // 0 if all rows, or heads, share one
  int early;               // whether KV pages were complete before the preceding kernel began (PDL)
  float scaling;
};

__device__ __forceinline__ void Assignment::advance(const Params& params) {
  start = next();
  ++index;
  if (++column_tile * COLUMNS < params.group * params.tokens) return;
  column_tile = 0;
  if (++head < params.kv_heads) return;
  head = 0;
  ++sequence;
  const int2 count = params.counts[sequence];
  tiles = (count.x + TILE - 1) / TILE, pages = count.y;
}
