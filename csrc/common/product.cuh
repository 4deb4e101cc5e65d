// Products of rows of weights, which arrive in pieces in shared memory, with a few rows of x.
//
// Compiled with: ROWS (of x), ELEMENT (__half, __nv_bfloat16), WARPS (of a thread block), DEPTH
// (pieces of a warp in flight, at most 32), PIECE (elements, a multiple of 256, or of 512 with FP8),
// CENTERED (1: the norm's weight is added to 1), USE_TMA (copy.cuh), WEIGHT_BITS (weights.cuh; 16
// or 8); SIDES: rows of weights per output.
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
      both[0] = weighted(two.x * scale, by.x, CENTERED);
      both[1] = weighted(two.y * scale, by.y, CENTERED);
    }
  }
  __syncthreads();
}

#if WEIGHT_BITS != 16
// Scales of the elements of a piece that a lane multiplies at a time; the piece begins at element
// `start` of a row of weights. They are requested before the piece has arrived.
struct PieceScales {
  float scales[PIECE / AT_ONCE];

  __device__ __forceinline__ PieceScales(const float* row, int start, int width, int lane) {
#pragma unroll
    for (int i = 0; i < PIECE / AT_ONCE; ++i) {
      const int at = start + i * AT_ONCE + lane * EACH;
      scales[i] = at < width ? __ldg(row + at / SCALE_COLUMNS) : 0.0f;
    }
  }

  __device__ __forceinline__ float operator[](int i) const { return scales[i]; }
};

// Add products of a piece's elements from `at` on, 16 per lane, with COUNT rows that are `width`
// apart.
template <int COUNT>
__device__ __forceinline__ void multiply(float (&sums)[COUNT], const uint8_t* piece,
                                         const ELEMENT* x, int width, int at, int lane,
                                         float scale) {
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
    sums[row] = fmaf(scale, sum, sums[row]);
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
#else
// 16-bit weights have no scales.
struct PieceScales {
  __device__ __forceinline__ PieceScales(const SCALE*, int, int, int) {}
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
