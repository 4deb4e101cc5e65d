// x of linear_few with INT4 weights: all warps convert it to integers in shared memory, so that
// codes need no conversion. A group of weights is multiplied by integers of 22 bits: the elements
// times the power of two that makes the group's largest at least 2^20, in three signed digits of
// eight bits. bfloat16 elements down to 2^-13 of the largest become integers exactly (float16:
// 2^-10); others are rounded by at most 2^-21 of the largest. Sums of products with integers are
// exact. The digits are columns of the operand for x: a lane's products are with digit lane % 4,
// where digit 3, which does not exist, counts as 0.
//
// Compiled with: ROWS (1 or 2), MOST_WARPS, the macros of boxes.cuh (WEIGHT_BITS 4).
#pragma once

#include "linear/boxes.cuh"

constexpr int DIGITS = 3;
constexpr int CHUNK = 8;  // elements that a thread converts together, and codes in a word
constexpr int GROUP_LANES = GROUP_COLUMNS / CHUNK;

// What corrects products with the digits of a group: (product - zero * total) * undo.
struct alignas(16) GroupOfX {
  float undo;          // of digit 0; times 2^8 for each further digit
  int totals[DIGITS];  // sums of the digits
};

// All rows of x in shared memory.
struct Integers {
  uint2* digits;     // (ROWS, DIGITS, width / CHUNK), in the order of codes
  GroupOfX* groups;  // (ROWS, width / GROUP_COLUMNS)
  int chunks;        // width / CHUNK

  __device__ __forceinline__ Integers(uint8_t* memory, int width)
      : digits(reinterpret_cast<uint2*>(memory)),
        groups(reinterpret_cast<GroupOfX*>(memory + ROWS * DIGITS * width)),
        chunks(width / CHUNK) {}

  // Store a chunk, counted through all rows; called by whole warps, whose lanes have consecutive
  // chunks.
  __device__ __forceinline__ void store(int chunk, const uint4& eight) const {
    const uint32_t pairs = __vmaxu2(__vmaxu2(magnitudes(eight.x), magnitudes(eight.y)),
                                    __vmaxu2(magnitudes(eight.z), magnitudes(eight.w)));
    uint32_t largest = max(pairs & 0xffff, pairs >> 16);
#pragma unroll
    for (int step = 1; step < GROUP_LANES; step *= 2)
      largest = max(largest, __shfl_xor_sync(~0u, largest, step));
    const float bound =
        static_cast<float>(bits_as<ELEMENT>(static_cast<unsigned short>(largest)));
    // The largest integer is at least 2^20 and less than 2^21. It is smaller where undo would be
    // subnormal otherwise.
    const uint32_t exponent = max(__float_as_uint(bound) >> 23, 21u);
    const float scale = __uint_as_float((274 - exponent) << 23);
    uint32_t integers[CHUNK];
    convert(integers[0], integers[1], eight.x, scale);
    convert(integers[2], integers[3], eight.y, scale);
    convert(integers[4], integers[5], eight.z, scale);
    convert(integers[6], integers[7], eight.w, scale);
    int totals[DIGITS];
#pragma unroll
    for (int digit = 0; digit < DIGITS; ++digit) {
      const uint2 words = {
          four_digits(digit, integers[0], integers[4], integers[1], integers[5]),
          four_digits(digit, integers[2], integers[6], integers[3], integers[7])};
      digits[(chunk / chunks * DIGITS + digit) * chunks + chunk % chunks] = words;
      totals[digit] = __dp4a(static_cast<int>(words.x), 0x01010101, 0);
      totals[digit] = __dp4a(static_cast<int>(words.y), 0x01010101, totals[digit]);
#pragma unroll
      for (int step = 1; step < GROUP_LANES; step *= 2)
        totals[digit] += __shfl_xor_sync(~0u, totals[digit], step);
    }
    if (chunk % GROUP_LANES != 0) return;
    // Infinities and NaN make all products NaN.
    const float undo = exponent == 255 ? __int_as_float(0x7fffffff)
                                       : __uint_as_float((exponent - 20) << 23);
    groups[chunk / GROUP_LANES] = {undo, {totals[0], totals[1], totals[2]}};
  }

 private:
  __device__ __forceinline__ static uint32_t magnitudes(uint32_t pair) { return pair & 0x7fff7fff; }

  // Round a pair times a scale to integers, and add 2^23 + 2^15 + 2^7, so that each of the last
  // three bytes is a digit plus 128. A float from 2^23 to 2^24 has an integer in its last 23 bits;
  // 2^23 + 2^22 keeps sums of either sign there, and another 2^22 is added to the bits.
  __device__ __forceinline__ static void convert(uint32_t& first, uint32_t& second, uint32_t pair,
                                                 float scale) {
    constexpr float ADDED = (3 << 22) + (1 << 15) + (1 << 7);
    const float2 two = unpacked(pair, ELEMENT());
    first = __float_as_uint(fmaf(two.x, scale, ADDED)) + (1 << 22);
    second = __float_as_uint(fmaf(two.y, scale, ADDED)) + (1 << 22);
  }

  // Return a digit of four integers as signed bytes: a byte of each, less 128.
  __device__ __forceinline__ static uint32_t four_digits(int digit, uint32_t a, uint32_t b,
                                                         uint32_t c, uint32_t d) {
    const uint32_t bytes = digit | (digit + 4) << 4;
    return __byte_perm(__byte_perm(a, b, bytes), __byte_perm(c, d, bytes), 0x5410) ^ 0x80808080;
  }
};

// The undo and total of one digit of a group.
struct Correction {
  float undo;
  int total;
};

// A piece of a row of x, in the order of weights. Lanes divide the digits differently from the
// products: this lane has elements of digit lane / 8, but its products and their corrections are
// with digit lane % 4, in the left or right half of a line of weights (pieces.cuh).
struct PieceOfX {
  static constexpr bool IN_REGISTERS = ROWS == 1;  // Corrections of two rows do not fit.

  uint32_t words[LOADS][WORDS][2];
  Correction corrections[LOADS];
  const GroupOfX* groups;  // of this piece

  __device__ __forceinline__ void load(const Integers& x, int row, int piece, int lane) {
    const uint2* const digits = x.digits + (row * DIGITS + min(lane / 8, DIGITS - 1)) * x.chunks;
    groups = x.groups + (row * x.chunks + piece * (PIECE / CHUNK)) / GROUP_LANES;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
#pragma unroll
      for (int j = 0; j < WORDS; ++j) {
        const uint2 two = digits[piece * (PIECE / CHUNK) + (i * 8 + lane % 8) * WORDS + j];
        words[i][j][0] = two.x, words[i][j][1] = two.y;
      }
      corrections[i] = read_correction(i, lane);
    }
  }

  __device__ __forceinline__ Correction correction(int i, int lane) const {
    return IN_REGISTERS ? corrections[i] : read_correction(i, lane);
  }

 private:
  __device__ __forceinline__ Correction read_correction(int i, int lane) const {
    const int digit = lane % 4;
    const float power = digit == 0 ? 1.0f : digit == 1 ? 0x1p8f : digit == 2 ? 0x1p16f : 0.0f;
    const GroupOfX& group = groups[Piece::column(i, lane) / GROUP_COLUMNS];
    return {group.undo * power, group.totals[min(digit, DIGITS - 1)]};
  }
};

using Operand = PieceOfX[ROWS][SPAN];

// All rows of x, which the thread block normalizes and converts once.
class RowsOfX {
 public:
  // Bytes of shared memory.
  __device__ __forceinline__ static int bytes(int width) {
    return ROWS * (DIGITS * width + width / GROUP_COLUMNS * int(sizeof(GroupOfX)));
  }

  __device__ __forceinline__ RowsOfX(const ELEMENT* x, const ELEMENT* norm, float epsilon,
                                     int width, int, int, uint8_t* memory)
      : integers_(memory, width), x_(reinterpret_cast<const uint4*>(x)),
        norm_(reinterpret_cast<const uint4*>(norm)), epsilon_(epsilon), width_(width) {}

  // Request the norm's weight. No kernel writes it, so the preceding one may still be running.
  __device__ __forceinline__ void request_norm() {
    if (norm_ != nullptr) load_norm(threadIdx.x);
  }

  __device__ __forceinline__ void request() { load(threadIdx.x); }

  // Normalize and convert x; called by all threads.
  __device__ __forceinline__ void prepare(float (&squares)[MOST_WARPS][ROWS]) {
    const int all = ROWS * integers_.chunks, at_once = AT_ONCE * blockDim.x;
    float scale = 1.0f, last_scale = 1.0f;  // of the first and last row
    if (norm_ != nullptr) {
      add_squares(squares, all, at_once);
      __syncthreads();
      if (at_once < all) load(threadIdx.x);
      scale = scale_of(squares, 0), last_scale = scale_of(squares, ROWS - 1);
    }
#pragma unroll 1
    for (int first = threadIdx.x; first < all; first += at_once) {
      if (first != threadIdx.x) {
        load(first);
        if (norm_ != nullptr) load_norm(first);
      }
      for_each(first, [&](int i, int chunk) {
        uint4 eight = loaded_[i];
        if (norm_ != nullptr) {
          const uint4& by = by_[i];
          const float by_scale = chunk < integers_.chunks ? scale : last_scale;
          eight = {normed(eight.x, by.x, by_scale), normed(eight.y, by.y, by_scale),
                   normed(eight.z, by.z, by_scale), normed(eight.w, by.w, by_scale)};
        }
        integers_.store(chunk, eight);
      });
    }
    __syncthreads();
  }

  __device__ __forceinline__ void load_span(int) const {}

  __device__ __forceinline__ void get_operand(Operand& operand, int span) const {
#pragma unroll
    for (int row = 0; row < ROWS; ++row)
#pragma unroll
      for (int p = 0; p < SPAN; ++p)
        operand[row][p].load(integers_, row, span * SPAN + p, threadIdx.x % 32);
  }

 private:
  static constexpr int AT_ONCE = 4;  // chunks of a thread in registers
  static_assert(ROWS <= 2, "a first and a last row");

  __device__ __forceinline__ float scale_of(const float (&squares)[MOST_WARPS][ROWS],
                                            int row) const {
    const int lane = threadIdx.x % 32;
    const float sum = warp_sum(lane < blockDim.x / 32 ? squares[lane][row] : 0.0f);
    return rsqrtf(sum / width_ + epsilon_);
  }

  template <typename Use>
  __device__ __forceinline__ void for_each(int first, Use use) const {
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int chunk = first + i * blockDim.x;
      if (chunk < ROWS * integers_.chunks) use(i, chunk);
    }
  }

  // L1 is bypassed: a preceding kernel may have written x while this one was running.
  __device__ __forceinline__ void load(int first) {
    for_each(first, [&](int i, int chunk) { loaded_[i] = __ldcg(x_ + chunk); });
  }

  __device__ __forceinline__ void load_norm(int first) {
    for_each(first,
             [&](int i, int chunk) { by_[i] = __ldg(norm_ + chunk % integers_.chunks); });
  }

  __device__ __forceinline__ void add_squares(float (&squares)[MOST_WARPS][ROWS], int all,
                                              int at_once) {
    float sums[ROWS] = {};
#pragma unroll 1
    for (int first = threadIdx.x; first < all; first += at_once) {
      if (first != threadIdx.x) load(first);
      for_each(first, [&](int i, int chunk) {
        const uint4& x = loaded_[i];
        const float sum = squared(x.x) + squared(x.y) + squared(x.z) + squared(x.w);
#pragma unroll
        for (int row = 0; row < ROWS; ++row)
          sums[row] += ROWS == 1 || (chunk < integers_.chunks) == (row == 0) ? sum : 0.0f;
      });
    }
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const float sum = warp_sum(sums[row]);
      if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32][row] = sum;
    }
  }

  Integers integers_;
  uint4 loaded_[AT_ONCE], by_[AT_ONCE];
  const uint4 *x_, *norm_;
  float epsilon_;
  int width_;
};

// Scales of a row's load: of its left and right half.
struct TwoScales {
  static constexpr int NUMBER = sizeof(SCALE) / 2;
  uint32_t words[NUMBER];

  __device__ __forceinline__ float of_half(bool right) const {
#if FLOAT_SCALES
    return __uint_as_float(right ? words[1] : words[0]);
#else
    const float2 two = unpacked(words[0], ELEMENT());
    return right ? two.y : two.x;
#endif
  }
};

// Products of a box.
struct Products {
  float found[ROWS][TILES][2] = {};

  __device__ __forceinline__ Products(uint32_t stage, const Operand& x, int lane) {
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
      for (int pair = 0; pair < SPAN_SCALES / 2; pair += 2) multiply(stage, x, tile, pair, lane);
  }

  // Add the sums of both halves of the columns and of all digits, and call use(row of the box, row
  // of x, sum) in one lane for each sum.
  template <typename Use>
  __device__ __forceinline__ void for_each(int lane, Use use) const {
    const bool right = lane / 4 % 2, last = lane / 2 % 2;
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      float of_tile[TILES];
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const float(&two)[2] = found[row][tile];
        of_tile[tile] = (right ? two[1] : two[0]) +
                        __shfl_xor_sync(~0u, right ? two[0] : two[1], 4);
      }
      float sum = (last ? of_tile[1] : of_tile[0]) +
                  __shfl_xor_sync(~0u, last ? of_tile[0] : of_tile[1], 2);
      sum += __shfl_xor_sync(~0u, sum, 1);
      if (lane % 2 == 0) use(lane / 2 % 2 * TILE + lane / 4 % 2 * 4 + lane / 8, row, sum);
    }
  }

 private:
  // Add products of two loads; a load has a pair of groups, one in each half.
  __device__ __forceinline__ void multiply(uint32_t stage, const Operand& x, int tile,
                                           int first_pair, int lane) {
    const bool right = lane / 4 % 2;
    const int first_row = tile * TILE + lane / 8;
    uint32_t zeros[2][1];
#pragma unroll
    for (int which = 0; which < 2; ++which)
      load_shared(zeros[which], stage + ZEROS_AT + (first_row + which * 4) * SPAN_SCALES +
                                    first_pair * 2);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int p = (first_pair + k) / LOADS, i = (first_pair + k) % LOADS;
      const uint32_t from = stage + first_row * BOX_ROW + p * weight_bytes(PIECE) +
                            (i * 8 + lane % 8) * WORDS * 4;
      uint32_t a[WORDS], b[WORDS];
      load_shared(a, from), load_shared(b, from + 4 * BOX_ROW);
      int sums[ROWS][4] = {};
#pragma unroll
      for (int j = 0; j < WORDS; ++j)
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
          constexpr uint32_t EVEN = 0x0f0f0f0f;
          const uint32_t(&digits)[2] = x[row][p].words[i][j];
          mma(sums[row], a[j] & EVEN, b[j] & EVEN, a[j] >> 4 & EVEN, b[j] >> 4 & EVEN, digits[0],
              digits[1]);
        }
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        const int zero = __byte_perm(zeros[which][0], 0, (right ? 0x4441 : 0x4440) + k * 2);
        const int pair = (first_row + which * 4) * SPAN_SCALES / 2 + first_pair + k;
        TwoScales scales;
        load_shared(scales.words, stage + SCALES_AT + pair * int(sizeof(TwoScales)));
        const float scale = scales.of_half(right);
#pragma unroll
        for (int row = 0; row < ROWS; ++row) {
          const Correction correction = x[row][p].correction(i, lane);
          const int sum = (right ? sums[row][which * 2 + 1] : sums[row][which * 2]) -
                          zero * correction.total;
          float& of_row = found[row][tile][which];
          of_row = fmaf(scale * correction.undo, static_cast<float>(sum), of_row);
        }
      }
    }
  }
};
