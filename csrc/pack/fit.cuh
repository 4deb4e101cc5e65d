// Scale, zero point and codes of groups of values, which are the accumulators of a warp (mma.cuh).
//
// x[tile][side][c]: eight lanes (of one quad, all groups) have a line of values, each lane two of
// every tile (with indices c / 2); a lane has parts of four lines, line = 2 * side + c % 2. A group
// is GROUP_TILES tiles of a line. For keys, a line is a channel and its tiles are tokens; for
// values, a line is a token and its tiles are channels. (In PyTorch: oscar_mm/quant/fit.py.)
//
// Compiled with: CODE_BITS, ROTATE, FIT (0 min-max, 1 least squares), LSQ_ROUNDS.
#pragma once

#include "common/code_numbers.cuh"
#include "common/page.cuh"

constexpr int STEPS = (1 << CODE_BITS) - 1;
constexpr int LINES = 4;

// The line that a lane is responsible for: a pair of the eight lanes is responsible for each of
// four lines.
__device__ __forceinline__ int line_of_lane(int lane) { return lane >> 3; }

// Reduce each line over its eight lanes: at every exchange, a lane passes on half of the lines that
// it still has, until only its own is left.
template <typename Combine>
__device__ __forceinline__ float reduce_lines(const float (&lines)[LINES], int lane,
                                              Combine combine) {
  const bool high = lane & 16, odd = lane & 8;
  float kept[2], given[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    kept[i] = high ? lines[2 + i] : lines[i], given[i] = high ? lines[i] : lines[2 + i];
    kept[i] = combine(kept[i], __shfl_xor_sync(~0u, given[i], 16));
  }
  float own = odd ? kept[1] : kept[0];
  own = combine(own, __shfl_xor_sync(~0u, odd ? kept[0] : kept[1], 8));
  return combine(own, __shfl_xor_sync(~0u, own, 4));
}

__device__ __forceinline__ float sum_lines(const float (&lines)[LINES], int lane) {
  return reduce_lines(lines, lane, [](float a, float b) { return a + b; });
}

// Broadcast the result of each line from the lanes responsible for it.
__device__ __forceinline__ void broadcast(float (&lines)[LINES], float own, int lane) {
#pragma unroll
  for (int line = 0; line < LINES; ++line)
    lines[line] = __shfl_sync(~0u, own, 8 * line + (lane & 3));
}

// The number as a page stores it; if that is not finite, `not_finite` becomes NaN.
__device__ __forceinline__ float as_half(float x, float& not_finite) {
  x = as_half(x);
  not_finite = fmaf(x, 0.0f, not_finite);
  return x;
}

// Scale and zero point of a group of the lane's own line, and the mean of its values.
struct Fit {
  float scale, zero, mean;

  // Convert to the stored form. unit: factor from values to stored units.
  __device__ __forceinline__ void round(float unit, float& not_finite) {
    scale = as_half(scale * unit, not_finite), zero = as_half(zero * unit, not_finite);
  }
};

// Conversion of a group's values to codes: one multiplication and addition to [0, 1], then steps.
// Values that are not rotated have few digits and are often exactly between two codes: then the
// difference from the zero point, which is exact, decides.
struct Assign {
  static constexpr float TOP = ROTATE ? 1 : STEPS;  // position of the highest code; the lowest: 0
  float factor[LINES], offset[LINES];

  __device__ __forceinline__ Assign(const Fit& fit, float unit, int lane) {
    float own = fit.scale > 0.0f ? (ROTATE ? reciprocal(fit.scale) : 1.0f / fit.scale) : 0.0f;
    own *= unit * (TOP / STEPS);
    broadcast(factor, own, lane);
    broadcast(offset, ROTATE ? -fit.zero * own * (1.0f / unit) : -fit.zero, lane);
  }

  // Position of a value among the codes.
  __device__ __forceinline__ float position(float x, int line) const {
    return ROTATE ? fmaf(x, factor[line], offset[line]) : (x + offset[line]) * factor[line];
  }

  // The code in the low bits of a float, which is the code plus ROUND.
  __device__ __forceinline__ static float raised(float position) {
    if (ROTATE) return fmaf(__saturatef(position), STEPS, ROUND);
    return fminf(fmaxf(position, 0.0f), STEPS) + ROUND;
  }
};

// Value i of a group on a line.
template <int TILES>
__device__ __forceinline__ float value_of(const float (&x)[TILES][2][4], int first, int line,
                                          int i) {
  return x[first + i / 2][line / 2][i % 2 * 2 + line % 2];
}

// Linear regression of every EVERY-th value on its code; sum: the sum of all values.
template <int GROUP_TILES, int EVERY, int TILES>
__device__ __forceinline__ void regress(const float (&x)[TILES][2][4], int first, float sum,
                                        Fit& fit, int lane) {
  constexpr int LANE_COUNT = 2 * GROUP_TILES / EVERY;
  constexpr float COUNT = LANE_COUNT * 8;
  // One sum of (code + OFFSET)^2 contains both a lane's sum of codes and their sum of squares,
  // which stays below 2 * OFFSET. All are integers below 2^24, hence exact.
  constexpr float OFFSET = CODE_BITS == 2 ? 128.0f : 0.0f;
  static_assert(CODE_BITS != 2 || LANE_COUNT * STEPS * STEPS < 2 * 128, "sums do not mix");
  const Assign assign(fit, 1.0f, lane);
  float codes[LINES] = {}, squares[LINES] = {}, products[LINES] = {}, sums[LINES] = {};
  // Lines are the inner loop, because their sums are independent.
#pragma unroll
  for (int i = 0; i < 2 * GROUP_TILES; i += EVERY)
#pragma unroll
    for (int line = 0; line < LINES; ++line) {
      const float value = value_of(x, first, line, i);
      const float code = Assign::raised(assign.position(value, line)) - (ROUND - OFFSET);
      if (CODE_BITS != 2) codes[line] += code;
      if (EVERY != 1) sums[line] += value;
      squares[line] = fmaf(code, code, squares[line]);
      products[line] = fmaf(code, value, products[line]);
    }
#pragma unroll
  for (int line = 0; line < LINES; ++line)
    if constexpr (CODE_BITS == 2) {
      squares[line] -= LANE_COUNT * OFFSET * OFFSET;
      codes[line] = fmaf(squares[line], 0.5f / OFFSET, ROUND - 0.25f) - ROUND;
      squares[line] = fmaf(-2.0f * OFFSET, codes[line], squares[line]);
    }
  if (EVERY != 1) sum = sum_lines(sums, lane);
  const float code = sum_lines(codes, lane), square = sum_lines(squares, lane);
  const float product = fmaf(-OFFSET, sum, sum_lines(products, lane));
  // Computed from integers, hence exactly 0 or not.
  const float variance = fmaf(COUNT, square, -code * code);
  const float covariance = fmaf(COUNT, product, -code * sum);
  if (variance > 0.0f) fit.scale = covariance * reciprocal(variance);
  fit.zero = fmaf(-fit.scale, code, sum) * (1.0f / COUNT);
}

// Fit the groups of GROUP_TILES tiles from `first` on, one per line.
// start: initial range of the least-squares fit, as a fraction of the min-max range.
template <int GROUP_TILES, int TILES>
__device__ __forceinline__ Fit fit_group(const float (&x)[TILES][2][4], int first, float start,
                                         int lane) {
  float low[LINES], high[LINES], sums[LINES];
#pragma unroll
  for (int i = 0; i < 2 * GROUP_TILES; ++i)
#pragma unroll
    for (int line = 0; line < LINES; ++line) {
      const float value = value_of(x, first, line, i);
      low[line] = i ? fminf(low[line], value) : value;
      high[line] = i ? fmaxf(high[line], value) : value;
      sums[line] = i ? sums[line] + value : value;
    }
  float least = reduce_lines(low, lane, [](float a, float b) { return fminf(a, b); });
  const float most = reduce_lines(high, lane, [](float a, float b) { return fmaxf(a, b); });
  const float sum = sum_lines(sums, lane), range = most - least;
  // fminf and fmaxf ignore NaN, the sum does not. (Infinity makes an invalid range.)
  if (isnan(sum)) least = sum;
  const float mean = sum * (1.0f / (16 * GROUP_TILES));
  if (FIT == 0) return {range * (1.0f / STEPS), least, mean};
  Fit fit = {range * (start / STEPS), (most + least - range * start) * 0.5f, mean};
  // The first round uses only some of the values.
  regress<GROUP_TILES, GROUP_TILES < 4 ? 2 : 4>(x, first, sum, fit, lane);
#pragma unroll 1
  for (int round = 1; round < LSQ_ROUNDS; ++round)
    regress<GROUP_TILES, 1>(x, first, sum, fit, lane);
  return fit;
}

// Agreement of the values of groups, one per line, with their codes, computed from positions: this
// removes a mean far from zero before anything is squared.
template <int GROUP_TILES>
struct Agreement {
  float codes[LINES] = {}, squares[LINES] = {}, products[LINES] = {};

  __device__ __forceinline__ void add(float position, float raised, int line) {
    const float code = raised - ROUND;
    codes[line] += code;
    squares[line] = fmaf(position, position, squares[line]);
    products[line] = fmaf(position, code, products[line]);
  }

  // The scale and zero point to store instead of those that gave the codes, so that restored values
  // are not shrunk (quant/fit.py, unbiased_scale). unit: unit of the mean of `fit`.
  __device__ __forceinline__ Fit unbiased(const Fit& fit, float unit, int lane) const {
    constexpr float COUNT = 16 * GROUP_TILES, STEP = Assign::TOP / STEPS;
    const float code = sum_lines(codes, lane) * (1.0f / COUNT), mean = fit.mean * unit;
    const float middle = (mean - fit.zero) * STEP / fit.scale;
    const float variance = fmaf(-COUNT * middle, middle, sum_lines(squares, lane));
    const float covariance = fmaf(-COUNT * middle, code, sum_lines(products, lane)) * STEP;
    const float scale = fit.scale * fminf(fmaxf(variance / covariance, 0.5f), 2.0f);
    const Fit found = {as_half(scale), as_half(fmaf(-scale, code, mean)), fit.mean};
    return covariance > 0.0f && isfinite(found.scale) && isfinite(found.zero) ? found : fit;
  }
};
