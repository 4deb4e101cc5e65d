// Scale, zero point and codes of vectors of one token at a time, spread over lanes (in PyTorch:
// oscar_mm/quant/fit.py).
//
// A group is COUNT values in each of several lanes, whose numbers differ in the bits FIRST, 2
// FIRST, ... up to END / 2.
//
// Compiled with, in addition to page.cuh's macros: ROTATE, FIT (0 min-max, 1 least squares),
// LSQ_ROUNDS.
#pragma once

#include "common/code_numbers.cuh"
#include "common/codes.cuh"

template <int FIRST, int END>
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int step = FIRST; step < END; step *= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Sum of codes, which are given as floats with ROUND added: they are summed as integers, two per
// addition.
struct CodeSum {
  uint32_t bits = 0;

  __device__ __forceinline__ void add(float raised) { bits += __float_as_uint(raised); }

  // The sum of COUNT codes.
  template <int COUNT>
  __device__ __forceinline__ float sum() const {
    return static_cast<float>(bits - COUNT * ROUND_BITS);
  }
};

// Collector of codes: each is added to a word at its place, as a float with ROUND added. The bits
// of ROUND cancel against the initial values of words.
//
// For keys (IS_KEY), a lane has both codes of a pair, in the two halves of a word; for values, it
// has one, in the lower half. A code takes WIDTH bits, so a word contains the codes of two words of
// a page, one in its even bytes and one in its odd bytes; with 3 bits, those of the two halves of 8
// channels of one word. `join` separates them.
template <int BITS, bool IS_KEY>
struct RawCodes {
  using Bytes = CodeBytes<BITS>;
  static constexpr int WIDTH = BITS == 2 ? 2 : 4;
  static constexpr int WORDS = BITS == 3 ? Bytes::WORDS : Bytes::WORDS / 2;
  uint32_t words[WORDS];

  __device__ static constexpr int word_of(int step) { return BITS == 2 ? step / 4 : step / 2; }

  __device__ static constexpr int shift_of(int step, int half, int odd) {
    if (BITS == 2) return 16 * odd + step / 2 % 2 * 8 + step % 2 * 4 + half * 2;
    return 16 * odd + (BITS == 3 ? half * 8 + step % 2 * 4 : step % 2 * 8 + half * 4);
  }

  __device__ static constexpr uint32_t first_word() {
    uint32_t sum = 0;
    for (int step = 0; step < 4; ++step)
      for (int half = 0; half < 2; ++half)
        for (int odd = 0; odd < (IS_KEY ? 2 : 1); ++odd)
          if (word_of(step) == 0) sum += ROUND_BITS << shift_of(step, half, odd);
    return 0u - sum;
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) words[i] = first_word();
  }

  __device__ __forceinline__ void add(float raised, int step, int half, int odd) {
    words[word_of(step)] += __float_as_uint(raised) << shift_of(step, half, odd);
  }

  // Place of the code of element i of a lane's keys: (step, half of 8 channels, odd).
  __device__ __forceinline__ float code(int i) const {
    const uint32_t bits = words[word_of(i / 4)] >> shift_of(i / 4, i / 2 % 2, i % 2);
    return __uint_as_float(ROUND_BITS | bits & ((1u << BITS) - 1)) - ROUND;
  }

  // Add to that code and return it; i need not be a constant. (It uses selections, because with
  // branches the compiler would put the words into local memory.)
  __device__ __forceinline__ int change(uint32_t i, int by) {
    const int at = word_of(i / 4), shift = shift_of(i / 4, i / 2 % 2, i % 2);
    uint32_t changed = 0;
#pragma unroll
    for (int word = 0; word < WORDS; ++word) {
      words[word] += word == at ? static_cast<uint32_t>(by) << shift : 0u;
      changed |= word == at ? words[word] : 0u;
    }
    return changed >> shift & ((1u << BITS) - 1);
  }

  // Add the codes to those of a lane, as byte `byte` (and byte + 2) of each word.
  __device__ __forceinline__ void join(Codes<BITS>& codes, int byte) const {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const uint32_t even = words[i], odd = words[i] >> 8;
      if constexpr (BITS == 3) {
        codes.words[i] |= (even & 0x00330033u | (odd & 0x00330033u) << 2) << (8 * byte);
        const uint32_t high = even >> 2 & 0x00110011u | odd & 0x00440044u;
        codes.high[i / 2] |= high << (i % 2 + 8 * byte);
      } else {
        codes.words[2 * i] |= (even & 0x00ff00ffu) << (8 * byte);
        codes.words[2 * i + 1] |= (odd & 0x00ff00ffu) << (8 * byte);
      }
    }
  }
};

// Scale and zero point as a page stores them, and the squared error of restored values.
struct Fit {
  float scale, zero, error;
};

// Conversion of values to codes: one multiplication and addition to [0, 1], then steps. Values that
// are not rotated have few digits and are often exactly between two codes: then the difference from
// the zero point, which is exact, decides.
template <int BITS>
struct Assign {
  static constexpr float STEPS = (1 << BITS) - 1;
  static constexpr float TOP = ROTATE ? 1 : STEPS;  // position of the highest code; the lowest: 0
  static constexpr float STEP = TOP / STEPS;
  float factor, offset;

  __device__ __forceinline__ Assign(float scale, float zero) {
    factor = scale > 0.0f ? (ROTATE ? reciprocal(scale) * STEP : 1.0f / scale) : 0.0f;
    offset = ROTATE ? -zero * factor : -zero;
  }

  __device__ __forceinline__ float position(float x) const {
    return ROTATE ? fmaf(x, factor, offset) : (x + offset) * factor;
  }

  // The code in the low bits of a float, which is the code plus ROUND.
  __device__ __forceinline__ static float raised(float position) {
    if (ROTATE) return fmaf(__saturatef(position), STEPS, ROUND);
    return fminf(fmaxf(position, 0.0f), STEPS) + ROUND;
  }
};

// Fit a group, the values [AT, AT + COUNT) of x in each of its lanes, and pass on its codes by
// take(i, raised) for value i. `start` is the initial range of the least-squares fit, as a fraction
// of the min-max range. WITH_ERROR: also compute the error.
template <int BITS, int FIRST, int END, bool UNBIASED, bool WITH_ERROR, int AT, int COUNT, int ALL,
          typename Take>
__device__ __forceinline__ Fit fit_group(const float (&x)[ALL], float start, Take take) {
  using A = Assign<BITS>;
  constexpr float N = COUNT * (END / FIRST);
  float least = x[AT], most = x[AT], sum = x[AT];
#pragma unroll
  for (int i = 1; i < COUNT; ++i) {
    least = fminf(least, x[AT + i]), most = fmaxf(most, x[AT + i]);
    sum += x[AT + i];
  }
#pragma unroll
  for (int step = FIRST; step < END; step *= 2) {
    least = fminf(least, __shfl_xor_sync(~0u, least, step));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
  }
  sum = sum_of_lanes<FIRST, END>(sum);
  // fminf and fmaxf ignore NaN, the sum does not. (Infinity makes an invalid range.)
  if (isnan(sum)) least = sum;
  const float range = most - least;
  Fit fit = {range * (1.0f / A::STEPS), least, 0.0f};
  if (FIT == 1) {
    fit.scale = range * (start / A::STEPS), fit.zero = (most + least - range * start) * 0.5f;
#pragma unroll 1
    for (int round = 0; round < LSQ_ROUNDS; ++round) {
      // Linear regression of the values on their codes. Sums of codes are integers below 2^24.
      const A assign(fit.scale, fit.zero);
      CodeSum sum_of_codes;
      float squares = 0.0f, products = 0.0f;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        const float raised = A::raised(assign.position(x[AT + i])), code = raised - ROUND;
        sum_of_codes.add(raised);
        squares = fmaf(code, code, squares), products = fmaf(code, x[AT + i], products);
      }
      const float codes = sum_of_lanes<FIRST, END>(sum_of_codes.template sum<COUNT>());
      squares = sum_of_lanes<FIRST, END>(squares);
      products = sum_of_lanes<FIRST, END>(products);
      const float variance = fmaf(N, squares, -codes * codes);
      // Rounding must not make it negative: the sign of a scale has its own meaning.
      const float covariance = fmaxf(fmaf(N, products, -codes * sum), 0.0f);
      if (variance > 0.0f) fit.scale = covariance * reciprocal(variance);
      fit.zero = fmaf(-fit.scale, codes, sum) * (1.0f / N);
    }
  }
  fit.scale = as_half(fit.scale), fit.zero = as_half(fit.zero);
  const A assign(fit.scale, fit.zero);
  CodeSum sum_of_codes;
  float code_squares = 0.0f, squares = 0.0f, products = 0.0f;
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    const float position = assign.position(x[AT + i]), raised = A::raised(position);
    take(i, raised);
    const float code = raised - ROUND;
    if (UNBIASED) {
      sum_of_codes.add(raised);
      squares = fmaf(position, position, squares), products = fmaf(position, code, products);
      if (WITH_ERROR) code_squares = fmaf(code, code, code_squares);
    } else if (WITH_ERROR) {
      const float apart = fmaf(code, A::STEP, -position);
      squares = fmaf(apart, apart, squares);
    }
  }
  const float unit = fit.scale * (1.0f / A::STEP);  // unit of positions
  if (!UNBIASED) {
    if (WITH_ERROR) fit.error = sum_of_lanes<FIRST, END>(squares) * unit * unit;
    return fit;
  }
  // Restored values must not be shrunk (quant/fit.py, unbiased_scale). Computed from positions,
  // which removes a mean far from zero before anything is squared.
  const float codes = sum_of_lanes<FIRST, END>(sum_of_codes.template sum<COUNT>());
  squares = sum_of_lanes<FIRST, END>(squares), products = sum_of_lanes<FIRST, END>(products);
  const float mean = sum * (1.0f / N), mean_code = codes * (1.0f / N);
  const float middle = fit.scale > 0.0f ? (mean - fit.zero) / unit : 0.0f;
  const float variance = fmaf(-N * middle, middle, squares);
  const float covariance = fmaf(-N * middle, mean_code, products) * A::STEP;
  const float whole = fit.scale * fminf(fmaxf(variance / covariance, 0.5f), 2.0f);
  const float scale = as_half(whole), zero = as_half(fmaf(-whole, mean_code, mean));
  Fit found = fit;
  if (covariance > 0.0f && isfinite(scale) && isfinite(zero)) found = {scale, zero, 0.0f};
  if (WITH_ERROR) {
    // Sum of (scale * code + apart - unit * position)^2.
    const float apart = found.zero - fit.zero;
    code_squares = sum_of_lanes<FIRST, END>(code_squares);
    const float of_codes = found.scale * fmaf(found.scale, code_squares, 2.0f * apart * codes);
    const float of_both = unit * fmaf(found.scale, products, apart * N * middle);
    found.error = fmaf(N * apart, apart, of_codes) + fmaf(unit * unit, squares, -2.0f * of_both);
  }
  return found;
}
