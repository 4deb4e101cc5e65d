// quantize_rows: rows of x in FP8 (e4m3), with a scale for each block of 128 columns: the block's
// largest magnitude becomes the largest code. Divisions are rounded as in PyTorch. Half a warp
// quantizes a block, eight elements per thread. Rows beyond the last become zeros.
//
// Compiled with: ELEMENT (__half, __nv_bfloat16); sm_89 and newer.

#include "common/overlap.cuh"
#include "common/rounding.cuh"

constexpr int THREADS = 256, BLOCK = 128, EACH = 8;
constexpr float LARGEST = 448.0f;

struct Params {
  const ELEMENT* x;  // (rows, width)
  uint8_t* codes;    // (padded, width)
  float* scales;     // (width / BLOCK, padded)
  int rows, padded;
  int width;         // a multiple of BLOCK
};

// Codes of two numbers; those beyond the range become the largest code, and NaN remains NaN.
__device__ __forceinline__ uint32_t codes_of(float low, float high) {
  uint32_t codes;
  asm("{ .reg .b16 two; cvt.rn.satfinite.e4m3x2.f32 two, %1, %2; cvt.u32.u16 %0, two; }"
      : "=r"(codes)
      : "f"(high), "f"(low));
  return codes;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    quantize_rows(const __grid_constant__ Params params) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x) * EACH;
  const int64_t row = at / params.width;
  const int column = at % params.width;
  let_next_begin();
  wait_for_previous();
  if (row >= params.padded) return;
  uint4 eight = {};
  if (row < params.rows) eight = load16(params.x + at);
  const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
  float2 pairs[4];
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    pairs[i] = unpacked(words[i], ELEMENT());
    largest = fmaxf(largest, fmaxf(fabsf(pairs[i].x), fabsf(pairs[i].y)));
  }
  const uint32_t half = 0xffffu << (threadIdx.x & 16);
#pragma unroll
  for (int step = BLOCK / EACH / 2; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(half, largest, step));
  const float scale = largest > 0.0f ? __fdiv_rn(largest, LARGEST) : 1.0f;
  uint32_t codes[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    codes[i] = codes_of(__fdiv_rn(pairs[i].x, scale), __fdiv_rn(pairs[i].y, scale));
  *reinterpret_cast<uint2*>(params.codes + at) = {codes[0] | codes[1] << 16,
                                                  codes[2] | codes[3] << 16};
  if (column % BLOCK == 0)
    params.scales[static_cast<int64_t>(column / BLOCK) * params.padded + row] = scale;
}
