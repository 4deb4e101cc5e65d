// append: rows of new keys and values -> slots of tokens in 16-bit precision. One thread block per
// written token.
//
// Bytes are copied unchanged, UNIT at a time, so every dtype and head_dim is supported. NaN and
// infinity are recognized by their exponent, which is all ones.
//
// Compiled with: UNIT (bytes that a thread copies at a time: 16, 8 or 4), ELEMENT_BYTES (2 or 4),
// EXPONENT (bit mask of an element's exponent; for 2-byte elements, twice in 32 bits).

#include "common/overlap.cuh"
#include "common/types.cuh"

constexpr int WORDS = UNIT / 4;

struct Params {
  const uint8_t* keys;  // (batch, KV heads, tokens, row_bytes), strides in bytes
  const uint8_t* values;
  uint8_t* recent;      // (slots, 2, KV heads, row_bytes)
  const int* writes;    // (n, 3): row, token, slot (-1: nothing to do)
  int* not_finite;      // set to 1 if a key or value is NaN or infinite
  int64_t key_stride[3];
  int64_t value_stride[3];
  int kv_heads, row_bytes;
  int beside;           // whether the preceding kernel is decode, which reads none of these slots
};

struct alignas(UNIT) Unit {
  uint32_t words[WORDS];

  __device__ bool is_finite() const {
    bool finite = true;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const uint32_t bits = words[i] & EXPONENT;
      if (ELEMENT_BYTES == 4) {
        finite = finite && bits != EXPONENT;
      } else {
        finite = finite && (bits & 0xffff) != (EXPONENT & 0xffff) && bits >> 16 != EXPONENT >> 16;
      }
    }
    return finite;
  }
};

__device__ __forceinline__ void copy_token(const Params& params, int row, int token, int slot) {
  const int units = params.row_bytes / UNIT, all = 2 * params.kv_heads * units;
  uint8_t* target = params.recent + static_cast<int64_t>(slot) * 2 * params.kv_heads *
                                        params.row_bytes;
  bool finite = true;
#pragma unroll 4
  for (int i = threadIdx.x; i < all; i += blockDim.x) {
    const int at = i % units * UNIT, side_head = i / units;
    const bool is_value = side_head >= params.kv_heads;
    const int head = is_value ? side_head - params.kv_heads : side_head;
    const int64_t* stride = is_value ? params.value_stride : params.key_stride;
    const uint8_t* source = (is_value ? params.values : params.keys) + row * stride[0] +
                            head * stride[1] + token * stride[2] + at;
    const Unit unit = *reinterpret_cast<const Unit*>(source);
    finite = finite && unit.is_finite();
    *reinterpret_cast<Unit*>(target + i * UNIT) = unit;
  }
  if (!finite) *params.not_finite = 1;
}

extern "C" __global__ void append(const __grid_constant__ Params params) {
  let_next_begin();
  if (!params.beside) wait_for_previous();
  const int* write = params.writes + blockIdx.x * 3;
  const int row = write[0], token = write[1], slot = write[2];
  if (slot >= 0) copy_token(params, row, token, slot);
  wait_for_previous();
}
