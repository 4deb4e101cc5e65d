// x of linear_few with FP8 weights: each warp keeps its part in registers, as halves.
//
// Compiled with: ROWS (1 or 2), MOST_WARPS, the macros of boxes.cuh (WEIGHT_BITS 8).
#pragma once

#include "linear/boxes.cuh"

// This lane's elements of a piece of a row, of which eight lanes have one.
struct Elements {
  uint4 chunks[LOADS][CHUNKS];

  // FIXED: whether no kernel writes the elements, such as those of the norm's weight. For x, L1 is
  // bypassed: a preceding kernel may have written x while this one was running.
  template <bool FIXED = false>
  __device__ __forceinline__ void load(const ELEMENT* row, int piece, int lane) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) {
        const uint4* const from = reinterpret_cast<const uint4*>(
            row + piece * PIECE + (i * 8 + lane % 8) * EACH + j * 8);
        chunks[i][j] = FIXED ? __ldg(from) : __ldcg(from);
      }
  }

  __device__ __forceinline__ float square() const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) {
        const uint4& x = chunks[i][j];
        sum += squared(x.x) + squared(x.y) + squared(x.z) + squared(x.w);
      }
    return sum;
  }

  __device__ __forceinline__ void normalize(const Elements& by, float scale) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) {
        uint4& x = chunks[i][j];
        const uint4& y = by.chunks[i][j];
        x = {normed(x.x, y.x, scale), normed(x.y, y.y, scale), normed(x.z, y.z, scale),
             normed(x.w, y.w, scale)};
      }
  }
};

// A piece of x as factors, in the order of weights. Lanes divide the factors differently from the
// products: this lane has factors of row lane / 8 of x, but its products are with row lane % 4, in
// the left or right half of a line of weights (pieces.cuh).
struct Factors {
  uint4 chunks[LOADS][CHUNKS];
  float undo[LOADS];  // what this lane's products must be multiplied by

  __device__ __forceinline__ void convert(const Elements& x, int lane) {
    const int owner = lane % 4 * 8 + lane / 4 % 2 * 4;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      uint32_t largest = 0;
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) {
        const uint4& four = x.chunks[i][j];
        largest = Conversion::larger(largest, Conversion::larger(four.x, four.y));
        largest = Conversion::larger(largest, Conversion::larger(four.z, four.w));
      }
      const Conversion conversion = Conversion::of<4>(largest);
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) {
        const uint4& four = x.chunks[i][j];
        chunks[i][j] = {conversion.factors(four.x, false), conversion.factors(four.y, true),
                        conversion.factors(four.z, false), conversion.factors(four.w, true)};
      }
      undo[i] = __shfl_sync(~0u, conversion.undo(), owner);
    }
  }
};

using Operand = Factors[SPAN];

// Load the scale of a box's row.
__device__ __forceinline__ float load_scale(uint32_t from) {
  float scale;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(scale) : "r"(from));
  return scale;
}

// Add products of this lane's two rows of a tile with row lane % 4 of x.
__device__ __forceinline__ void multiply(float (&found)[2], uint32_t stage, int tile, int p,
                                         const Factors& x, int lane) {
  const bool right = lane / 4 % 2;
  const int first = tile * TILE + lane / 8;
  Piece piece;
#pragma unroll
  for (int which = 0; which < 2; ++which)
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      load_shared(piece.words[which][i], stage + (first + which * 4) * BOX_ROW +
                                             p * weight_bytes(PIECE) + i * WORDS * 32 +
                                             lane % 8 * WORDS * 4);
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    uint32_t a[EACH / 2], b[EACH / 2];
    piece.factors(a, 0, i), piece.factors(b, 1, i);
    float sums[4] = {};
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
      const uint4& k = x.chunks[i][j];
      const int at = j * 4;
      mma(sums, a[at], b[at], a[at + 1], b[at + 1], k.x, k.y, FACTOR());
      mma(sums, a[at + 2], b[at + 2], a[at + 3], b[at + 3], k.z, k.w, FACTOR());
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const int at = (first + which * 4) * SPAN_SCALES +
                     (p * PIECE + Piece::column(i, lane)) / COLUMNS_OF_SCALE;
      const float scale = load_scale(stage + SCALES_AT + at * sizeof(SCALE));
      const float sum = right ? sums[which * 2 + 1] : sums[which * 2];
      found[which] = fmaf(scale * x.undo[i], sum, found[which]);
    }
  }
}

// Bring a span of the norm's weight to L1; called by all lanes of a warp.
__device__ __forceinline__ void bring_to_l1(const ELEMENT* from, int lane) {
  if (lane * 64 >= SPAN * PIECE) return;
  uint32_t unused;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(unused) : "l"(from + lane * 64));
}

// The part of x that a warp multiplies.
class RowsOfX {
 public:
  // Bytes of shared memory.
  __device__ __forceinline__ static int bytes(int) { return 0; }

  // column: index of the warp among the `columns` that divide the width.
  __device__ __forceinline__ RowsOfX(const ELEMENT* x, const ELEMENT* norm, float epsilon,
                                     int width, int column, int columns, uint8_t*)
      : row_(x + min(threadIdx.x % 32 / 8, ROWS - 1) * width), norm_(norm), epsilon_(epsilon),
        width_(width), column_(column), columns_(columns) {}

  // Bring the norm's weight to L1. No kernel writes it, so the preceding one may still be running.
  __device__ __forceinline__ void request_norm() const {
    if (norm_ != nullptr) bring_to_l1(norm_ + column_ * SPAN * PIECE, threadIdx.x % 32);
  }

  __device__ __forceinline__ void request() { load_span(column_); }

  // Compute the scale of RMSNorm; called by all threads.
  __device__ __forceinline__ void prepare(float (&squares)[MOST_WARPS][ROWS]) {
    if (norm_ == nullptr) return;
    const int lane = threadIdx.x % 32, spans = width_ / (SPAN * PIECE);
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < SPAN; ++p) sum += x_[p].square();
#pragma unroll 1
    for (int span = column_ + columns_; span < spans; span += columns_)
#pragma unroll
      for (int p = 0; p < SPAN; ++p) {
        Elements others;
        others.load(row_, span * SPAN + p, lane);
        sum += others.square();
      }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane % 8 == 0 && lane / 8 < ROWS) squares[threadIdx.x / 32][lane / 8] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int other = 0; other < columns_; ++other)
      sum += squares[other][min(lane / 8, ROWS - 1)];
    scale_ = rsqrtf(sum / width_ + epsilon_);
  }

  // Load the next span of the warp.
  __device__ __forceinline__ void load_span(int span) {
#pragma unroll
    for (int p = 0; p < SPAN; ++p) x_[p].load(row_, span * SPAN + p, threadIdx.x % 32);
  }

  // Convert the span that was loaded last.
  __device__ __forceinline__ void get_operand(Operand& operand, int span) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int p = 0; p < SPAN; ++p) {
      if (norm_ != nullptr) {
        Elements by;
        by.load<true>(norm_, span * SPAN + p, lane);
        x_[p].normalize(by, scale_);
      }
      operand[p].convert(x_[p], lane);
    }
  }

 private:
  Elements x_[SPAN];
  const ELEMENT *row_, *norm_;
  float epsilon_, scale_ = 1.0f;
  int width_, column_, columns_;
};

// Products of a box.
struct Products {
  float found[TILES][2] = {};

  __device__ __forceinline__ Products(uint32_t stage, const Operand& x, int lane) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int p = 0; p < SPAN; ++p) multiply(found[tile], stage, tile, p, x[p], lane);
  }

  // Add the sums of both halves of the columns, and call use(row of the box, row of x, sum) in one
  // lane for each sum.
  template <typename Use>
  __device__ __forceinline__ void for_each(int lane, Use use) const {
    const bool right = lane / 4 % 2;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const float sum = (right ? found[tile][1] : found[tile][0]) +
                        __shfl_xor_sync(~0u, right ? found[tile][0] : found[tile][1], 4);
      if (lane % 4 < ROWS) use(tile * TILE + lane / 4 % 2 * 4 + lane / 8, lane % 4, sum);
    }
  }
};
