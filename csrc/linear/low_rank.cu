// low_rank: what LoRA adapters add to products: y = products + between B^T, where between is x A^T,
// with 0 in the ranks that a row does not use. Then the residual stream is added to y, or two
// products become silu(gate) * up.
//
// A warp computes TILE outputs of up to ROWS rows on matrix units. It copies its part of B before
// the kernel that computes the products has ended. It then requests all other reads at once, since
// each access waits behind the weights of the next launch.
//
// Compiled with: GATED (1: the first half of the outputs are the gate's), ELEMENT (__half,
// __nv_bfloat16).

#include "common/mma.cuh"
#include "common/overlap.cuh"
#include "common/rounding.cuh"

constexpr int ROWS = 16;
constexpr int TILE = 8;    // outputs
constexpr int STEP = 16;   // ranks of a product
constexpr int WARPS = 4, THREADS = WARPS * 32;
constexpr int SIDES = GATED ? 2 : 1;
constexpr int MODULES = 4;  // at most

struct Params {
  const ELEMENT* products;  // (rows, SIDES * outputs)
  const ELEMENT* between;   // (rows, modules * ranks)
  const ELEMENT* up;        // (SIDES * outputs, ranks)
  const uint8_t* idle;      // (rows, ranks): 1 if the row does not use the rank of any module; or
                            // null
  const ELEMENT* residual;  // (rows, outputs) to be added, or null
  ELEMENT* output;          // (rows, outputs)
  int64_t products_stride, between_stride, idle_stride;  // between rows, in elements
  int ends[MODULES];        // where the outputs of each module end, multiples of TILE
  int rows, outputs, ranks;  // ranks of each module, a multiple of STEP
};

// L1 is bypassed: the preceding kernel writes while this one is running.
__device__ __forceinline__ uint32_t load_pair(const ELEMENT* from) {
  return __ldcg(reinterpret_cast<const uint32_t*>(from));
}

// Four elements, with 0 where the bytes of `idle` are 1.
__device__ __forceinline__ uint2 load_used(const ELEMENT* from, const uint8_t* idle) {
  uint2 four = __ldcg(reinterpret_cast<const uint2*>(from));
  if (idle == nullptr) return four;
  const uint32_t used = ~(__ldcg(reinterpret_cast<const uint32_t*>(idle)) * 0xff);
  four.x &= __byte_perm(used, 0, 0x1100);
  four.y &= __byte_perm(used, 0, 0x3322);
  return four;
}

// Columns of a product may have any order: this lane's four columns are consecutive ranks.
extern "C" __global__ void __launch_bounds__(THREADS)
    low_rank(const __grid_constant__ Params params) {
  extern __shared__ uint2 ahead[];  // (ranks / STEP, SIDES, THREADS): four ranks of an output
  const int lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int rows = params.rows, outputs = params.outputs, ranks = params.ranks;
  const int first = (blockIdx.x * WARPS + threadIdx.x / 32) * TILE;
  if (first >= outputs) return;
  for (int i = 0; i < ranks / STEP * SIDES; ++i) {
    const int64_t row = i % SIDES * outputs + first + group;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(
                     shared_address(ahead + i * THREADS + threadIdx.x)),
                 "l"(params.up + row * ranks + i / SIDES * STEP + quad * 4)
                 : "memory");
  }
  let_next_begin();
  int modules[SIDES];
#pragma unroll
  for (int side = 0; side < SIDES; ++side) {
    modules[side] = 0;
#pragma unroll
    for (int i = 0; i < MODULES - 1; ++i)
      modules[side] += side * outputs + first >= params.ends[i];
  }
  wait_for_previous();

  uint32_t products[SIDES][2] = {}, residual[2] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = group + half * 8, at = first + quad * 2;
    if (row >= rows) break;
#pragma unroll
    for (int side = 0; side < SIDES; ++side)
      products[side][half] =
          load_pair(params.products + row * params.products_stride + side * outputs + at);
    if (params.residual != nullptr)
      residual[half] = load_pair(params.residual + static_cast<int64_t>(row) * outputs + at);
  }
  float sums[SIDES][4] = {};
  asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll 4
  for (int step = 0; step < ranks / STEP; ++step)
#pragma unroll
    for (int side = 0; side < SIDES; ++side) {
      uint2 x[2] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = group + half * 8, at = step * STEP + quad * 4;
        if (row < rows)
          x[half] = load_used(
              params.between + row * params.between_stride + modules[side] * ranks + at,
              params.idle == nullptr ? nullptr : params.idle + row * params.idle_stride + at);
      }
      const uint2 up = ahead[(step * SIDES + side) * THREADS + threadIdx.x];
      mma(sums[side], x[0].x, x[1].x, x[0].y, x[1].y, up.x, up.y, ELEMENT());
    }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = group + half * 8;
    if (row >= rows) break;
    const float2 added = unpacked(residual[half], ELEMENT());
    float2 y = unpacked(products[0][half], ELEMENT());
    y = {rounded(y.x + sums[0][half * 2]), rounded(y.y + sums[0][half * 2 + 1])};
    if (GATED) {
      const float2 other = unpacked(products[SIDES - 1][half], ELEMENT());
      y = {gated(y.x, other.x + sums[SIDES - 1][half * 2]),
           gated(y.y, other.y + sums[SIDES - 1][half * 2 + 1])};
    }
    ELEMENT* const output = params.output + static_cast<int64_t>(row) * outputs + first + quad * 2;
    *reinterpret_cast<uint32_t*>(output) = packed(y.x + added.x, y.y + added.y, ELEMENT());
  }
}
