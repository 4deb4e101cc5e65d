// Attention of one warp to one stream page, where every token's key has its own scale.
//
// A token's score is scale * (query . codes) + zero * sum of the query, plus query . center if the
// sign bit of the scale is set. So queries are the same for all pages. For products with codes,
// they are integers of two bytes, high and low: products with codes as bytes are exact, and a
// register takes four codes instead of the two of float16.
//
// Bytes of codes alternate between two tokens (code_bytes). With SPLIT, a column has the query at
// the bytes of one token and zeros at those of the other; the other half of the columns has them
// the other way round. So one product covers 16 channels of two tiles. Without SPLIT, words are
// first sorted by token, and one product covers 32 channels.
#pragma once

#include "decode/attend_page.cuh"

// Products of the lane's columns with a page's center, in units of codes. The queries are the rows:
// high parts, then low parts.
__device__ __forceinline__ void center_products(float (&products)[2], const Queries& query,
                                                const uint8_t* center, int lane) {
  float sums[4][4] = {};  // one for every fourth step: four products are independent
#pragma unroll
  for (int run = 0; run < KSTEPS / 2; ++run) {
    const Pairs pairs(center, run, lane & 3);
#pragma unroll
    for (int parity = 0; parity < 2; ++parity) {
      const int step = 2 * run + parity;
      const uint4 rows = load16(&query.parts[step][lane % (4 * USED_COLUMNS)]);
      mma(sums[step % 4], rows.x, rows.y, rows.z, rows.w, pairs.get(parity, 0),
          pairs.get(parity, 1), __half());
    }
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) sum += sums[i][0] + sums[i][2];
#pragma unroll
  for (int c = 0; c < 2; ++c)
    // Half of the product: part_scores multiplies it by 2.
    products[c] = __shfl_sync(~0u, sum, 8 * (lane & 3) + 4 * c) * (0.5f / SUBNORMAL);
}

// Store two channels of a column's query, from `channel` on; they are within QUERY_RANGE.
template <int QUADS>
__device__ __forceinline__ void store_fixed(uint4 (&fixed)[FIXED_STEPS][QUADS], int column,
                                            int channel, float even, float odd) {
  const int step = channel / TILE, half = channel / 8 % 2, quad = channel / 2 % 4;
  const int numbers[2] = {__float2int_rn(even * FIXED_UNIT), __float2int_rn(odd * FIXED_UNIT)};
  const int high[2] = {(numbers[0] + 128) >> 8, (numbers[1] + 128) >> 8};
  uint4* place = &fixed[SPLIT ? step : step / 4 * 2 + step % 2][column * 4 + quad];
  if (SPLIT) {
    uint32_t* words = reinterpret_cast<uint32_t*>(place) + half;
    const int by = column < COLUMNS / 2 ? 0 : 8;
    words[0] = ((high[0] & 0xff) | (high[1] & 0xff) << 16) << by;
    words[2] = ((numbers[0] & 0xff) | (numbers[1] & 0xff) << 16) << by;
  } else {
    unsigned short* pairs = reinterpret_cast<unsigned short*>(place) + 2 * half + step / 2 % 2;
    pairs[0] = (high[0] & 0xff) | (high[1] & 0xff) << 8;
    pairs[4] = (numbers[0] & 0xff) | (numbers[1] & 0xff) << 8;
  }
}

// Products of a part's tiles (with SPLIT, two tiles at a time) with the high and low bytes of
// queries.
template <int BITS, int I = 0, class Q>
__device__ __forceinline__ void fixed_products(int (&high)[PART_SCORES][4],
                                               int (&low)[PART_SCORES][4],
                                               const Codes<BITS> (&codes)[PART_TILES],
                                               const Q& query, int lane) {
  if constexpr (I < FIXED_STEPS) {
    constexpr int STEP = SPLIT ? I : I / 2 * 4 + I % 2;
    const uint4 both = query.operands(I, lane);  // high, low
#pragma unroll
    for (int i = 0; i < PART_SCORES; ++i) {
      uint32_t of[2][2];  // [half][whether for a product's upper rows]
      if constexpr (SPLIT) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          of[0][j] = in_byte<BITS, STEP, 0>(code_bytes<BITS, STEP, 0>(codes[2 * i + j]));
          of[1][j] = in_byte<BITS, STEP, 1>(code_bytes<BITS, STEP, 1>(codes[2 * i + j]));
        }
      } else {
        const uint32_t first[2] = {code_bytes<BITS, STEP, 0>(codes[i]),
                                   code_bytes<BITS, STEP, 1>(codes[i])};
        const uint32_t second[2] = {code_bytes<BITS, STEP + 2, 0>(codes[i]),
                                    code_bytes<BITS, STEP + 2, 1>(codes[i])};
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint32_t own = j ? 0x7531 : 0x6420;
          of[0][j] = in_byte<BITS, STEP, 0>(__byte_perm(first[0], second[0], own));
          of[1][j] = in_byte<BITS, STEP, 1>(__byte_perm(first[1], second[1], own));
        }
      }
      mma(high[i], of[0][0], of[0][1], of[1][0], of[1][1], both.x, both.y);
      mma(low[i], of[0][0], of[0][1], of[1][0], of[1][1], both.z, both.w);
    }
    fixed_products<BITS, I + 1>(high, low, codes, query, lane);
  }
}

// Bits of the float 1.5 * 2^23. For integers n below 2^22, 1.5 * 2^23 + n is a float whose bits are
// these plus n. So integer sums start at this number and need no conversion.
constexpr int FIXED_ZERO = 0x4b400000;

// A product in units of codes, from the sums of high and low bytes.
template <int BITS>
__device__ __forceinline__ float fixed_sum(int high, int low) {
  constexpr float LOW = 1.0f / SUBNORMAL / FIXED_UNIT / (1 << BYTE_PLACE<BITS>), HIGH = 256.0f * LOW, ZERO = 12582912.0f;
  return fmaf(__int_as_float(low), LOW, fmaf(__int_as_float(high), HIGH, -ZERO * (HIGH + LOW)));
}

// Numbers for a lane's tokens of a part, in pairs like its scores: for tokens group and group + 8
// of each tile; with SPLIT, for the one of these tokens that the lane's columns attend to, of every
// two tiles.
struct Numbers {
  uint32_t pairs[PART_SCORES];

  // numbers: of all tokens of a page, in runs of four tiles.
  __device__ __forceinline__ Numbers(const uint8_t* numbers, int part, int lane) {
    const int tile = part * PART_TILES, group = lane >> 2;
    uint32_t all[PART_TILES];
    load_words(all, numbers + tile / 4 * 128 + group * 16 + tile % 4 * 4, 0);
    if constexpr (SPLIT) {
      const uint32_t own = lane & 2 ? 0x7632 : 0x5410;
#pragma unroll
      for (int i = 0; i < PART_SCORES; ++i)
        pairs[i] = __byte_perm(all[2 * i], all[2 * i + 1], own);
    } else {
#pragma unroll
      for (int i = 0; i < PART_TILES; ++i) pairs[i] = all[i];
    }
  }
};

// Scores of a part of a page. center: products of the lane's columns with the page's center.
template <class P, class Q>
__device__ __forceinline__ void part_scores(float (&scores)[PART_SCORES][4], const uint8_t* page,
                                            const Q& query, const float (&center)[2],
                                            int part, int lane) {
  Codes<P::Keys::WIDTH> codes[PART_TILES];
#pragma unroll
  for (int i = 0; i < PART_TILES; ++i)
    codes[i].load(page + P::key_codes, part * PART_TILES + i, lane);
  int high[PART_SCORES][4], low[PART_SCORES][4];
#pragma unroll
  for (int i = 0; i < PART_SCORES; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) high[i][c] = low[i][c] = FIXED_ZERO;
  fixed_products(high, low, codes, query, lane);
  const Numbers scales(page + P::key_scales, part, lane), zeros(page + P::key_zeros, part, lane);
  const float total[2] = {query.total[2 * (lane & 3)], query.total[2 * (lane & 3) + 1]};
#pragma unroll
  for (int i = 0; i < PART_SCORES; ++i) {
    const float2 scale = __half22float2(*reinterpret_cast<const __half2*>(&scales.pairs[i]));
    const float2 zero = __half22float2(*reinterpret_cast<const __half2*>(&zeros.pairs[i]));
    // The sign bit as 2 or 0: a multiplication replaces a test of bits.
    const uint32_t twos = scales.pairs[i] >> 1 & 0x40004000u;
    const float2 two = __half22float2(*reinterpret_cast<const __half2*>(&twos));
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      float rest = (c & 2 ? zero.y : zero.x) * total[c & 1];
      if (CENTER) rest = fmaf(c & 2 ? two.y : two.x, center[c & 1], rest);
      const float by = fabsf(c & 2 ? scale.y : scale.x);
      scores[i][c] = fmaf(fixed_sum<P::Keys::WIDTH>(high[i][c], low[i][c]), by, rest);
    }
  }
}

// Tokens [start, stop) are in use. Of TEAM warps, each attends to every TEAM-th part.
template <class P>
__device__ __forceinline__ void attend_stream(State& state, const uint8_t* page,
                                              const Queries& query, int start, int stop,
                                              int member, int lane) {
  float center[2];
  if (CENTER) center_products(center, query, page + P::center, lane);
#pragma unroll 1
  for (int part = start / PART_TOKENS; part * PART_TOKENS < stop; ++part) {
    if (TEAM > 1 && part % TEAM != member) continue;
    float scores[PART_SCORES][4];
    part_scores<P>(scores, page, query, center, part, lane);
    attend_part<P>(state, page, part, scores, query, start, stop, lane);
  }
}
