// block_tables: block tables and lengths of a scheduler's batch -> the tables of decode and store.
//
// Thread block 0 distributes the work list of items over the thread blocks of decode. The others
// are: one thread block per decoding row, which lists its pages and its tokens in 16-bit precision;
// one warp per job and per page that may begin; one thread per new token, for its place in its
// ring. (oscar_mm/ops/block_tables.py defines the tables and computes them on a CPU.)

#include "block_tables/rows.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int TILE = 16;
constexpr int HEAD = 4;            // integers of a job, or a beginning, before its sources
constexpr int CENTER_TOKENS = 32;
constexpr int FIELDS = 32;         // integers of a thread block's work
constexpr int SEGMENT_ITEMS = 20;  // empty places after a segment, if thread blocks have several
constexpr int MANY_SEGMENTS = 3;   // segments per thread block from which warps may divide the list
constexpr int SHORT_ITEMS = 48;    // maximum mean items of these segments
constexpr int WARP_SEGMENT_ITEMS = 3;  // empty places after a segment then
constexpr int WORKING_WARPS[] = {12, 16};  // of a thread block, if each warp has one segment
constexpr int FEWEST_ITEMS = 8;    // minimum items of a thread block of decode, if there are enough
constexpr int ROUND_ITEMS = 12;    // minimum if three quarters of the thread blocks would have work
constexpr int NOTHING = -2147483647 - 1;

struct Params {
  const int* blocks;         // (rows, block_stride): pages of each row
  const int* lengths;        // (rows): tokens of each row, new ones included
  const int* starts;         // (rows + 1): first new token of each row
  const int64_t* slots;      // (tokens): page * 128 + place of each new token; negative: not stored
  const int2* tails;         // (rows): ring of each row, or -1; first token of the row in the ring
  int2* items;               // (rows, item_stride)
  int2* counts;              // (rows)
  int* assignments;          // (workers, FIELDS)
  int* jobs;                 // (job_count, HEAD + TILE)
  int* begins;               // (begin_count, HEAD + CENTER_TOKENS)
  int* recents;              // (rows, recent_stride): places of tokens in 16-bit precision
  int* writes;               // (write_count, 3)
  int64_t block_stride, item_stride;
  int rows, decodes, row_tiles;  // row_tiles: jobs per row if all rows have the same number; else 0
  int job_count, begin_count, write_count;
  int heads, column_tiles, workers;
  int sinks, window, size;   // of a ring: places of sinks, tokens that are read, other places
  int recent_stride;
  int staged;                // whether store reads new tokens from their rings
};

// Number of past tokens of a row.
__device__ __forceinline__ int past_of(const Params& params, int row) {
  return max(params.lengths[row] - (params.starts[row + 1] - params.starts[row]), 0);
}

// Tokens that a decoding row reads in 16-bit precision: [0, sinks) and [first, past).
struct Exact {
  int sinks, first, past;

  __device__ __forceinline__ Exact(const Params& params, int row) : past(past_of(params, row)) {
    const int2 tail = params.tails[row];
    sinks = tail.x >= 0 && tail.y == 0 ? min(params.sinks, past) : 0;
    first = tail.x >= 0 ? max(max(tail.y, past - params.window), sinks) : past;
  }

  __device__ __forceinline__ int count() const { return sinks + past - first; }
  __device__ __forceinline__ int tiles() const { return ceil_div(count(), TILE); }
  __device__ __forceinline__ int pages() const {
    return first > sinks ? ceil_div(first, PAGE_TOKENS) : 0;
  }
  __device__ __forceinline__ int items() const { return 1 + tiles() + pages(); }
};

// Place of a row's token in its ring.
__device__ __forceinline__ int place_of(const Params& params, int ring, int position) {
  const int within = position < params.sinks ? position : params.sinks + position % params.size;
  return ring * (params.sinks + params.size) + within;
}

// The last of `count` rows whose number is at most `wanted`; numbers are in ascending order.
template <class Number>
__device__ __forceinline__ int row_at(int count, int wanted, const Number& number) {
  int low = 0, high = count - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (number(middle) <= wanted)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

__device__ __forceinline__ int sum_of(int x) {
  for (int step = 16; step; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

__device__ __forceinline__ int items_of(const Params& params, int row) {
  return Exact(params, row).items();
}

// Number of parts of all segments if a part has at most `items` items. Called by whole warps.
__device__ __forceinline__ int parts_of(const Params& params, int items) {
  int parts = 0;
  for (int row = threadIdx.x % 32; row < params.decodes; row += 32)
    parts += ceil_div(items_of(params, row), items);
  return sum_of(parts) * params.heads * params.column_tiles;
}

// The smallest maximum length of a part, at least `longest`, for which all segments have no more
// parts than `workers`. Called by whole warps.
__device__ __forceinline__ int longest_part(const Params& params, int workers, int longest) {
  int high = longest;
  for (int row = 0; row < params.decodes; ++row) high = max(high, items_of(params, row));
  while (longest < high) {
    const int middle = (longest + high) / 2;
    if (parts_of(params, middle) <= workers)
      high = middle;
    else
      longest = middle + 1;
  }
  return longest;
}

// The same as `_assign_warps` in oscar_mm/ops/decode_tables.py.
__device__ __forceinline__ void assign_warps(const Params& params, int* before) {
  const int rows = params.decodes, per_row = params.heads * params.column_tiles;
  int working = 0, longest = 0, total = 0;
  for (int each : WORKING_WARPS) {
    const int warps = params.workers * each;
    if (rows * per_row > warps) continue;
    longest = longest_part(params, warps, 1), total = parts_of(params, longest);
    if (8 * total < 7 * warps) continue;
    working = each;
    break;
  }
  if (!working) return;
  if (threadIdx.x < 32)
    sums_before(before, rows, threadIdx.x,
                [&](int row) { return ceil_div(items_of(params, row), longest); });
  __syncthreads();
  const auto first_of = [&](int row) { return per_row * before[row]; };
  for (int worker = threadIdx.x; worker < params.workers; worker += THREADS) {
    int* fields = params.assignments + worker * FIELDS + FIELDS / 2;
    // Length, workers and parts of Assignment, even of thread blocks without work.
    fields[2] = working, fields[3] = total, fields[12] = longest;
    const int number = worker * working;
    if (number >= total) continue;
    const int row = row_at(rows, number, first_of);
    const int parts = ceil_div(items_of(params, row), longest);
    const int within = (number - first_of(row)) / parts;
    const Exact exact(params, row);
    fields[4] = row, fields[5] = within / params.column_tiles;
    fields[6] = within % params.column_tiles, fields[7] = row * per_row + within;
    fields[9] = exact.tiles(), fields[10] = exact.pages();
    fields[11] = first_of(row) + within * parts;
  }
}

// The same as `assign` in oscar_mm/ops/decode_tables.py.
__device__ __forceinline__ void assign(const Params& params, int* before) {
  const int rows = params.decodes, per_row = params.heads * params.column_tiles;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const bool few = rows * per_row <= params.workers;
  if (warp == 0) sums_before(before, rows, lane, [&](int row) { return items_of(params, row); });
  __syncthreads();
  const bool by_warps = rows * per_row >= MANY_SEGMENTS * params.workers &&
                        before[rows] <= SHORT_ITEMS * rows;
  const int gap = by_warps ? WARP_SEGMENT_ITEMS : SEGMENT_ITEMS;
  const auto length_of = [&](int row) { return items_of(params, row) + (few ? 0 : gap); };
  __syncthreads();
  if (warp == 0) sums_before(before, rows, lane, length_of);
  __syncthreads();
  const int total = per_row * before[rows];
  int longest = 1;  // items of a part, if each thread block has one segment
  if (few) {
    const bool crowded = parts_of(params, FEWEST_ITEMS) * 4 > params.workers * 3;
    longest = longest_part(params, params.workers, crowded ? ROUND_ITEMS : FEWEST_ITEMS);
    __syncthreads();
    if (warp == 0)
      sums_before(before, rows, lane, [&](int row) { return ceil_div(items_of(params, row), longest); });
    __syncthreads();
  }
  const int used = few ? per_row * before[rows] : min(params.workers, total);
  const auto first_of = [&](int row) { return per_row * before[row]; };
  for (int worker = threadIdx.x; worker < params.workers; worker += THREADS) {
    int fields[FIELDS] = {};
    if (worker < used) {
      const int begin =
          few ? worker : static_cast<int>(static_cast<int64_t>(total) * worker / used);
      const int place = few ? begin : begin + gap;  // no part begins in empty places
      const int row = row_at(rows, place, first_of), items = items_of(params, row);
      const int size = few ? ceil_div(items, longest) : length_of(row);
      const int within = (place - first_of(row)) / size;
      const int head = within / params.column_tiles, tile = within % params.column_tiles;
      int first = 0, last = 0, start = first_of(row) + within * size;
      if (few) {
        start = 0;
        for (int other = 0; other < row; ++other) start += per_row * items_of(params, other);
        start += within * items;
        const int part = worker - first_of(row) - within * size;
        first = start + items * part / size, last = start + items * (part + 1) / size;
      } else {
        first = max(begin, start);
        last = static_cast<int>(static_cast<int64_t>(total) * (worker + 1) / used);
      }
      const int segment = row * per_row + within, tiles = Exact(params, row).tiles();
      const int found[] = {first, last, total, min(params.workers, total), row, head, tile, segment,
                           start, tiles, items - 1 - tiles, few ? first_of(row) + within * size : 0,
                           few ? size : 0, gap, by_warps};
      for (int i = 0; i < 15; ++i) fields[i] = found[i];
    }
    for (int i = 0; i < FIELDS; ++i) params.assignments[worker * FIELDS + i] = fields[i];
  }
  __syncthreads();
  if (by_warps) assign_warps(params, before);
}

__device__ __forceinline__ void list_pages(const Params& params, int row) {
  const Exact exact(params, row);
  const int pages = exact.pages(), count = exact.count(), ring = params.tails[row].x;
  for (int page = threadIdx.x; page < pages; page += THREADS) {
    const int stop = min(exact.first - page * PAGE_TOKENS, PAGE_TOKENS);
    params.items[row * params.item_stride + page] = {
        params.blocks[row * params.block_stride + page],
        stop | (page == 0 ? exact.sinks << 8 : 0)};
  }
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const int position = i < exact.sinks ? i : exact.first + i - exact.sinks;
    params.recents[row * params.recent_stride + i] = place_of(params, ring, position);
  }
  if (threadIdx.x == 0) params.counts[row] = {count, pages};
}

// First job, or beginning, of a row, for rows of any number of tokens. A row has as many as it may
// need according to its first token, so that the host knows the total.
__device__ __forceinline__ int first_job(const Params& params, int row) {
  return params.row_tiles ? row * params.row_tiles : 2 * row + params.starts[row] / TILE;
}

__device__ __forceinline__ int first_begin(const Params& params, int row) {
  return params.row_tiles ? row : row + params.starts[row] / PAGE_TOKENS;
}

// The place in its ring of a row's new token; -1 if it gets none.
__device__ __forceinline__ int new_place(const Params& params, int row, int token) {
  const int ring = params.tails[row].x, left = params.starts[row + 1] - token;
  const int position = params.lengths[row] - left;
  if (ring < 0 || (position >= params.sinks && left > params.size)) return -1;
  return place_of(params, ring, position);
}

// Where store finds a row's new token.
__device__ __forceinline__ int source_of(const Params& params, int row, int token) {
  return params.staged ? ~new_place(params, row, token) : token;
}

__device__ __forceinline__ void write_job(const Params& params, int line, int lane) {
  const int row =
      row_at(params.rows, line, [&](int other) { return first_job(params, other); });
  const int start = params.starts[row], past = past_of(params, row);
  const int place = (past / TILE + line - first_job(params, row)) * TILE + lane % TILE;
  const int token = start + place - past;
  int64_t slot = -1;
  if (lane < TILE && place >= past && token < params.starts[row + 1]) slot = params.slots[token];
  const uint32_t stored = __ballot_sync(~0u, slot >= 0);
  const int64_t one = __shfl_sync(~0u, slot, stored ? __ffs(stored) - 1 : 0);
  int* job = params.jobs + static_cast<int64_t>(line) * (HEAD + TILE);
  const int page = stored ? static_cast<int>(one / PAGE_TOKENS) : -1;
  const int tile = stored ? static_cast<int>(one % PAGE_TOKENS) / TILE : 0;
  if (lane < HEAD) job[lane] = lane == 0 ? page : lane == 1 ? tile : 0;
  if (lane < TILE) job[HEAD + lane] = slot >= 0 ? source_of(params, row, token) : NOTHING;
}

__device__ __forceinline__ void write_begin(const Params& params, int line, int lane) {
  const int row =
      row_at(params.rows, line, [&](int other) { return first_begin(params, other); });
  const int start = params.starts[row], stop = params.starts[row + 1];
  const int past = past_of(params, row);
  const int number = ceil_div(past, PAGE_TOKENS) + line - first_begin(params, row);
  const int token = start + number * PAGE_TOKENS - past;
  const int64_t slot = token < stop ? params.slots[token] : -1;
  // The page's own first tokens, or the last that there are.
  const int source = max(start, min(token, stop - CENTER_TOKENS));
  const int found = min(stop - source, CENTER_TOKENS);
  const bool begins = slot >= 0, copies = found < CENTER_TOKENS && number > 0;
  const int count = begins && !copies ? found : 0;
  int* begin = params.begins + static_cast<int64_t>(line) * (HEAD + CENTER_TOKENS);
  if (lane == 0) begin[0] = begins ? static_cast<int>(slot / PAGE_TOKENS) : -1;
  if (lane == 1) begin[1] = 0;
  if (lane == 2) begin[2] = count;
  if (lane == 3)
    begin[3] = begins && copies ? params.blocks[row * params.block_stride + number - 1] : 0;
  begin[HEAD + lane] = lane < count ? source_of(params, row, source + lane) : NOTHING;
}

__device__ __forceinline__ void write_place(const Params& params, int token) {
  int* write = params.writes + static_cast<int64_t>(token) * 3;
  int place = -1;
  if (token < params.starts[params.rows] && params.slots[token] >= 0) {
    const int row = row_at(params.rows, token, [&](int other) { return params.starts[other]; });
    place = new_place(params, row, token);
  }
  write[0] = 0, write[1] = token, write[2] = place;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    block_tables(const __grid_constant__ Params params) {
  __shared__ int before[MAX_ROWS + 1];
  if (blockIdx.x == 0) {
    assign(params, before);
    return;
  }
  const int row = blockIdx.x - 1;
  if (row < params.decodes) {
    list_pages(params, row);
    return;
  }
  const int first = (row - params.decodes) * WARPS, lines = params.job_count + params.begin_count;
  const int line = first + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (line < params.job_count) {
    write_job(params, line, lane);
  } else if (line < lines) {
    write_begin(params, line - params.job_count, lane);
  } else if (const int token = (line - lines) * 32 + lane; token < params.write_count) {
    write_place(params, token);
  }
}
