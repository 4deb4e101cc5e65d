// dequantize: a quantized weight matrix in 16 bits, for products of many rows, which a library
// computes. Each thread converts eight neighbours of a row, and rounds once.
//
// Compiled with: ELEMENT (__half, __nv_bfloat16), WEIGHT_BITS (8, 4) and FLOAT_SCALES
// (common/weights.cuh).

#include "common/overlap.cuh"
#include "common/weights.cuh"

constexpr int THREADS = 256, EACH = 8;

struct Params {
  const uint8_t* codes;  // (rows, width)
  const SCALE* scales;   // (rows / rows_per_scale, width / columns_per_scale), rounded up
  const uint8_t* zeros;  // INT4: like the scales
  ELEMENT* weights;      // (rows, width)
  int64_t rows;
  int width;             // a multiple of EACH
  int rows_per_scale;
  int columns_per_scale; // a multiple of EACH
};

#if WEIGHT_BITS == 8
// Return the two elements times a scale.
__device__ __forceinline__ uint32_t scaled(uint32_t two, float scale) {
  const float2 pair = unpacked(two, ELEMENT());
  const ELEMENT found[2] = {ELEMENT(pair.x * scale), ELEMENT(pair.y * scale)};
  return *reinterpret_cast<const uint32_t*>(found);
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    dequantize(const __grid_constant__ Params params) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) * EACH;
  const int64_t row = at / params.width;
  const int column = at % params.width;
  let_next_begin();
  wait_for_previous();
  if (row >= params.rows) return;
  const int columns = (params.width + params.columns_per_scale - 1) / params.columns_per_scale;
  const int64_t place =
      row / params.rows_per_scale * columns + column / params.columns_per_scale;
  const uint8_t* from = params.codes + at * WEIGHT_BITS / 8;
  uint4 eight;
#if WEIGHT_BITS == 8
  const float scale = params.scales[place];
  const uint2 codes = *reinterpret_cast<const uint2*>(from);
  const uint2 low = elements_of(codes.x, ELEMENT()), high = elements_of(codes.y, ELEMENT());
  eight = {scaled(low.x, scale), scaled(low.y, scale), scaled(high.x, scale),
           scaled(high.y, scale)};
#else
  const Group4 group(params.scales[place], params.zeros[place]);
  const uint32_t word = *reinterpret_cast<const uint32_t*>(from);
  eight = {group.weights(word), group.weights(word >> 4), group.weights(word >> 8),
           group.weights(word >> 12)};
#endif
  *reinterpret_cast<uint4*>(params.weights + at) = eight;
}
