// experts: a mixture of experts for a few rows, each row by the experts that it chooses. Two launches
// like those of linear.cu, of which the first also routes:
//
//   DOWN 0: out[row][k] = silu(x Wg^T) * (x Wu^T), of the k-th chosen expert, x normalized
//   DOWN 1: out[row] = residual[row] + sum over k of share[row][k] * (x[row][k] Wd^T)
//
// A row's shares are the softmax of its router's logits, of which the CHOSEN largest count. Which
// weights are to be read is known only after the launch in front, so none are read ahead of it.
//
// Compiled with: DOWN, CHOSEN (experts of a row, at most 32), EXPERTS, NORMALIZE (1: shares add up to
// 1), ROWS (1 to 4), and as product.cuh says.

#include "overlap.cuh"
#include "product.cuh"

constexpr int SIDES = DOWN ? CHOSEN : 2;
constexpr int LOGITS = (EXPERTS + 31) / 32;  // of a lane

struct Params {
  const ELEMENT* x;         // (ROWS, width), or with DOWN (ROWS, CHOSEN, width)
  const ELEMENT* norm;      // (width), not with DOWN
  const ELEMENT* logits;    // (ROWS, EXPERTS), not with DOWN
  const ELEMENT* weights;   // (EXPERTS, outputs, width): first the gates' outputs, then the others
  const ELEMENT* residual;  // (ROWS, total), with DOWN
  ELEMENT* output;          // (ROWS, CHOSEN, total), or with DOWN (ROWS, total)
  int* chosen;              // (ROWS, CHOSEN): written by the first launch, read by the second
  float* shares;            // likewise
  int total, width;         // outputs of a row and expert; width: a multiple of 256
  float epsilon;
};

// The largest logits of a row, the lower index first where two are equal; by a warp.
__device__ __forceinline__ void route(const ELEMENT* logits, int* chosen, float* shares, int lane) {
  float share[LOGITS], largest = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < LOGITS; ++i) {
    const int expert = i * 32 + lane;
    share[i] = expert < EXPERTS ? static_cast<float>(logits[expert]) : -INFINITY;
    largest = fmaxf(largest, share[i]);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
#pragma unroll
  for (int i = 0; i < LOGITS; ++i) sum += share[i] = expf(share[i] - largest);
  sum = warp_sum(sum);
  float mine = 0.0f, all = 0.0f;
  int which = 0;
#pragma unroll 1
  for (int k = 0; k < CHOSEN; ++k) {
    float best = -1.0f;
    int at = 0;
#pragma unroll
    for (int i = 0; i < LOGITS; ++i)
      if (share[i] > best) best = share[i], at = i * 32 + lane;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(~0u, best, step);
      const int place = __shfl_xor_sync(~0u, at, step);
      if (other > best || (other == best && place < at)) best = other, at = place;
    }
#pragma unroll
    for (int i = 0; i < LOGITS; ++i)
      if (at == i * 32 + lane) share[i] = -1.0f;
    best /= sum;
    all += best;
    if (lane == k) mine = best, which = at;
  }
  if (lane < CHOSEN) {
    // Logits that are NaN choose nothing: an expert that exists, and NaN for its share.
    chosen[lane] = min(max(which, 0), EXPERTS - 1);
    shares[lane] = rounded(NORMALIZE ? mine / all : mine);
  }
}

// A unit of work is an output: of DOWN a row's, else of a row and one of its experts.
struct Place {
  int item, output;

  __device__ __forceinline__ Place(int unit, int total)
      : item(unit / total), output(unit % total) {}

  __device__ __forceinline__ const ELEMENT* weights(const Params& params, const int* chosen,
                                                    int side) const {
    const int expert = chosen[DOWN ? item * CHOSEN + side : item];
    const int64_t row = DOWN ? static_cast<int64_t>(expert) * params.total + output
                             : (2ll * expert + side) * params.total + output;
    return params.weights + row * params.width;
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    experts(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ uint64_t full[WARPS][DEPTH];
  __shared__ float sums[WARPS][ROWS], shares[ROWS * CHOSEN];
  __shared__ int chosen[ROWS * CHOSEN];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int width = params.width, total = params.total;
  uint8_t* ring = memory + warp * DEPTH * PIECE_BYTES;
  ELEMENT* x = reinterpret_cast<ELEMENT*>(memory + WARPS * DEPTH * PIECE_BYTES);
  ELEMENT* norm = x + (DOWN ? CHOSEN : 1) * ROWS * width;

  const int64_t number = blockIdx.x * WARPS + warp, warps = gridDim.x * WARPS;
  const int64_t units = static_cast<int64_t>(DOWN ? 1 : CHOSEN) * ROWS * total;
  const int first = number * units / warps, last = (number + 1) * units / warps;
  if (lane < DEPTH) barrier_init(&full[warp][lane]);
#if BULK
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  if (!DOWN)
    for (int i = threadIdx.x; i < width / 8; i += THREADS)
      *reinterpret_cast<uint4*>(norm + i * 8) = load16(params.norm + i * 8);
  let_next_begin();
  wait_for_previous();
  if (DOWN) {
    for (int i = threadIdx.x; i < ROWS * CHOSEN; i += THREADS)
      chosen[i] = params.chosen[i], shares[i] = params.shares[i];
  } else if (warp < ROWS) {
    int* which = chosen + warp * CHOSEN;
    float* share = shares + warp * CHOSEN;
    route(params.logits + warp * EXPERTS, which, share, lane);
    if (blockIdx.x == 0 && lane < CHOSEN) {
      params.chosen[warp * CHOSEN + lane] = which[lane];
      params.shares[warp * CHOSEN + lane] = share[lane];
    }
  }
  __syncthreads();
  Cursor<SIDES> ahead(first);
  auto request = [&](int slot) {
    const ELEMENT* row = Place(ahead.output, total).weights(params, chosen, ahead.side);
    request_piece(row, ahead.start, width, ring + slot * PIECE_BYTES, &full[warp][slot], lane);
    ahead.next(width);
  };
#pragma unroll 1
  for (int slot = 0; slot < DEPTH && ahead.output < last; ++slot) request(slot);
  take_rows(params.x, (DOWN ? CHOSEN : 1) * width, !DOWN, params.epsilon, x, norm, sums);

  int slot = 0;
  uint32_t parity = 0;
  for (int unit = first; unit < last; ++unit) {
    const Place place(unit, total);
    float y = 0.0f, gate = 0.0f;
#pragma unroll 1
    for (int side = 0; side < SIDES; ++side) {
      float dot[1] = {};
      const ELEMENT* row = x + (DOWN ? place.item * CHOSEN + side : place.item / CHOSEN) * width;
      for (int start = 0; start < width; start += PIECE) {
        barrier_wait(&full[warp][slot], parity);
        multiply_piece(dot, ring + slot * PIECE_BYTES, row, start, width, lane);
        __syncwarp();
        if (ahead.output < last) request(slot);
        if (++slot == DEPTH) slot = 0, parity ^= 1;
      }
      const float product = warp_sum(dot[0]);
      if (DOWN)
        y += rounded(rounded(product) * shares[place.item * CHOSEN + side]);
      else if (side == 0)
        gate = product;
      else
        y = gated(gate, product);
    }
    if (lane == 0) {
      if (DOWN) y = rounded(y) + static_cast<float>(params.residual[unit]);
      params.output[unit] = ELEMENT(y);
    }
  }
}
