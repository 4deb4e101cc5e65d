// linear_few: one or two rows times quantized weight matrices, y = x W^T, as in a decode step: W is
// read once, at memory bandwidth. x is normalized first (RMSNorm); then a bias or the residual
// stream is added to y, or two products become silu(gate) * up.
//
// A thread block computes consecutive grains. A grain is GRAIN outputs of one matrix (with a gate:
// of both). Weights are copied in boxes of GRAIN rows of a matrix and 256 bytes of each row; these
// columns are a span. The warps of a thread block divide the spans: warp i takes spans i, i +
// `columns`, ..., with its part of x in registers. It multiplies all boxes of a span; if there are
// fewer spans than warps, several teams of warps share the boxes. `depth` boxes of each warp are in
// flight, with their scales and zero points. FP8 weights are multiplied as halves
// (halves_of_x.cuh), INT4 weights as integers (integers_of_x.cuh). The sums of all warps are added
// at the end.
//
// Rounding is the same as in separate operations, as in linear.cu.
//
// Compiled with: ROWS (1 or 2), GRAIN (16), MOST_WARPS, the macros of matrices.cuh and pieces.cuh
// (WEIGHT_BITS 8 or 4), USE_TMA (always 1).

#include "common/cluster.cuh"
#include "common/copy.cuh"
#include "common/overlap.cuh"
// Both headers define RowsOfX (reads, normalizes and converts x), Operand (x in a span, as matrix
// units take it) and Products (of a box).
#if WEIGHT_BITS == 4
#include "linear/integers_of_x.cuh"
#else
#include "linear/halves_of_x.cuh"
#endif

constexpr int MAX_DEPTH = 16;
constexpr int MOST_BEFORE_X = WEIGHT_BITS == 4 ? 1 : MAX_DEPTH;  // boxes; fastest by format
constexpr int UNIT = WEIGHT_BITS == 4 ? 8 : 1;  // elements of W in an element of a tensor map
constexpr int LANES = 4;                        // that add the sums of an output

struct Params {
  TensorMap weights[MATRICES];  // in boxes of GRAIN x BOX_ROW bytes; INT4: of words
  Matrices matrices;            // INT4: with groups of GROUP_COLUMNS
  const ELEMENT* x;             // (ROWS, width), width a multiple of SPAN * PIECE
  const ELEMENT* norm;          // (width) weight of the RMSNorm; null: x is not normalized
  int grains;                   // of all matrices
  int depth;                    // stages of a warp, at most MAX_DEPTH
  int columns;                  // warps that divide the width, a divisor of all warps
  float epsilon;                // of the norm
  int unused[8];
};

// Make a barrier complete only after this thread's copies of scales, too.
__device__ __forceinline__ void arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

// An output of this thread block.
struct Output {
  int64_t at = 0;   // in (rows, total)
  int row, within;  // of x; output of the thread block
  int index = -1;   // of the output, or -1 if there is none

  __device__ __forceinline__ Output(const Matrices& matrices, int item, int first, int outputs)
      : row(item / outputs), within(item % outputs) {
    const Grain grain(matrices, first + within / GRAIN);
    if (row >= ROWS || grain.row + within % GRAIN >= matrices.outputs[grain.matrix]) return;
    index = grain.output + within % GRAIN;
    at = static_cast<int64_t>(row) * matrices.total + index;
  }

  // Bias and residual, 0 where there is none.
  __device__ __forceinline__ float2 addends(const Matrices& matrices) const {
    if (index < 0) return {0.0f, 0.0f};
    const float bias = WeightRow(matrices, index, 0).bias(matrices);
    if (matrices.residual == nullptr) return {bias, 0.0f};
    return {bias, static_cast<float>(matrices.residual[at])};
  }
};

extern "C" __global__ void __launch_bounds__(MOST_WARPS * 32, 1)
    linear_few(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ uint64_t full[MOST_WARPS][MAX_DEPTH];
  __shared__ float squares[MOST_WARPS][ROWS];
  const Matrices& matrices = params.matrices;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int columns = params.columns, teams = warps / columns;
  const int column = warp % columns, team = warp / columns;
  const int width = matrices.width, spans = width / (SPAN * PIECE);
  const int first = blockIdx.x * params.grains / gridDim.x;
  const int last = (blockIdx.x + 1) * params.grains / gridDim.x;
  const int count = (last - first) * SIDES, depth = params.depth;
  const uint32_t ring = shared_address(memory) + warp * depth * STAGE;
  uint8_t* const of_x = memory + warps * depth * STAGE;
  float* const sums = reinterpret_cast<float*>(of_x + RowsOfX::bytes(width));
  Box* const boxes = reinterpret_cast<Box*>(sums + columns * count * GRAIN * ROWS);

  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const Grain grain(matrices, first + i / SIDES);
    boxes[i] = {GATED ? i % SIDES : grain.matrix, grain.row};
  }
  if (lane < depth) barrier_init(&full[warp][lane], 1 + 32);
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();

  // The next stage to request.
  int span_ahead = team < count ? column : spans, box_ahead = team;
  const auto request = [&](int slot) {
    if (span_ahead >= spans) return;
    const Box box = boxes[box_ahead];
    const uint32_t stage = ring + slot * STAGE;
    uint64_t* const barrier = &full[warp][slot];
    if (lane == 0) {
      copy_begin(barrier, GRAIN * BOX_ROW, 0);
      copy_box<true>(stage, params.weights[box.matrix], span_ahead * (SPAN * PIECE / UNIT), box.row,
                     barrier);
    }
    request_scales(matrices, box, span_ahead, stage, lane);
    arrive_after_copies(barrier);
    box_ahead += teams;
    if (box_ahead >= count) box_ahead = team, span_ahead += columns;
  };
  // All that is in flight delays x and the preceding kernel's reads. So the boxes before x are
  // requested one after the other.
  const int before_x = min(depth, MOST_BEFORE_X);
#pragma unroll 1
  for (int slot = 0; slot < before_x && span_ahead < spans; ++slot) {
    if (slot == 1) let_next_begin();
    if (slot > 0) barrier_wait(&full[warp][slot - 1], 0);
    request(slot);
  }
  let_next_begin();

  RowsOfX rows(params.x, params.norm, params.epsilon, width, column, columns, of_x);
  rows.request_norm();
  wait_for_previous();
  rows.request();
#pragma unroll 1
  for (int slot = before_x; slot < depth; ++slot) request(slot);
  // Requested now, needed at the end.
  const int outputs = (last - first) * GRAIN;
  float2 addends = Output(matrices, threadIdx.x / LANES, first, outputs).addends(matrices);
  rows.prepare(squares);

  int slot = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int span = column;;) {
    Operand operand;
    rows.get_operand(operand, span);
#pragma unroll 1
    for (int box = team; box < count; box += teams) {
      barrier_wait(&full[warp][slot], parity);
      const Products products(ring + slot * STAGE, operand, lane);
      __syncwarp();
      request(slot);
      if (++slot == depth) slot = 0, parity ^= 1;
      float* const of_box = sums + (column * count + box) * GRAIN * ROWS;
      products.for_each(lane, [&](int row, int x_row, float sum) {
        float& all = of_box[row * ROWS + x_row];
        all = span == column ? sum : all + sum;
      });
    }
    span += columns;
    if (span >= spans) break;
    rows.load_span(span);
  }
  __syncthreads();

  // Shuffles need whole warps: GRAIN times LANES threads are whole warps.
#pragma unroll 1
  for (int item = threadIdx.x / LANES; item < outputs * ROWS; item += blockDim.x / LANES) {
    const Output output(matrices, item, first, outputs);
    if (item >= blockDim.x / LANES) addends = output.addends(matrices);
    const int grain = output.within / GRAIN, within = output.within % GRAIN;
    const float* sum = sums + (grain * SIDES * GRAIN + within) * ROWS + output.row;
    float products[SIDES] = {};
#pragma unroll 4
    for (int other = threadIdx.x % LANES; other < columns; other += LANES)
#pragma unroll
      for (int side = 0; side < SIDES; ++side)
        products[side] += sum[(other * count + side) * GRAIN * ROWS];
#pragma unroll
    for (int side = 0; side < SIDES; ++side)
#pragma unroll
      for (int step = 1; step < LANES; step *= 2)
        products[side] += __shfl_xor_sync(~0u, products[side], step);
    if (threadIdx.x % LANES == 0 && output.index >= 0)
      finish(matrices, output.at, products, addends.x, addends.y);
  }
}
