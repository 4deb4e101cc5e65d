// Decode attention by warps: each warp attends to segments of its own.
//
// A thread block waits for its slowest warp before it moves on to the next segment, which takes as
// long as 20 pages. If segments are short and many, the part of each warp is long enough without the
// others. So here warps have queries and a buffer of their own and never wait for each other. Each
// of them has a part of one segment, if nearly all of them get work that way; otherwise the work
// list (decode.cu) is split evenly over them.
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
// Every MAX_ITEMS items of a segment, the state is added to a record, once it has pages. Tensor cores
// cut off what they add to a large sum, so the error grows with the number of items.
constexpr int MAX_ITEMS = 32;
constexpr int KEY_BYTES = PageA::value_codes, VALUE_BYTES = PageA::head_bytes - KEY_BYTES;
static_assert(KEY_BYTES >= TILE * ROW_BYTES && VALUE_BYTES >= TILE * ROW_BYTES,
              "a buffer holds 16 tokens in 16 bit");

// Queries of one warp. They take less memory than Queries: integers only, and only the columns that
// differ.
struct OwnQueries {
  alignas(16) uint4 fixed[FIXED_STEPS][4 * USED_COLUMNS];
  float total[COLUMNS], unit[COLUMNS];

  // As of Queries: columns 4 to 7 have the bytes at the places of the other token.
  __device__ __forceinline__ uint4 operands(int step, int lane) const {
    const uint4 both = fixed[step][lane % 16];
    const uint32_t by = lane < 16 ? 1 : 256;
    return make_uint4(both.x * by, both.y * by, both.z * by, both.w * by);
  }
};

__device__ __forceinline__ void store_pair(OwnQueries& queries, int column, int channel, float even,
                                           float odd) {
  store_fixed(queries.fixed, column, channel, even, odd);
}

// Two signed bytes, in bytes 0 and 2 of a word, as a pair of float16.
__device__ __forceinline__ uint32_t halves_of(uint32_t bytes) {
  const uint32_t pair = (bytes ^ 0x00800080u) | 0x64006400u;  // 1024 + 128 + the number
  const __half2 halves =
      __hsub2(*reinterpret_cast<const __half2*>(&pair), __floats2half2_rn(1152.0f, 1152.0f));
  return *reinterpret_cast<const uint32_t*>(&halves);
}

// Products of the lane's columns with a page's center, in units of codes.
//
// Rows 0 to 3 of operand A are the high bytes of the queries, rows 4 to 7 the low bytes; rows 8 to
// 15 are those of the next 16 channels. Columns 0 to 3 of B are the center, columns 4 to 7 that of
// the next 16 channels. So half of the product's rows and columns match.
__device__ __forceinline__ void center_products(float (&products)[2], const OwnQueries& query,
                                                const uint8_t* center, int lane) {
  const int group = lane >> 2, quad = lane & 3;
  float sums[2][4] = {};  // two products are independent
#pragma unroll
  for (int run = 0; run < KSTEPS / 2; ++run) {
    const uint2 b = *reinterpret_cast<const uint2*>(center + (run * 4 + quad) * 16 +
                                                    (group >> 2) * 8);
    uint32_t a[2][2];
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const uint4* both = &query.fixed[2 * run + step][lane % 16];
      const uint2 bytes = reinterpret_cast<const uint2*>(both)[group >> 2];
      a[step][0] = halves_of(bytes.x), a[step][1] = halves_of(bytes.y);
    }
    mma(sums[run % 2], a[0][0], a[1][0], a[0][1], a[1][1], b.x, b.y, __half());
  }
  const int c = quad & 2;
  float sum = c ? sums[0][2] + sums[1][2] : sums[0][0] + sums[1][0];
  if (group < 4) sum *= 256.0f;
  sum += __shfl_xor_sync(~0u, sum, 2);
  sum += __shfl_xor_sync(~0u, sum, 16);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    // Half of the product: part_scores multiplies it by 2.
    products[i] = __shfl_sync(~0u, sum, 4 * (2 * (quad & 1) + i)) *
                  (0.5f / FIXED_UNIT / SUBNORMAL);
}

// Shared memory of a warp.
struct Own {
  alignas(128) uint8_t buffer[PageA::head_bytes];
  union {
    OwnQueries query;
    alignas(16) float records[USED_COLUMNS][RECORD];  // once the queries are no longer needed
  };
  uint64_t full[2];  // keys, values
  // The segment that the warp attends to, and the next one. They are in shared memory to leave
  // registers for the pages.
  Assignment part, next;
  int number;    // of the warp
  int last;      // item of the part
  int goes_on;   // whether the warp has another segment
  int is_added;  // whether the record has earlier items of the segment
};

// Warps of a segment, if each warp has one segment.
__device__ __forceinline__ int parts_of(const Assignment& part) {
  return (part.items() + part.parts - 1) / part.parts;
}

// Warps that share the work list, if they straddle segments; none has an empty part.
__device__ __forceinline__ int64_t warps_of(const Assignment& part) {
  return min(part.workers * BY_WARPS, part.length);
}

// Number, among the warps of all thread blocks, of the warp whose part contains a position of the
// work list, if warps straddle segments.
__device__ __forceinline__ int warp_of(const Assignment& part, int position) {
  return static_cast<int>(((position + 1) * warps_of(part) - 1) / part.length);
}

// Move on to the number-th warp's segment and its part of that segment, if each warp has one
// segment. All segments of a sequence have the same number of warps.
__device__ __forceinline__ void find_segment(const Params& params, Assignment& part, int number) {
  const int column_tiles = (params.group * params.tokens + COLUMNS - 1) / COLUMNS;
  const int row_segments = params.kv_heads * column_tiles;
  int segment = part.head * column_tiles + part.column_tile, parts = parts_of(part);
  while (number >= part.first + (row_segments - segment) * parts) {
    part.first += (row_segments - segment) * parts;
    part.index += row_segments - segment, segment = 0;
    const int2 count = params.counts[++part.sequence];
    part.tiles = (count.x + TILE - 1) / TILE, part.pages = count.y;
    parts = parts_of(part);
  }
  const int further = (number - part.first) / parts, place = (number - part.first) % parts;
  part.first += further * parts, part.index += further, segment += further;
  part.head = segment / column_tiles, part.column_tile = segment % column_tiles;
  part.begin = part.items() * place / parts, part.end = part.items() * (place + 1) / parts;
}

// Narrow a thread block's part to that of one of its warps; return the warp's number, or -1 if it
// has no items.
__device__ __forceinline__ int divide(const Params& params, Assignment& part, int warp) {
  if (part.parts) {
    const int number = blockIdx.x * part.length + warp;
    if (warp >= part.length || number >= part.workers) return -1;
    find_segment(params, part, number);
    return number;
  }
  const int number = blockIdx.x * BY_WARPS + warp;
  const int64_t length = part.length;
  if (number >= warps_of(part)) return -1;
  const int begin = static_cast<int>(length * number / warps_of(part));
  part.end = static_cast<int>(length * (number + 1) / warps_of(part));
  while (begin >= part.start + part.items()) {
    if (part.next() >= part.end) return -1;
    part.advance(params);
  }
  part.begin = max(begin, part.start);
  return part.begin < part.end ? number : -1;
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
__device__ __forceinline__ float (*record_of(const Params& params, const Own& own))[RECORD] {
  const int64_t number = static_cast<int64_t>(own.part.index) + own.number;
  return reinterpret_cast<float(*)[RECORD]>(params.partials + number * PART);
}

// Bring the 16-bit tokens of items [begin, end) to L2. For a warp, prefetches take less time than
// copies to shared memory.
__device__ __forceinline__ void prefetch_tokens(const Params& params, const Assignment& part,
                                                int begin, int end, int lane) {
  constexpr int AT_ONCE = 4, LINE = 128;
#pragma unroll 1
  for (int first = max(begin, 1); first < end; first += AT_ONCE) {
    int2 entries[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      entries[i] = first + i < end ? entry_of(params, part, first + i, lane) : int2{};
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

// Sums of the records of all columns, in order. The sums of the columns are independent of each
// other, and there are few records, so no addition waits for shuffles as in Column.
struct Sums {
  float x[USED_COLUMNS][PER_LANE] = {};
  float total[USED_COLUMNS] = {}, maximum[USED_COLUMNS];

  __device__ __forceinline__ Sums() {
    for (float& each : maximum) each = -1e30f;
  }

  __device__ __forceinline__ void add(const float* records, int lane) {
#pragma unroll
    for (int column = 0; column < USED_COLUMNS; ++column) {
      const float* record = records + column * RECORD;
      const float top = record[HEAD_DIM + 1], next = fmaxf(top, maximum[column]);
      const float before = exp2_fast(maximum[column] - next), mine = exp2_fast(top - next);
      maximum[column] = next;
      total[column] = total[column] * before + record[HEAD_DIM] * mine;
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i)
        x[column][i] = x[column][i] * before + record[channel_of(i, lane)] * mine;
    }
  }
};

// Write a segment's output, or this warp's part of it; the last warp adds the parts.
__device__ __forceinline__ void finish_segment(const Params& params, const Own& own, int lane) {
  const Assignment part = own.part;
  int first = part.first, last = first + (part.parts ? parts_of(part) : 1) - 1;
  if (!part.parts) {
    const int stop = part.start + part.items();
    first = part.start < part.begin ? warp_of(part, part.start) : own.number;
    last = stop > part.end ? warp_of(part, stop - 1) : own.number;
  }
  first = uniform(first);
  const int parts = uniform(last) - first + 1;
  const int columns = min(COLUMNS, params.group * params.tokens - part.column_tile * COLUMNS);
  const float* records = own.records[0];
  if (parts > 1) {
    float4* target = reinterpret_cast<float4*>(record_of(params, own));
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
  Sums sums;
#pragma unroll 1
  for (int i = 0; i < parts; ++i) sums.add(records + i * PART, lane);
#pragma unroll
  for (int column = 0; column < USED_COLUMNS; ++column) rotate_back(sums.x[column], lane);
#pragma unroll
  for (int column = 0; column < USED_COLUMNS; ++column)
    if (column < columns)
      write_column(params, part, column, sums.x[column], sums.total[column], lane);
}

// Weights of the first and the last part of a page that are in use, and the maximum of its scores.
__device__ __forceinline__ void page_weights(Weights (&weights)[2], State& state, const Own& own,
                                             int start, int stop, int lane) {
  float center[2], scores[PART_SCORES][4], before[PART_SCORES][4];
  const int quad = lane & 3, first = start / PART_TOKENS;
  const float unit[2] = {own.query.unit[2 * quad], own.query.unit[2 * quad + 1]};
  float next[2] = {-INFINITY, -INFINITY};
  if (CENTER) center_products(center, own.query, own.buffer + PageA::center, lane);
#pragma unroll 1
  for (int part = first; part * PART_TOKENS < stop; ++part) {
#pragma unroll
    for (int i = 0; i < PART_SCORES; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) before[i][c] = scores[i][c];
    part_scores<PageA>(scores, own.buffer, own.query, center, part, lane);
    if (is_partial(part, start, stop)) {
      asm volatile("");  // a branch, not selects in every page
      clear_unused(scores, part, start, stop, lane);
    }
    raise_to(next, scores);
  }
  next[0] *= unit[0], next[1] *= unit[1];
  raise_maximum(state, next);
  weights[1] = weights_of(scores, unit, next);
  const bool both = (first + 1) * PART_TOKENS < stop;
  weights[0] = both ? weights_of(before, unit, next) : weights[1];
}

// Attend to all items of a warp.
__device__ __forceinline__ void attend(const Params& params, uint8_t* shared, int warp, int lane) {
  Own& own = reinterpret_cast<Own*>(shared)[warp];
  if (lane < 2) barrier_init(&own.full[lane]);
#if USE_TMA
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  __syncwarp();
  // Stored tokens may be requested before the preceding kernel has ended; it writes the new tokens
  // and the queries.
  if (!params.early) wait_for_previous();
  if (lane == 0) {
    const Work& work = params.assignments[blockIdx.x];
    Assignment part = work.warp.parts ? work.warp : work.block;
    own.number = divide(params, part, warp);
    own.part = part;
  }
  __syncwarp();
  if (uniform(own.number) < 0) return;
  int item = uniform(run_of(own.part).first);
  int2 entry = entry_of(params, own.part, item, lane);
#pragma unroll 1
  for (int waited = 0; waited < 2; ++waited) {
    if (waited) {
      wait_for_previous();
      let_next_begin();
    }
    if (waited == (item == 0))
      for (int side = 0; side < 2; ++side) request(params, own, side, own.part, item, entry, lane);
  }
  uint32_t parity = 0;
  while (true) {
    __syncwarp();
    Assignment part = own.part;
    make_uniform(part);
    Query<32 / USED_COLUMNS> query;
    query.fetch(params, part, 0, lane);
    own.last = run_of(part).last - 1, own.goes_on = part.next() < part.end, own.is_added = false;
    prefetch_tokens(params, part, item, min(own.last, part.tiles) + 1, lane);
    query.store(own.query, params.scaling, 0, lane);
    __syncwarp();
    State state;
    state.clear();
    while (true) {
      const int tiles = uniform(own.part.tiles), last = uniform(own.last);
      const bool is_page = item > tiles;
      const bool ends = item == last, has_next = !ends || uniform(own.goes_on);
      const int next_item = ends ? 0 : item + 1;
      if (ends && has_next) {
        if (lane == 0) {
          Assignment following = own.part;
          following.advance(params);
          own.next = following;
        }
        __syncwarp();
      }
      const Assignment& part_of_next = ends ? own.next : own.part;
      const int used = uniform(entry.y), stop = used & 0xff, start = used >> 8 & 0xff;
      Weights weights[2];
      float scores[4];
      barrier_wait(&own.full[0], parity);
      if (is_page) {
        page_weights(weights, state, own, start, stop, lane);
      } else {
        plain_scores(scores, own.buffer,
                     query_of(params, own.part, query_column(lane >> 2)), lane);
      }
      __syncwarp();
      int2 next = {0, 0};
      if (has_next) {
        next = entry_of(params, part_of_next, next_item, lane);
        request(params, own, 0, part_of_next, next_item, next, lane);
      }
      barrier_wait(&own.full[1], parity);
      if (is_page) {
#pragma unroll 1
        for (int i = start / PART_TOKENS; i * PART_TOKENS < stop; ++i) {
          attend_values<PageA>(state, own.buffer, i, weights[0], start, stop, lane);
          weights[0] = weights[1];
        }
      } else {
        int visible[2];
        visible_tokens(visible, params, own.part, item, lane);
        attend_plain(state, scores, own.buffer + KEY_BYTES, stop,
                     params.scaling * LOG2E, visible, lane);
        if (item == min(own.part.tiles, own.last)) settle_plain<PageA::Values::LOW>(state, lane);
      }
      __syncwarp();
      if (has_next) request(params, own, 1, part_of_next, next_item, next, lane);
      parity ^= 1;
      const bool stays = !is_page || (item + 1) % MAX_ITEMS;
      item = next_item, entry = next;
      if (!ends && stays) continue;
      // Add the state to those of earlier items, and make room for more.
      complete_state<PageA::Values::LOW>(state);
      float(*record)[RECORD] = record_of(params, own);
      if (own.is_added) add_state(record, state, lane);
      __syncwarp();
      store_state(ends ? own.records : record, state, lane);
      __syncwarp();
      if (ends) break;
      state.clear();
      own.is_added = true;
    }
    finish_segment(params, own, lane);
    if (!uniform(own.goes_on)) return;
    __syncwarp();
    own.part = own.next;
  }
}

}  // namespace by_warps
