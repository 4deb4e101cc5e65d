// linear_few: a few rows times quantized weight matrices, y = x W^T, as in a decode step: W is read
// once, at memory bandwidth. x is normalized first (RMSNorm); then a bias or the residual stream is
// added to y, or two products become silu(gate) * up.
//
// A thread block computes consecutive grains. A grain is GRAIN outputs of one matrix (with a gate:
// of both). Weights are copied in boxes of GRAIN rows of a matrix and 256 bytes of each row; these
// columns are a span. The warps of a thread block divide the spans: warp i takes spans i, i +
// `columns`, ..., so that its part of x stays in registers. It multiplies all boxes of a span; if
// there are fewer spans than warps, several teams of warps share the boxes. `depth` boxes of each
// warp are in flight, with their scales and zero points. Products are those of pieces.cuh, whose
// operand for x has columns for four rows of it. With INT4, all warps together convert x before
// that, to shared memory; with FP8, each warp converts its own part. The sums of all warps are added
// at the end.
//
// Rounding is the same as in separate operations, as in linear.cu.
//
// Compiled with: ROWS (1 to 4), GRAIN (16 or 32), MOST_WARPS, the macros of matrices.cuh and
// pieces.cuh (WEIGHT_BITS 8 or 4), USE_TMA (always 1).

#include "common/cluster.cuh"
#include "common/copy.cuh"
#include "common/overlap.cuh"
#include "common/pieces.cuh"
#include "linear/grain.cuh"

constexpr int MAX_DEPTH = 16;
constexpr int MOST_BEFORE_X = WEIGHT_BITS == 4 ? 1 : MAX_DEPTH;  // boxes; fastest by format
constexpr int BOX_ROW = 256;  // bytes
constexpr int SPAN = BOX_ROW / weight_bytes(PIECE);  // pieces
constexpr int UNIT = WEIGHT_BITS == 4 ? 8 : 1;       // elements of W in an element of a tensor map
constexpr int COLUMNS_OF_SCALE = WEIGHT_BITS == 4 ? GROUP_COLUMNS : SCALE_COLUMNS;
constexpr int SPAN_SCALES = SPAN * PIECE / COLUMNS_OF_SCALE;  // of a row of a box
constexpr int SCALES_AT = GRAIN * BOX_ROW;                    // in a stage
constexpr int ZEROS_AT = SCALES_AT + GRAIN * SPAN_SCALES * int(sizeof(SCALE));
constexpr int STAGE =
    (ZEROS_AT + (WEIGHT_BITS == 4 ? GRAIN * SPAN_SCALES : 0) + 127) / 128 * 128;
constexpr int TILE = 8;              // rows of a product
constexpr int TILES = GRAIN / TILE;  // of a box
constexpr int LANES = 4;             // that add the sums of an output
static_assert(GRAIN % TILE == 0 && GRAIN <= 32 && ROWS <= 4, "whole tiles, a row for each lane");

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

// Rows of a matrix whose weights are copied together.
struct Box {
  int matrix, row;
};

#if WEIGHT_BITS == 4
// A piece of x as factors: the eight lanes of each row have its elements, in the order of weights.
// The other numbers are those of this lane's products: of row lane % 4, and the half of the lanes'
// piece of weights.
struct Factors {
  uint4 chunks[LOADS][CHUNKS];
  float undo[LOADS];    // by which products must be multiplied
  float totals[LOADS];  // sums of the factors

  // pieces: of a row of x.
  __device__ __forceinline__ void load(const Blocks& x, int pieces, int piece, int lane) {
    const int own = min(lane / 8, ROWS - 1) * pieces + piece;
    const int of_products = min(lane % 4, ROWS - 1) * pieces + piece;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) chunks[i][j] = x.load(own, i, j, lane);
      const int column = Piece::column(i, lane);
      const BlockOfX& other = x.others[of_products * 2 + column / BLOCK];
      undo[i] = other.undo;
      totals[i] = other.totals[column % BLOCK / GROUP_COLUMNS];
    }
  }
};
#else
// This lane's elements of a piece of a row, of which eight lanes have one.
struct Elements {
  uint4 chunks[LOADS][CHUNKS];

  // FIXED: whether no kernel writes the elements, as the norm's weight. For x, L1 is bypassed: a
  // preceding kernel may have written x while this one was running.
  template <bool FIXED = false>
  __device__ __forceinline__ void load(const ELEMENT* row, int piece, int lane) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) {
        const uint4* const from = reinterpret_cast<const uint4*>(
            row + piece * PIECE + (i * 8 + lane % 8) * EACH + j * 8);
        chunks[i][j] = FIXED ? __ldg(from) : __ldcg(from);
      }
  }

  __device__ __forceinline__ float square() const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) {
        const uint4& x = chunks[i][j];
        sum += squared(x.x) + squared(x.y) + squared(x.z) + squared(x.w);
      }
    return sum;
  }

  __device__ __forceinline__ void normalize(const Elements& by, float scale) {
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) {
        uint4& x = chunks[i][j];
        const uint4& y = by.chunks[i][j];
        x = {normed(x.x, y.x, scale), normed(x.y, y.y, scale), normed(x.z, y.z, scale),
             normed(x.w, y.w, scale)};
      }
  }
};

// A piece of x as factors: the eight lanes of each row have its elements, in the order of weights.
// The other numbers are those of this lane's products: of row lane % 4, and the half of the lanes'
// piece of weights.
struct Factors {
  uint4 chunks[LOADS][CHUNKS];
  float undo[LOADS];    // by which products must be multiplied

  __device__ __forceinline__ void convert(const Elements& x, int lane) {
    const int owner = lane % 4 * 8 + lane / 4 % 2 * 4;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      uint32_t largest = 0;
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) {
        const uint4& four = x.chunks[i][j];
        largest = Conversion::larger(largest, Conversion::larger(four.x, four.y));
        largest = Conversion::larger(largest, Conversion::larger(four.z, four.w));
      }
      const Conversion conversion = Conversion::of<4>(largest);
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) {
        const uint4& four = x.chunks[i][j];
        chunks[i][j] = {conversion.factors(four.x, false), conversion.factors(four.y, true),
                        conversion.factors(four.z, false), conversion.factors(four.w, true)};
      }
      undo[i] = __shfl_sync(~0u, conversion.undo(), owner);
    }
  }
};
#endif

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
// the matrix, whose products are not used, have those of its last one.
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

#if WEIGHT_BITS == 8
// Bring a span of the norm's weight to L1; called by all lanes of a warp.
__device__ __forceinline__ void bring_to_l1(const ELEMENT* from, int lane) {
  if (lane * 64 >= SPAN * PIECE) return;
  uint32_t unused;
  asm volatile("ld.global.nc.b32 %0, [%1];" : "=r"(unused) : "l"(from + lane * 64));
}
#endif

// Make a barrier complete only after this thread's copies of scales, too.
__device__ __forceinline__ void arrive_after_copies(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ float load_scale(uint32_t from, float) {
  float scale;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(scale) : "r"(from));
  return scale;
}

__device__ __forceinline__ float load_scale(uint32_t from, ELEMENT) {
  unsigned short bits;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(from));
  return static_cast<float>(bits_as<ELEMENT>(bits));
}

__device__ __forceinline__ float load_zero(uint32_t from) {
  uint32_t zero;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(zero) : "r"(from));
  return static_cast<float>(zero);
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
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

// Add products of this lane's two rows of a tile with row lane % 4 of x.
__device__ __forceinline__ void multiply(float (&found)[2], uint32_t stage, int tile, int p,
                                         const Factors& x, int lane) {
  const bool right = lane / 4 % 2;
  const int first = tile * TILE + lane / 8;
  Piece piece;
#pragma unroll
  for (int which = 0; which < 2; ++which)
#pragma unroll
    for (int i = 0; i < LOADS; ++i)
      load_shared(piece.words[which][i], stage + (first + which * 4) * BOX_ROW +
                                             p * weight_bytes(PIECE) + i * WORDS * 32 +
                                             lane % 8 * WORDS * 4);
#pragma unroll
  for (int i = 0; i < LOADS; ++i) {
    uint32_t a[EACH / 2], b[EACH / 2];
    piece.factors(a, 0, i), piece.factors(b, 1, i);
    float sums[4] = {};
#pragma unroll
    for (int j = 0; j < CHUNKS; ++j) {
      const uint4& k = x.chunks[i][j];
      const int at = j * 4;
      mma(sums, a[at], b[at], a[at + 1], b[at + 1], k.x, k.y, FACTOR());
      mma(sums, a[at + 2], b[at + 2], a[at + 3], b[at + 3], k.z, k.w, FACTOR());
    }
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const int at = (first + which * 4) * SPAN_SCALES +
                     (p * PIECE + Piece::column(i, lane)) / COLUMNS_OF_SCALE;
      const float scale = load_scale(stage + SCALES_AT + at * sizeof(SCALE), SCALE());
      float sum = right ? sums[which * 2 + 1] : sums[which * 2];
#if WEIGHT_BITS == 4
      sum = fmaf(sum, 0x1p24f, -load_zero(stage + ZEROS_AT + at) * x.totals[i]);
#endif
      found[which] = fmaf(scale * x.undo[i], sum, found[which]);
    }
  }
}

#if WEIGHT_BITS == 4
// Blocks of x, of which each lane has four elements: `block` and every further warps-th one.
struct PartOfX {
  static constexpr int COUNT = 4;
  uint2 x[COUNT], norm[COUNT];

  template <typename Use>
  __device__ __forceinline__ static void for_each(const Params& params, int block, Use use) {
    const int warps = blockDim.x / 32, all = ROWS * (params.matrices.width / BLOCK);
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (block + i * warps < all) use(i, block + i * warps);
  }

  __device__ __forceinline__ void load(const Params& params, int block, int lane) {
    for_each(params, block, [&](int i, int each) { x[i] = four_of(params.x, each, lane); });
  }

  __device__ __forceinline__ void load_norm(const Params& params, int block, int lane) {
    const uint2* const from = reinterpret_cast<const uint2*>(params.norm) + lane;
    const int of_row = params.matrices.width / BLOCK;
    for_each(params, block, [&](int i, int each) { norm[i] = __ldg(from + each % of_row * 32); });
  }
};

// Normalize x and convert it to factors; called by all threads, with the first part of each warp.
__device__ __forceinline__ void convert_x(const Params& params, PartOfX& part, const Blocks& blocks,
                                          float* squares, int warp, int lane) {
  const int of_row = params.matrices.width / BLOCK, all = ROWS * of_row;
  const int step = PartOfX::COUNT * (blockDim.x / 32);
  const bool has_norm = params.norm != nullptr;
  if (has_norm) {
#pragma unroll 1
    for (int block = warp; block < all; block += step) {
      if (block != warp) part.load(params, block, lane);
      part.for_each(params, block, [&](int i, int each) {
        const float sum = warp_sum(squared(part.x[i].x) + squared(part.x[i].y));
        if (lane == 0) squares[each] = sum;
      });
    }
    __syncthreads();
    if (warp + step < all) part.load(params, warp, lane);
  }
#pragma unroll 1
  for (int block = warp; block < all; block += step) {
    if (block != warp) part.load(params, block, lane);
    if (block != warp && has_norm) part.load_norm(params, block, lane);
    part.for_each(params, block, [&](int i, int each) {
      uint2 four = part.x[i];
      if (has_norm) {
        float sum = 0.0f;
        for (int j = lane; j < of_row; j += 32) sum += squares[each / of_row * of_row + j];
        const float scale = rsqrtf(warp_sum(sum) / params.matrices.width + params.epsilon);
        four = {normed(four.x, part.norm[i].x, scale), normed(four.y, part.norm[i].y, scale)};
      }
      blocks.store(each, four, lane);
    });
  }
  __syncthreads();
}
#endif

// Add the sums of both halves of the columns: of this lane's first row in left halves, and of its
// second row in right halves.
__device__ __forceinline__ float of_halves(const float (&found)[2], int lane) {
  const bool right = lane / 4 % 2;
  return (right ? found[1] : found[0]) +
         __shfl_xor_sync(~0u, right ? found[0] : found[1], 4);
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
  const Matrices& matrices = params.matrices;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  const int columns = params.columns, teams = warps / columns;
  const int column = warp % columns, team = warp / columns;
  const int width = matrices.width, spans = width / (SPAN * PIECE);
  const int first = blockIdx.x * params.grains / gridDim.x;
  const int last = (blockIdx.x + 1) * params.grains / gridDim.x;
  const int count = (last - first) * SIDES, depth = params.depth;
  const uint32_t ring = shared_address(memory) + warp * depth * STAGE;
  float* const sums = reinterpret_cast<float*>(memory + warps * depth * STAGE);
  Box* const boxes = reinterpret_cast<Box*>(sums + columns * count * GRAIN * ROWS);
#if WEIGHT_BITS == 4
  const int x_blocks = width / BLOCK;  // of a row
  uint8_t* const of_x = reinterpret_cast<uint8_t*>(boxes + count + count % 2);
  const Blocks blocks{reinterpret_cast<uint2*>(of_x),
                      reinterpret_cast<BlockOfX*>(of_x + ROWS * width * 2)};
  float* const squares = reinterpret_cast<float*>(blocks.others + ROWS * x_blocks);
#else
  __shared__ float squares[MOST_WARPS][ROWS];
#endif

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

  const int outputs = (last - first) * GRAIN;
#if WEIGHT_BITS == 4
  PartOfX part;
  if (params.norm != nullptr) part.load_norm(params, warp, lane);
  wait_for_previous();
  part.load(params, warp, lane);
#else
  const int x_row = min(lane / 8, ROWS - 1);
  const ELEMENT* const row = params.x + x_row * width;
  if (params.norm != nullptr) bring_to_l1(params.norm + column * SPAN * PIECE, lane);
  wait_for_previous();
  Elements x[SPAN];
#pragma unroll
  for (int p = 0; p < SPAN; ++p) x[p].load(row, column * SPAN + p, lane);
#endif
#pragma unroll 1
  for (int slot = before_x; slot < depth; ++slot) request(slot);
  // Requested now, needed at the end.
  float2 addends = Output(matrices, threadIdx.x / LANES, first, outputs).addends(matrices);
#if WEIGHT_BITS == 4
  convert_x(params, part, blocks, squares, warp, lane);
#else
  float scale = 1.0f;
  if (params.norm != nullptr) {
    float sum = 0.0f;
#pragma unroll
    for (int p = 0; p < SPAN; ++p) sum += x[p].square();
#pragma unroll 1
    for (int span = column + columns; span < spans; span += columns)
#pragma unroll
      for (int p = 0; p < SPAN; ++p) {
        Elements others;
        others.load(row, span * SPAN + p, lane);
        sum += others.square();
      }
#pragma unroll
    for (int step = 1; step < 8; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane % 8 == 0 && lane / 8 < ROWS) squares[warp][lane / 8] = sum;
    __syncthreads();
    sum = 0.0f;
    for (int other = 0; other < columns; ++other) sum += squares[other][x_row];
    scale = rsqrtf(sum / width + params.epsilon);
  }
#endif

  int slot = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int span = column;;) {
    Factors factors[SPAN];
#pragma unroll
    for (int p = 0; p < SPAN; ++p) {
#if WEIGHT_BITS == 4
      factors[p].load(blocks, width / PIECE, span * SPAN + p, lane);
#else
      if (params.norm != nullptr) {
        Elements by;
        by.load<true>(params.norm, span * SPAN + p, lane);
        x[p].normalize(by, scale);
      }
      factors[p].convert(x[p], lane);
#endif
    }
#pragma unroll 1
    for (int box = team; box < count; box += teams) {
      const uint32_t stage = ring + slot * STAGE;
      float found[TILES][2] = {};
      barrier_wait(&full[warp][slot], parity);
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
        for (int p = 0; p < SPAN; ++p) multiply(found[tile], stage, tile, p, factors[p], lane);
      __syncwarp();
      request(slot);
      if (++slot == depth) slot = 0, parity ^= 1;
      float* const of_box = sums + ((column * count + box) * GRAIN + lane / 8 + lane / 4 % 2 * 4) *
                                       ROWS + lane % 4;
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const float both = of_halves(found[tile], lane);
        float* const of_row = of_box + tile * TILE * ROWS;
        if (lane % 4 < ROWS) *of_row = span == column ? both : *of_row + both;
      }
    }
    span += columns;
    if (span >= spans) break;
#if WEIGHT_BITS == 8
#pragma unroll
    for (int p = 0; p < SPAN; ++p) x[p].load(row, span * SPAN + p, lane);
#endif
  }
  __syncthreads();

  // Shuffles need whole warps: GRAIN times LANES threads are some.
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
