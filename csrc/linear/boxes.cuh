// Boxes of quantized weights in shared memory: GRAIN rows of a matrix and 256 bytes of each row,
// with their scales and zero points. The columns of a box are a span.
//
// Compiled with: GRAIN (16), the macros of matrices.cuh and pieces.cuh (WEIGHT_BITS 8 or 4).
#pragma once

#include "common/pieces.cuh"
#include "linear/grain.cuh"

constexpr int BOX_ROW = 256;  // bytes
constexpr int SPAN = BOX_ROW / weight_bytes(PIECE);  // pieces
constexpr int COLUMNS_OF_SCALE = WEIGHT_BITS == 4 ? GROUP_COLUMNS : SCALE_COLUMNS;
constexpr int SPAN_SCALES = SPAN * PIECE / COLUMNS_OF_SCALE;  // of a row of a box
constexpr int SCALES_AT = GRAIN * BOX_ROW;                    // in a stage
constexpr int ZEROS_AT = SCALES_AT + GRAIN * SPAN_SCALES * int(sizeof(SCALE));
// Bytes of a stage: a box with its scales and, with INT4, its zero points.
constexpr int STAGE =
    (ZEROS_AT + (WEIGHT_BITS == 4 ? GRAIN * SPAN_SCALES : 0) + 127) / 128 * 128;
constexpr int TILE = 8;              // rows of a product
constexpr int TILES = GRAIN / TILE;  // of a box
static_assert(GRAIN == 16, "two tiles; lanes 0 to 15 of a warp request the scales of one row each");

// GRAIN rows of a matrix, from `row` on, whose weights are copied together.
struct Box {
  int matrix, row;
};

// Copy BYTES to shared memory asynchronously: any power of two from 4 to 16, or a multiple of 16.
template <int BYTES>
__device__ __forceinline__ void copy_row(uint32_t target, const void* from) {
  constexpr int AT_ONCE = BYTES < 16 ? BYTES : 16;
#pragma unroll
  for (int at = 0; at < BYTES; at += AT_ONCE)
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(target + at),
                 "l"(static_cast<const uint8_t*>(from) + at), "n"(AT_ONCE)
                 : "memory");
}

// Request the scales and zero points of a box in a span; called by all lanes of a warp. Rows beyond
// the matrix, whose products are not used, take those of the last row.
__device__ __forceinline__ void request_scales(const Matrices& matrices, const Box& box, int span,
                                               uint32_t stage, int lane) {
  if (lane >= GRAIN) return;
  const int row = min(box.row + lane, matrices.outputs[box.matrix] - 1);
  const int count = matrices.width / COLUMNS_OF_SCALE;
#if WEIGHT_BITS == 4
  const int64_t first = static_cast<int64_t>(row) * count + span * SPAN_SCALES;
  copy_row<SPAN_SCALES>(stage + ZEROS_AT + lane * SPAN_SCALES, matrices.zeros[box.matrix] + first);
#else
  const int64_t first = (row >> matrices.shifts[box.matrix]) * count + span * SPAN_SCALES;
#endif
  constexpr int BYTES = SPAN_SCALES * sizeof(SCALE);
  copy_row<BYTES>(stage + SCALES_AT + lane * BYTES, matrices.scales[box.matrix] + first);
}

template <int NUMBER>
__device__ __forceinline__ void load_shared(uint32_t (&words)[NUMBER], uint32_t from) {
  if constexpr (NUMBER == 4)
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(from));
  else if constexpr (NUMBER == 2)
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "r"(from));
  else
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(words[0]) : "r"(from));
}
