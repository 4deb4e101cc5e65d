// Codes of a key that lower the error of its scores (in PyTorch: oscar_mm/quant/fit.py).
//
// Both channels of a RoPE pair, whose elements in a lane are COUNT / 2 apart, have the same weight.
// So the butterflies of that bit cancel in H D H: it consists of two blocks of HEAD_DIM / 2, both
// with element i ^ j of the transformed weights in row i and column j.
//
// Compiled with, in addition to page.cuh's macros: SCORE_CHANGES (maximum codes of a key that
// change) and SCORE_FLOOR (fraction of the mean energy that is added to every channel's own).
#pragma once

#include "common/codes.cuh"
#include "common/hadamard.cuh"
#include "store/fit.cuh"

// Shared memory of a warp: a number for each pair of each lane, and for each pair of the center.
// Lanes read the numbers of other lanes, the four lanes of a token only among themselves, without
// bank conflicts.
struct ScoreShared {
  float pairs[HEAD_DIM / 8 * 32];
  float center[HEAD_DIM / 2];
};

// The energy of a page's center, before rotation.
__device__ __forceinline__ void keep_center_energy(const uint8_t* center, ScoreShared& shared,
                                                   int lane) {
  float x[PER_LANE];
#pragma unroll
  for (int i = 0; i < PER_LANE; i += 2) {
    const float2 two = __half22float2(
        reinterpret_cast<const __half2*>(center)[(lane * PER_LANE + i) / 2]);
    x[i] = two.x, x[i + 1] = two.y;
  }
  hadamard(x, lane);  // in the order of the elements, in which the bits of channels are permuted
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    const float energy = x[i] * x[i] + __shfl_xor_sync(~0u, x[i] * x[i], 16);
    if (lane < 16) shared.center[lane * PER_LANE + i] = energy;
  }
  __syncwarp();
}

// The energy of balanced keys, before rotation.
template <int COUNT>
__device__ __forceinline__ void keep_energy(const float (&x)[COUNT], ScoreShared& shared,
                                            int lane) {
  __syncwarp();  // other lanes have read the previous content
#pragma unroll
  for (int i = 0; i < COUNT / 2; ++i)
    shared.pairs[i * 32 + lane] = fmaf(x[i], x[i], x[i + COUNT / 2] * x[i + COUNT / 2]);
}

// Bits, shifted, with the sign of x as the new lowest bit.
__device__ __forceinline__ uint32_t with_sign(uint32_t bits, float x) {
  return __funnelshift_l(__float_as_uint(x), bits, 1);
}

// Change codes. x: the rotated values that they represent.
template <int BITS, int COUNT>
__device__ __forceinline__ void lower_score_error(RawCodes<BITS, true>& raw,
                                                  const float (&x)[COUNT], const Fit& fit,
                                                  ScoreShared& shared, int lane) {
  constexpr int PAIRS = COUNT / 2, STEPS = (1 << BITS) - 1;
  constexpr int WORDS = (COUNT + 31) / 32;
  static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "a word is chosen by up to two bits");
  constexpr uint32_t ELEMENTS = 32 * WORDS - 1, NAME = 8 * ELEMENTS + 7;  // masks
  const int quad = lane & 3;
  float weights[PAIRS], total = 0.0f;
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) {
    weights[i] = shared.pairs[i * 32 + lane];
#if CENTER
    weights[i] += shared.center[(i / 8 * 4 + quad) * 8 + i % 8];
#endif
    total += weights[i];
  }
  // Includes the factors of both transforms.
  constexpr float NORM = 2.0f / HEAD_DIM;
  const float floor = SCORE_FLOOR * NORM * sum_of_lanes<1, 4>(total);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) weights[i] = (weights[i] + floor) * NORM;
  // A bit for each element: whether its code is the smallest, or the largest.
  uint32_t bottom[WORDS] = {}, top[WORDS] = {};
  float gradient[2][PAIRS];
#pragma unroll
  for (int i = COUNT - 1; i >= 0; --i) {
    const float code = raw.code(i);
    gradient[i / PAIRS][i % PAIRS] = fmaf(code, fit.scale, fit.zero) - x[i];
    bottom[i / 32] = with_sign(bottom[i / 32], code - 0.5f);
    top[i / 32] = with_sign(top[i / 32], STEPS - 0.5f - code);
  }
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    butterflies<PAIRS, 1, 4>(gradient[part], lane);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) gradient[part][i] *= weights[i];
    butterflies<PAIRS, 1, 4>(gradient[part], lane);
  }
  butterflies<PAIRS, 1, 4>(weights, lane);
#pragma unroll
  for (int i = 0; i < PAIRS; ++i) shared.pairs[i * 32 + lane] = weights[i];
  __syncwarp();
  // All changes have the same curvature, so the largest gradient gains most, if it exceeds this
  // bound.
  const float least = fit.scale > 0.0f ? 0.5f * fit.scale * shared.pairs[lane & ~3] : INFINITY;
#pragma unroll 1
  for (int change = 1;; ++change) {
    uint32_t negative[WORDS] = {}, blocked[WORDS];  // negative: elements whose codes should increase
#pragma unroll
    for (int i = COUNT - 1; i >= 0; --i)
      negative[i / 32] = with_sign(negative[i / 32], gradient[i / PAIRS][i % PAIRS]);
#pragma unroll
    for (int word = 0; word < WORDS; ++word)
      blocked[word] = negative[word] & top[word] | ~negative[word] & bottom[word];
    // The largest gradient, as an integer whose low bits are replaced by: element, lane, up.
    // Blocked elements are negative.
    int best = 0;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const uint32_t bits = __float_as_uint(gradient[i / PAIRS][i % PAIRS]);
      const uint32_t named = chosen(bits, i * 8, 0x7fffffffu - NAME);
      const uint32_t sign = blocked[i / 32] << (31 - i % 32);
      best = max(best, static_cast<int>(chosen(named, sign, 0x7fffffffu)));
    }
    // Bits 8 and 9 name the element's word.
    uint32_t ups = best & 1 << 8 ? negative[WORDS > 1] : negative[0];
    if (WORDS > 2 && best & 1 << 9)
      ups = best & 1 << 8 ? negative[WORDS - 1] : negative[WORDS / 2];
    best |= quad * 2 | ups >> (best >> 3 & 31) & 1;
#pragma unroll
    for (int step = 1; step < 4; step *= 2) best = max(best, __shfl_xor_sync(~0u, best, step));
    const bool gains = __int_as_float(best) > least;
    const uint32_t element = best >> 3 & ELEMENTS, owner = best >> 1 & 3;
    const int sign = best & 1 ? 1 : -1;
    const bool is_here = gains && owner == quad;
    const int code = raw.change(element, is_here ? sign : 0);
    if (change == SCORE_CHANGES || !__any_sync(~0u, gains)) return;
#pragma unroll
    for (int word = 0; word < WORDS; ++word) {
      const bool is_in = WORDS == 1 || element / 32 == word;
      const uint32_t bit = is_here && is_in ? 1u << element % 32 : 0u;
      bottom[word] = bottom[word] & ~bit | (code == 0 ? bit : 0u);
      top[word] = top[word] & ~bit | (code == STEPS ? bit : 0u);
    }
    const float by = gains ? sign * fit.scale : 0.0f;
    const float first = element < PAIRS ? by : 0.0f, second = by - first;
    const int place = element % PAIRS * 32 + (lane ^ owner);
#pragma unroll
    for (int i = 0; i < PAIRS; ++i) {
      const float row = shared.pairs[place ^ i * 32];
      gradient[0][i] = fmaf(first, row, gradient[0][i]);
      gradient[1][i] = fmaf(second, row, gradient[1][i]);
    }
  }
}
