// unpack: pages -> 16-bit keys and values in the model's coordinates. One thread block per page and
// KV head, one warp per tile of 16 tokens: first its keys, then its values.
//
// A lane keeps the elements whose codes it reads (page.cuh, pages/fragments.py): a quarter of the
// channels of 2 tokens for keys, an eighth of the channels of 4 tokens for values. The rotation's
// butterflies run over the elements of a lane and, by shuffles, over the lanes that share a token.
// Lanes then exchange elements, so that each has eight consecutive channels and four lanes write 64
// bytes.
//
// Compiled with, in addition to page.cuh's macros: KEY_BITS, VALUE_BITS, ELEMENT (__half,
// __nv_bfloat16), ROTATE.

#include "common/codes.cuh"
#include "common/hadamard.cuh"
#include "common/mma.cuh"
#include "common/page.cuh"

using P = Page<KEY_BITS, VALUE_BITS>;
constexpr int THREADS = TILES * 32;
constexpr int STEPS = HEAD_DIM / TILE;
constexpr int OF_KEY = HEAD_DIM / 4;    // channels of a token per lane
constexpr int OF_VALUE = HEAD_DIM / 8;

struct Params {
  const uint8_t* pages;  // (slots, page_bytes)
  const int* slots;      // (pages)
  const float* sigma;    // (KV heads or 1, HEAD_DIM) or null
  ELEMENT* keys;         // (pages, KV heads, 128, HEAD_DIM), strides in elements
  ELEMENT* values;
  int64_t page_stride, head_stride;  // of both; tokens and channels are contiguous
  int kv_heads, sigma_rows;
};

__device__ __forceinline__ float half_at(const uint4& eight, int i) {
  const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
  const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i / 2]));
  return i % 2 ? pair.y : pair.x;
}

// Transpose words among the lanes of a quad: each lane has one word of each of the same four runs
// of eight channels; afterwards lane q has the four words of run q.
__device__ __forceinline__ uint4 runs_to_lanes(const uint32_t (&word)[4], int quad) {
  uint32_t x[4];
#pragma unroll
  for (int i = 0; i < 4; i += 2) {  // lanes 1 apart exchange words 1 apart
    const uint32_t given = __shfl_xor_sync(~0u, quad & 1 ? word[i] : word[i + 1], 1);
    x[i] = quad & 1 ? given : word[i];
    x[i + 1] = quad & 1 ? word[i + 1] : given;
  }
  uint32_t y[4];
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // lanes 2 apart exchange words 2 apart
    const uint32_t given = __shfl_xor_sync(~0u, quad & 2 ? x[i] : x[i + 2], 2);
    y[i] = quad & 2 ? given : x[i];
    y[i + 2] = quad & 2 ? x[i + 2] : given;
  }
  return make_uint4(y[0], y[1], y[2], y[3]);
}

// Elements of a lane: (step, half of 8 channels, odd), for the token of group and half `thalf`.
__device__ __forceinline__ void stream_key(float (&x)[OF_KEY], const Codes<KEY_BITS>& codes,
                                           const uint8_t* page, int tile, int thalf, int lane) {
  const int place = tile / 4 * 64 + (lane >> 2) * 8 + tile % 4 * 2 + thalf;
  float scale = __half2float(reinterpret_cast<const __half*>(page + P::key_scales)[place]);
  const float zero = __half2float(reinterpret_cast<const __half*>(page + P::key_zeros)[place]);
  const bool centered = CENTER && signbit(scale);
  if (CENTER) scale = fabsf(scale);
#pragma unroll
  for (int run = 0; run < STEPS / 2; ++run) {
    uint4 center = {};
    if (centered) center = load16(page + P::center + (run * 4 + (lane & 3)) * 16);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float code = code_of(codes, 2 * run + i / 4, i / 2 % 2, thalf + 2 * (i % 2));
      x[8 * run + i] = fmaf(code, scale, zero);
      if (CENTER) x[8 * run + i] += half_at(center, i);
    }
  }
}

// The same for scales per channel.
__device__ __forceinline__ void channel_key(float (&x)[OF_KEY], const Codes<KEY_BITS>& codes,
                                            const uint8_t* page, float norm, int tile, int thalf,
                                            int lane) {
  const int scales_at = tile * TILE / KEY_GROUP * HEAD_DIM * 2;
#pragma unroll
  for (int run = 0; run < STEPS / 2; ++run) {
    const int at = scales_at + (run * 4 + (lane & 3)) * 16;
    const uint4 scales = load16(page + P::key_scales + at);
    const uint4 zeros = load16(page + P::key_zeros + at);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float code = code_of(codes, 2 * run + i / 4, i / 2 % 2, thalf + 2 * (i % 2));
      x[8 * run + i] = fmaf(code, half_at(scales, i), half_at(zeros, i));
      if constexpr (SCALING) x[8 * run + i] *= norm;
    }
  }
}

__device__ __forceinline__ void unpack_keys(const uint8_t* page, const uint8_t* norms, int tile,
                                            const float* sigma, ELEMENT* target, int lane) {
  const int group = lane >> 2, quad = lane & 3;
  Codes<KEY_BITS> codes;
  codes.load(page + P::key_codes, tile, lane);
  float2 norm = {1.0f, 1.0f};
  if constexpr (SCALING)
    norm = __half22float2(reinterpret_cast<const __half2*>(norms)[tile / 4 * 32 + group * 4 +
                                                                  tile % 4]);
#pragma unroll
  for (int thalf = 0; thalf < 2; ++thalf) {
    float x[OF_KEY];
    if (STREAM)
      stream_key(x, codes, page, tile, thalf, lane);
    else
      channel_key(x, codes, page, thalf ? norm.y : norm.x, tile, thalf, lane);
#if ROTATE
    hadamard<OF_KEY, 1, 4>(x, lane);
#endif
    ELEMENT* row = target + (tile * TILE + 8 * thalf + group) * HEAD_DIM;
#pragma unroll
    for (int run = 0; run < OF_KEY / 8; ++run) {  // 32 channels
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float low = x[8 * run + 2 * i], high = x[8 * run + 2 * i + 1];
        if (sigma != nullptr) {
          const float* factor = sigma + 32 * run + 8 * i + 2 * quad;
          low *= factor[0], high *= factor[1];
        }
        pairs[i] = packed(low, high, ELEMENT());
      }
      *reinterpret_cast<uint4*>(row + 32 * run + 8 * quad) = runs_to_lanes(pairs, quad);
    }
  }
}

__device__ __forceinline__ void unpack_values(const uint8_t* page, int tile, ELEMENT* target,
                                              int lane) {
  const int group = lane >> 2, quad = lane & 3, odd_lane = group & 1;
  Codes<VALUE_BITS> codes;
  codes.load(page + P::value_codes, tile, lane);
#pragma unroll
  for (int thalf = 0; thalf < 2; ++thalf) {
    // Elements of a lane, for two tokens: (step, half of the channels).
    float x[2][OF_VALUE];
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
#pragma unroll
      for (int step = 0; step < STEPS; ++step) {
        const int at = step * TILE / VALUE_GROUP * PAGE_TOKENS + tile / 2 * 32 + quad * 8 +
                       tile % 2 * 4 + thalf * 2 + odd;
        const float scale =
            __half2float(reinterpret_cast<const __half*>(page + P::value_scales)[at]);
        const float zero = __half2float(reinterpret_cast<const __half*>(page + P::value_zeros)[at]);
#pragma unroll
        for (int half = 0; half < 2; ++half)
          x[odd][2 * step + half] =
              fmaf(code_of(codes, step, half, thalf + 2 * odd), scale, zero);
      }
#if ROTATE
      hadamard<OF_VALUE, 4, 32>(x[odd], lane);
#endif
    }
    // A lane and its neighbour each have every other channel of both tokens: each takes one token.
    ELEMENT* row = target + (tile * TILE + 8 * thalf + 2 * quad + odd_lane) * HEAD_DIM;
#pragma unroll
    for (int run = 0; run < OF_VALUE / 4; ++run) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * run + i;
        const float kept = odd_lane ? x[1][at] : x[0][at];
        const float given = __shfl_xor_sync(~0u, odd_lane ? x[0][at] : x[1][at], 4);
        pairs[i] = packed(odd_lane ? given : kept, odd_lane ? kept : given, ELEMENT());
      }
      *reinterpret_cast<uint4*>(row + value_channel(2 * run, 0, group & 6)) =
          make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    unpack(const __grid_constant__ Params params) {
  const int tile = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.y;
  const uint8_t* whole =
      params.pages + params.slots[blockIdx.x] * static_cast<int64_t>(P::page_bytes(params.kv_heads));
  const uint8_t* page = whole + static_cast<int64_t>(head) * P::head_bytes;
  const uint8_t* norms =
      SCALING == 2 ? whole + static_cast<int64_t>(params.kv_heads) * P::head_bytes
                   : page + P::norms;
  const float* sigma = params.sigma;
  if (sigma != nullptr && params.sigma_rows > 1) sigma += head * HEAD_DIM;
  const int64_t at = blockIdx.x * params.page_stride + head * params.head_stride;
  unpack_keys(page, norms, tile, sigma, params.keys + at, lane);
  unpack_values(page, tile, params.values + at, lane);
}
