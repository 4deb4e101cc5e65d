// experts: mixture of experts for a few rows, each with the experts that it chooses. Two launches:
//
//   DOWN 0: out[row][k] = silu(x Wg^T) * (x Wu^T) with the k-th chosen expert, x normalized with NORM
//   DOWN 1: out[row] = residual[row] + sum over k of share[row][k] * (x[row][k] Wd^T)
//
// A row's shares are the CHOSEN largest values of the softmax of its router's logits. Every thread
// block computes them itself. The first launch cannot request weights before the router has ended,
// and releases the second launch only then, so that the second can request weights at once.
//
// A thread block computes a run of tiles. A tile has eight rows of weights: those of eight outputs,
// or without DOWN, four of the gate and four others of the same outputs. Warps take pieces of tiles
// in turn (pieces.cuh), with DOWN of all chosen experts, one after the other, and request DEPTH of
// them ahead. Sums of pieces are added at the end. More requests than a multiprocessor can track
// would block its accesses to shared memory too.
//
// Compiled with: DOWN, NORM, CHOSEN (experts of a row, at most 32), EXPERTS (at most 65,535),
// NORMALIZE (1: shares add up to 1), ROWS (1 to 4), WIDTH (columns of weights, a multiple of 256),
// OUTPUTS (of a row and expert, a multiple of 8), WARPS, DEPTH, and the macros of pieces.cuh.

#include "common/overlap.cuh"
#include "common/pieces.cuh"
#include "experts/logits.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int KEYS = (EXPERTS + 31) / 32 * 32;  // of a row
constexpr int TILE = DOWN ? 8 : 4;              // outputs
constexpr int TILES = OUTPUTS / TILE;           // of an expert's matrix
constexpr int ALL = (DOWN ? ROWS : ROWS * CHOSEN) * TILES;
constexpr int PARTS = WIDTH / PIECE;            // pieces of a row of weights
constexpr int PIECES = (DOWN ? CHOSEN : 1) * PARTS;  // of a tile, and of a row of x
constexpr int RECORD = 16 + 1;                  // floats between sums of pieces: no bank conflicts
constexpr int X_BLOCKS = ROWS * PIECES * 2;     // of x
constexpr int X_EACH = (X_BLOCKS + WARPS - 1) / WARPS;  // blocks that a warp prepares
static_assert(WIDTH % PIECE == 0 && OUTPUTS % TILE == 0 && CHOSEN <= 32, "whole pieces and tiles");

struct Params {
  const ELEMENT* x;         // (ROWS, WIDTH), or with DOWN (ROWS, CHOSEN, WIDTH)
  const ELEMENT* norm;      // (WIDTH), with NORM and without DOWN
  const ELEMENT* logits;    // (ROWS, EXPERTS)
  const WEIGHT* weights;    // without DOWN (EXPERTS, 2, OUTPUTS, WIDTH), the gate's outputs first,
                            // else (EXPERTS, OUTPUTS, WIDTH)
  const SCALE* scales;      // FP8: (EXPERTS, outputs >> shift, WIDTH / 128), rounded up;
                            // INT4: (EXPERTS, outputs, WIDTH >> shift), at least one
  const uint8_t* zeros;     // INT4: like the scales
  const ELEMENT* residual;  // (ROWS, OUTPUTS), with DOWN
  ELEMENT* output;          // (ROWS, CHOSEN, OUTPUTS), or with DOWN (ROWS, OUTPUTS)
  int shift;                // FP8: log2 of the rows of a scale, of which OUTPUTS is a multiple;
                            // INT4: log2 of the columns of a group; 31: as wide as the matrix
  float epsilon;
};

// Load the keys of all rows; called by all threads.
__device__ __forceinline__ void load_keys(const ELEMENT* logits, uint32_t (&keys)[ROWS][KEYS]) {
  const unsigned short* bits = reinterpret_cast<const unsigned short*>(logits);
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * KEYS; i += THREADS) {
    const int row = i / KEYS, expert = i % KEYS;
    // L1 is bypassed: this may run before the preceding kernel has ended.
    keys[row][expert] =
        expert < EXPERTS ? key_of(__ldcg(bits + row * EXPERTS + expert), expert) : 0;
  }
}

// Find the experts of all rows by their keys, largest logit first; called by all threads.
__device__ __forceinline__ void choose(const uint32_t (&keys)[ROWS][KEYS],
                                       int (&chosen)[ROWS * CHOSEN]) {
  constexpr int LANES = 4;  // that share an expert; KEYS makes whole warps
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * KEYS * LANES; i += THREADS) {
    const int row = i / LANES / KEYS, expert = i / LANES % KEYS;
    const uint4* others = reinterpret_cast<const uint4*>(keys[row]) + i % LANES;
    const uint32_t mine = keys[row][expert];
    int above[4] = {};
#pragma unroll 8
    for (int j = 0; j < KEYS / 4; j += LANES) {
      const uint4 four = others[j];
      above[0] += four.x > mine, above[1] += four.y > mine;
      above[2] += four.z > mine, above[3] += four.w > mine;
    }
    int rank = above[0] + above[1] + above[2] + above[3];
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) rank += __shfl_xor_sync(~0u, rank, step);
    if (mine != 0 && rank < CHOSEN) chosen[row * CHOSEN + rank] = expert;
  }
}

// Compute the shares of a row's chosen experts; called by one warp.
__device__ __forceinline__ void share(const uint32_t (&keys)[KEYS], const int* chosen,
                                      float* shares, int lane) {
  const float largest = logit_of(keys[chosen[0]]);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < EXPERTS; i += 32)
    if (i + lane < EXPERTS) sum += expf(logit_of(keys[i + lane]) - largest);
  sum = warp_sum(sum);
  const float mine = lane < CHOSEN ? expf(logit_of(keys[chosen[lane]]) - largest) / sum : 0.0f;
  const float all = warp_sum(mine);
  if (lane < CHOSEN) shares[lane] = rounded(NORMALIZE ? mine / all : mine);
}

// Request a tile's piece.
__device__ __forceinline__ void request(Piece& target, const Params& params, const int* chosen,
                                        int tile, int piece, uint64_t policy, int lane) {
  const int expert = chosen[DOWN ? tile / TILES * CHOSEN + piece / PARTS : tile / TILES];
  const int output = tile % TILES * TILE + lane / 8;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t row =
        DOWN ? expert * OUTPUTS + output + half * 4 : (2 * expert + half) * OUTPUTS + output;
    RowOfWeights of_row{params.weights + row * (weight_bytes(WIDTH) / sizeof(WEIGHT))};
#if WEIGHT_BITS == 8
    of_row.scales = params.scales + (row >> params.shift) * (WIDTH / SCALE_COLUMNS);
#elif WEIGHT_BITS == 4
    const int64_t first = row * max(WIDTH >> params.shift, 1);
    of_row.scales = params.scales + first, of_row.zeros = params.zeros + first;
#endif
    target.request(half, of_row, params.shift, piece % PARTS, policy, lane);
  }
}

// Add the sums of halves of a row's pieces.
__device__ __forceinline__ float of_halves(const float* sums) { return sums[0] + sums[1]; }

// Write outputs of tiles without DOWN, given the sums of pieces; eight lanes share an output.
__device__ __forceinline__ void finish_between(const Params& params, const float* sums, int first,
                                               int count) {
  constexpr int LANES = 8;
  // Tiles make whole warps.
  for (int i = threadIdx.x / LANES; i < count * TILE; i += THREADS / LANES) {
    const float* of_tile = sums + i / TILE * PIECES * RECORD + i % TILE * 2;
    float gate = 0.0f, up = 0.0f;
#pragma unroll
    for (int piece = 0; piece < PIECES; piece += LANES) {
      const int at = piece + threadIdx.x % LANES;
      if (at >= PIECES) continue;
      gate += of_halves(of_tile + at * RECORD);
      up += of_halves(of_tile + at * RECORD + 8);
    }
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
      gate += __shfl_xor_sync(~0u, gate, step);
      up += __shfl_xor_sync(~0u, up, step);
    }
    if (threadIdx.x % LANES == 0) params.output[first * TILE + i] = ELEMENT(gated(gate, up));
  }
}

// Write outputs of tiles with DOWN; a warp has an output, and a lane an expert.
__device__ __forceinline__ void finish(const Params& params, const float* sums,
                                       const float* shares, int first, int count) {
  const int lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = threadIdx.x / 32; i < count * TILE; i += WARPS) {
    const int output = first * TILE + i, row = output / OUTPUTS;
    const float residual = static_cast<float>(params.residual[output]);
    float y = 0.0f;
    if (lane < CHOSEN) {
      const float* of_expert = sums + (i / TILE * PIECES + lane * PARTS) * RECORD + i % TILE * 2;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) y += of_halves(of_expert + part * RECORD);
      y = rounded(rounded(y) * shares[row * CHOSEN + lane]);
    }
    y = warp_sum(y);
    if (lane == 0) params.output[output] = ELEMENT(rounded(y) + residual);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 16 / WARPS)
    experts(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ float shares[ROWS * CHOSEN], squares[DOWN || !NORM ? 1 : X_BLOCKS];
  __shared__ int chosen[ROWS * CHOSEN];
  __shared__ alignas(16) uint32_t keys[ROWS][KEYS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Blocks blocks{reinterpret_cast<uint2*>(memory),
                      reinterpret_cast<BlockOfX*>(memory + X_BLOCKS * BLOCK * 2)};
  float* const sums = reinterpret_cast<float*>(blocks.others + X_BLOCKS);

  const int first = blockIdx.x * ALL / gridDim.x;
  const int tiles = (blockIdx.x + 1) * ALL / gridDim.x - first, count = tiles * PIECES;

  if (!DOWN) {
    uint2 x[X_EACH], by[X_EACH];
#pragma unroll
    for (int i = 0; i < X_EACH; ++i) {
      const int block = i * WARPS + warp;
      if (NORM && block < X_BLOCKS) by[i] = four_of(params.norm, block % (PARTS * 2), lane);
    }
    wait_for_previous();
    let_next_begin();
#pragma unroll
    for (int i = 0; i < X_EACH; ++i) {
      const int block = i * WARPS + warp;
      if (block < X_BLOCKS) x[i] = four_of(params.x, block, lane);
    }
    load_keys(params.logits, keys);
#pragma unroll
    for (int i = 0; i < X_EACH; ++i) {
      const int block = i * WARPS + warp;
      if (!NORM || block >= X_BLOCKS) continue;
      const float sum = warp_sum(squared(x[i].x) + squared(x[i].y));
      if (lane == 0) squares[block] = sum;
    }
    __syncthreads();
    choose(keys, chosen);
#pragma unroll
    for (int i = 0; i < X_EACH; ++i) {
      const int block = i * WARPS + warp;
      if (block >= X_BLOCKS) continue;
      if (!NORM) {
        blocks.store(block, x[i], lane);
        continue;
      }
      const float* of_row = squares + block / (PARTS * 2) * PARTS * 2;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < PARTS * 2; j += 32)
        if (j + lane < PARTS * 2) sum += of_row[j + lane];
      const float scale = rsqrtf(warp_sum(sum) / WIDTH + params.epsilon);
      blocks.store(block, {normed(x[i].x, by[i].x, scale), normed(x[i].y, by[i].y, scale)}, lane);
    }
  } else {
    let_next_begin();
    load_keys(params.logits, keys);
    __syncthreads();
    choose(keys, chosen);
  }
  __syncthreads();

  const uint64_t policy = read_once();
  Piece ahead[DEPTH];
  const auto request_at = [&](Piece& target, int i) {
    if (i < count)
      request(target, params, chosen, first + i / PIECES, i % PIECES, policy, lane);
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) request_at(ahead[i], i * WARPS + warp);

  if (DOWN) {
    const int row = WARPS - 1 - warp;
    if (row < ROWS) share(keys[row], chosen + row * CHOSEN, shares + row * CHOSEN, lane);
    wait_for_previous();
    constexpr int AT_ONCE = 3;
#pragma unroll 1
    for (int start = warp; start < X_BLOCKS; start += AT_ONCE * WARPS) {
      uint2 four[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int block = start + i * WARPS;
        if (block < X_BLOCKS) four[i] = four_of(params.x, block, lane);
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int block = start + i * WARPS;
        if (block < X_BLOCKS) blocks.store(block, four[i], lane);
      }
    }
    __syncthreads();
  }

#pragma unroll 1
  for (int start = warp; start < count; start += DEPTH * WARPS)
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      const int at = start + i * WARPS;
      if (at >= count) break;
      const int row = (first + at / PIECES) / (DOWN ? TILES : TILES * CHOSEN);
      const float2 products = ahead[i].times(blocks, row * PIECES + at % PIECES, lane);
      if (lane % 4 == 0) {
        sums[at * RECORD + lane / 4] = products.x;
        sums[at * RECORD + lane / 4 + 8] = products.y;
      }
      request_at(ahead[i], at + DEPTH * WARPS);
    }
  __syncthreads();
  if (DOWN)
    finish(params, sums, shares, first, tiles);
  else
    finish_between(params, sums, first, tiles);
}
