// Attention of one warp to one stream page, of which every token's key has its own scale.
//
// A token's score is scale * (query . codes) + zero * sum of the query, and, where the sign bit of
// the scale is set, query . center. So what a query is multiplied by does not change from page to
// page, and a warp keeps its queries in registers.
#pragma once

#include "decode/attend_page.cuh"

// Products of the lane's columns with a page's center (sums[0], sums[1]) and their sums (sums[2],
// sums[3]), in units of codes.
__device__ __forceinline__ void center_products(float (&sums)[4], const QueryParts& query,
                                                const uint8_t* center, int lane) {
  constexpr uint32_t ONES = 0x3c003c00;
  const bool upper = lane >= 16;  // columns 4 to 7
  float odd[4] = {};  // of every other step: the products of both do not wait for each other
#pragma unroll
  for (int c = 0; c < 4; ++c) sums[c] = 0.0f;
#pragma unroll
  for (int run = 0; run < KSTEPS / 2; ++run) {
    const Pairs pairs(center, run, lane & 3);
#pragma unroll
    for (int parity = 0; parity < 2; ++parity) {
      const uint2 first = query[2 * run + parity][0][lane];
      const uint2 second = query[2 * run + parity][1][lane];
      float(&target)[4] = parity ? odd : sums;
      const uint32_t low = CENTER ? pairs.get(parity, 0) : ONES;
      const uint32_t high = CENTER ? pairs.get(parity, 1) : ONES;
      if (NARROW) {
        mma(target, low, ONES, high, ONES, upper ? first.y : first.x, upper ? second.y : second.x,
            __half());
      } else {
        mma(target, low, ONES, high, ONES, first.x, second.x, __half());
        mma(target, low, ONES, high, ONES, first.y, second.y, __half());
      }
    }
  }
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    sums[c] = (sums[c] + odd[c]) * (1.0f / SUBNORMAL);
    join_parts(sums[c]);
  }
  sums[0] *= 0.5f, sums[1] *= 0.5f;  // attend_stream multiplies them by 2
}

// Queries of a segment, by the factors that codes of LOW bits have of their places.
struct StreamQuery {
  uint32_t parts[PRODUCTS][KSTEPS][2];

  template <int LOW>
  __device__ __forceinline__ void prepare(const QueryParts& query, int lane) {
    const bool upper = lane >= 16;
#pragma unroll
    for (int step = 0; step < KSTEPS; ++step)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint2 both = query[step][half][lane];
        const float factor = 1.0f / (1 << (LOW * bit_place<LOW>(step, half)));
        const uint32_t by = packed(factor, factor, __half());
        if (NARROW) {
          parts[0][step][half] = times(upper ? both.y : both.x, by);
        } else {
          parts[0][step][half] = times(both.x, by);
          parts[PRODUCTS - 1][step][half] = times(both.y, by);
        }
      }
  }
};

// Tokens [start, stop) are in use.
template <class P>
__device__ __forceinline__ void attend_stream(State& state, const uint8_t* page,
                                              const StreamQuery& keys, const QueryParts& query,
                                              const float (&unit)[2], int start, int stop,
                                              int lane) {
  const int group = lane >> 2;
  float apart[4];  // by column: product with the center, sum
  center_products(apart, query, page + P::center, lane);
#pragma unroll 1
  for (int part = start / PART_TOKENS; part * PART_TOKENS < stop; ++part) {
    Codes<P::Keys::WIDTH> codes[PART_TILES];
    float scores[PART_TILES][4];
#pragma unroll
    for (int i = 0; i < PART_TILES; ++i) {
      codes[i].load(page + P::key_codes, part * PART_TILES + i, lane);
#pragma unroll
      for (int c = 0; c < 4; ++c) scores[i][c] = 0.0f;
    }
    key_products<P::Keys::WIDTH, PART_TILES>(scores, codes, keys.parts);
    const uint8_t* place = page + (part * 8 + group) * 16;
    const uint4 scales = load16(place + P::key_scales), zeros = load16(place + P::key_zeros);
    const uint32_t scale_pairs[4] = {scales.x, scales.y, scales.z, scales.w};
    const uint32_t zero_pairs[4] = {zeros.x, zeros.y, zeros.z, zeros.w};
#pragma unroll
    for (int i = 0; i < PART_TILES; ++i) {
      const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(&scale_pairs[i]));
      const float2 zero = __half22float2(*reinterpret_cast<const __half2*>(&zero_pairs[i]));
      // The sign bit as 2 or 0: numbers are multiplied where bits would have to be looked at.
      const uint32_t twos = scale_pairs[i] >> 1 & 0x40004000u;
      const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&twos));
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        join_parts(scores[i][c]);
        float rest = (c & 2 ? zero.y : zero.x) * apart[2 + (c & 1)];
        if (CENTER) rest = fmaf(c & 2 ? two.y : two.x, apart[c & 1], rest);
        scores[i][c] = fmaf(scores[i][c], fabsf(c & 2 ? scale.y : scale.x), rest);
      }
    }
    attend_part<P>(state, page, part, scores, unit, start, stop, lane);
  }
}
