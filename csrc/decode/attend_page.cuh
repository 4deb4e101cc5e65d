// Attention of one warp to one packed page: the part that is common to all pages, and pages with
// key scales per channel (attend_stream.cuh has pages with key scales per token).
#pragma once

#include "common/codes.cuh"
#include "common/mma.cuh"
#include "common/page.cuh"
#include "decode/state.cuh"

constexpr int PRODUCTS = NARROW ? 1 : 2;  // of keys and queries: high parts, low parts

// Add key products to the scores of COUNT tiles, one step of all tiles at a time, so that the
// products are independent of each other.
template <int BITS, int COUNT, int STEP = 0>
__device__ __forceinline__ void key_products(float (*scores)[4], const Codes<BITS>* codes,
                                             const uint32_t (&query)[PRODUCTS][KSTEPS][2]) {
  if constexpr (STEP < KSTEPS) {
#pragma unroll
    for (int product = 0; product < PRODUCTS; ++product)
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
        mma(scores[i], codes[i].template get<STEP, 0, false>(),
            codes[i].template get<STEP, 0, true>(), codes[i].template get<STEP, 1, false>(),
            codes[i].template get<STEP, 1, true>(), query[product][STEP][0],
            query[product][STEP][1], __half());
    key_products<BITS, COUNT, STEP + 1>(scores, codes, query);
  }
}

template <int BITS, int STEP, int END>
__device__ __forceinline__ void value_products(State& state, const Codes<BITS>& codes,
                                               const uint32_t (&weights)[2]) {
  if constexpr (STEP < END) {
    mma(state.out[STEP], codes.template get<STEP, 0, false>(),
        codes.template get<STEP, 1, false>(), codes.template get<STEP, 0, true>(),
        codes.template get<STEP, 1, true>(), weights[0], weights[1], __half());
    value_products<BITS, STEP + 1, END>(state, codes, weights);
  }
}

// Pairs of elements (tokens or channels) 16 * step + 8 * half + 2 quad, + 1 of a vector in fragment
// order: (run of 32 elements, quad, step parity, half).
struct Pairs {
  uint4 four;
  __device__ __forceinline__ Pairs(const uint8_t* vector, int run, int quad)
      : four(load16(vector + (run * 4 + quad) * 16)) {}
  __device__ __forceinline__ uint32_t get(int parity, int half) const {
    return parity ? (half ? four.w : four.z) : (half ? four.y : four.x);
  }
};

// 64 tokens at a time fit in registers without spilling; in a team of four, each warp has 32.
constexpr int PART_TILES = TEAM > 2 ? 2 : 4;
constexpr int PART_TOKENS = PART_TILES * TILE;
// A lane has four scores of each tile, or with SPLIT of every two tiles.
constexpr int PART_SCORES = SPLIT ? PART_TILES / 2 : PART_TILES;

// Token, within a part, of a lane's score [i][c].
__device__ __forceinline__ int token_of(int i, int c, int lane) {
  const int group = lane >> 2;
  return SPLIT ? (2 * i + c / 2) * TILE + group + (lane & 2) * 4 : i * TILE + group + (c & 2) * 4;
}

// Add a column and its low part, which are two lanes apart; both lanes get the sum.
__device__ __forceinline__ void join_parts(float& x) {
  if (NARROW) x += __shfl_xor_sync(~0u, x, 2);
}

// Clear those of a pair of numbers whose tokens are not in use, i.e. not in [start, stop).
__device__ __forceinline__ uint32_t in_use(uint32_t pair, int token, int start, int stop) {
  if (token < start || token >= stop) pair &= 0xffff0000u;
  if (token + 1 < start || token + 1 >= stop) pair &= 0x0000ffffu;
  return pair;
}

// Scores that are probabilities, as operand B of products with values: with SPLIT, pairs of tiles.
struct Weights {
  uint32_t of[PART_SCORES][2];
};

// Mark tokens that are not in use, i.e. not in [start, stop).
__device__ __forceinline__ void clear_unused(float (&scores)[PART_SCORES][4], int part, int start,
                                             int stop, int lane) {
#pragma unroll
  for (int i = 0; i < PART_SCORES; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const int token = part * PART_TOKENS + token_of(i, c, lane);
      if (token < start || token >= stop) scores[i][c] = -INFINITY;
    }
}

// Whether a part has tokens that are not in use.
__device__ __forceinline__ bool is_partial(int part, int start, int stop) {
  return start > part * PART_TOKENS || stop < (part + 1) * PART_TOKENS;
}

// Raise `next` to the lane's largest scores of its two columns.
__device__ __forceinline__ void raise_to(float (&next)[2], const float (&scores)[PART_SCORES][4]) {
#pragma unroll
  for (int i = 0; i < PART_SCORES; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) next[c & 1] = fmaxf(next[c & 1], scores[i][c]);
}

// Probabilities of a part's scores, relative to the maximum `next`.
__device__ __forceinline__ Weights weights_of(const float (&scores)[PART_SCORES][4],
                                              const float (&unit)[2], const float (&next)[2]) {
  Weights weights;
#pragma unroll
  for (int i = 0; i < PART_SCORES; ++i) {
    float x[4];
#pragma unroll
    for (int c = 0; c < 4; ++c) x[c] = exp2_fast(fmaf(scores[i][c], unit[c & 1], -next[c & 1]));
    weights.of[i][0] = transposed(packed(x[0], x[1], __half()));
    weights.of[i][1] = transposed(packed(x[2], x[3], __half()));
  }
  return weights;
}

// Attend to the values of a part of a page. Tokens [start, stop) are in use; the other tokens of a
// stream page may never have been written.
template <class P>
__device__ __forceinline__ void attend_values(State& state, const uint8_t* page, int part,
                                              const Weights& all, int start, int stop, int lane) {
  constexpr uint32_t ONES = 0x3c003c00;
  constexpr int VALUE_STEPS = VALUE_GROUP / TILE, LOW = P::Values::LOW;
  static_assert(VALUE_GROUPS <= 4, "a value group has its products below");
  const int quad = lane & 3;
  // For the first value group, the state accumulates probability * zero; other groups are added
  // below.
  float zero[VALUE_GROUPS][4] = {};
#pragma unroll
  for (int i = 0; i < PART_TILES; ++i) {
    const int tile = part * PART_TILES + i, run = tile >> 1, parity = i & 1;
    uint32_t weights[2];
    if constexpr (SPLIT) {
      const bool upper = lane >= 16;  // columns 4 to 7
      const uint32_t both = all.of[i / 2][i % 2];
      weights[0] = upper ? 0 : both, weights[1] = upper ? both : 0;
    } else {
      weights[0] = all.of[i][0], weights[1] = all.of[i][1];
    }
    Codes<P::Values::WIDTH> codes;
    codes.load(page + P::value_codes, tile, lane);
#pragma unroll
    for (int value_group = 0; value_group < VALUE_GROUPS; ++value_group) {
      const int at = value_group * PAGE_TOKENS * 2;
      const Pairs scales(page + P::value_scales + at, run, quad);
      const Pairs zeros(page + P::value_zeros + at, run, quad);
      uint32_t scale[2] = {scales.get(parity, 0), scales.get(parity, 1)};
      uint32_t point[2] = {zeros.get(parity, 0), zeros.get(parity, 1)};
      if (STREAM && is_partial(part, start, stop)) {
        asm volatile("");  // a branch, not selects in every page
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          // 0 * NaN is not 0.
          const int token = tile * TILE + 8 * half + 2 * quad;
          scale[half] = in_use(scale[half], token, start, stop);
          point[half] = in_use(point[half], token, start, stop);
        }
      }
      // Rows 0 to 7 accumulate probability * zero, rows 8 to 15 probability.
      float(&sums)[4] = value_group == 0 ? state.sums : zero[value_group];
      mma(sums, point[0], ONES, point[1], ONES, weights[0], weights[1], __half());
      const uint32_t scaled[2] = {times(weights[0], scale[0]), times(weights[1], scale[1])};
      if (value_group == 0) value_products<P::Values::WIDTH, 0, VALUE_STEPS>(state, codes, scaled);
      if constexpr (VALUE_GROUPS > 1)
        if (value_group == 1)
          value_products<P::Values::WIDTH, VALUE_STEPS, 2 * VALUE_STEPS>(state, codes, scaled);
      if constexpr (VALUE_GROUPS > 2) {
        if (value_group == 2)
          value_products<P::Values::WIDTH, 2 * VALUE_STEPS, 3 * VALUE_STEPS>(state, codes, scaled);
        if (value_group == 3)
          value_products<P::Values::WIDTH, 3 * VALUE_STEPS, 4 * VALUE_STEPS>(state, codes, scaled);
      }
    }
  }
  if constexpr (VALUE_GROUPS > 1) {
    // The maximum may rise with the next part, so the sums are added part by part.
#pragma unroll
    for (int tile = VALUE_STEPS; tile < CHANNEL_TILES; ++tile)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        state.out[tile][c] += zero[tile / VALUE_STEPS][c & 1] / out_unit<LOW>(tile, c >> 1);
  }
}

// From the scores of a part of a page to its values. Tokens [start, stop) are in use.
template <class P>
__device__ __forceinline__ void attend_part(State& state, const uint8_t* page, int part,
                                            float (&scores)[PART_SCORES][4],
                                            const Queries& query, int start, int stop, int lane) {
  if (is_partial(part, start, stop)) {
    asm volatile("");  // a branch, not selects in every page
    clear_unused(scores, part, start, stop, lane);
  }
  const int quad = lane & 3;
  const float unit[2] = {query.unit[2 * quad], query.unit[2 * quad + 1]};
  float next[2] = {-INFINITY, -INFINITY};
  raise_to(next, scores);
  next[0] *= unit[0], next[1] *= unit[1];
  raise_maximum(state, next);
  attend_values<P>(state, page, part, weights_of(scores, unit, next), start, stop, lane);
}

// Queries times the scales of a key group, and the queries' products with its zeros (the same in
// all rows).
template <class P>
struct GroupQuery {
  uint32_t scaled[PRODUCTS][KSTEPS][2];
  float zero[4];

  __device__ __forceinline__ void prepare(const uint8_t* page, int key_group,
                                          const QueryParts& query, int lane) {
    const uint8_t* scales = page + P::key_scales + key_group * HEAD_DIM * 2;
    const uint8_t* zeros = page + P::key_zeros + key_group * HEAD_DIM * 2;
    const int quad = lane & 3;
    const uint32_t upper = lane >= 16 ? ~0u : 0u;  // columns 4 to 7
    zero[0] = zero[1] = zero[2] = zero[3] = 0.0f;
#pragma unroll
    for (int run = 0; run < KSTEPS / 2; ++run) {
      const Pairs scale(scales, run, quad), point(zeros, run, quad);
#pragma unroll
      for (int parity = 0; parity < 2; ++parity) {
        const int step = 2 * run + parity;
        uint32_t whole[PRODUCTS][2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint2 parts = query[step][half][lane];
          // Masked codes are scaled by their bit place.
          constexpr int LOW = P::Keys::LOW;
          const float factor = 1.0f / (1 << (LOW * bit_place<LOW>(step, half)));
          const uint32_t by = packed(factor, factor, __half());
          const uint32_t high = times(parts.x, by), low = times(parts.y, by);
          const uint32_t by_scale = scale.get(parity, half);
          uint32_t rounded = times(high, by_scale);
          // The rounding error is itself a float16; the low part's product is added to it.
          if (NARROW) {
            // Columns 0 to 3 have no low part, so nothing is subtracted.
            rounded &= upper;
            scaled[0][step][half] = times_add(low, by_scale, times_less(high, by_scale, rounded));
            whole[0][half] = upper ? parts.y : parts.x;
          } else {
            scaled[0][step][half] = rounded;
            scaled[PRODUCTS - 1][step][half] =
                times_add(low, by_scale, times_less(high, by_scale, rounded));
            whole[0][half] = parts.x, whole[PRODUCTS - 1][half] = parts.y;
          }
        }
#pragma unroll
        for (int product = 0; product < PRODUCTS; ++product)
          mma(zero, point.get(parity, 0), point.get(parity, 0), point.get(parity, 1),
              point.get(parity, 1), whole[product][0], whole[product][1], __half());
      }
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) zero[c] *= 1.0f / SUBNORMAL;
  }
};

// Tokens [start, stop) are in use.
template <class P>
__device__ __forceinline__ void attend_page(State& state, const uint8_t* page,
                                            const uint8_t* norms,
                                            const Queries& query, int start, int stop, int lane) {
  constexpr int GROUP_TILES = KEY_GROUP / TILE;
  constexpr int RUN_TILES = GROUP_TILES < PART_TILES ? GROUP_TILES : PART_TILES;
  const int group = lane >> 2;
  GroupQuery<P> keys;
  if constexpr (KEY_GROUPS == 1) keys.prepare(page, 0, query.parts, lane);
#pragma unroll 1
  for (int part = start / PART_TOKENS; part * PART_TOKENS < stop; ++part) {
    float scores[PART_TILES][4];
#pragma unroll
    for (int i = 0; i < PART_TILES; i += RUN_TILES) {
      const int tile = part * PART_TILES + i;
      if constexpr (KEY_GROUPS > 1) keys.prepare(page, tile / GROUP_TILES, query.parts, lane);
      Codes<P::Keys::WIDTH> codes[RUN_TILES];
#pragma unroll
      for (int j = 0; j < RUN_TILES; ++j) {
        codes[j].load(page + P::key_codes, tile + j, lane);
#pragma unroll
        for (int c = 0; c < 4; ++c) scores[i + j][c] = keys.zero[c];
      }
      key_products<P::Keys::WIDTH, RUN_TILES>(scores + i, codes, keys.scaled);
    }
#pragma unroll
    for (int i = 0; i < PART_TILES; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) join_parts(scores[i][c]);
    if constexpr (SCALING) {
      const uint4 eight = load16(norms + (part * 8 + group) * 16);
      const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int i = 0; i < PART_TILES; ++i) {
        const float2 norm = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
        scores[i][0] *= norm.x, scores[i][1] *= norm.x;
        scores[i][2] *= norm.y, scores[i][3] *= norm.y;
      }
    }
    attend_part<P>(state, page, part, scores, query, start, stop, lane);
  }
}
