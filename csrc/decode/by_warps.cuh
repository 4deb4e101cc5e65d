// Decode attention by warps: each warp attends to segments of its own.
//
// A thread block waits for its slowest warp before it moves on to the next segment, which takes as
// long as 20 pages. If segments are short and many, the part of each warp is long enough without the
// others. So here the work list (decode.cu) is split evenly over warps, which have queries and a
// buffer of their own and never wait for each other.
//
// A buffer holds one item: the keys of the next item are requested once the scores of this one are
// known, and its values at the end, so that one of the two is in flight while the other is in use.
#pragma once

#include "common/copy.cuh"
#include "common/overlap.cuh"
#include "decode/attend_page.cuh"
#include "decode/attend_plain.cuh"
#include "decode/attend_stream.cuh"
#include "decode/items.cuh"
#include "decode/query.cuh"
#include "decode/records.cuh"

namespace by_warps {

static_assert(SPLIT && !HAS_B, "no such kernel");
static_assert(PAGE_TOKENS == 2 * PART_TOKENS, "scores of two parts are kept");
// Items after which the state is added to a record. Tensor cores cut off what they add to a large
// sum, so the error grows with the number of items.
constexpr int MAX_ITEMS = 32;
constexpr int KEY_BYTES = PageA::value_codes, VALUE_BYTES = PageA::head_bytes - KEY_BYTES;
static_assert(KEY_BYTES >= TILE * ROW_BYTES && VALUE_BYTES >= TILE * ROW_BYTES,
              "a buffer holds 16 tokens in 16 bit");

struct PartScores {
  float of[PART_SCORES][4];
};

// Shared memory of a warp.
struct Own {
  alignas(128) uint8_t buffer[PageA::head_bytes];
  union {
    Queries query;
    alignas(16) float records[USED_COLUMNS][RECORD];  // once the queries are no longer needed
  };
  uint64_t full[2];  // keys, values
  Assignment part;   // the segment that the warp attends to; here, to leave registers for the pages
};

// Warps that share the work list; none has an empty part.
__device__ __forceinline__ int64_t warps_of(const Assignment& part) {
  return min(part.workers * WARPS, part.length);
}

// The warp, among those of all thread blocks, whose part has a position of the work list.
__device__ __forceinline__ int warp_of(const Assignment& part, int position) {
  return static_cast<int>(((position + 1) * warps_of(part) - 1) / part.length);
}

// Narrow a thread block's part to that of one of its warps; return whether it has items.
__device__ __forceinline__ bool divide(const Params& params, Assignment& part, int warp) {
  const int64_t number = blockIdx.x * WARPS + warp, length = part.length;
  if (number >= warps_of(part)) return false;
  const int begin = static_cast<int>(length * number / warps_of(part));
  part.end = static_cast<int>(length * (number + 1) / warps_of(part));
  while (begin >= part.start + part.items()) {
    if (part.next() >= part.end) return false;
    part.advance(params);
  }
  part.begin = max(begin, part.start);
  return part.begin < part.end;
}

__device__ __forceinline__ const uint8_t* page_of(const Params& params, const Assignment& part,
                                                  int2 entry) {
  const int64_t page = entry.x * static_cast<int64_t>(PageA::page_bytes(params.kv_heads));
  return params.pages_a + page + part.head * PageA::head_bytes;
}

// Copy the keys (side 0) or the values (side 1) of an item to the buffer.
__device__ __forceinline__ void request(const Params& params, Own& own, int side,
                                        const Assignment& part, int item, int2 entry, int lane) {
  uint64_t* barrier = &own.full[side];
  uint8_t* target = own.buffer + side * KEY_BYTES;
  if (item > part.tiles) {
    const int bytes = side ? VALUE_BYTES : KEY_BYTES;
    copy_begin(barrier, bytes, lane);
    copy_piece(target, page_of(params, part, entry) + side * KEY_BYTES, bytes, barrier, lane);
    copy_end(barrier);
  } else {
    copy_rows<ROW_BYTES, TILE>(target, row_of(params, part, item, entry.x, side, lane % TILE),
                               lane < entry.y, barrier, lane);
  }
}

// The warp's record of a segment in global memory. Along the work list, segment or warp changes from
// part to part, so their sum identifies a part.
__device__ __forceinline__ float (*record_of(const Params& params, const Assignment& part))[RECORD] {
  const int64_t number = static_cast<int64_t>(part.index) + warp_of(part, part.begin);
  return reinterpret_cast<float(*)[RECORD]>(params.partials + number * PART);
}

// Bring the 16-bit tokens of a segment to L2: they take a warp less time than their copies would.
__device__ __forceinline__ void prefetch_tokens(const Params& params, const Assignment& part,
                                                int lane) {
  constexpr int AT_ONCE = 4, LINE = 128;
  const Run run = run_of(part);
#pragma unroll 1
  for (int first = max(run.first, 1); first < min(run.last, part.tiles + 1); first += AT_ONCE) {
    int2 entries[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      entries[i] = first + i <= part.tiles ? entry_of(params, part, first + i, lane) : int2{};
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (lane % TILE < entries[i].y)
#pragma unroll
        for (int at = 0; at < ROW_BYTES; at += LINE)
          asm volatile("prefetch.global.L2 [%0];" ::"l"(
              row_of(params, part, first + i, entries[i].x, lane / TILE, lane % TILE) + at));
  }
}

// The same number in all lanes: tells the compiler that branches on it do not diverge.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(~0u, x, 0); }

__device__ __forceinline__ void make_uniform(Assignment& part) {
  part.begin = uniform(part.begin), part.end = uniform(part.end);
  part.start = uniform(part.start), part.sequence = uniform(part.sequence);
  part.tiles = uniform(part.tiles), part.pages = uniform(part.pages);
  part.gap = uniform(part.gap);
}

// Write a segment's output, or this warp's part of it; the last warp adds the parts.
__device__ __forceinline__ void finish_segment(const Params& params, const Own& own, int lane) {
  const Assignment part = own.part;
  const int first = uniform(warp_of(part, part.start));
  const int parts = uniform(warp_of(part, part.start + part.items() - 1)) - first + 1;
  const int columns = min(COLUMNS, params.group * params.tokens - part.column_tile * COLUMNS);
  const float* records = own.records[0];
  if (parts > 1) {
    float4* target = reinterpret_cast<float4*>(record_of(params, part));
    for (int i = lane; i < PART / 4; i += 32)
      target[i] = reinterpret_cast<const float4*>(records)[i];
    __syncwarp();
    int before = 0;
    if (lane == 0)
      asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;"
                   : "=r"(before)
                   : "l"(params.arrivals + part.index)
                   : "memory");
    if (__shfl_sync(~0u, before, 0) != parts - 1) return;
    if (lane == 0) params.arrivals[part.index] = 0;
    records = params.partials + (static_cast<int64_t>(part.index) + first) * PART;
  }
#pragma unroll 1
  for (int column = 0; column < columns; ++column) {
    Column sum;
    sum.clear();
#pragma unroll 1
    for (int i = 0; i < parts; i += 32)
      sum.add(records + i * PART + column * RECORD, min(parts - i, 32), lane);
    write_column(params, part, column, sum.x, sum.total, lane);
  }
}

// All work of a thread block; part: its part of the work list.
__device__ __forceinline__ void attend(const Params& params, uint8_t* shared, Assignment part,
                                       int warp, int lane) {
  Own& own = reinterpret_cast<Own*>(shared)[warp];
  if (lane < 2) barrier_init(&own.full[lane]);
#if USE_TMA
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  __syncwarp();
  // Stored tokens may be requested before the preceding kernel has ended; it writes the new tokens
  // and the queries.
  if (!params.early) wait_for_previous();
  if (!divide(params, part, warp)) return;
  make_uniform(part);
  int item = max(part.begin - part.start, 0);
  int2 entry = entry_of(params, part, item, lane);
#pragma unroll 1
  for (int waited = 0; waited < 2; ++waited) {
    if (waited) {
      wait_for_previous();
      let_next_begin();
    }
    if (waited == (item == 0))
      for (int side = 0; side < 2; ++side) request(params, own, side, part, item, entry, lane);
  }
  uint32_t parity = 0;
  while (true) {
    prefetch_tokens(params, part, lane);
    Query<USED_COLUMNS> query;
    query.fetch(params, part, 0, lane);
    query.store(own.query, params.scaling, 0, lane);
    __syncwarp();
    State state;
    state.clear();
    own.part = part;
    const int last = run_of(part).last - 1;
    const bool goes_on = part.next() < part.end;
    int left = MAX_ITEMS;
    bool is_added = false;  // whether the record has earlier items
    while (true) {
      const bool is_page = item > part.tiles, is_last_plain = item == min(part.tiles, last);
      const bool ends = item == last, has_next = !ends || goes_on;
      const int next_item = ends ? 0 : item + 1;
      int2 next = {0, 0};
      if (ends && goes_on) part.advance(params), make_uniform(part);
      if (has_next) next = entry_of(params, part, next_item, lane);
      const int used = uniform(entry.y), stop = used & 0xff, start = used >> 8 & 0xff;
      // Of the last part that was read, and of the one before.
      PartScores scores, before;
      const int first_part = start / PART_TOKENS;
      barrier_wait(&own.full[0], parity);
      if (is_page) {
        float center[2];
        if (CENTER) center_products(center, own.query.parts, own.buffer + PageA::center, lane);
#pragma unroll 1
        for (int i = first_part; i * PART_TOKENS < stop; ++i) {
          before = scores;
          part_scores<PageA>(scores.of, own.buffer, own.query, center, i, lane);
        }
      } else {
        plain_scores(scores.of[0], own.buffer,
                     query_of(params, own.part, query_column(lane >> 2)), lane);
      }
      __syncwarp();
      if (has_next) request(params, own, 0, part, next_item, next, lane);
      barrier_wait(&own.full[1], parity);
      if (is_page) {
        if ((first_part + 1) * PART_TOKENS >= stop) before = scores;  // there is only one part
#pragma unroll 1
        for (int i = first_part; i * PART_TOKENS < stop; ++i) {
          attend_part<PageA>(state, own.buffer, i, before.of, own.query, start, stop, lane);
          before = scores;
        }
      } else {
        int visible[2];
        visible_tokens(visible, params, own.part, item, lane);
        attend_plain(state, scores.of[0], own.buffer + KEY_BYTES, stop,
                     params.scaling * LOG2E, visible, lane);
        if (is_last_plain) settle_plain<PageA::Values::LOW>(state, lane);
      }
      __syncwarp();
      if (has_next) request(params, own, 1, part, next_item, next, lane);
      parity ^= 1;
      item = next_item, entry = next;
      if (!ends && (--left > 0 || !is_page)) continue;
      // Add the state to those of earlier items, and make room for more.
      complete_state<PageA::Values::LOW>(state);
      float(*record)[RECORD] = record_of(params, own.part);
      if (is_added) add_state(record, state, lane);
      __syncwarp();
      store_state(ends ? own.records : record, state, lane);
      __syncwarp();
      if (ends) break;
      state.clear();
      is_added = true, left = MAX_ITEMS;
    }
    finish_segment(params, own, lane);
    if (!goes_on) return;
    __syncwarp();
  }
}

}  // namespace by_warps
