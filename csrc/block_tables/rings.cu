// rings: the ring of tokens in 16-bit precision of each row of a batch, and the row's first token
// in it. One thread block. (oscar_mm/ops/rings.py describes how rings are found, and does the same
// on a CPU.)

#include "block_tables/rows.cuh"

constexpr int THREADS = 1024;
constexpr unsigned short NO_RING = 0xffff;

struct alignas(16) Ring {
  int lease;  // number of its current tenant
  int start;  // the tenant's first token in it
  int total;  // tokens of the tenant, after the last step
  int seen;   // clock at that step
};

struct Params {
  const int* blocks;      // (rows, block_stride): pages of each row
  const int* lengths;     // (rows): tokens of each row, new ones included
  const int* starts;      // (rows + 1): of the new tokens of each row
  const int64_t* slots;   // (tokens): negative: not stored
  int2* tails;            // (rows): ring, or -1; first token of the row in the ring
  int2* owners;           // (block_count): ring and lease of the row that last wrote to a block
  Ring* rings;            // (ring_count)
  int64_t block_stride;
  int rows, block_count, ring_count;
  int new_tokens;         // maximum new tokens of a decoding row
  int clock;              // number of this step
  int keeps;              // whether rows outside of the batch keep their rings
};

struct Row {
  int past, total;
  bool stores;

  __device__ __forceinline__ Row(const Params& params, int row) : total(params.lengths[row]) {
    const int start = params.starts[row], stop = params.starts[row + 1];
    past = max(total - (stop - start), 0);
    stores = stop > start && params.slots[stop - 1] >= 0;
  }
};

__device__ __forceinline__ void set_owners(const Params& params, int row, int first, int total,
                                           int2 owner) {
  for (int number = first; number * PAGE_TOKENS < total; ++number) {
    const int block = params.blocks[row * params.block_stride + number];
    if (block >= 0 && block < params.block_count) params.owners[block] = owner;
  }
}

// The ring whose tenant last wrote to the row's last block and has as many tokens as the row.
__device__ __forceinline__ int continued_ring(const Params& params, int row, const Row& state) {
  if (!state.stores || state.past == 0) return -1;
  const int block = params.blocks[row * params.block_stride + (state.past - 1) / PAGE_TOKENS];
  if (block < 0 || block >= params.block_count) return -1;
  const int2 owner = params.owners[block];
  if (owner.x < 0 || owner.x >= params.ring_count) return -1;
  const Ring ring = params.rings[owner.x];
  const bool is_near = state.past <= ring.total && state.past > ring.total - params.new_tokens;
  return ring.lease == owner.y && is_near ? owner.x : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    rings(const __grid_constant__ Params params) {
  __shared__ uint32_t ages[MAX_ROWS];  // first used for the rows that claim rings
  __shared__ unsigned short oldest[MAX_ROWS];
  __shared__ int before[MAX_ROWS + 1];
  for (int ring = threadIdx.x; ring < MAX_ROWS; ring += THREADS)
    ages[ring] = ~0u, oldest[ring] = NO_RING;
  for (int row = threadIdx.x; row < params.rows; row += THREADS) {
    const Row state(params, row);
    if (state.stores)
      set_owners(params, row, ceil_div(state.past, PAGE_TOKENS), state.total, {-1, 0});
  }
  __syncthreads();
  for (int row = threadIdx.x; row < params.rows; row += THREADS) {
    const int ring = continued_ring(params, row, Row(params, row));
    params.tails[row] = {ring, 0};
    if (ring >= 0) atomicMin(&ages[ring], static_cast<uint32_t>(row));
  }
  __syncthreads();
  for (int row = threadIdx.x; row < params.rows; row += THREADS) {
    const int ring = params.tails[row].x;
    if (ring >= 0 && ages[ring] != static_cast<uint32_t>(row)) params.tails[row].x = -1;
  }
  __syncthreads();
  for (int ring = threadIdx.x; ring < params.ring_count; ring += THREADS) {
    const uint32_t age = static_cast<uint32_t>(params.clock) - params.rings[ring].seen;
    const bool is_free = ages[ring] == ~0u;
    ages[ring] = is_free ? max(age, 1u) : 0;
    if (is_free && !params.keeps) ++params.rings[ring].lease;
  }
  const auto needs = [&](int row) {
    return params.tails[row].x < 0 && Row(params, row).stores ? 1 : 0;
  };
  if (threadIdx.x < 32) sums_before(before, params.rows, threadIdx.x, needs);
  __syncthreads();
  if (before[params.rows]) {
    for (int ring = threadIdx.x; ring < params.ring_count; ring += THREADS) {
      const uint32_t age = ages[ring];
      int rank = 0;
      for (int other = 0; other < params.ring_count; ++other)
        rank += ages[other] > age || (ages[other] == age && other < ring);
      if (age) oldest[rank] = ring;
    }
  }
  __syncthreads();
  for (int row = threadIdx.x; row < params.rows; row += THREADS) {
    const Row state(params, row);
    if (!state.stores) continue;
    int number = params.tails[row].x;
    const bool continues = number >= 0;
    if (!continues && oldest[before[row]] != NO_RING) number = oldest[before[row]];
    int2 owner = {number, 0};
    Ring ring = {0, 0, 0, 0};
    if (number >= 0) {
      ring = params.rings[number];
      if (!continues) ++ring.lease, ring.start = state.past;
      ring.total = state.total, ring.seen = params.clock;
      params.rings[number] = ring;
      owner.y = ring.lease;
    }
    params.tails[row] = {number, ring.start};
    set_owners(params, row, state.past / PAGE_TOKENS, state.total, owner);
  }
}
