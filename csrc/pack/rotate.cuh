// The rotation of keys and values as matrix products: 16-bit rows in shared memory -> lines of
// accumulators (fit.cuh). The factor UNIT, with which the rotation preserves lengths, is not
// applied.
//
// Compiled with, in addition to page.cuh's macros: ELEMENT (__half, __nv_bfloat16), ROTATE.
#pragma once

#include "common/hadamard.cuh"
#include "common/mma.cuh"
#include "common/rows.cuh"
#include "pack/fit.cuh"

constexpr int KSTEPS = HEAD_DIM / TILE;
constexpr int RUNS = HEAD_DIM / 32;  // runs of 32 channels: two steps of a product
constexpr float UNIT = ROTATE ? HADAMARD_NORM : 1.0f;

// Entry (in, out) of the rotation has the sign of the parity of in & out. The signs of entries (in,
// out) and (in + 1, out) are the sign bits of two 16-bit numbers: for several bits of `in`, they
// are the exclusive or of the signs for each bit and of pair_signs(out).
__device__ __forceinline__ uint32_t signs(bool in, bool out) {
  return in && out ? 0x80008000u : 0u;
}
__device__ __forceinline__ uint32_t pair_signs(int out) { return out & 1 ? 0x80000000u : 0u; }

// Two entries of a column of the rotation, or of the identity: `sizes` with signs.
__device__ __forceinline__ uint32_t entries(int in, int out, uint32_t sizes, uint32_t signs) {
  if (ROTATE) return sizes ^ signs;
  return in == (out & ~1) ? sizes & (out & 1 ? 0xffff0000u : 0x0000ffffu) : 0u;
}

// Rotate all tokens, for the 16 channels of a warp: x[tile][half of the channels][c]. sizes: sizes
// of the rows of the rotation, in pairs.
__device__ __forceinline__ void rotate_keys(float (&x)[TILES][2][4], const uint8_t* rows,
                                            const uint32_t* sizes, int warp, int lane) {
  const int group = lane >> 2, quad = lane & 3, out = 16 * warp + group;
  const uint32_t row = shared_address(rows) + lane % 16 * ROW_BYTES;
  const uint32_t lane_signs =
      signs(quad & 1, group & 2) ^ signs(quad & 2, group & 4) ^ pair_signs(group);
#pragma unroll
  for (int step = 0; step < KSTEPS; ++step) {
    const uint32_t sign = lane_signs ^ signs(step & 1, warp & 1) ^ signs(step & 2, warp & 2) ^
                          signs(step & 4, warp & 4);
    uint32_t turn[2][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t size = sizes[8 * step + 4 * half + quad];
#pragma unroll
      for (int side = 0; side < 2; ++side)
        turn[side][half] = entries(16 * step + 8 * half + 2 * quad, out + 8 * side, size,
                                   sign ^ signs(half, side));
    }
    const uint32_t at = row + ((2 * step + lane / 16) ^ lane % 8) * 16;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      const uint4 a = load_fragments(at + tile * TILE * ROW_BYTES);
#pragma unroll
      for (int side = 0; side < 2; ++side) {
        if (step == 0)
          product(x[tile][side], a.x, a.y, a.z, a.w, turn[side][0], turn[side][1], ELEMENT());
        else
          mma(x[tile][side], a.x, a.y, a.z, a.w, turn[side][0], turn[side][1], ELEMENT());
      }
    }
  }
}

// Rotate all channels of the 16 tokens of a tile: x[channel tile][half of the tokens][c]. One
// product per run of 32 channels, then the rest of the rotation over the runs.
__device__ __forceinline__ void rotate_values(float (&x)[CHANNEL_TILES][2][4], const uint8_t* rows,
                                              int tile, int lane) {
  const int group = lane >> 2, quad = lane & 3;
  const uint32_t ones = packed(1.0f, 1.0f, ELEMENT());
  uint32_t turn[2][2][4];  // [step of output channels][step of input channels]
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int step = i / 8, from = i / 4 % 2, in_half = i / 2 % 2, out_half = i % 2;
    // Bits 1 to 4 of the input channel come from quad, in_half and from.
    turn[step][from][i % 4] =
        entries(16 * from + 8 * in_half + 2 * quad, value_channel(step, out_half, group), ones,
                signs(quad & 1, out_half) ^ signs(quad & 2, step) ^ signs(in_half, group & 2) ^
                    signs(from, group & 4) ^ pair_signs(group));
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
      const int token = 16 * tile + 8 * half + lane % 8;
      const uint4 b =
          load_fragments(shared_address(rows + chunk_offset(token, 4 * run + lane / 8)));
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const uint32_t(&near)[4] = turn[step][0];
        const uint32_t(&far)[4] = turn[step][1];
        float(&sum)[4] = x[2 * run + step][half];
        product(sum, near[0], near[1], near[2], near[3], b.x, b.y, ELEMENT());
        mma(sum, far[0], far[1], far[2], far[3], b.z, b.w, ELEMENT());
      }
    }
#if ROTATE
#pragma unroll
  for (int apart = 2; apart < CHANNEL_TILES; apart *= 2)
#pragma unroll
    for (int at = 0; at < CHANNEL_TILES; ++at)
      if (!(at & apart))
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          float &a = x[at][i / 4][i % 4], &b = x[at + apart][i / 4][i % 4];
          const float sum = a + b;
          b = a - b, a = sum;
        }
#endif
}
