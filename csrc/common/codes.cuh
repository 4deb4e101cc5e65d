// Codes of one tile of 16 tokens of a page, as a lane of a warp stores them.
#pragma once

#include "common/page.cuh"

// Mask of a bit place of a byte (lowest first), in two bytes of a word.
template <int LOW>
__device__ constexpr uint32_t bit_mask(int place) {
  return ((1u << LOW) - 1u) * 0x00010001u << (LOW * place);
}

// Bit place, within its byte, of the code of a step (k-step of keys, channel tile of values) and a
// half (of 8 channels).
template <int LOW>
__device__ __forceinline__ constexpr int bit_place(int step, int half) {
  return LOW == 2 ? 2 * (step & 1) + half : half;
}

// Bits of x where `mask` is set, else bits of y. In assembly, because the compiler would split this
// one operation for each of several masks applied to the result.
__device__ __forceinline__ uint32_t chosen(uint32_t x, uint32_t y, uint32_t mask) {
  uint32_t z;
  asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(z) : "r"(x), "r"(y), "r"(mask));
  return z;
}

// COUNT words of a lane: up to four consecutive words per lane, then those of the next lane.
template <int COUNT>
__device__ __forceinline__ void load_words(uint32_t (&words)[COUNT], const uint8_t* source,
                                           int lane) {
  if constexpr (COUNT == 1) {
    words[0] = reinterpret_cast<const uint32_t*>(source)[lane];
  } else if constexpr (COUNT == 2) {
    const uint2 pair = reinterpret_cast<const uint2*>(source)[lane];
    words[0] = pair.x, words[1] = pair.y;
  } else {
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i) {
      const uint4 four = load16(source + i * 512 + lane * 16);
      words[4 * i] = four.x, words[4 * i + 1] = four.y;
      words[4 * i + 2] = four.z, words[4 * i + 3] = four.w;
    }
  }
}

template <int COUNT>
__device__ __forceinline__ void save_words(uint8_t* target, const uint32_t (&words)[COUNT],
                                           int lane) {
  if constexpr (COUNT == 1) {
    reinterpret_cast<uint32_t*>(target)[lane] = words[0];
  } else if constexpr (COUNT == 2) {
    reinterpret_cast<uint2*>(target)[lane] = make_uint2(words[0], words[1]);
  } else {
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i)
      reinterpret_cast<uint4*>(target + i * 512)[lane] =
          make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
  }
}

// Write one byte of each of a lane's words.
template <int COUNT>
__device__ __forceinline__ void save_bytes(uint8_t* target, const uint32_t (&words)[COUNT],
                                           int lane, int byte) {
  // Consecutive words of a lane.
  constexpr int RUN_WORDS = COUNT < 4 ? COUNT : 4;
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    target[(i / RUN_WORDS * 32 * RUN_WORDS + lane * RUN_WORDS + i % RUN_WORDS) * 4 + byte] =
        static_cast<uint8_t>(words[i] >> (8 * byte));
}

template <int BITS>
struct Codes {
  using Bytes = CodeBytes<BITS>;
  static constexpr int LOW = Bytes::LOW;
  uint32_t words[Bytes::WORDS];
  uint32_t high[Bytes::HIGH_WORDS];  // for codes of 3 bits

  // codes: of all tokens of a page.
  __device__ __forceinline__ void load(const uint8_t* codes, int tile, int lane) {
    load_words(words, codes + tile * Bytes::TILE_BYTES, lane);
    if constexpr (BITS == 3)
      load_words(high, codes + Bytes::HIGH + tile * Bytes::HIGH_TILE_BYTES, lane);
  }

  __device__ __forceinline__ void save(uint8_t* codes, int tile, int lane) const {
    save_words(codes + tile * Bytes::TILE_BYTES, words, lane);
    if constexpr (BITS == 3)
      save_words(codes + Bytes::HIGH + tile * Bytes::HIGH_TILE_BYTES, high, lane);
  }

  // Write only one byte of each word: the codes of one token.
  __device__ __forceinline__ void save_byte(uint8_t* codes, int tile, int lane, int byte) const {
    save_bytes(codes + tile * Bytes::TILE_BYTES, words, lane, byte);
    if constexpr (BITS == 3)
      save_bytes(codes + Bytes::HIGH + tile * Bytes::HIGH_TILE_BYTES, high, lane, byte);
  }

  // A fragment's register: two codes of a step and half, from the lower or the upper byte of each
  // half of their word.
  template <int STEP, int HALF, bool UPPER>
  __device__ __forceinline__ uint32_t get() const {
    constexpr int place = bit_place<LOW>(STEP, HALF);
    uint32_t word = words[LOW == 2 ? STEP / 2 : STEP];
    if constexpr (BITS == 3) {
      // A word of high bits covers four steps: bit 2 place of a byte belongs to the first two
      // steps, bit 2 place + 1 to the last two. It moves to bit 2 place + 2, which is free for
      // every other place, so two places of all four bytes are joined at once. The word is rotated,
      // because the last place would need bit 32.
      constexpr int pair = STEP / 2 % 2;
      constexpr uint32_t low = HALF ? 0xccccccccu : 0x33333333u;
      const uint32_t bits = high[STEP / 4];
      word = chosen(word, __funnelshift_l(bits, bits, 2 - pair), low);
      return (UPPER ? __funnelshift_r(word, word, 8) : word) & 0x00070007u << (2 * place);
    }
    return (UPPER ? word >> 8 : word) & bit_mask<LOW>(place);
  }
};

// Codes of a step and half as bytes: for channels 2 quad and 2 quad + 1, the codes of token group
// (bytes 0 and 2) and of token group + 8 (bytes 1 and 3). Each byte also has other bits, which
// in_byte removes.
template <int BITS, int STEP, int HALF>
__device__ __forceinline__ uint32_t code_bytes(const Codes<BITS>& codes) {
  if constexpr (BITS == 4) return codes.words[STEP];
  const uint32_t word = codes.words[STEP / 2];
  if constexpr (BITS == 2) return word;
  // Move the high bit of a place to the low bits of the next place, for two places at once.
  constexpr int pair = STEP / 2 % 2;
  const uint32_t high = codes.high[STEP / 4];
  return chosen(word >> (2 * HALF), HALF ? high >> pair : high << (2 - pair), 0x33333333u);
}

// Place of the lowest bit of a code that in_byte returns: the highest place, because shifts to the
// left are multiplications, which use another pipe than masks. With more channels, it is a place at
// which sums of products with bytes are below 2^22 (FIXED_ZERO).
template <int BITS>
constexpr int HIGHEST_PLACE = HEAD_DIM <= 128 && BITS == 2 ? 6 : 4;
template <int BITS>
constexpr int BYTE_PLACE =
    HEAD_DIM * ((1 << BITS) - 1) << HIGHEST_PLACE<BITS> <= 1 << 15 ? HIGHEST_PLACE<BITS> : 0;

template <int BITS, int STEP, int HALF>
__device__ __forceinline__ uint32_t in_byte(uint32_t bytes) {
  constexpr int at = BITS == 2 ? 2 * bit_place<2>(STEP, HALF) : 4 * (BITS == 3 ? STEP % 2 : HALF);
  constexpr int up = BYTE_PLACE<BITS> - at;
  return (up < 0 ? bytes >> -up : bytes * (1u << up)) &
         0x01010101u * ((1u << BITS) - 1u) << BYTE_PLACE<BITS>;
}

// The code of a step and half of its channels, in byte `byte` of its word: half of 8 tokens + 2 *
// (odd element of a pair), where pairs are of channels (keys) or of tokens (values).
template <int BITS>
__device__ __forceinline__ float code_of(const Codes<BITS>& codes, int step, int half, int byte) {
  constexpr int LOW = Codes<BITS>::LOW, STEPS_OF_WORD = LOW == 2 ? 2 : 1;
  const int place = bit_place<LOW>(step, half);
  uint32_t code = codes.words[step / STEPS_OF_WORD] >> (8 * byte + LOW * place);
  code &= (1u << LOW) - 1;
  if constexpr (BITS == 3) {
    const uint32_t high = codes.high[step / 4] >> (8 * byte + 2 * place + step / 2 % 2);
    code |= (high & 1u) << 2;
  }
  // 2^23 + code as a float, minus 2^23: as exact as a conversion, but cheaper.
  return __uint_as_float(0x4b000000u | code) - 8388608.0f;
}
