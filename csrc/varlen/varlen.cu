// varlen: causal attention of concatenated sequences in 16-bit precision (Hopper). A sequence's last
// query attends to all its keys, an earlier one to correspondingly fewer.
//
// A thread block computes a tile of a sequence's queries for one head: each of its warpgroups has 64
// of them. A producer warp copies the queries, then tiles of keys and values, with TMA. While the
// scores of a tile become weights, the values of the previous one are multiplied by theirs.
//
// A tile of values may contain rows of the next sequence, which can be anything, even NaN. A weight
// of 0 would not hide NaN, so these rows are cleared. Surplus rows of the other tiles only affect
// scores that are masked, and outputs that are not written.
//
// Compiled with: HEAD_DIM (64, 128), ELEMENT (__half, __nv_bfloat16), USE_TMA (always 1).

#include "common/cluster.cuh"
#include "common/copy.cuh"
#include "common/mma.cuh"
#include "common/overlap.cuh"
#include "common/wgmma.cuh"

constexpr int GROUPS = 2;               // consuming warpgroups
constexpr int QUERIES = GROUPS * 64;    // of a tile
constexpr int KEYS = 128;               // of a tile
constexpr int STAGES = 2;               // tiles of keys in shared memory, and of values
constexpr int PANEL = 64, ROW = 128;    // elements and bytes of a row of a box
constexpr int PANELS = HEAD_DIM / PANEL;
constexpr int QUERY_PANEL = QUERIES * ROW, KEY_PANEL = KEYS * ROW;  // bytes
constexpr int QUERY_TILE = PANELS * QUERY_PANEL, KEY_TILE = PANELS * KEY_PANEL;
constexpr int CONSUMING = GROUPS * 128, THREADS = CONSUMING + 128;

struct Params {
  TensorMap queries;      // (all queries, query heads * HEAD_DIM), in boxes of QUERIES x PANEL
  TensorMap keys;         // (all keys, KV heads * HEAD_DIM), in boxes of KEYS x PANEL
  TensorMap values;
  const int* query_ends;  // (sequences + 1)
  const int* key_ends;
  ELEMENT* output;        // (all queries, query heads, HEAD_DIM)
  int sequences;
  int group;              // query heads of a KV head
  float scale;            // of scores, times log2(e)
  int unused[7];          // up to the alignment of TensorMap, 64 bytes
};

// Tile of a sequence's queries. blockIdx.y counts the tiles of all sequences; a sequence's last
// tile comes first, since it has the most keys.
struct Tile {
  int first;              // index of the tile's first query in its sequence
  int queries, keys;      // of the sequence
  int query_start, key_start;

  // Find the thread block's tile; return false if there are fewer tiles. All lanes call this.
  __device__ __forceinline__ bool find(const Params& params) {
    const int lane = threadIdx.x % 32;
    int tile = blockIdx.y;
    for (int sequence = lane; sequence - lane < params.sequences; sequence += 32) {
      const int here = min(sequence, params.sequences), next = min(sequence + 1, params.sequences);
      const int start = params.query_ends[here], count = params.query_ends[next] - start;
      const int own_start = params.key_ends[here], own = params.key_ends[next] - own_start;
      const int tiles = (count + QUERIES - 1) / QUERIES;
      int end = tiles;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(~0u, end, step);
        if (lane >= step) end += before;
      }
      const uint32_t after = __ballot_sync(~0u, tile < end);
      if (after != 0) {
        const int source = __ffs(after) - 1;
        first = __shfl_sync(~0u, end - 1 - tile, source) * QUERIES;
        queries = __shfl_sync(~0u, count, source);
        keys = __shfl_sync(~0u, own, source);
        query_start = __shfl_sync(~0u, start, source);
        key_start = __shfl_sync(~0u, own_start, source);
        return true;
      }
      tile -= __shfl_sync(~0u, end, 31);
    }
    return false;
  }

  // Tokens before the sequence's first query.
  __device__ __forceinline__ int past() const { return keys - queries; }

  // Tiles of keys that the last query attends to; none if the sequence has no keys.
  __device__ __forceinline__ int key_tiles() const {
    const int last = past() + min(first + QUERIES, queries);
    return last > 0 ? (last + KEYS - 1) / KEYS : 0;
  }
};

// Tiles in shared memory: `full` completes when a tile has arrived, `empty` when all warps are done
// with it.
struct Ring {
  uint32_t memory;
  uint64_t *full, *empty;
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ uint32_t tile() const { return memory + slot * KEY_TILE; }
  __device__ __forceinline__ void wait_full() const { barrier_wait(&full[slot], parity); }

  // Return the tile to the producer, and go on to the next.
  __device__ __forceinline__ void release() {
    if (threadIdx.x % 32 == 0)
      asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(&empty[slot]))
                   : "memory");
    next();
  }

  __device__ __forceinline__ void next() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }

  // Copy a tile of a head's keys or values, from row `row` on.
  __device__ __forceinline__ void copy(const TensorMap& map, int head, int row) {
    barrier_wait(&empty[slot], parity ^ 1);  // The first phases pass at once.
    copy_begin(&full[slot], KEY_TILE, 0);
#pragma unroll
    for (int i = 0; i < PANELS; ++i)
      copy_box<false>(tile() + i * KEY_PANEL, map, head * HEAD_DIM + i * PANEL, row, &full[slot]);
    next();
  }
};

__device__ __forceinline__ void produce(const Params& params, const Tile& tile, uint32_t queries,
                                        uint64_t* arrived, Ring keys, Ring values) {
  const int count = tile.key_tiles(), head = blockIdx.x, kv_head = head / params.group;
  if (count == 0) return;
  copy_begin(arrived, QUERY_TILE, 0);
#pragma unroll
  for (int i = 0; i < PANELS; ++i)
    copy_box<false>(queries + i * QUERY_PANEL, params.queries, head * HEAD_DIM + i * PANEL,
                    tile.query_start + tile.first, arrived);
#pragma unroll 1
  for (int i = 0; i < count; ++i) {
    keys.copy(params.keys, kv_head, tile.key_start + i * KEYS);
    values.copy(params.values, kv_head, tile.key_start + i * KEYS);
  }
}

using Scores = float[KEYS / 2];
using Outputs = float[HEAD_DIM / 2];
using Weights = uint32_t[KEYS / 16][4];

// A warpgroup's queries: this lane has two rows of its warp's 16, `row` and row + 8.
struct Softmax {
  float scale;
  int row;           // index of the last key that the first row attends to
  float high[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};

  // Turn scores into weights, and return the factors of earlier weights. `start`: index of the
  // tile's first key.
  __device__ __forceinline__ float2 weigh(Scores& scores, int start) {
    const int lane = threadIdx.x % 32, column = start + lane % 4 * 2;
    if (start + KEYS - 1 > row - lane / 4)
#pragma unroll
      for (int i = 0; i < KEYS / 2; ++i)
        if (column + i / 4 * 8 + i % 2 > row + i / 2 % 2 * 8) scores[i] = -INFINITY;
    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = high[half];
#pragma unroll
      for (int i = 0; i < KEYS / 2; i += 4)
        most = fmaxf(most, fmaxf(scores[i + half * 2], scores[i + half * 2 + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      factors[half] = exp2_fast((high[half] - most) * scale);
      high[half] = most;
      const float by = most * scale;
      float total = 0.0f;
#pragma unroll
      for (int i = 0; i < KEYS / 2; i += 4)
#pragma unroll
        for (int j = i + half * 2; j < i + half * 2 + 2; ++j) {
          scores[j] = exp2_fast(fmaf(scores[j], scale, -by));
          total += scores[j];
        }
      sum[half] = fmaf(sum[half], factors[half], total);
    }
    return {factors[0], factors[1]};
  }
};

// Keep the compiler from moving the computation of a sum of weights behind a later wait for
// products: store it, under a condition that is never true.
__device__ __forceinline__ void compute_now(float sum, uint32_t address) {
  asm volatile(
      "{ .reg .pred never;\n setp.lt.f32 never, %0, 0f00000000;\n"
      "@never st.shared.f32 [%1], %0; }" ::"f"(sum),
      "r"(address)
      : "memory");
}

// Begin to multiply a warpgroup's queries by a tile of keys.
__device__ __forceinline__ void begin_scores(Scores& scores, uint32_t queries, uint32_t keys) {
#pragma unroll
  for (int i = 0; i < KEYS / 2; ++i) scores[i] = 0.0f;
  const uint64_t a = swizzled_rows(queries), b = swizzled_rows(keys);
  pin(scores);
  wgmma_begin();
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel)
#pragma unroll
    for (int at = 0; at < ROW; at += 32)
      wgmma(scores, a + (panel * QUERY_PANEL + at) / 16, b + (panel * KEY_PANEL + at) / 16,
            ELEMENT());
  wgmma_commit();
}

// Begin to add a tile of values times their weights.
__device__ __forceinline__ void begin_outputs(Outputs& outputs, const Weights& weights,
                                              uint32_t values) {
  const uint64_t b = swizzled_columns(values, KEY_PANEL);
  pin(outputs);
  wgmma_begin();
#pragma unroll
  for (int i = 0; i < KEYS / 16; ++i)
    wgmma_transposed(outputs, weights[i], b + i * 16 * ROW / 16, ELEMENT());
  wgmma_commit();
}

// Wait for outputs, whose weights were read until now.
__device__ __forceinline__ void end_outputs(Outputs& outputs, Weights& weights) {
  wgmma_wait();
  pin(outputs);
#pragma unroll
  for (int i = 0; i < KEYS / 16; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(weights[i][j])::"memory");
}

__device__ __forceinline__ void round_weights(Weights& weights, const Scores& scores) {
#pragma unroll
  for (int i = 0; i < KEYS / 16; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
      weights[i][j] = packed(scores[i * 8 + j * 2], scores[i * 8 + j * 2 + 1], ELEMENT());
}

// Clear the rows of a tile of values from `first` on.
__device__ __forceinline__ void clear(uint32_t values, int first) {
#pragma unroll 1
  for (int i = first * 8 + threadIdx.x; i < KEYS * 8; i += CONSUMING)
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(values + panel * KEY_PANEL +
                                                                    i * 16),
                   "r"(0)
                   : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync 1, %0;" ::"n"(CONSUMING) : "memory");
}

__device__ __forceinline__ void write(const Params& params, const Tile& tile,
                                      const Outputs& outputs, const float (&sum)[2], int row) {
  const int quad = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float total = sum[half];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const float by = total == 0.0f ? 0.0f : 1.0f / total;
    if (row + half * 8 >= tile.queries) continue;
    ELEMENT* to = params.output +
                  (static_cast<int64_t>(tile.query_start + row + half * 8) * gridDim.x +
                   blockIdx.x) *
                      HEAD_DIM +
                  quad * 2;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; ++i)
      *reinterpret_cast<uint32_t*>(to + i * 8) = packed(
          outputs[i * 4 + half * 2] * by, outputs[i * 4 + half * 2 + 1] * by, ELEMENT());
  }
}

__device__ __forceinline__ void consume(const Params& params, const Tile& tile, uint32_t queries,
                                        uint64_t* arrived, Ring keys, Ring values) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = tile.key_tiles();
  const int row = tile.first + warp * 16 + lane / 4;
  Outputs outputs = {};
  Softmax softmax{params.scale, tile.past() + row};
  if (count > 0) {
    queries += warp / 4 * 64 * ROW;
    Scores scores;
    Weights weights;
    barrier_wait(arrived, 0);
    keys.wait_full();
    begin_scores(scores, queries, keys.tile());
    wgmma_wait();
    pin(scores);
    keys.release();
    softmax.weigh(scores, 0);
    round_weights(weights, scores);
#pragma unroll 1
    for (int i = 1; i < count; ++i) {
      keys.wait_full();
      begin_scores(scores, queries, keys.tile());
      values.wait_full();
      begin_outputs(outputs, weights, values.tile());
      wgmma_wait<1>();
      pin(scores);
      keys.release();
      const float2 factors = softmax.weigh(scores, i * KEYS);
      compute_now(softmax.sum[0] + softmax.sum[1], queries);
      end_outputs(outputs, weights);
      values.release();
#pragma unroll
      for (int j = 0; j < HEAD_DIM / 2; ++j) outputs[j] *= j / 2 % 2 ? factors.y : factors.x;
      round_weights(weights, scores);
    }
    values.wait_full();
    if (count * KEYS > tile.keys) clear(values.tile(), tile.keys - (count - 1) * KEYS);
    begin_outputs(outputs, weights, values.tile());
    end_outputs(outputs, weights);
  }
  write(params, tile, outputs, softmax.sum, row);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    varlen(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  constexpr int TILES = QUERY_TILE + 2 * STAGES * KEY_TILE;
  uint64_t* barriers = reinterpret_cast<uint64_t*>(memory + TILES);
  const uint32_t queries = shared_address(memory);
  const Ring keys{queries + QUERY_TILE, barriers + 1, barriers + 1 + STAGES};
  const Ring values{keys.memory + STAGES * KEY_TILE, keys.empty + STAGES, keys.empty + 2 * STAGES};
  if (threadIdx.x <= 4 * STAGES) {
    const bool empties = threadIdx.x > 0 && (threadIdx.x - 1) / STAGES % 2 == 1;
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(
                     shared_address(barriers + threadIdx.x)),
                 "r"(empties ? GROUPS * 4 : 1)
                 : "memory");
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  let_next_begin();
  wait_for_previous();
  Tile tile;
  if (!tile.find(params)) return;
  // Registers are divided among warpgroups: consumers need more than a third.
  if (threadIdx.x < CONSUMING) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    consume(params, tile, queries, barriers, keys, values);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == CONSUMING) produce(params, tile, queries, barriers, keys, values);
  }
}
