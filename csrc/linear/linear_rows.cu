// linear_rows: up to COLUMNS rows of x times weight matrices, y = x W^T, as in a decode step of
// many sequences: W is read once, at memory bandwidth. A bias or the residual stream is added to y,
// or two products become silu(gate) * up. x is already normalized (rms_norm.cu).
//
// A thread block computes a run of outputs, in sweeps of `step` outputs. A sweep passes over the
// width once, in stages: SPAN elements of each of its rows of W and of all rows of x. `depth`
// stages are in flight at any time. So x, which is too large to stay in shared memory, is read from
// the L2 cache once per sweep. Producer warps request stages, one row per lane: rows of W before
// the kernel that computes x has ended (overlap.cuh), rows of x after that. Consumer warps multiply
// tiles of TILE rows of W, as the 16-row operand, by x as the other operand, and split a stage's
// elements among them; their sums are added in shared memory at the end of a sweep. The stride of
// rows is 16 bytes more than their length, which avoids bank conflicts. Rows that were not
// requested may contain anything, which affects only their own products.
//
// With a gate, a sweep's rows of W alternate between eight rows of the gate and eight of the other
// matrix: 16 rows make eight outputs. Rounding is the same as in separate operations, as in
// linear.cu.
//
// GROUPED: groups of rows, each times its own expert's matrices, which are stored one after the
// other. A thread block computes a run of sweeps, group after group. The first launch (GATED) waits
// for the groups and releases the second launch only then, so that the second can read them at once
// and request weights before the first has ended.
//
// Compiled with: COLUMNS (8, 16, 24, 32), GATED, ELEMENT, WEIGHT_BITS and FLOAT_SCALES
// (matrices.cuh), GROUPED (not with INT4), CONSUMERS and PRODUCERS (warps), TILE (16 or 32), SWEEP (maximum rows of W), SPAN (elements, a multiple of 32),
// USE_TMA (always 1: without bulk copies, cuBLAS is five times as fast).

#include "common/copy.cuh"
#include "common/mma.cuh"
#include "common/overlap.cuh"
#include "experts/groups.cuh"
#include "linear/matrices.cuh"

constexpr int THREADS = (CONSUMERS + PRODUCERS) * 32, CONSUMING = CONSUMERS * 32;
constexpr int STRIDE = weight_bytes(SPAN) + 16;  // bytes between rows of W in a stage
// Bytes between rows of x in a stage. A lane reads 8 bytes with FP8 and 16 with INT4, and ldmatrix
// otherwise: no bank conflicts.
constexpr int X_STRIDE = SPAN * 2 + 256 / WEIGHT_BITS;
constexpr int STEP = WEIGHT_BITS == 4 ? 64 : 32;  // elements that a warp multiplies at a time
constexpr int RECORD = TILE + 4;       // floats between columns of a tile's sums: no bank conflicts
constexpr int MAX_DEPTH = 16;
constexpr int ITEMS = (SWEEP / SIDES * COLUMNS + CONSUMING - 1) / CONSUMING;
static_assert(SWEEP <= PRODUCERS * 32 && COLUMNS <= PRODUCERS * 32, "a producers' lane has a row");
static_assert(SWEEP % TILE == 0 && SWEEP / TILE <= CONSUMERS, "a consumer has a tile");
static_assert(SPAN % 32 == 0 && TILE % 16 == 0 && COLUMNS % 8 == 0, "whole fragments");

struct Params {
  const ELEMENT* x;    // (rows, width), width a multiple of 32
  // GROUPED: those of the first expert; the output is (places, total); with FP8, `total` is a
  // multiple of the rows of a scale.
  Matrices matrices;
  const Group* groups; // GROUPED
  const int* count;    // number of groups
  const int* rows_of;  // (places): rows of x; null: the row of a place has the same number
  int rows;            // at most COLUMNS; unless GROUPED
  int step;            // outputs of a sweep, at most SWEEP / SIDES
  int depth;           // stages, at most MAX_DEPTH
};

// Rows of W in a stage, for the tiles of `outputs`.
__device__ __forceinline__ int stage_rows(int outputs) {
  const int rows = GATED ? (outputs + 7) / 8 * 16 : outputs;
  return (rows + TILE - 1) / TILE * TILE;
}

// Row of an output's weights in a stage; with a gate, the gate's row, and the other row is 8
// further.
__device__ __forceinline__ int stage_row(int output) {
  return GATED ? output / 8 * 16 + output % 8 : output;
}

// Iteration of a thread block over its sweeps.
struct Sweeps {
  const Params& params;
  int at, last;  // outputs; GROUPED: sweeps, group after group
  int sweeps;    // GROUPED: of a group
  Group group;

  __device__ __forceinline__ explicit Sweeps(const Params& params) : params(params) {
    const int64_t block = blockIdx.x, blocks = gridDim.x;
    int64_t total = params.matrices.total;
    if (GROUPED) {
      sweeps = (params.matrices.total + params.step - 1) / params.step;
      // L1 is bypassed: the second launch may run before the first has ended.
      total = static_cast<int64_t>(__ldcg(params.count)) * sweeps;
    }
    at = block * total / blocks;
    last = (block + 1) * total / blocks;
    group = {0, 0, params.rows, 0};
    find_group();
  }

  __device__ __forceinline__ bool more() const { return at < last; }

  __device__ __forceinline__ int output() const { return GROUPED ? at % sweeps * params.step : at; }

  __device__ __forceinline__ int outputs() const {
    return min(params.step, GROUPED ? params.matrices.total - output() : last - at);
  }

  __device__ __forceinline__ void next() {
    at += GROUPED ? 1 : params.step;
    if (GROUPED && at % sweeps == 0) find_group();
  }

  __device__ __forceinline__ void find_group() {
    if (!GROUPED || !more()) return;
    const int4 found = __ldcg(reinterpret_cast<const int4*>(params.groups + at / sweeps));
    group = {found.x, found.y, found.z, found.w};
  }

  __device__ __forceinline__ int64_t expert() const {
    return GROUPED ? static_cast<int64_t>(group.expert) * SIDES * params.matrices.total : 0;
  }
};

// Stages in shared memory. `full` completes when a stage has arrived, `empty` when all warps have
// read it.
struct Ring {
  uint8_t* memory;
  uint64_t *full, *empty;
  int x_row;  // first row of x in a stage
  int depth;
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ uint8_t* stage() const {
    return memory + slot * (x_row * STRIDE + COLUMNS * X_STRIDE);
  }

  __device__ __forceinline__ void next() {
    if (++slot == depth) slot = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  uint64_t state;
  asm volatile("mbarrier.arrive.shared.b64 %0, [%1];"
               : "=l"(state)
               : "r"(shared_address(barrier))
               : "memory");
}

__device__ __forceinline__ void wait_for_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(CONSUMING) : "memory");
}

// Iteration of a producer over the stages of its thread block.
struct Producer {
  const Params& params;
  const int row;  // this lane's row of a stage, of W and of x
  Sweeps sweep;
  int start = 0;
  const WEIGHT* weights;  // this lane's rows in the sweep, or null
  const ELEMENT* x;

  __device__ __forceinline__ explicit Producer(const Params& params)
      : params(params),
        row(threadIdx.x % 32 * PRODUCERS + threadIdx.x / 32 - CONSUMERS),
        sweep(params) {
    find_rows();
  }

  __device__ __forceinline__ void find_rows() {
    const Matrices& matrices = params.matrices;
    const int within = GATED ? row / 16 * 8 + row % 8 : row, side = GATED ? row / 8 % 2 : 0;
    weights = nullptr, x = nullptr;
    if (!more()) return;
    if (within < sweep.outputs())
      weights = WeightRow(matrices, sweep.output() + within, side).weights(matrices) +
                sweep.expert() * width();
    if (row >= sweep.group.rows) return;
    const int place = sweep.group.first + row;
    const int from = GROUPED && params.rows_of != nullptr ? __ldcg(params.rows_of + place) : place;
    x = params.x + static_cast<int64_t>(from) * width();
  }

  __device__ __forceinline__ int width() const { return params.matrices.width; }

  __device__ __forceinline__ bool more() const { return sweep.more(); }

  __device__ __forceinline__ void next() {
    start += SPAN;
    if (start < width()) return;
    start = 0;
    sweep.next();
    find_rows();
  }

  __device__ __forceinline__ int elements() const { return min(SPAN, width() - start); }

  // Copy the rows that this warp's lanes point at.
  template <bool WEIGHTS, int PITCH, class T>
  __device__ __forceinline__ void copy_rows(uint8_t* target, const T* from, uint32_t offset,
                                            uint32_t bytes, uint64_t* barrier) const {
    if (from != nullptr)
      copy_piece<WEIGHTS>(target + row * PITCH, reinterpret_cast<const uint8_t*>(from) + offset,
                          bytes, barrier, 0);
  }

  __device__ __forceinline__ void request_weights(const Ring& ring) const {
    const uint32_t bytes = weight_bytes(elements()), x_bytes = elements() * sizeof(ELEMENT);
    uint64_t* full = &ring.full[ring.slot];
    copy_begin(full, sweep.outputs() * SIDES * bytes + sweep.group.rows * x_bytes, row);
    copy_rows<true, STRIDE>(ring.stage(), weights, weight_bytes(start), bytes, full);
  }

  __device__ __forceinline__ void request_x(const Ring& ring) const {
    uint64_t* full = &ring.full[ring.slot];
    copy_rows<false, X_STRIDE>(ring.stage() + ring.x_row * STRIDE, x, start * sizeof(ELEMENT),
                               elements() * sizeof(ELEMENT), full);
    copy_end(full);
  }
};

__device__ __forceinline__ void produce(const Params& params, Ring ring) {
  Producer ahead(params), behind = ahead;
  Ring requested = ring;
  int stages = 0;
#pragma unroll 1
  for (; stages < params.depth && ahead.more(); ++stages, ahead.next(), ring.next())
    ahead.request_weights(ring);
  let_next_begin();
  wait_for_previous();
#pragma unroll 1
  for (; stages > 0; --stages, behind.next(), requested.next()) behind.request_x(requested);
  // A slot's first stage is consumed in the phase of parity 0.
#pragma unroll 1
  for (; ahead.more(); ahead.next(), ring.next()) {
    barrier_wait(&ring.empty[ring.slot], ring.parity ^ 1);
    ahead.request_weights(ring);
    ahead.request_x(ring);
  }
}

using Sums = float[TILE / 16][COLUMNS / 8][4];

// Row of W of this lane's products in a tile; rows beyond the sweep, whose products are not used,
// are replaced by its last one.
__device__ __forceinline__ WeightRow tile_row(const Matrices& matrices, const Sweeps& sweep,
                                              int tile, int i, int half, int lane) {
  const int row = tile * TILE + i * 16 + half * 8 + lane / 4;  // of the stage
  const int output = GATED ? row / 16 * 8 + row % 8 : row;
  const int within = min(output, sweep.outputs() - 1);
  return WeightRow(matrices, sweep.output() + within, GATED ? half : 0);
}

#if WEIGHT_BITS == 8
// Scales of this lane's rows of W in a tile.
struct TileScales {
  const float* of[TILE / 16][2];

  __device__ __forceinline__ TileScales(const Matrices& matrices, const Sweeps& sweep, int tile,
                                        int lane) {
#pragma unroll
    for (int i = 0; i < TILE / 16; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        of[i][half] = tile_row(matrices, sweep, tile, i, half, lane).scales(matrices, sweep.expert());
  }
};

// Add products of 32 elements of a tile's rows of W, from element `at` of their rows on, with all
// rows of x.
//
// A lane's four bytes of W are elements 4 quad to 4 quad + 3 of its row, which take the places of
// elements 2 quad, 2 quad + 1, 2 quad + 8 and 2 quad + 9; those of x are permuted alike.
__device__ __forceinline__ void multiply(Sums& sums, uint32_t weights, uint32_t x, int rows,
                                         const TileScales& scales, int at) {
  uint2 b[COLUMNS / 8][2];
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j)
    if (!GROUPED || j * 8 < rows)
#pragma unroll
      for (int k = 0; k < 2; ++k)
        asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                     : "=r"(b[j][k].x), "=r"(b[j][k].y)
                     : "r"(x + j * 8 * X_STRIDE + k * 32)
                     : "memory");
#pragma unroll
  for (int i = 0; i < TILE / 16; ++i) {
    const uint4 codes = load_fragments(weights + i * 16 * STRIDE);
    const float scale[2] = {__ldg(scales.of[i][0] + at / SCALE_COLUMNS),
                            __ldg(scales.of[i][1] + at / SCALE_COLUMNS)};
    const uint32_t pairs[2][2] = {{codes.x, codes.y}, {codes.z, codes.w}};
    uint32_t a[2][4];
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        a[k][half] = elements_of(pairs[k][half] & 0xffff, ELEMENT());
        a[k][half + 2] = elements_of(pairs[k][half] >> 16, ELEMENT());
      }
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j) {
      if (GROUPED && j * 8 >= rows) continue;
      float products[4];
      product(products, a[0][0], a[0][1], a[0][2], a[0][3], b[j][0].x, b[j][0].y, ELEMENT());
      mma(products, a[1][0], a[1][1], a[1][2], a[1][3], b[j][1].x, b[j][1].y, ELEMENT());
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[i][j][k] = fmaf(scale[k / 2], products[k], sums[i][j][k]);
    }
  }
}
#elif WEIGHT_BITS == 4
static_assert(!GROUPED, "experts are not in INT4");

// Scales and zero points of this lane's rows of W in a tile.
struct TileScales {
  const SCALE* scales[TILE / 16][2];
  const uint8_t* zeros[TILE / 16][2];
  int group_shift;

  __device__ __forceinline__ TileScales(const Matrices& matrices, const Sweeps& sweep, int tile,
                                        int lane)
      : group_shift(matrices.group_shift) {
#pragma unroll
    for (int i = 0; i < TILE / 16; ++i)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const WeightRow row = tile_row(matrices, sweep, tile, i, half, lane);
        scales[i][half] = matrices.scales[row.matrix] + row.groups(matrices);
        zeros[i][half] = matrices.zeros[row.matrix] + row.groups(matrices);
      }
  }
};

// Add products of 64 elements of a tile's rows of W, from element `at` of their rows on, with all
// rows of x.
//
// A lane's word of W is elements 8 quad to 8 quad + 7 of 32, in pairs that take the places of
// elements 2 quad and 2 quad + 8 in two products of 16; those of x are permuted alike.
__device__ __forceinline__ void multiply(Sums& sums, uint32_t weights, uint32_t x, int,
                                         const TileScales& scales, int at) {
  uint4 b[COLUMNS / 8][2];
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
    for (int k = 0; k < 2; ++k)
      asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(b[j][k].x), "=r"(b[j][k].y), "=r"(b[j][k].z), "=r"(b[j][k].w)
                   : "r"(x + j * 8 * X_STRIDE + k * 64)
                   : "memory");
#pragma unroll
  for (int i = 0; i < TILE / 16; ++i) {
    const uint4 codes = load_fragments(weights + i * 16 * STRIDE);
    const uint32_t words[2][2] = {{codes.x, codes.y}, {codes.z, codes.w}};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int group = (at + k * 32) >> scales.group_shift;
      float scale[2];
      uint32_t a[4][2];  // pairs of codes, rows
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scale[half] = static_cast<float>(scales.scales[i][half][group]);
        const uint32_t zero = zero_of(scales.zeros[i][half][group], ELEMENT());
#pragma unroll
        for (int pair = 0; pair < 4; ++pair)
          a[pair][half] = elements_of(words[k][half], pair, zero, ELEMENT());
      }
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j) {
        const uint4& y = b[j][k];
        float products[4];
        product(products, a[0][0], a[0][1], a[1][0], a[1][1], y.x, y.y, ELEMENT());
        mma(products, a[2][0], a[2][1], a[3][0], a[3][1], y.z, y.w, ELEMENT());
#pragma unroll
        for (int c = 0; c < 4; ++c)
          sums[i][j][c] = fmaf(scale[c / 2], products[c], sums[i][j][c]);
      }
    }
  }
}
#else
// 16-bit weights have no scales.
struct TileScales {
  __device__ __forceinline__ TileScales(const Matrices&, const Sweeps&, int, int) {}
};

// Add products of 32 elements of a tile's rows of W with all rows of x.
__device__ __forceinline__ void multiply(Sums& sums, uint32_t weights, uint32_t x, int rows,
                                         const TileScales&, int) {
  uint4 b[COLUMNS / 8];
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j)
    if (!GROUPED || j * 8 < rows) b[j] = load_fragments(x + j * 8 * STRIDE);
#pragma unroll
  for (int i = 0; i < TILE / 16; ++i) {
    const uint4 a = load_fragments(weights + i * 16 * STRIDE);
    const uint4 c = load_fragments(weights + i * 16 * STRIDE + 32);
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j)
      if (!GROUPED || j * 8 < rows)
        mma(sums[i][j], a.x, a.y, a.z, a.w, b[j].x, b[j].y, ELEMENT());
#pragma unroll
    for (int j = 0; j < COLUMNS / 8; ++j)
      if (!GROUPED || j * 8 < rows)
        mma(sums[i][j], c.x, c.y, c.z, c.w, b[j].z, b[j].w, ELEMENT());
  }
}
#endif

// partials: (CONSUMERS, COLUMNS, RECORD), sums of a tile over a part of the width.
__device__ __forceinline__ void consume(const Params& params, Ring ring, float* partials) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const Matrices& matrices = params.matrices;
  let_next_begin();
  wait_for_previous();
#pragma unroll 1
  for (Sweeps sweep(params); sweep.more(); sweep.next()) {
    const int output = sweep.output(), outputs = sweep.outputs(), rows = sweep.group.rows;
    const int tiles = stage_rows(outputs) / TILE, parts = CONSUMERS / tiles;
    const int tile = warp % tiles, part = warp / tiles;

    // Requested now, needed at the end.
    float bias[ITEMS] = {}, residual[ITEMS] = {};
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int item = thread + i * CONSUMING, column = item / outputs;
      if (GROUPED || column >= rows) continue;
      const int at = output + item % outputs;
      bias[i] = WeightRow(matrices, at, 0).bias(matrices);
      if (matrices.residual != nullptr)
        residual[i] = static_cast<float>(
            matrices.residual[static_cast<int64_t>(column) * matrices.total + at]);
    }

    Sums sums = {};
    const TileScales scales(matrices, sweep, tile, lane);
    const int row = tile * TILE + lane % 16;
    // Quantized weights: x is not read by ldmatrix; lane 4 group + quad reads row `group`.
    const int x_at = WEIGHT_BITS == 16 ? lane % 8 * X_STRIDE + lane / 8 * 16
                                       : lane / 4 * X_STRIDE + lane % 4 * (64 / WEIGHT_BITS);
#pragma unroll 1
    for (int start = 0; start < matrices.width; start += SPAN) {
      const int elements = min(SPAN, matrices.width - start);
      const uint32_t stage = shared_address(ring.stage());
      const uint32_t weights = stage + row * STRIDE + lane / 16 * 16;
      const uint32_t x = stage + ring.x_row * STRIDE + x_at;
      barrier_wait(&ring.full[ring.slot], ring.parity);
      if (part < parts)
#pragma unroll 2
        for (int k = part * STEP; k < elements; k += parts * STEP)
          multiply(sums, weights + weight_bytes(k), x + k * 2, rows, scales, start + k);
      __syncwarp();
      if (lane == 0) arrive(&ring.empty[ring.slot]);
      ring.next();
    }

    const int group = lane / 4, quad = lane % 4;
    float* partial = partials + (warp * COLUMNS + 2 * quad) * RECORD + group;
#pragma unroll
    for (int i = 0; i < TILE / 16; ++i)
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
        for (int k = 0; k < 4; ++k)
          partial[(j * 8 + k % 2) * RECORD + i * 16 + k / 2 * 8] = sums[i][j][k];
    wait_for_consumers();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
      const int item = thread + i * CONSUMING, column = item / outputs, which = item % outputs;
      if (column >= rows) continue;
      const int row = stage_row(which);
      const float* sum = partials + (row / TILE * COLUMNS + column) * RECORD + row % TILE;
      float products[SIDES] = {};
#pragma unroll 4
      for (int other = 0; other < parts; ++other, sum += tiles * COLUMNS * RECORD)
#pragma unroll
        for (int side = 0; side < SIDES; ++side) products[side] += sum[side * 8];
      const int64_t place = sweep.group.first + column;
      finish(matrices, place * matrices.total + output + which, products, bias[i], residual[i]);
    }
    wait_for_consumers();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    linear_rows(const __grid_constant__ Params params) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ uint64_t full[MAX_DEPTH], empty[MAX_DEPTH];
  const int thread = threadIdx.x;
  if (thread < params.depth) {
    barrier_init(&full[thread], 1);
    barrier_init(&empty[thread], CONSUMERS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  float* partials = reinterpret_cast<float*>(memory);
  uint8_t* stages = memory + CONSUMERS * COLUMNS * RECORD * sizeof(float);
  const Ring ring{stages, full, empty, stage_rows(params.step), params.depth};
  if (GROUPED && GATED) wait_for_previous();
  if (thread < CONSUMING)
    consume(params, ring, partials);
  else
    produce(params, ring);
}
