// experts: mixture of experts for a few rows, each with the experts that it chooses. Two launches:
//
//   DOWN 0: out[row][k] = silu(x Wg^T) * (x Wu^T) with the k-th chosen expert, x normalized
//   DOWN 1: out[row] = residual[row] + sum over k of share[row][k] * (x[row][k] Wd^T)
//
// A row's shares are the CHOSEN largest values of the softmax of its router's logits. Every thread
// block computes them itself. The first launch cannot request weights before the router has ended,
// and releases the second launch only then, so that the second can request weights at once.
//
// A thread block computes a run of tiles. A tile has 16 rows of weights: those of 16 outputs, or
// without DOWN, eight of the gate and eight others of the same outputs. Warps take pieces of tiles
// in turn: 16 rows of 128 columns, with DOWN of all chosen experts, one after the other. Weights go
// from memory to registers, DEPTH pieces of a warp ahead, and from there to matrix units, as the
// 16-row operand; the eight columns of the other operand are all the same row of x. Sums of pieces
// are added at the end. So there are few instructions per weight, and all loads of a small launch
// are in flight at once.
//
// Compiled with: DOWN, CHOSEN (experts of a row, at most 32), EXPERTS (at most 65,535), NORMALIZE
// (1: shares add up to 1), ROWS (1 to 4), WIDTH (columns of weights, a multiple of 128), OUTPUTS (of
// a row and expert, a multiple of 16), DEPTH, and the macros of weights.cuh; GROUP_COLUMNS (INT4:
// columns of a group: 32, 64, or 128 for larger groups too).

#include "common/factors.cuh"
#include "common/overlap.cuh"
#include "experts/logits.cuh"

constexpr int WARPS = 16, THREADS = WARPS * 32;
constexpr int KEYS = (EXPERTS + 15) / 16 * 16;  // of a row
constexpr int PIECE = 128;                      // columns
constexpr int TILE = DOWN ? 16 : 8;             // outputs
constexpr int TILES = OUTPUTS / TILE;           // of an expert's matrix
constexpr int ALL = (DOWN ? ROWS : ROWS * CHOSEN) * TILES;
constexpr int PARTS = WIDTH / PIECE;            // pieces of a row of weights
constexpr int PIECES = (DOWN ? CHOSEN : 1) * PARTS;  // of a tile, and of a row of x
constexpr int RECORD = 16 + 1;                  // floats between sums of pieces: no bank conflicts
constexpr int GROUPS = WEIGHT_BITS == 4 ? PIECE / GROUP_COLUMNS : 1;  // of a row in a piece
// A lane loads LOADS times WORDS words of a row in a piece, each time of one group.
constexpr int WORDS = 4 / GROUPS, LOADS = WEIGHT_BITS / WORDS;
constexpr int EACH = WORDS * 32 / WEIGHT_BITS;  // elements of a load
constexpr int CHUNKS = EACH / 8;                // 16 bytes of x for a load
constexpr int X_EACH = (ROWS * PIECES + WARPS - 1) / WARPS;  // pieces of x that a warp prepares
static_assert(WIDTH % PIECE == 0 && OUTPUTS % TILE == 0 && CHOSEN <= 32, "whole pieces and tiles");

struct Params {
  const ELEMENT* x;         // (ROWS, WIDTH), or with DOWN (ROWS, CHOSEN, WIDTH)
  const ELEMENT* norm;      // (WIDTH), not with DOWN
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

// Find the experts of all rows, largest logit first; called by all threads.
__device__ __forceinline__ void choose(const ELEMENT* logits, uint32_t (&keys)[ROWS][KEYS],
                                       int (&chosen)[ROWS * CHOSEN]) {
  constexpr int LANES = 4;  // that share an expert
  const unsigned short* bits = reinterpret_cast<const unsigned short*>(logits);
#pragma unroll 1
  for (int i = threadIdx.x; i < ROWS * KEYS; i += THREADS) {
    const int row = i / KEYS, expert = i % KEYS;
    // L1 is bypassed: this may run before the preceding kernel has ended.
    keys[row][expert] =
        expert < EXPERTS ? key_of(__ldcg(bits + row * EXPERTS + expert), expert) : 0;
  }
  __syncthreads();
  // These are whole warps.
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
  __syncthreads();
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

// Load words of weights, which are read once per step: they are evicted from L2 first.
template <int COUNT>
__device__ __forceinline__ void load_words(uint32_t (&words)[COUNT], const uint8_t* from,
                                           uint64_t policy) {
  if constexpr (COUNT == 4)
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from), "l"(policy));
  // Other lanes' loads, or this lane's next one, are from the same 32 bytes.
  else if constexpr (COUNT == 2)
    asm volatile("ld.global.nc.L2::cache_hint.v2.b32 {%0, %1}, [%2], %3;"
                 : "=r"(words[0]), "=r"(words[1])
                 : "l"(from), "l"(policy));
  else
    asm volatile("ld.global.nc.L2::cache_hint.b32 %0, [%1], %2;"
                 : "=r"(words[0])
                 : "l"(from), "l"(policy));
}

// What products with a piece of x need besides its factors.
struct PieceOfX {
  float undo;            // number by which products must be multiplied
  float totals[GROUPS];  // INT4: sums of a group's factors
};

// Pieces of x in shared memory. Lane 4 group + quad multiplies, in its load i, elements EACH (4 i +
// quad) and following. Their 16 bytes are next to those of the other three.
struct Pieces {
  uint2* factors;  // of four elements; elements are not converted for weights of 16 bits
  PieceOfX* others;

  // Store a piece, of which each lane has four elements.
  __device__ __forceinline__ void store(int piece, uint2 four, int lane) const {
    const int chunk = lane / 2;  // of eight elements
    const int place = (chunk / (4 * CHUNKS) * CHUNKS + chunk % CHUNKS) * 4 + chunk / CHUNKS % 4;
#if WEIGHT_BITS != 16
    const Conversion conversion = Conversion::of<32>(Conversion::larger(four.x, four.y));
    four = {conversion.factors(four.x, false), conversion.factors(four.y, true)};
    if (lane == 0) others[piece].undo = conversion.undo();
#endif
#if WEIGHT_BITS == 4
    constexpr int LANES = 32 / GROUPS;
    const float2 even = unpacked(four.x, __half()), odd = unpacked(four.y, __half());
    float total = even.x + even.y + 16.0f * (odd.x + odd.y);
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) total += __shfl_xor_sync(~0u, total, step);
    if (lane % LANES == 0) others[piece].totals[lane / LANES] = total;
#endif
    factors[piece * 32 + place * 2 + lane % 2] = four;
  }

  // Load the elements of a chunk of a lane's load.
  __device__ __forceinline__ uint4 load(int piece, int chunk, int lane) const {
    return reinterpret_cast<const uint4*>(factors)[piece * 16 + chunk * 4 + lane % 4];
  }
};

#if WEIGHT_BITS == 16
using FACTOR = ELEMENT;
#else
using FACTOR = __half;
#endif

// This lane's part of a piece of weights: parts of rows lane / 4 and lane / 4 + 8.
struct Piece {
  uint32_t words[2][LOADS][WORDS];
#if WEIGHT_BITS != 16
  SCALE scales[2][GROUPS];
#endif
#if WEIGHT_BITS == 4
  uint8_t zeros[2][GROUPS];
#endif

  // Request a tile's piece.
  __device__ __forceinline__ void request(const Params& params, const int* chosen, int tile,
                                          int piece, uint64_t policy, int lane) {
    const int expert = chosen[DOWN ? tile / TILES * CHOSEN + piece / PARTS : tile / TILES];
    const int output = tile % TILES * TILE + lane / 4, part = piece % PARTS;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = DOWN ? expert * OUTPUTS + output + half * 8
                           : (2 * expert + half) * OUTPUTS + output;
      const uint8_t* from = reinterpret_cast<const uint8_t*>(params.weights) +
                            static_cast<int64_t>(row) * weight_bytes(WIDTH) +
                            part * weight_bytes(PIECE) + lane % 4 * WORDS * 4;
#pragma unroll
      for (int i = 0; i < LOADS; ++i) load_words(words[half][i], from + i * WORDS * 16, policy);
#if WEIGHT_BITS == 8
      scales[half][0] = __ldg(params.scales + (row >> params.shift) * PARTS + part);
#elif WEIGHT_BITS == 4
      const int64_t first = static_cast<int64_t>(row) * max(WIDTH >> params.shift, 1);
#pragma unroll
      for (int i = 0; i < GROUPS; ++i) {
        const int64_t group = first + ((part * PIECE + i * GROUP_COLUMNS) >> params.shift);
        scales[half][i] = __ldg(params.scales + group);
        zeros[half][i] = __ldg(params.zeros + group);
      }
#endif
    }
  }

  // Factors of a load of a row, in pairs.
  __device__ __forceinline__ void factors(uint32_t (&pairs)[EACH / 2], int half, int load) const {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const uint32_t word = words[half][load][i];
#if WEIGHT_BITS == 16
      pairs[i] = word;
#elif WEIGHT_BITS == 8
      const uint2 two = halves_of(word);
      pairs[2 * i] = two.x, pairs[2 * i + 1] = two.y;
#else
      const uint4 four = halves_of_word(word);
      pairs[4 * i] = four.x, pairs[4 * i + 1] = four.y;
      pairs[4 * i + 2] = four.z, pairs[4 * i + 3] = four.w;
#endif
    }
  }

  // Return the products of the two rows with a piece of x.
  __device__ __forceinline__ float2 times(const Pieces& pieces, int piece, int lane) const {
    float found[2] = {};
#pragma unroll
    for (int group = 0; group < GROUPS; ++group) {
      float sums[2][4] = {};  // of even and odd products, which do not wait for each other
#pragma unroll
      for (int i = group * (LOADS / GROUPS); i < (group + 1) * (LOADS / GROUPS); ++i) {
        uint32_t a[EACH / 2], b[EACH / 2];
        factors(a, 0, i), factors(b, 1, i);
#pragma unroll
        for (int j = 0; j < CHUNKS; ++j) {
          const uint4 x = pieces.load(piece, i * CHUNKS + j, lane);
          const int at = j * 4;
          mma(sums[0], a[at], b[at], a[at + 1], b[at + 1], x.x, x.y, FACTOR());
          mma(sums[1], a[at + 2], b[at + 2], a[at + 3], b[at + 3], x.z, x.w, FACTOR());
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = sums[0][half * 2] + sums[1][half * 2];
#if WEIGHT_BITS == 4
        const float zero = static_cast<float>(zeros[half][group]);
        sum = fmaf(sum, 0x1p24f, -zero * pieces.others[piece].totals[group]);
#endif
#if WEIGHT_BITS == 16
        found[half] = sum;
#else
        found[half] = fmaf(static_cast<float>(scales[half][group]), sum, found[half]);
#endif
      }
    }
#if WEIGHT_BITS == 16
    const float undo = 1.0f;
#else
    const float undo = pieces.others[piece].undo;
#endif
    return {found[0] * undo, found[1] * undo};
  }
};

// Load four elements per lane of a piece of x.
__device__ __forceinline__ uint2 four_of(const ELEMENT* x, int piece, int lane) {
  return __ldcg(reinterpret_cast<const uint2*>(x) + piece * 32 + lane);
}

// Write outputs of a tile without DOWN, given the sums of its pieces; eight lanes share an output.
__device__ __forceinline__ void finish_between(const Params& params, const float* sums, int first,
                                               int count) {
  for (int i = threadIdx.x / 8; i < count * TILE; i += THREADS / 8) {
    const float* of_tile = sums + i / TILE * PIECES * RECORD + i % TILE;
    float gate = 0.0f, up = 0.0f;
    for (int piece = threadIdx.x % 8; piece < PIECES; piece += 8) {
      gate += of_tile[piece * RECORD];
      up += of_tile[piece * RECORD + 8];
    }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
      gate += __shfl_xor_sync(~0u, gate, step);
      up += __shfl_xor_sync(~0u, up, step);
    }
    if (threadIdx.x % 8 == 0) params.output[first * TILE + i] = ELEMENT(gated(gate, up));
  }
}

// Write outputs of tiles with DOWN; a warp has an output of each tile, and a lane an expert.
__device__ __forceinline__ void finish(const Params& params, const float* sums,
                                       const float* shares, int first, int count) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = 0; i < count; ++i) {
    const int row = (first + i) / TILES, output = (first + i) * TILE + warp;
    const float residual = static_cast<float>(params.residual[output]);
    float y = 0.0f;
    if (lane < CHOSEN) {
      const float* of_expert = sums + (i * PIECES + lane * PARTS) * RECORD + warp;
#pragma unroll
      for (int part = 0; part < PARTS; ++part) y += of_expert[part * RECORD];
      y = rounded(rounded(y) * shares[row * CHOSEN + lane]);
    }
    y = warp_sum(y);
    if (lane == 0) params.output[output] = ELEMENT(rounded(y) + residual);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    experts(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ float shares[ROWS * CHOSEN], squares[DOWN ? 1 : ROWS * PIECES];
  __shared__ int chosen[ROWS * CHOSEN];
  __shared__ alignas(16) uint32_t keys[ROWS][KEYS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Pieces pieces{reinterpret_cast<uint2*>(memory),
                      reinterpret_cast<PieceOfX*>(memory + ROWS * PIECES * PIECE * 2)};
  float* const sums = reinterpret_cast<float*>(pieces.others + ROWS * PIECES);

  const int first = blockIdx.x * ALL / gridDim.x;
  const int tiles = (blockIdx.x + 1) * ALL / gridDim.x - first, count = tiles * PIECES;

  uint2 x[DOWN ? 1 : X_EACH], by[DOWN ? 1 : X_EACH];
  if (!DOWN) {
#pragma unroll
    for (int i = 0; i < X_EACH; ++i) {
      const int piece = i * WARPS + warp;
      if (piece < ROWS * PIECES) by[i] = four_of(params.norm, piece % PARTS, lane);
    }
    wait_for_previous();
#pragma unroll
    for (int i = 0; i < X_EACH; ++i) {
      const int piece = i * WARPS + warp;
      if (piece < ROWS * PIECES) x[i] = four_of(params.x, piece, lane);
    }
  }
  let_next_begin();
  choose(params.logits, keys, chosen);

  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  Piece ahead[DEPTH];
  const auto request = [&](Piece& target, int i) {
    if (i < count)
      target.request(params, chosen, first + i / PIECES, i % PIECES, policy, lane);
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) request(ahead[i], i * WARPS + warp);

  if (DOWN) {
    const int row = WARPS - 1 - warp;
    if (row < ROWS) share(keys[row], chosen + row * CHOSEN, shares + row * CHOSEN, lane);
    wait_for_previous();
    constexpr int AT_ONCE = 3;
#pragma unroll 1
    for (int start = warp; start < ROWS * PIECES; start += AT_ONCE * WARPS) {
      uint2 four[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int piece = start + i * WARPS;
        if (piece < ROWS * PIECES) four[i] = four_of(params.x, piece, lane);
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; ++i) {
        const int piece = start + i * WARPS;
        if (piece < ROWS * PIECES) pieces.store(piece, four[i], lane);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < X_EACH; ++i) {
      const int piece = i * WARPS + warp;
      if (piece >= ROWS * PIECES) continue;
      const float sum = warp_sum(squared(x[i].x) + squared(x[i].y));
      if (lane == 0) squares[piece] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < X_EACH; ++i) {
      const int piece = i * WARPS + warp;
      if (piece >= ROWS * PIECES) continue;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < PARTS; j += 32)
        if (j + lane < PARTS) sum += squares[piece / PARTS * PARTS + j + lane];
      const float scale = rsqrtf(warp_sum(sum) / WIDTH + params.epsilon);
      pieces.store(piece, {normed(x[i].x, by[i].x, scale), normed(x[i].y, by[i].y, scale)}, lane);
    }
  }
  __syncthreads();

#pragma unroll 1
  for (int start = warp; start < count; start += DEPTH * WARPS)
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      const int at = start + i * WARPS;
      if (at >= count) break;
      const int row = (first + at / PIECES) / (DOWN ? TILES : TILES * CHOSEN);
      const float2 two = ahead[i].times(pieces, row * PIECES + at % PIECES, lane);
      if (lane % 4 == 0) {
        sums[at * RECORD + lane / 4] = two.x;
        sums[at * RECORD + lane / 4 + 8] = two.y;
      }
      request(ahead[i], at + DEPTH * WARPS);
    }
  __syncthreads();
  if (DOWN)
    finish(params, sums, shares, first, tiles);
  else
    finish_between(params, sums, first, tiles);
}
