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
// (matrices.cuh), GROUP_COLUMNS (INT4: columns of a group: 32, 64, or 128 for larger groups too),
// GROUPED, CONSUMERS and PRODUCERS (warps), TILE (16, 32 or 64), SWEEP (maximum rows of W), SPAN
// (elements, a multiple of 32, or of 128 with FP8 and INT4), USE_TMA (always 1: without bulk
// copies, cuBLAS is five times as fast).

#include "common/copy.cuh"
#include "common/factors.cuh"
#include "common/overlap.cuh"
#include "experts/groups.cuh"
#include "linear/matrices.cuh"

constexpr int THREADS = (CONSUMERS + PRODUCERS) * 32, CONSUMING = CONSUMERS * 32;
constexpr int STRIDE = weight_bytes(SPAN) + 16;  // bytes between rows of W in a stage
// Bytes between rows of x in a stage. A lane reads 8 bytes with FP8 and 16 with INT4, and ldmatrix
// otherwise: no bank conflicts.
constexpr int X_STRIDE = SPAN * 2 + 256 / WEIGHT_BITS;
// Elements that a warp multiplies at a time; quantized elements of a unit have one or two scales.
constexpr int UNIT = WEIGHT_BITS == 16 ? 32 : WEIGHT_BITS == 4 && GROUP_COLUMNS < 128 ? 64 : 128;
constexpr int GROUPS = WEIGHT_BITS == 4 && GROUP_COLUMNS == 32 ? 2 : 1;  // of a row in a unit
constexpr int FRAGMENT = 16;           // rows of W
constexpr int RECORD = TILE + 4;       // floats between columns of a tile's sums: no bank conflicts
constexpr int MAX_DEPTH = 16;
constexpr int ITEMS = (SWEEP / SIDES * COLUMNS + CONSUMING - 1) / CONSUMING;
constexpr int PARTIALS = CONSUMERS * COLUMNS * RECORD;  // floats
static_assert(SWEEP <= PRODUCERS * 32 && COLUMNS <= PRODUCERS * 32, "a producers' lane has a row");
static_assert(SWEEP % TILE == 0 && SWEEP / TILE <= CONSUMERS, "a consumer has a tile");
static_assert(SPAN % UNIT == 0 && TILE % 16 == 0 && COLUMNS % 8 == 0, "whole fragments");

struct Params {
  const ELEMENT* x;    // (rows, width), width a multiple of 32
  // GROUPED: those of the first expert; the output is (places, total); with FP8, `total` is a
  // multiple of the rows of a scale; rows of all experts' matrices are at most 2^31 - 1.
  Matrices matrices;
  const Group* groups; // GROUPED
  const int* count;    // number of groups
  const int* rows_of;  // (places): rows of x; null: the row of a place has the same number
  int rows;            // at most COLUMNS; unless GROUPED
  int step;            // outputs of a sweep, at most SWEEP / SIDES
  int depth;           // stages, at most MAX_DEPTH
};

// Rows of W in a stage, for the fragments of `outputs`.
__device__ __forceinline__ int stage_rows(int outputs) {
  const int rows = GATED ? (outputs + 7) / 8 * 16 : outputs;
  return (rows + FRAGMENT - 1) / FRAGMENT * FRAGMENT;
}

__device__ __forceinline__ int tiles_of(int outputs) {
  return (stage_rows(outputs) + TILE - FRAGMENT) / TILE;
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

  // Row of the weights of an output of the sweep.
  __device__ __forceinline__ WeightRow row(int within, int side) const {
    WeightRow found(params.matrices, output() + within, side);
    if (GROUPED) found.row += group.expert * SIDES * params.matrices.total;
    return found;
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
    return memory + slot * stage_bytes();
  }

  __device__ __forceinline__ int stage_bytes() const {
    return x_row * STRIDE + COLUMNS * X_STRIDE;
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
    if (within < sweep.outputs()) {
      const WeightRow found = sweep.row(within, side);
      weights = found.weights(matrices);
#if WEIGHT_BITS == 4
      found.prefetch_groups(matrices);
#endif
    }
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

#if WEIGHT_BITS != 16
// Type of the factors: two codes become halves in one instruction, bfloat16 in four. With FP8,
// experts keep ELEMENT: they have few rows for each load of x, which would be converted
// repeatedly.
#if GROUPED && WEIGHT_BITS == 8
using FACTOR = ELEMENT;
#else
using FACTOR = __half;
#endif
constexpr int STEPS = UNIT / GROUPS / 32;  // of a group

struct RowScale {
  float scale;
#if WEIGHT_BITS == 4
  float zero;
#endif
};

// Scales and zero points of rows of W, for the next unit: each lane has the rows of a tile that are
// its number plus multiples of 32. They are requested a unit ahead, because
// they come from global memory.
struct RowScales {
  static constexpr int EACH = (TILE + 31) / 32;
  const SCALE* scales[EACH];
  SCALE scale[EACH][GROUPS];
#if WEIGHT_BITS == 4
  const uint8_t* zeros[EACH];
  uint32_t zero[EACH][GROUPS];
#endif
  int group_shift;

  // Rows beyond the sweep, whose products are not used, are replaced by its last one. Requests the
  // scales of the tile's first unit.
  __device__ __forceinline__ RowScales(const Matrices& matrices, const Sweeps& sweep)
      : group_shift(matrices.group_shift) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int tiles = tiles_of(max(sweep.outputs(), 1));
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int at = warp % tiles * TILE + i * 32 + lane % TILE;  // of the stage
      const int output = max(min(GATED ? at / 16 * 8 + at % 8 : at, sweep.outputs() - 1), 0);
      const WeightRow row = sweep.row(output, GATED ? at / 8 % 2 : 0);
#if WEIGHT_BITS == 4
      scales[i] = matrices.scales[row.matrix] + row.groups(matrices);
      zeros[i] = matrices.zeros[row.matrix] + row.groups(matrices);
#else
      scales[i] = row.scales(matrices);
#endif
    }
    request(min(warp / tiles * UNIT, matrices.width - UNIT));
  }

  // Request the scales of the unit that begins at element `at`.
  __device__ __forceinline__ void request(int at) {
#pragma unroll
    for (int i = 0; i < EACH; ++i)
#pragma unroll
      for (int j = 0; j < GROUPS; ++j) {
#if WEIGHT_BITS == 4
        const int group = (at + j * (UNIT / GROUPS)) >> group_shift;
        zero[i][j] = __ldg(zeros[i] + group);
#else
        const int group = at / SCALE_COLUMNS;
#endif
        scale[i][j] = __ldg(scales[i] + group);
      }
  }

  // Return the scale of this lane's row in a half of fragment `i` of a tile.
  __device__ __forceinline__ RowScale of(int i, int half, int group, int lane) const {
    const int owner = i % 2 * 16 + half * 8 + lane / 4;
    const float factor = WEIGHT_BITS == 4 ? 0x1p24f : 1.0f;
    RowScale found;
    found.scale = __shfl_sync(~0u, static_cast<float>(scale[i / 2][group]) * factor, owner);
#if WEIGHT_BITS == 4
    found.zero = __shfl_sync(~0u, static_cast<float>(zero[i / 2][group]), owner);
#endif
    return found;
  }
};

// Convert a unit's elements of a column of x, which four lanes share, to factors. `undo`: the
// numbers by which this lane's columns of products must be multiplied.
__device__ __forceinline__ void to_factors(uint32_t (&x)[UNIT / 8], float (&undo)[2], int lane) {
  undo[0] = undo[1] = 1.0f;
  if (WEIGHT_BITS == 8 && (GROUPED || Format<ELEMENT>::HALF)) return;
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < UNIT / 8; ++i) largest = Conversion::larger(largest, x[i]);
  const Conversion conversion = Conversion::of<4>(largest);
#pragma unroll
  for (int i = 0; i < UNIT / 8; ++i) x[i] = conversion.factors(x[i], i % 2);
#pragma unroll
  for (int i = 0; i < 2; ++i)
    undo[i] = __shfl_sync(~0u, conversion.undo(), lane % 4 * 8 + i * 4);
}

// Load this lane's elements of a unit of eight rows of x.
__device__ __forceinline__ void load_columns(uint32_t (&b)[UNIT / 8], uint32_t x) {
#if WEIGHT_BITS == 4
#pragma unroll
  for (int i = 0; i < UNIT / 8; i += 4)
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(b[i]), "=r"(b[i + 1]), "=r"(b[i + 2]), "=r"(b[i + 3])
                 : "r"(x + i * 16)
                 : "memory");
#else
#pragma unroll
  for (int i = 0; i < UNIT / 8; i += 2)
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(b[i]), "=r"(b[i + 1])
                 : "r"(x + i * 16)
                 : "memory");
#endif
}

// Factors of 16 rows and 32 columns: those of eight elements of each of a lane's two rows.
struct Factors {
  uint4 rows[2];
};

#if WEIGHT_BITS == 4
// What halves_of_word returns for eight codes that are 1.
constexpr uint4 ONES = {0x00010001, 0x00100010, 0x00010001, 0x00100010};

// Codes are of two steps.
__device__ __forceinline__ Factors factors_of(const uint4& codes, int step) {
  if (step % 2) return {{halves_of_word(codes.z), halves_of_word(codes.w)}};
  return {{halves_of_word(codes.x), halves_of_word(codes.y)}};
}
#else
__device__ __forceinline__ Factors factors_of(const uint4& codes, int) {
  const uint2 a = elements_of(codes.x, FACTOR()), b = elements_of(codes.z, FACTOR());
  const uint2 c = elements_of(codes.y, FACTOR()), d = elements_of(codes.w, FACTOR());
  return {{{a.x, a.y, b.x, b.y}, {c.x, c.y, d.x, d.y}}};
}
#endif

// Add products of 32 columns of W and x; `begin`: without an addend.
__device__ __forceinline__ void multiply_step(float (&c)[COLUMNS / 8][4], const Factors& factors,
                                              const uint32_t (&b)[COLUMNS / 8][UNIT / 8], int step,
                                              bool begin, int rows) {
  const uint4 &x = factors.rows[0], &y = factors.rows[1];
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    if (GROUPED && j * 8 >= rows) continue;
    const uint32_t* k = &b[j][step * 4];
    if (begin)
      product(c[j], x.x, y.x, x.y, y.y, k[0], k[1], FACTOR());
    else
      mma(c[j], x.x, y.x, x.y, y.y, k[0], k[1], FACTOR());
    mma(c[j], x.z, y.z, x.w, y.w, k[2], k[3], FACTOR());
  }
}

// Add products of a unit of a tile's rows of W with all rows of x: of COUNT fragments of 16 rows,
// or of the first `fragments` if there are fewer. Their products do not wait for each other.
//
// FP8: a lane's four bytes of W are elements 4 quad to 4 quad + 3 of its row, which take the places
// of elements 2 quad, 2 quad + 1, 2 quad + 8 and 2 quad + 9. INT4: a lane's word is elements 8 quad
// to 8 quad + 7 of 32, in pairs that take the places of elements 2 quad and 2 quad + 8 in two
// products of 16. Elements of x are permuted alike.
template <int COUNT = TILE / 16>
__device__ __forceinline__ void multiply(Sums& sums, uint32_t weights, uint32_t x, int rows,
                                         int fragments, const RowScales& scales, int lane) {
  if constexpr (COUNT > 1)
    if (fragments < COUNT)
      return multiply<COUNT - 1>(sums, weights, x, rows, fragments, scales, lane);
  uint32_t b[COLUMNS / 8][UNIT / 8];
  float undo[COLUMNS / 8][2];
#pragma unroll
  for (int j = 0; j < COLUMNS / 8; ++j) {
    if (GROUPED && j * 8 >= rows) continue;
    load_columns(b[j], x + j * 8 * X_STRIDE);
    to_factors(b[j], undo[j], lane);
  }
  uint4 codes[COUNT];
#pragma unroll
  for (int group = 0; group < GROUPS; ++group) {
    float products[COUNT][COLUMNS / 8][4];
#if WEIGHT_BITS == 4
    float ones[COLUMNS / 8][4];  // products with codes that are all 1, for the zero points
#endif
#pragma unroll
    for (int step = group * STEPS; step < (group + 1) * STEPS; ++step) {
      constexpr int LOADED = WEIGHT_BITS == 4 ? 2 : 1;  // steps
      const bool begin = step == group * STEPS;
      if (step % LOADED == 0)
#pragma unroll
        for (int i = 0; i < COUNT; ++i)
          codes[i] = load_fragments(weights + i * 16 * STRIDE + step / LOADED * 32);
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
        multiply_step(products[i], factors_of(codes[i], step), b, step, begin, rows);
#if WEIGHT_BITS == 4
      multiply_step(ones, {{ONES, ONES}}, b, step, begin, rows);
#endif
    }
#pragma unroll
    for (int i = 0; i < 2 * COUNT; ++i) {
      const RowScale scale = scales.of(i / 2, i % 2, group, lane);
#pragma unroll
      for (int j = 0; j < COLUMNS / 8; ++j)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float product = products[i / 2][j][i % 2 * 2 + k];
#if WEIGHT_BITS == 4
          product = fmaf(-scale.zero, ones[j][k], product);
#endif
          float& sum = sums[i / 2][j][i % 2 * 2 + k];
          sum = fmaf(scale.scale, product * undo[j][k], sum);
        }
    }
  }
}
#else
// Add products of 32 elements of a tile's rows of W with all rows of x.
__device__ __forceinline__ void multiply(Sums& sums, uint32_t weights, uint32_t x, int rows) {
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
#if WEIGHT_BITS == 16 || GROUPED
  wait_for_previous();
#endif
  Sweeps sweep(params);
#if WEIGHT_BITS != 16
  RowScales ahead(matrices, sweep);
#endif
#if WEIGHT_BITS != 16 && !GROUPED
  wait_for_previous();
#endif
#pragma unroll 1
  for (; sweep.more(); sweep.next()) {
    const int output = sweep.output(), outputs = sweep.outputs(), rows = sweep.group.rows;
    const int tiles = tiles_of(outputs), parts = CONSUMERS / tiles;
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
    const int row = tile * TILE + lane % 16;
    // Quantized weights: x is not read by ldmatrix; lane 4 group + quad reads row `group`.
    const int x_at = WEIGHT_BITS == 16 ? lane % 8 * X_STRIDE + lane / 8 * 16
                                       : lane / 4 * X_STRIDE + lane % 4 * (64 / WEIGHT_BITS);
#if WEIGHT_BITS != 16
    const int fragments = min(stage_rows(outputs) / 16 - tile * (TILE / 16), TILE / 16);
    int next = part < parts ? part * UNIT : matrices.width;
#endif
#pragma unroll 1
    for (int start = 0; start < matrices.width; start += SPAN) {
      const int elements = min(SPAN, matrices.width - start);
      const uint32_t stage = shared_address(ring.stage());
      const uint32_t weights = stage + row * STRIDE + lane / 16 * 16;
      const uint32_t x = stage + ring.x_row * STRIDE + x_at;
      barrier_wait(&ring.full[ring.slot], ring.parity);
#if WEIGHT_BITS == 16
      if (part < parts)
#pragma unroll 2
        for (int k = part * UNIT; k < elements; k += parts * UNIT)
          multiply(sums, weights + k * 2, x + k * 2, rows);
#else
#pragma unroll 1
      while (next < start + elements) {
        const RowScales scales = ahead;
        const int k = next - start;
        next += parts * UNIT;
        ahead.request(min(next, matrices.width - UNIT));
        multiply(sums, weights + weight_bytes(k), x + k * 2, rows, fragments, scales, lane);
      }
#endif
      __syncwarp();
      if (lane == 0) arrive(&ring.empty[ring.slot]);
      ring.next();
    }

#if WEIGHT_BITS != 16
    Sweeps following = sweep;
    following.next();
    if (following.more()) ahead = RowScales(matrices, following);
#endif
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
  uint8_t* stages = memory + PARTIALS * sizeof(float);
  const Ring ring{stages, full, empty, stage_rows(params.step), params.depth};
  if (GROUPED && GATED) wait_for_previous();
  if (thread < CONSUMING)
    consume(params, ring, partials);
  else
    produce(params, ring);
}
