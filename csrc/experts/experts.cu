// experts: mixture of experts for a few rows, each with the experts that it chooses. Two launches
// like those of linear.cu:
//
//   DOWN 0: out[row][k] = silu(x Wg^T) * (x Wu^T) with the k-th chosen expert, x normalized
//   DOWN 1: out[row] = residual[row] + sum over k of share[row][k] * (x[row][k] Wd^T)
//
// A row's shares are the CHOSEN largest values of the softmax of its router's logits. Every thread
// block computes them itself. The first launch cannot request weights before the router has ended,
// and releases the second launch only then, so that the second can request weights at once.
//
// Compiled with: DOWN, CHOSEN (experts of a row, at most 32), EXPERTS (at most 65,536), NORMALIZE
// (1: shares add up to 1), ROWS (1 to 4), EARLY (pieces that a warp of the second launch requests
// before it waits: more would delay the last pieces of the first launch), and the macros of
// product.cuh.

#include "common/overlap.cuh"
#include "common/product.cuh"
#include "experts/logits.cuh"

constexpr int SIDES = DOWN ? CHOSEN : 2;
constexpr int KEYS = (EXPERTS + 3) / 4 * 4;  // of a row

struct Params {
  const ELEMENT* x;         // (ROWS, width), or with DOWN (ROWS, CHOSEN, width)
  const ELEMENT* norm;      // (width), not with DOWN
  const ELEMENT* logits;    // (ROWS, EXPERTS)
  const WEIGHT* weights;    // (EXPERTS, outputs, width): first the gate's outputs, then the others
  const SCALE* scales;      // FP8: (EXPERTS, outputs >> shift, width / 128), rounded up;
                            // INT4: (EXPERTS, outputs, width >> shift), at least one
  const uint8_t* zeros;     // INT4: like the scales
  const ELEMENT* residual;  // (ROWS, total), with DOWN
  ELEMENT* output;          // (ROWS, CHOSEN, total), or with DOWN (ROWS, total)
  int total, width;         // total: outputs of a row and expert; width: a multiple of 256
  int shift;                // FP8: log2 of the rows of a scale, of which `total` is a multiple;
                            // INT4: log2 of the columns of a group; 31: as wide as the matrix
  float epsilon;
};

// Find the experts of all rows, largest logit first; called by all threads.
__device__ __forceinline__ void choose(const ELEMENT* logits, uint32_t (&keys)[ROWS][KEYS],
                                       int (&chosen)[ROWS * CHOSEN]) {
  const unsigned short* bits = reinterpret_cast<const unsigned short*>(logits);
  for (int i = threadIdx.x; i < ROWS * KEYS; i += THREADS) {
    const int row = i / KEYS, expert = i % KEYS;
    // L1 is bypassed: this may run before the preceding kernel has ended.
    keys[row][expert] =
        expert < EXPERTS ? key_of(__ldcg(bits + row * EXPERTS + expert), expert) : 0;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < ROWS * EXPERTS; i += THREADS) {
    const int row = i / EXPERTS, expert = i % EXPERTS;
    const uint4* others = reinterpret_cast<const uint4*>(keys[row]);
    const uint32_t mine = keys[row][expert];
    int above[4] = {};
#pragma unroll 8
    for (int j = 0; j < KEYS / 4; ++j) {
      const uint4 four = others[j];
      above[0] += four.x > mine, above[1] += four.y > mine;
      above[2] += four.z > mine, above[3] += four.w > mine;
    }
    const int rank = above[0] + above[1] + above[2] + above[3];
    if (rank < CHOSEN) chosen[row * CHOSEN + rank] = expert;
  }
  __syncthreads();
}

// Compute the shares of a row's chosen experts; called by one warp.
__device__ __forceinline__ void share(const uint32_t (&keys)[KEYS], const int* chosen,
                                      float* shares, int lane) {
  const float largest = logit_of(keys[chosen[0]]);
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < EXPERTS; i += 32)
    if (i + lane < EXPERTS) sum += expf(logit_of(keys[i + lane]) - largest);
  sum = warp_sum(sum);
  const float mine = lane < CHOSEN ? expf(logit_of(keys[chosen[lane]]) - largest) / sum : 0.0f;
  const float all = warp_sum(mine);
  if (lane < CHOSEN) shares[lane] = rounded(NORMALIZE ? mine / all : mine);
}

// A unit of work is one output: with DOWN, of a row, else of a row and one of its experts.
struct Unit {
  int item, output;

  __device__ __forceinline__ Unit(int unit, int total)
      : item(unit / total), output(unit % total) {}

  __device__ __forceinline__ void next(int total) {
    if (++output == total) output = 0, ++item;
  }

  __device__ __forceinline__ int64_t row(const Params& params, const int* chosen, int side) const {
    const int expert = chosen[DOWN ? item * CHOSEN + side : item];
    return DOWN ? static_cast<int64_t>(expert) * params.total + output
                : (2ll * expert + side) * params.total + output;
  }

  __device__ __forceinline__ const WEIGHT* weights(const Params& params, const int* chosen,
                                                   int side) const {
    const int units = weight_bytes(params.width) / sizeof(WEIGHT);
    return params.weights + row(params, chosen, side) * units;
  }

  __device__ __forceinline__ RowScales scales(const Params& params, const int* chosen,
                                              int side) const {
    const int64_t row = this->row(params, chosen, side);
#if WEIGHT_BITS == 4
    const int64_t first = row * max(params.width >> params.shift, 1);
    return {params.scales + first, params.zeros + first, params.shift};
#else
    const int columns = (params.width + SCALE_COLUMNS - 1) / SCALE_COLUMNS;
    return {params.scales + (row >> params.shift) * columns};
#endif
  }
};

// Iteration of a warp over its pieces, with the unit of each piece.
struct Pieces : Cursor<SIDES> {
  Unit unit;
  const int last;

  __device__ __forceinline__ Pieces(int first, int last, int total)
      : Cursor<SIDES>(first), unit(first, total), last(last) {}

  __device__ __forceinline__ bool more() const { return output < last; }

  __device__ __forceinline__ void next(const Params& params) {
    const int before = output;
    Cursor<SIDES>::next(params.width);
    if (output != before) unit.next(params.total);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    experts(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ uint64_t full[WARPS][DEPTH], rows;
  __shared__ float sums[WARPS][ROWS], shares[ROWS * CHOSEN];
  __shared__ int chosen[ROWS * CHOSEN];
  __shared__ alignas(16) uint32_t keys[ROWS][KEYS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int width = params.width, total = params.total;
  uint8_t* ring = memory + warp * DEPTH * PIECE_BYTES;
  ELEMENT* x = reinterpret_cast<ELEMENT*>(memory + WARPS * DEPTH * PIECE_BYTES);
  ELEMENT* norm = x + (DOWN ? CHOSEN : 1) * ROWS * width;

  const int64_t number = blockIdx.x * WARPS + warp, warps = gridDim.x * WARPS;
  const int64_t units = static_cast<int64_t>(DOWN ? 1 : CHOSEN) * ROWS * total;
  const int first = number * units / warps, last = (number + 1) * units / warps;
  Unit current(first, total);
  Pieces ahead(first, last, total), soon = ahead;
  if (lane < DEPTH) barrier_init(&full[warp][lane]);
  if (threadIdx.x == 0) barrier_init(&rows);
#if USE_TMA
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
  if (!DOWN) {
    for (int i = threadIdx.x; i < width / 8; i += THREADS)
      *reinterpret_cast<uint4*>(norm + i * 8) = load16(params.norm + i * 8);
    wait_for_previous();
    if (warp == 0) request_rows(params.x, ROWS * width, x, &rows, lane);
  }
  let_next_begin();
  choose(params.logits, keys, chosen);
  auto request = [&](int slot) {
    const WEIGHT* row = ahead.unit.weights(params, chosen, ahead.side);
    request_piece(row, ahead.start, width, ring + slot * PIECE_BYTES, &full[warp][slot], lane);
    const RowScales scales = ahead.unit.scales(params, chosen, ahead.side);
    PieceScales::prefetch(scales, ahead.start, width, lane);
    ahead.next(params);
  };
  PieceScales following;
  auto request_scales = [&] {
    if (!soon.more()) return;
    const RowScales scales = soon.unit.scales(params, chosen, soon.side);
    following = PieceScales(scales, soon.start, width, lane);
    soon.next(params);
  };
  int slot = 0;
  if (DOWN) {
#pragma unroll 1
    for (; slot < EARLY && ahead.more(); ++slot) request(slot);
    // Not by the first warp, which requests x.
    const int row = WARPS - 1 - warp;
    if (row < ROWS) share(keys[row], chosen + row * CHOSEN, shares + row * CHOSEN, lane);
    __syncthreads();
    wait_for_previous();
    if (warp == 0) request_rows(params.x, ROWS * CHOSEN * width, x, &rows, lane);
  }
#pragma unroll 1
  for (; slot < DEPTH && ahead.more(); ++slot) request(slot);
  request_scales();
  take_rows(width, !DOWN, params.epsilon, x, norm, &rows, sums);
#if WEIGHT_BITS == 4
  Block* blocks = reinterpret_cast<Block*>(norm + (DOWN ? 0 : width));
  make_integers(x, (DOWN ? CHOSEN : 1) * ROWS * width, blocks);
#endif

  slot = 0;
  uint32_t parity = 0;
  for (int unit = first; unit < last; ++unit, current.next(total)) {
    float y = 0.0f, gate = 0.0f, residual = 0.0f;
    if (DOWN && lane == 0) residual = static_cast<float>(params.residual[unit]);
#pragma unroll 1
    for (int side = 0; side < SIDES; ++side) {
      float dot[1] = {};
      const int item = DOWN ? current.item * CHOSEN + side : current.item / CHOSEN;
      const ELEMENT* row = x + item * width;
      for (int start = 0; start < width; start += PIECE) {
        const PieceScales of_piece = following;
        request_scales();
        barrier_wait(&full[warp][slot], parity);
        const uint8_t* piece = ring + slot * PIECE_BYTES;
#if WEIGHT_BITS == 4
        const Block* of_row = blocks + item * width / BLOCK;
        multiply_piece(dot, piece, row, of_row, start, width, lane, of_piece);
#else
        multiply_piece(dot, piece, row, start, width, lane, of_piece);
#endif
        __syncwarp();
        if (ahead.more()) request(slot);
        if (++slot == DEPTH) slot = 0, parity ^= 1;
      }
      const float product = warp_sum(dot[0]);
      if (DOWN)
        y += rounded(rounded(product) * shares[current.item * CHOSEN + side]);
      else if (side == 0)
        gate = product;
      else
        y = gated(gate, product);
    }
    if (lane == 0) {
      if (DOWN) y = rounded(y) + residual;
      params.output[unit] = ELEMENT(y);
    }
  }
}
