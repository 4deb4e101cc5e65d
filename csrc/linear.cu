// linear: a few rows times weight matrices, y = x W^T, as in a decode step: W is read once, at the
// speed of memory. On the way in x is normalized (RMSNorm), on the way out a bias is added, or the
// residual stream, or two products become silu(gate) * up.
//
// Every warp takes a run of outputs and reads their rows of W in pieces, DEPTH of which are on their
// way at any time. The first ones are asked for before the kernel that makes x has ended
// (overlap.cuh): memory stays busy between kernels. Rounding is that of the separate operations: every
// product, norm and sum is rounded to ELEMENT where transformers' modules round it.
//
// Compiled with: ROWS (1 to 4), GATED (1: weights[0] is the gate's, weights[1] the other's), ELEMENT
// (__half, __nv_bfloat16), WARPS, DEPTH (at most 32), PIECE (elements, a multiple of 256), BULK
// (copy.cuh).

#include "overlap.cuh"
#include "place.cuh"
#include "product.cuh"

struct Params {
  const ELEMENT* x;           // (ROWS, width)
  const ELEMENT* norm;        // (width) weight of the RMSNorm; null: x is taken as it is
  const ELEMENT* weights[3];  // (outputs[i], width)
  const ELEMENT* biases[3];   // (outputs[i]), or null
  const ELEMENT* residual;    // (ROWS, total) to be added, or null
  ELEMENT* output;            // (ROWS, total)
  int outputs[3];
  int total, width;  // width: a multiple of 256
  float epsilon;     // of the norm
};

__device__ __forceinline__ void request(const Params& params, const Cursor<SIDES>& at, uint8_t* target,
                                        uint64_t* barrier, int lane) {
  const ELEMENT* row = Place(params, at.output, at.side).weights(params);
  request_piece(row, at.start, params.width, target, barrier, lane);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) linear(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ uint64_t full[WARPS][DEPTH], rows;
  __shared__ float sums[WARPS][ROWS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, width = params.width;
  uint8_t* ring = memory + warp * DEPTH * PIECE_BYTES;
  ELEMENT* x = reinterpret_cast<ELEMENT*>(memory + WARPS * DEPTH * PIECE_BYTES);
  ELEMENT* norm = x + ROWS * width;

  const int64_t number = blockIdx.x * WARPS + warp, warps = gridDim.x * WARPS;
  const int first = number * params.total / warps, last = (number + 1) * params.total / warps;
  if (lane < DEPTH) barrier_init(&full[warp][lane]);
  if (threadIdx.x == 0) barrier_init(&rows);
#if BULK
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  __syncwarp();
  Cursor<SIDES> ahead(first);
#pragma unroll 1
  for (int slot = 0; slot < DEPTH && ahead.output < last; ++slot, ahead.next(width))
    request(params, ahead, ring + slot * PIECE_BYTES, &full[warp][slot], lane);
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
    const Place place(params, output, 0);
    const int64_t at = static_cast<int64_t>(lane) * params.total + output;
    float bias = 0.0f, residual = 0.0f, products[SIDES];
    if (params.biases[place.matrix] != nullptr)
      bias = static_cast<float>(params.biases[place.matrix][place.row]);
    if (lane < ROWS && params.residual != nullptr)
      residual = static_cast<float>(params.residual[at]);
#pragma unroll
    for (int side = 0; side < SIDES; ++side) {
      float dots[ROWS] = {};
      for (int start = 0; start < width; start += PIECE) {
        const uint8_t* piece = ring + slot * PIECE_BYTES;
        barrier_wait(&full[warp][slot], parity);
        multiply_piece(dots, piece, x, start, width, lane);
        __syncwarp();
        if (ahead.output < last) {
          request(params, ahead, ring + slot * PIECE_BYTES, &full[warp][slot], lane);
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
    if (lane < ROWS) {
      float y = rounded(products[0] + bias);
      if (GATED) y = gated(products[0], products[SIDES - 1]);
      if (params.residual != nullptr) y += residual;
      params.output[at] = ELEMENT(y);
    }
  }
}
