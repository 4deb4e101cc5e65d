// decode: attention of a few queries per sequence over packed pages, 16-bit tokens and new tokens.
//
// Work is one flat list of items, split evenly over thread blocks (stream-K). A segment is one
// (sequence, KV head, tile of up to 8 query columns); its items are the new tokens, then stored
// tokens in 16-bit precision (up to 16 per item), then pages. Empty places in the list stand for
// the time that a new segment takes. The warps of a thread block, or teams of TEAM warps that share
// the tokens of a page, take items in turn. Keys are operand A (16 tokens x 16 channels) and queries
// B (16 channels x 8 columns); then transposed values are A (16 channels x 16 tokens) and
// probabilities B, so that a column keeps its lanes throughout. Codes are used as subnormal float16
// numbers (page.cuh): the power of two of their bit place and a channel's scale are multiplied into
// the query, the scale of a token's key into its score, and the scale of its value into its
// probability.
//
// One float16 is too coarse for a query times a scale: at scores of 100, its rounding changes
// probabilities by percents. So a query has two parts, high and low, whose sum has 22 bits. For
// stream pages, whose scales are not in the query, it is an integer of 16 bits (attend_stream.cuh).
//
// Compiled with, in addition to page.cuh's macros: KEY_BITS_A, VALUE_BITS_A, KEY_BITS_B,
// VALUE_BITS_B (0: none) of one or two page formats, ELEMENT (__half, __nv_bfloat16), WARPS (at
// least 8), TEAM (1 if pages have key scales per channel), BUFFERS (with fewer than teams, some
// wait), USE_TMA (copy.cuh), ROTATE, NARROW (1: at most 4 columns are in use, and columns 4 to 7 have
// the low parts of 0 to 3, which needs no further product; 0: the low parts have their own products),
// BY_WARPS (warps of a thread block that divide work lists of short segments with by_warps.cuh; 0:
// thread blocks take these too).

#include "common/overlap.cuh"
#include "decode/attend_page.cuh"
#include "decode/attend_plain.cuh"
#include "decode/attend_stream.cuh"
#if BY_WARPS
#include "decode/by_warps.cuh"
#endif
#include "decode/merge.cuh"
#include "decode/query.cuh"
#include "decode/request.cuh"

// Convert State::out from the units of one format to those of the other.
template <class From, class To>
__device__ __forceinline__ void change_units(State& state) {
  constexpr int FROM = From::Values::LOW, TO = To::Values::LOW;
  if (FROM == TO) return;
#pragma unroll
  for (int tile = 0; tile < CHANNEL_TILES; ++tile)
#pragma unroll
    for (int c = 0; c < 4; ++c)
      state.out[tile][c] *= out_unit<FROM>(tile, c >> 1) / out_unit<TO>(tile, c >> 1);
}

// Whether the warp is the last of its team to leave a buffer; all of them call this.
__device__ __forceinline__ bool is_last_to_leave(Shared& shared, int buffer, int lane) {
  __syncwarp();
  if (TEAM == 1) return true;
  int before = 0;
  if (lane == 0) {
    asm volatile("atom.add.acq_rel.cta.shared.s32 %0, [%1], 1;"
                 : "=r"(before)
                 : "r"(shared_address(&shared.left[buffer]))
                 : "memory");
    if (before == TEAM - 1) shared.left[buffer] = 0;
  }
  return __shfl_sync(~0u, before, 0) == TEAM - 1;
}

__device__ __forceinline__ void attend_segment(const Params& params, Shared& shared,
                                               const Assignment& part, State& state,
                                               uint32_t taken, int warp, int lane) {
  bool second = false;  // whether the state is in units of the second format
  const Run run = run_of(part);
  // Item run.first + i is the (taken + i)-th of this thread block.
  const int team = warp / TEAM, member = warp % TEAM;
  int i = (team + TEAMS - taken % TEAMS) % TEAMS;
  for (; run.first + i < run.last; i += TEAMS) {
    const int item = run.first + i, refill = item + BUFFERS;
    int2 next = {0, 0};
    if (refill < run.last) next = entry_of(params, part, refill, lane);
    const uint32_t turn = taken + i;
    const int buffer = turn % BUFFERS;
    const uint8_t* rows = shared.buffers[buffer];
    // Warps run ahead of each other: the parity of a barrier alone could be that of two phases
    // earlier.
    while (load_acquire(&shared.turns[buffer]) != turn) {
    }
    barrier_wait(&shared.full[buffer], turn / BUFFERS & 1);
    const int use = shared.uses[buffer];
    const int stop = use & 0xff, start = use >> 8 & 0xff;
    if (item <= part.tiles) {
      if (member == 0) {  // 16 tokens are a single fragment
        int visible[2];
        visible_tokens(visible, params, part, item, lane);
        float scores[4];
        plain_scores(scores, rows, shared.plain[lane >> 2], lane);
        attend_plain(state, scores, rows + TILE * ROW_BYTES, stop, params.scaling * LOG2E,
                     visible, lane);
        // Convert the output to the units of pages, unless the warp's next item is unpacked too.
        if (item + TEAMS > part.tiles || item + TEAMS >= run.last)
          settle_plain<PageA::Values::LOW>(state, lane);
      }
    } else {
      if constexpr (HAS_B) {
        if (second != (use >> 16 != 0)) {
          second = !second;
          if (second)
            change_units<PageA, PageB>(state);
          else
            change_units<PageB, PageA>(state);
        }
      }
#if STREAM
      if (!HAS_B || !second)
        attend_stream<PageA>(state, rows, shared.query, start, stop, member, lane);
      else if constexpr (HAS_B)
        attend_stream<PageB>(state, rows, shared.query, start, stop, member, lane);
#else
      const uint8_t* norms = rows + (SCALING == 2 ? HEAD_BYTES : PageA::norms);
      if (!HAS_B || !second) {
        attend_page<PageA>(state, rows, norms, shared.query, start, stop, lane);
      } else if constexpr (HAS_B) {
        if constexpr (SCALING == 1) norms = rows + PageB::norms;
        attend_page<PageB>(state, rows, norms, shared.query, start, stop, lane);
      }
#endif
    }
    if (is_last_to_leave(shared, buffer, lane) && refill < run.last)
      request(params, shared, part, refill, next, turn + BUFFERS, lane);
  }
  if constexpr (HAS_B)
    if (second) change_units<PageB, PageA>(state);
  complete_state<PageA::Values::LOW>(state);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    decode(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) uint8_t raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  // A shuffle tells the compiler that a warp's branches on it do not diverge.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
#if BY_WARPS
  if (params.assignments[blockIdx.x].block.by_warps) {
    if (warp < BY_WARPS) by_warps::attend(params, raw, warp, lane);
    return;
  }
  if (warp >= WARPS) return;
#endif
  Assignment part = params.assignments[blockIdx.x].block;
  if (threadIdx.x == 0) shared.part = part;
  if (threadIdx.x < BUFFERS) {
    barrier_init(&shared.full[threadIdx.x]);
    shared.turns[threadIdx.x] = ~0u;
    shared.left[threadIdx.x] = 0;
  }
#if USE_TMA
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  __syncthreads();
  if (part.begin == part.end) return;
  uint32_t taken = 0;
  Query<32> query;
  // Stored tokens may be requested before the preceding kernel has ended; it writes the new tokens
  // and the queries.
#pragma unroll 1
  for (int waited = params.early ? 0 : 1; waited < 2; ++waited) {
    if (waited) {
      wait_for_previous();
      let_next_begin();
      if (warp < COLUMNS) query.fetch(params, part, warp, lane);
    }
    const bool all = !params.early;
    request_first(params, shared, part, taken, all || waited, all || !waited, warp, lane);
  }
  while (true) {
    if (warp < COLUMNS) {
      query.store(shared.query, params.scaling, warp, lane);
#pragma unroll
      for (int i = 0; i < query.PAIRS; ++i)
        reinterpret_cast<Query<32>::Pair*>(shared.plain[warp])[query.channel_of(i, lane) / 2] =
            query.plain[i];
    }
    __syncthreads();
    State state;
    state.clear();
    attend_segment(params, shared, part, state, taken, warp, lane);
    if (RECORDS_IN_BUFFERS) __syncthreads();  // all warps have attended to their last pages
    Records* records = records_of(shared);
    if (WARPS > SLOTS) {
      // Shared memory holds only half of the states: the upper warps store theirs first.
      if (warp >= SLOTS) store_state(records[warp - SLOTS], state, lane);
      __syncthreads();
      if (warp < WARPS - SLOTS) add_state(records[warp], state, lane);
      __syncwarp();
    }
    if (warp < SLOTS) store_state(records[warp], state, lane);
    __syncthreads();
    const Assignment done = part;
    const Run run = run_of(part);
    taken += run.last - run.first;
    part.gap = shared.part.gap;  // so that no register holds it meanwhile
    const bool goes_on = part.next() < part.end;
    if (goes_on) {
      // Load the next segment's pages while the states of this one are summed.
      part.advance(params);
      if (warp < COLUMNS) query.fetch(params, part, warp, lane);
      request_first(params, shared, part, taken, true, true, warp, lane, 0, FREE_BUFFERS);
    }
    finish_segment(params, shared, done, goes_on, warp, lane);
    if (!goes_on) return;
#if RECORDS_IN_BUFFERS && USE_TMA
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // bulk copies overwrite records
#endif
    __syncthreads();
    if (RECORDS_IN_BUFFERS)
      request_first(params, shared, part, taken, true, true, warp, lane, FREE_BUFFERS);
  }
}
