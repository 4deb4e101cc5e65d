// linear: a few rows times weight matrices, y = x W^T, as in a decode step: W is read once, at
// memory bandwidth. x is normalized first (RMSNorm); then a bias or the residual stream is added to
// y, or two products become silu(gate) * up.
//
// Every warp computes a run of outputs and reads their rows of W in pieces, with DEPTH pieces in
// flight at any time. The first pieces are requested before the kernel that computes x has ended
// (overlap.cuh), so memory stays busy between kernels. Rounding is the same as in separate
// operations: every product, norm and sum is rounded to ELEMENT where transformers' modules round
// it.
//
// Compiled with: GATED, ELEMENT and WEIGHT_BITS (matrices.cuh; 16, 8), ROWS (1 to 4), WARPS, DEPTH
// (at most 32), PIECE and CENTERED (product.cuh), USE_TMA (copy.cuh).

#include "common/overlap.cuh"
#include "common/product.cuh"
#include "linear/matrices.cuh"

struct Params {
  const ELEMENT* x;     // (ROWS, width), width a multiple of 256
  const ELEMENT* norm;  // (width) weight of the RMSNorm; null: x is not normalized
  Matrices matrices;
  float epsilon;        // of the norm
};

__device__ __forceinline__ void request(const Matrices& matrices, const Cursor<SIDES>& at,
                                        uint8_t* target, uint64_t* barrier, int lane) {
  const WEIGHT* row = WeightRow(matrices, at.output, at.side).weights(matrices);
  request_piece(row, at.start, matrices.width, target, barrier, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    linear(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ uint64_t full[WARPS][DEPTH], rows;
  __shared__ float sums[WARPS][ROWS];
  const Matrices& matrices = params.matrices;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = matrices.width;
  uint8_t* ring = memory + warp * DEPTH * PIECE_BYTES;
  ELEMENT* x = reinterpret_cast<ELEMENT*>(memory + WARPS * DEPTH * PIECE_BYTES);
  ELEMENT* norm = x + ROWS * width;

  const int64_t number = blockIdx.x * WARPS + warp, warps = gridDim.x * WARPS;
  const int first = number * matrices.total / warps;
  const int last = (number + 1) * matrices.total / warps;
  if (lane < DEPTH) barrier_init(&full[warp][lane]);
  if (threadIdx.x == 0) barrier_init(&rows);
#if USE_TMA
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  __syncwarp();
  Cursor<SIDES> ahead(first);
#pragma unroll 1
  for (int slot = 0; slot < DEPTH && ahead.output < last; ++slot, ahead.next(width))
    request(matrices, ahead, ring + slot * PIECE_BYTES, &full[warp][slot], lane);
  if (params.norm != nullptr)
    for (int i = threadIdx.x; i < width / 8; i += THREADS)
      *reinterpret_cast<uint4*>(norm + i * 8) = load16(params.norm + i * 8);
  let_next_begin();
  __syncthreads();
  wait_for_previous();
  if (warp == 0) request_rows(params.x, ROWS * width, x, &rows, lane);
  take_rows(width, params.norm != nullptr, params.epsilon, x, norm, &rows, sums);

  int slot = 0;
  uint32_t parity = 0;
  for (int output = first; output < last; ++output) {
    const int64_t at = static_cast<int64_t>(lane) * matrices.total + output;
    const float bias = WeightRow(matrices, output, 0).bias(matrices);
    float residual = 0.0f, products[SIDES];
    if (lane < ROWS && matrices.residual != nullptr)
      residual = static_cast<float>(matrices.residual[at]);
#pragma unroll
    for (int side = 0; side < SIDES; ++side) {
      float dots[ROWS] = {};
      const SCALE* scales = WeightRow(matrices, output, side).scales(matrices);
      for (int start = 0; start < width; start += PIECE) {
        const uint8_t* piece = ring + slot * PIECE_BYTES;
        const PieceScales of_piece(scales, start, width, lane);
        barrier_wait(&full[warp][slot], parity);
        multiply_piece(dots, piece, x, start, width, lane, of_piece);
        __syncwarp();
        if (ahead.output < last) {
          request(matrices, ahead, ring + slot * PIECE_BYTES, &full[warp][slot], lane);
          ahead.next(width);
        }
        if (++slot == DEPTH) slot = 0, parity ^= 1;
      }
      products[side] = 0.0f;
#pragma unroll
      for (int row = 0; row < ROWS; ++row) {
        const float dot = warp_sum(dots[row]);
        if (lane == row) products[side] = dot;
      }
    }
    if (lane < ROWS) finish(matrices, at, products, bias, residual);
  }
}
