// Parameters of decode, the work of a thread block, and its shared memory.
#pragma once

#include "common/page.cuh"
#include "decode/state.cuh"

constexpr int THREADS = WARPS * 32;
constexpr float LOG2E = 1.4426950408889634f;
constexpr int SLOTS = (WARPS + 1) / 2;
// Places of the line without an item that follow a segment, where thread blocks have several.
constexpr int SEGMENT_ITEMS = 20;
constexpr int HAS_B = KEY_BITS_B != 0;
using PageA = Page<KEY_BITS_A, VALUE_BITS_A>;
using PageB = Page<HAS_B ? KEY_BITS_B : KEY_BITS_A, HAS_B ? VALUE_BITS_B : VALUE_BITS_A>;
constexpr int HEAD_BYTES = PageA::head_bytes > PageB::head_bytes ? PageA::head_bytes
                                                                 : PageB::head_bytes;
constexpr int BUFFER_BYTES = HEAD_BYTES + PageA::shared_bytes;
static_assert(BUFFER_BYTES >= 2 * TILE * HEAD_DIM * 2, "a buffer holds 16 tokens in 16 bit");
// Floats of a partial: output, sum of weights, maximum, and one so that the stores of store_state
// have no bank conflicts.
constexpr int RECORD = HEAD_DIM + 3;
constexpr int USED_COLUMNS = NARROW ? COLUMNS / 2 : COLUMNS;  // the others have the same again

struct Params;

// The work of a thread block (oscar_mm/ops/decode_tables.py): its part [begin, end) of the line, and
// the segment that the part begins in.
struct alignas(16) Assignment {
  int begin, end;
  int length, workers;  // of the line; thread blocks that share it
  int sequence, head, column_tile, index;
  int start;            // of the segment on the line
  int tiles, pages;     // of the sequence: of up to 16 tokens in 16 bit, and of 128
  int first, parts;     // thread blocks of the segment, where each has but one segment; else parts 0

  __device__ int items() const { return 1 + tiles + pages; }

  // Where the next segment begins, if the thread block's part goes on.
  __device__ int next() const { return start + items() + SEGMENT_ITEMS; }

  // Thread block that has a position of the line.
  __device__ int worker(uint32_t position) const {
    return ((position + 1) * workers - 1) / static_cast<uint32_t>(length);
  }

  // Go on to the next segment.
  __device__ __forceinline__ void advance(const Params& params);
};

struct Params {
  const ELEMENT* queries;  // (batch, query heads, tokens, HEAD_DIM), strides in elements
  const ELEMENT* keys;     // (batch, KV heads, tokens, HEAD_DIM) of the new tokens
  const ELEMENT* values;
  ELEMENT* output;         // (batch, tokens, query heads, HEAD_DIM) contiguous
  const uint8_t* pages_a;  // (slots, page_bytes)
  const uint8_t* pages_b;
  const ELEMENT* recent;   // (slots, 2, KV heads, HEAD_DIM)
  const int* recents;      // (batch, recent_stride): slots of tokens in 16 bit
  const int2* items;       // (batch, item_stride): pages {slot, stop + (start << 8) + (second format
                           // ? 1 << 16 : 0)}: tokens [start, stop) of a page are in use
  const int2* counts;      // (batch): tokens in 16 bit, pages
  const Assignment* assignments;  // (thread blocks)
  const float* sigma;      // (batch or 1, KV heads or 1, HEAD_DIM) or null
  float* partials;         // (segments + thread blocks, USED_COLUMNS, RECORD)
  int* arrivals;           // (segments), zero before and after
  int64_t query_stride[3];
  int64_t key_stride[3];
  int64_t value_stride[3];
  int batch, kv_heads, group, tokens, recent_stride, item_stride;
  int sigma_row_stride, sigma_head_stride;  // 0 where all rows, or heads, share one
  int early;               // whether all that is stored was there before the launch in front began
  float scaling;
};

struct Shared {
  alignas(128) uint8_t buffers[BUFFERS][(BUFFER_BYTES + 127) / 128 * 128];
  alignas(16) float merge[SLOTS][USED_COLUMNS][RECORD];
  alignas(16) ELEMENT plain[COLUMNS][HEAD_DIM];  // queries as they came
  Queries query;
  uint64_t full[BUFFERS];
  uint32_t turns[BUFFERS];  // the turn (page number of this thread block) a buffer is filled for
  int uses[BUFFERS];        // tokens in use there, as Params::items has them
  int first, parts;         // of the assignment: registers are needed for the pages
  int is_last;
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
