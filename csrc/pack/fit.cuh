// Scale, zero point and codes of groups of values that a warp holds as accumulators (mma.cuh).
//
// x[tile][side][c]: eight lanes (of one quad, all groups) hold a line of values, each lane two of
// every tile (c / 2 tells them apart); a lane takes part in four lines, line = 2 * side + c % 2.
// A group is GROUP_TILES tiles of a line. Of keys a line is a channel, its tiles are tokens; of
// values a line is a token, its tiles are channels. (oscar_mm/quant/fit.py, in PyTorch.)
//
// Compiled with: CODE_BITS, ROTATE, FIT (0 min-max, 1 least squares), LSQ_ROUNDS.
#pragma once

#include "common/code_numbers.cuh"
#include "common/page.cuh"

constexpr int STEPS = (1 << CODE_BITS) - 1;
constexpr int LINES = 4;

// The line that a lane looks after: of each of its four, a pair of the eight lanes has one.
__device__ __forceinline__ int line_of_lane(int lane) { return lane >> 3; }

// Bring together what the eight lanes of each line have of it: at every exchange a lane gives away
// half of the lines that it still has. It ends up with its own.
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

// Give all lanes what those who look after their lines have.
__device__ __forceinline__ void broadcast(float (&lines)[LINES], float own, int lane) {
#pragma unroll
  for (int line = 0; line < LINES; ++line)
    lines[line] = __shfl_sync(~0u, own, 8 * line + (lane & 3));
}

// As a page stores it. `not_finite` becomes NaN where that is no finite number.
__device__ __forceinline__ float as_half(float x, float& not_finite) {
  x = as_half(x);
  not_finite = fmaf(x, 0.0f, not_finite);
  return x;
}

// Scale and zero point of a group of the line that a lane looks after, and the mean of its values.
struct Fit {
  float scale, zero, mean;

  // To what a page stores. unit: what a value is to be multiplied by to be in stored units.
  __device__ __forceinline__ void round(float unit, float& not_finite) {
    scale = as_half(scale * unit, not_finite), zero = as_half(zero * unit, not_finite);
  }
};

// How the values of a group become codes: by one multiplication and addition to [0, 1], then steps.
// Values that are not rotated are few-digit numbers, which often lie half way between two codes:
// the difference from the zero point, which is exact, decides then.
struct Assign {
  static constexpr float TOP = ROTATE ? 1 : STEPS;  // position of the highest code; the lowest: 0
  float factor[LINES], offset[LINES];

  __device__ __forceinline__ Assign(const Fit& fit, float unit, int lane) {
    float own = fit.scale > 0.0f ? (ROTATE ? reciprocal(fit.scale) : 1.0f / fit.scale) : 0.0f;
    own *= unit * (TOP / STEPS);
    broadcast(factor, own, lane);
    broadcast(offset, ROTATE ? -fit.zero * own * (1.0f / unit) : -fit.zero, lane);
  }

  // Of a value among the codes.
  __device__ __forceinline__ float position(float x, int line) const {
    return ROTATE ? fmaf(x, factor[line], offset[line]) : (x + offset[line]) * factor[line];
  }

  // The code in the low bits of a float that is ROUND more than it.
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

// Linear regression of one value in EVERY on its code; sum: of all values.
template <int GROUP_TILES, int EVERY, int TILES>
__device__ __forceinline__ void regress(const float (&x)[TILES][2][4], int first, float sum,
                                        Fit& fit, int lane) {
  constexpr int LANE_COUNT = 2 * GROUP_TILES / EVERY;
  constexpr float COUNT = LANE_COUNT * 8;
  // One sum of (code + OFFSET)^2 has a lane's sum of codes and that of their squares, which stays
  // below 2 * OFFSET. All are whole numbers below 2^24, so exact.
  constexpr float OFFSET = CODE_BITS == 2 ? 128.0f : 0.0f;
  static_assert(CODE_BITS != 2 || LANE_COUNT * STEPS * STEPS < 2 * 128, "sums do not mix");
  const Assign assign(fit, 1.0f, lane);
  float codes[LINES] = {}, squares[LINES] = {}, products[LINES] = {}, sums[LINES] = {};
  // Lines within, as their sums do not wait for each other.
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
  // Of whole numbers, so exactly 0 or not.
  const float variance = fmaf(COUNT, square, -code * code);
  const float covariance = fmaf(COUNT, product, -code * sum);
  if (variance > 0.0f) fit.scale = covariance * reciprocal(variance);
  fit.zero = fmaf(-fit.scale, code, sum) * (1.0f / COUNT);
}

// Fit the groups of GROUP_TILES tiles from `first` on, one of each line.
// start: first range of the least-squares fit, as a part of the min-max range.
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
  // fminf and fmaxf pass over NaN, the sum does not. (Infinity makes a range that is none.)
  if (isnan(sum)) least = sum;
  const float mean = sum * (1.0f / (16 * GROUP_TILES));
  if (FIT == 0) return {range * (1.0f / STEPS), least, mean};
  Fit fit = {range * (start / STEPS), (most + least - range * start) * 0.5f, mean};
  // The first round looks at some of the values only.
  regress<GROUP_TILES, GROUP_TILES < 4 ? 2 : 4>(x, first, sum, fit, lane);
#pragma unroll 1
  for (int round = 1; round < LSQ_ROUNDS; ++round)
    regress<GROUP_TILES, 1>(x, first, sum, fit, lane);
  return fit;
}

// How far the values of groups, one of each line, agree with their codes: by positions, in which a
// mean far from zero is gone before anything is squared.
template <int GROUP_TILES>
struct Agreement {
  float codes[LINES] = {}, squares[LINES] = {}, products[LINES] = {};

  __device__ __forceinline__ void add(float position, float raised, int line) {
    const float code = raised - ROUND;
    codes[line] += code;
    squares[line] = fmaf(position, position, squares[line]);
    products[line] = fmaf(position, code, products[line]);
  }

  // What to store, so that what is read is not shrunk, instead of the `fit` that gave the codes
  // (quant/fit.py, unbiased_scale). unit: of the mean of fit.
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
