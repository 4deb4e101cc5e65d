// Products of rows of weights, which arrive in pieces in shared memory, with a few rows of x.
//
// Compiled with: ROWS (of x), ELEMENT (__half, __nv_bfloat16), WARPS (of a thread block), DEPTH
// (pieces of a warp in flight, at most 32), PIECE (elements, a multiple of 256, of 512 with FP8, or
// of 1024 with INT4), USE_TMA (copy.cuh), WEIGHT_BITS and FLOAT_SCALES (weights.cuh); SIDES: rows
// of weights per output.
#pragma once

#include "common/copy.cuh"
#include "common/weights.cuh"

constexpr int THREADS = WARPS * 32;
constexpr int EACH = 128 / WEIGHT_BITS;  // elements that a lane multiplies at a time: 16 bytes
constexpr int AT_ONCE = 32 * EACH;
constexpr int PIECE_BYTES = weight_bytes(PIECE);
static_assert(PIECE % AT_ONCE == 0 && DEPTH <= 32, "a lane initializes a barrier");

// Iteration of a warp over its pieces.
template <int SIDES>
struct Cursor {
  int output, side = 0, start = 0;

  __device__ __forceinline__ explicit Cursor(int first) : output(first) {}

  __device__ __forceinline__ void next(int width) {
    start += PIECE;
    if (start < width) return;
    start = 0;
    if (++side < SIDES) return;
    side = 0;
    ++output;
  }
};

// Request the piece of a row of weights that begins at `start`; called by all lanes of a warp.
__device__ __forceinline__ void request_piece(const WEIGHT* row, int start, int width,
                                              uint8_t* target, uint64_t* barrier, int lane) {
  const uint32_t bytes = weight_bytes(min(PIECE, width - start));
  const uint8_t* from = reinterpret_cast<const uint8_t*>(row) + weight_bytes(start);
  copy_begin(barrier, bytes, lane);
  copy_piece<true>(target, from, bytes, barrier, lane);
  copy_end(barrier);
}

// Request a thread block's rows of x; called by all lanes of a warp. They arrive after the pieces
// that were requested before.
__device__ __forceinline__ void request_rows(const ELEMENT* from, int elements, ELEMENT* x,
                                             uint64_t* barrier, int lane) {
  copy_begin(barrier, elements * 2, lane);
  copy_piece(x, reinterpret_cast<const uint8_t*>(from), elements * 2, barrier, lane);
  copy_end(barrier);
}

// Wait for the rows and, with `norm`, which has arrived already, normalize them. Called by all
// threads.
__device__ __forceinline__ void take_rows(int width, bool normed, float epsilon, ELEMENT* x,
                                          const ELEMENT* norm, uint64_t* barrier,
                                          float (&sums)[WARPS][ROWS]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  barrier_wait(barrier, 0);
  if (!normed) return;
  float squares[ROWS] = {};
#pragma unroll
  for (int row = 0; row < ROWS; ++row)
    for (int i = threadIdx.x; i < width / 8; i += THREADS) {
      const uint4 eight = load16(x + row * width + i * 8);
      const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 two = unpacked(words[j], ELEMENT());
        squares[row] = fmaf(two.x, two.x, fmaf(two.y, two.y, squares[row]));
      }
    }
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const float sum = warp_sum(squares[row]);
    if (lane == 0) sums[warp][row] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    float sum = 0.0f;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) sum += sums[other][row];
    const float scale = rsqrtf(sum / width + epsilon);
    // These are not the elements of this thread above; the barrier separates the two.
    for (int i = threadIdx.x; i < width / 2; i += THREADS) {
      uint32_t* word = reinterpret_cast<uint32_t*>(x + row * width) + i;
      const float2 two = unpacked(*word, ELEMENT());
      const float2 by = unpacked(reinterpret_cast<const uint32_t*>(norm)[i], ELEMENT());
      ELEMENT* both = reinterpret_cast<ELEMENT*>(word);
      both[0] = ELEMENT(rounded(two.x * scale) * by.x);
      both[1] = ELEMENT(rounded(two.y * scale) * by.y);
    }
  }
  __syncthreads();
}

// Scales of a row of weights.
struct RowScales {
  const SCALE* scales;
  const uint8_t* zeros;  // INT4: zero points
  int group_shift;       // INT4: log2 of the columns of a scale
};

#if WEIGHT_BITS != 16
// Scale and zero point of the elements that a lane multiplies at a time.
struct LaneScale {
  float scale;
  uint32_t zero;
};

// Scales of a piece, which begins at element `start` of a row of weights. They are requested before
// the piece has arrived.
struct PieceScales {
  LaneScale scales[PIECE / AT_ONCE];

  __device__ __forceinline__ PieceScales() : scales() {}

  // Prefetch the scales into the L2 cache. FP8 needs no prefetch: many rows share a scale.
  __device__ __forceinline__ static void prefetch(const RowScales& row, int start, int width,
                                                  int lane) {
#if WEIGHT_BITS == 4
#pragma unroll
    for (int i = 0; i < PIECE / AT_ONCE; ++i) {
      const int at = start + i * AT_ONCE + lane * EACH;
      if (at >= width) continue;
      const int group = at >> row.group_shift;
      asm volatile("prefetch.global.L2 [%0];" ::"l"(row.scales + group));
      asm volatile("prefetch.global.L2 [%0];" ::"l"(row.zeros + group));
    }
#endif
  }

  __device__ __forceinline__ PieceScales(const RowScales& row, int start, int width, int lane) {
#pragma unroll
    for (int i = 0; i < PIECE / AT_ONCE; ++i) {
      const int at = start + i * AT_ONCE + lane * EACH;
      scales[i] = {};
      if (at >= width) continue;
#if WEIGHT_BITS == 4
      const int group = at >> row.group_shift;
      scales[i].zero = __ldg(row.zeros + group);
#else
      const int group = at / SCALE_COLUMNS;
#endif
      scales[i].scale = static_cast<float>(__ldg(row.scales + group));
    }
  }

  __device__ __forceinline__ const LaneScale& operator[](int i) const { return scales[i]; }
};

#if WEIGHT_BITS == 4
// INT4 codes are multiplied as integers, four in an instruction, by elements of x as integers of 16
// bits: the largest magnitude of a block becomes 2^15 - 1, which changes a block by less than
// rounding to ELEMENT does. Eight elements stay in their 16 bytes: high bytes of elements 0, 4, 1, 5
// and 2, 6, 3, 7, as their codes lie in a word, then the low bytes.
constexpr int BLOCK = EACH;

// Block of BLOCK elements of x.
struct Block {
  float undo;  // factor from its integers to its elements; not finite if an element is not
  int sum;     // sum of its integers
};

// Make integers of elements of x, in place; called by all threads.
__device__ __forceinline__ void make_integers(ELEMENT* x, int elements, Block* blocks) {
  constexpr int LANES = BLOCK / 8;
  for (int i = threadIdx.x; i < elements / 8; i += THREADS) {
    const uint4 eight = load16(x + i * 8);
    const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
    uint32_t largest = 0;  // bits: NaN is above infinity, and infinity above all numbers
#pragma unroll
    for (int j = 0; j < 4; ++j)
      largest = max(largest, max(words[j] & 0x7fff, words[j] >> 16 & 0x7fff));
#pragma unroll
    for (int step = 1; step < LANES; step *= 2)
      largest = max(largest, __shfl_xor_sync(~0u, largest, step));
    const float most = unpacked(largest, ELEMENT()).x;
    const float by = most > 1e-33f ? 32767.0f / most : 0.0f;
    int sum = 0;
    uint32_t bytes[2][2] = {};  // high and low bytes, of even and odd pairs
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 two = unpacked(words[j], ELEMENT());
      const int low = __float2int_rn(two.x * by), high = __float2int_rn(two.y * by);
      const int shift = j / 2 * 8;
      sum += low + high;
      bytes[0][j % 2] |= (low >> 8 & 255) << shift | (high >> 8 & 255) << (16 + shift);
      bytes[1][j % 2] |= (low & 255) << shift | (high & 255) << (16 + shift);
    }
    *reinterpret_cast<uint4*>(x + i * 8) = {bytes[0][0], bytes[0][1], bytes[1][0], bytes[1][1]};
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (i % LANES == 0) blocks[i / LANES] = {most / 32767.0f, sum};
  }
  __syncthreads();
}

// Add products of a piece's elements from `at` on, 32 per lane, with x, which begins at the piece.
__device__ __forceinline__ void multiply(float& sum, const uint8_t* piece, const ELEMENT* x,
                                         const Block* blocks, int at, int lane,
                                         const LaneScale& scale) {
  int high = 0;
  uint32_t low = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // Lanes begin with different words: no bank conflicts.
    const int which = (i + lane / 2 + lane / 8) % 4;
    const uint32_t word =
        reinterpret_cast<const uint32_t*>(piece + weight_bytes(at + lane * EACH))[which];
    const uint4 bytes = load16(x + at + lane * EACH + which * 8);
    const uint32_t even = word & 0x0f0f0f0f, odd = word >> 4 & 0x0f0f0f0f;
    high = __dp4a(static_cast<int>(even), static_cast<int>(bytes.x), high);
    high = __dp4a(static_cast<int>(odd), static_cast<int>(bytes.y), high);
    low = __dp4a(even, bytes.z, low);
    low = __dp4a(odd, bytes.w, low);
  }
  const Block block = blocks[at / BLOCK + lane];
  const int zero = static_cast<int>(scale.zero);
  const int product = high * 256 + static_cast<int>(low) - zero * block.sum;
  sum = fmaf(scale.scale * block.undo, static_cast<float>(product), sum);
}

// Add products of a whole piece, which begins at element `start` of a row of length `width`.
__device__ __forceinline__ void multiply_piece(float (&sums)[1], const uint8_t* piece,
                                               const ELEMENT* x, const Block* blocks, int start,
                                               int width, int lane, const PieceScales& scales) {
#pragma unroll
  for (int i = 0; i < PIECE / AT_ONCE; ++i)
    if (start + i * AT_ONCE + lane * EACH < width)
      multiply(sums[0], piece, x + start, blocks + start / BLOCK, i * AT_ONCE, lane, scales[i]);
}
#else
// Add products of a piece's elements from `at` on, 16 per lane, with COUNT rows that are `width`
// apart.
template <int COUNT>
__device__ __forceinline__ void multiply(float (&sums)[COUNT], const uint8_t* piece,
                                         const ELEMENT* x, int width, int at, int lane,
                                         const LaneScale& scale) {
  const uint4 codes = load16(piece + at + lane * EACH);
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
  float2 weights[8];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint2 halves = halves_of(words[j]);
    weights[2 * j] = unpacked(halves.x, __half());
    weights[2 * j + 1] = unpacked(halves.y, __half());
  }
  // Of eight lanes, four read the second half of their elements first: no bank conflicts.
  const int second = lane / 4 % 2;
#pragma unroll
  for (int row = 0; row < COUNT; ++row) {
    const ELEMENT* from = x + row * width + at + lane * EACH;
    const uint4 a = load16(from + second * 8), b = load16(from + (1 - second) * 8);
    const uint4 low = second ? b : a, high = second ? a : b;
    const uint32_t others[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 two = unpacked(others[j], ELEMENT());
      sum = fmaf(weights[j].x, two.x, fmaf(weights[j].y, two.y, sum));
    }
    sums[row] = fmaf(scale.scale, sum, sums[row]);
  }
}

// Add products of a whole piece, which begins at element `start` of rows of length `width`.
template <int COUNT>
__device__ __forceinline__ void multiply_piece(float (&sums)[COUNT], const uint8_t* piece,
                                               const ELEMENT* x, int start, int width, int lane,
                                               const PieceScales& scales) {
#pragma unroll
  for (int i = 0; i < PIECE / AT_ONCE; ++i)
    if (start + i * AT_ONCE + lane * EACH < width)
      multiply(sums, piece, x + start, width, i * AT_ONCE, lane, scales[i]);
}
#endif
#else
// 16-bit weights have no scales.
struct PieceScales {
  PieceScales() = default;
  __device__ __forceinline__ PieceScales(const RowScales&, int, int, int) {}
  __device__ __forceinline__ static void prefetch(const RowScales&, int, int, int) {}
};

// Add products of a piece's elements from `at` on, 8 per lane, with COUNT rows that are `width`
// apart.
template <int COUNT>
__device__ __forceinline__ void multiply(float (&sums)[COUNT], const uint8_t* piece,
                                         const ELEMENT* x, int width, int at, int lane) {
  const uint4 eight = load16(piece + (at + lane * 8) * 2);
  const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int row = 0; row < COUNT; ++row) {
    const uint4 other = load16(x + row * width + at + lane * 8);
    const uint32_t others[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 a = unpacked(words[j], ELEMENT()), b = unpacked(others[j], ELEMENT());
      sums[row] = fmaf(a.x, b.x, sums[row]);
      sums[row] = fmaf(a.y, b.y, sums[row]);
    }
  }
}

// Add products of a whole piece, which begins at element `start` of rows of length `width`.
template <int COUNT>
__device__ __forceinline__ void multiply_piece(float (&sums)[COUNT], const uint8_t* piece,
                                               const ELEMENT* x, int start, int width, int lane,
                                               const PieceScales&) {
  if (start + PIECE <= width) {
#pragma unroll
    for (int i = 0; i < PIECE; i += AT_ONCE)
      multiply(sums, piece, x + start, width, i, lane);
  } else {
    for (int i = 0; start + i < width; i += AT_ONCE)
      multiply(sums, piece, x + start, width, i, lane);
  }
}
#endif
