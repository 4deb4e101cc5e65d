// linear_cluster: up to COLUMNS rows of x times weight matrices, y = x W^T, as in a decode step of
// many sequences: W is read once, at memory bandwidth. A bias or the residual stream is added to y,
// or two products become silu(gate) * up. x is already normalized (rms_norm.cu).
//
// A cluster of thread blocks computes a run of outputs, and each of its thread blocks multiplies a
// part of the width: so it reads few elements of x for many of W. A sweep passes over that part in
// stages of SPAN elements and computes up to `step` grains, which are GRAIN outputs of one matrix
// (with a gate: of both).
//
// Producer warps request stages, `depth` of which are in flight at any time, one box of rows per
// lane: rows of W before the kernel that computes x has ended (overlap.cuh), rows of x after that.
// Warpgroups multiply tiles of TILE rows of W by x. Then each thread block sends its sums to those
// of the cluster that finish them: each finishes some rows of x. The sums arrive in slots of the
// ring, which the producers grant in the order of stages, so that they go on with the next sweep
// meanwhile. Rows of W that were not requested may contain anything, which affects only their own
// products.
//
// Rounding is the same as in separate operations, as in linear.cu.
//
// Codes of quantized weights are converted in registers, and rounded to ELEMENT after they are
// scaled, like dequantized weights.
//
// Compiled with: COLUMNS (16, 32, 64, 96, 128), GATED, ELEMENT, WEIGHT_BITS and FLOAT_SCALES
// (matrices.cuh), GROUP_COLUMNS (INT4: columns of a group: 32, 64, or 128 for larger groups too;
// FP8: 128), CLUSTER (thread blocks), GROUPS (consuming warpgroups), PRODUCERS (warps), GRAIN
// (outputs), SPAN (elements, a multiple of 64, of 128 with FP8 or of 256 with INT4), USE_TMA (always
// 1).

#include "common/cluster.cuh"
#include "common/copy.cuh"
#include "common/mma.cuh"
#include "common/overlap.cuh"
#include "common/wgmma.cuh"
#include "linear/grain.cuh"

constexpr int TILE = 64;   // rows of W
constexpr int PANEL = 64;  // elements of a row of x in shared memory
constexpr int ROW = 128;   // bytes of that
constexpr int PANELS = SPAN / PANEL;
constexpr int W_PANEL = ROW * 8 / WEIGHT_BITS;  // elements of a row of W
constexpr int W_PANELS = SPAN / W_PANEL;
constexpr int W_UNIT = WEIGHT_BITS == 4 ? 8 : 1;  // elements of W in an element of a tensor map
constexpr int CONSUMING = GROUPS * 128, THREADS = CONSUMING + PRODUCERS * 32;
constexpr int ROWS = GROUPS * TILE;  // of W in a stage
constexpr int OUTPUTS = ROWS / SIDES;
constexpr int BOXES = ROWS / GRAIN;  // per panel
constexpr int X_AT = ROWS * ROW * W_PANELS, STAGE = X_AT + COLUMNS * ROW * PANELS;
constexpr int SHARE = COLUMNS / CLUSTER;  // rows of x that a thread block finishes
constexpr int CHUNKS = SHARE / 4;         // of 16 bytes of sums
constexpr int SUMS = TILE * SHARE * 4;  // bytes of a tile's sums that a thread block sends another
constexpr int TOGETHER = STAGE / SUMS;  // such parts in a slot
constexpr int GRANTS = (GROUPS * CLUSTER + TOGETHER - 1) / TOGETHER;
static_assert(BOXES <= PRODUCERS * 32, "a lane copies a box");
static_assert(TILE % (GRAIN * SIDES) == 0 && SPAN % W_PANEL == 0 && SHARE % 8 == 0);

struct Params {
  TensorMap x;           // (rows, width), in boxes of COLUMNS x PANEL
  TensorMap weights[MATRICES];  // in boxes of GRAIN x W_PANEL; INT4: of words
  Matrices matrices;
  int rows;          // at most COLUMNS
  int share, extra;  // grains of a cluster; number of clusters that have one more
  int step;          // grains of a sweep, at most OUTPUTS / GRAIN
  int depth;         // stages, more than GRANTS
  int unused[11];
};

// Iteration of a thread block over its sweeps.
struct Sweeps {
  const int step;
  int grain, end;

  __device__ __forceinline__ explicit Sweeps(const Params& params) : step(params.step) {
    const int cluster = blockIdx.x / CLUSTER;
    grain = cluster * params.share + min(cluster, params.extra);
    end = grain + params.share + (cluster < params.extra);
  }

  __device__ __forceinline__ bool more() const { return grain < end; }
  __device__ __forceinline__ int grains() const { return min(step, end - grain); }
  __device__ __forceinline__ void next() { grain += step; }
};

// Stages of a sweep, the same number in each thread block; elements beyond the width are zeros.
__device__ __forceinline__ int stages_of(const Matrices& matrices) {
  return (matrices.width + CLUSTER * SPAN - 1) / (CLUSTER * SPAN);
}

// Stages in shared memory. `full` completes when a stage has arrived or a slot is granted, `empty`
// when all warps have done with it.
struct Ring {
  uint32_t memory;
  uint64_t *full, *empty;
  int depth;
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ uint32_t stage() const { return memory + slot * STAGE; }

  __device__ __forceinline__ void next() {
    if (++slot == depth) slot = 0, parity ^= 1;
  }
};

__device__ __forceinline__ void barrier_init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
               : "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Iteration of a producer over the stages and grants of its thread block.
struct Producer {
  const Params& params;
  const int box, stages;
  Sweeps sweep;
  int stage;
  const TensorMap* map;  // of this lane's box
  int row;

  __device__ __forceinline__ explicit Producer(const Params& params)
      : params(params),
        box(threadIdx.x % 32 * PRODUCERS + threadIdx.x / 32 - CONSUMING / 32),
        stages(stages_of(params.matrices)),
        sweep(params) {
    begin();
  }

  __device__ __forceinline__ void begin() {
    stage = 0;
    const Grain grain(params.matrices, sweep.grain + box / SIDES);
    map = &params.weights[GATED ? box % SIDES : grain.matrix];
    row = grain.row;
  }

  __device__ __forceinline__ bool more() const { return sweep.more(); }

  __device__ __forceinline__ void next() {
    if (++stage < stages + GRANTS) return;
    sweep.next();
    begin();
  }

  __device__ __forceinline__ int start() const {
    return (blockIdx.x % CLUSTER * stages + stage) * SPAN;
  }

  __device__ __forceinline__ void request_weights(const Ring& ring) const {
    uint64_t* barrier = &ring.full[ring.slot];
    const int boxes = sweep.grains() * SIDES;
    if (stage >= stages) {
      if (box == 0) arrive(barrier);
      return;
    }
    copy_begin(barrier, (boxes * GRAIN * W_PANELS + COLUMNS * PANELS) * ROW, box);
    if (box >= boxes) return;
#pragma unroll
    for (int i = 0; i < W_PANELS; ++i)
      copy_box<true>(ring.stage() + (i * ROWS + box * GRAIN) * ROW, *map,
                     (start() + i * W_PANEL) / W_UNIT, row, barrier);
  }

  __device__ __forceinline__ void request_x(const Ring& ring) const {
    if (stage >= stages || box >= PANELS) return;
    copy_box<false>(ring.stage() + X_AT + box * COLUMNS * ROW, params.x, start() + box * PANEL, 0,
                    &ring.full[ring.slot]);
  }
};

__device__ __forceinline__ void produce(const Params& params, Ring ring) {
  Producer ahead(params), behind = ahead;
  Ring requested = ring;
  int stages = 0;
#pragma unroll 1
  for (; stages < params.depth && ahead.more(); ++stages, ahead.next(), ring.next())
    ahead.request_weights(ring);
  prefetch_map(params.x);
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

using Sums = float[COLUMNS / 2];

#if WEIGHT_BITS != 16
// Scales and zero points of this lane's two rows of W in a stage, requested a stage ahead,
// because they come from global memory.
struct StageScales {
  static constexpr int GROUPS_OF_ROW = SPAN / GROUP_COLUMNS;
  const SCALE* of[2];
  SCALE scales[GROUPS_OF_ROW][2];
#if WEIGHT_BITS == 4
  const uint8_t* zeros_of[2];
  uint32_t zeros[GROUPS_OF_ROW][2];
#endif

  // Rows beyond the sweep take scales of its last rows.
  __device__ __forceinline__ StageScales(const Matrices& matrices, const Sweeps& sweep) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = threadIdx.x / 32 * 16 + half * 8 + threadIdx.x % 32 / 4, box = at / GRAIN;
      const Grain grain(matrices, min(sweep.grain + box / SIDES, sweep.end - 1));
      const int output = min(grain.output + at % GRAIN, matrices.total - 1);
      const WeightRow row(matrices, output, GATED ? box % 2 : 0);
#if WEIGHT_BITS == 4
      of[half] = matrices.scales[row.matrix] + row.groups(matrices);
      zeros_of[half] = matrices.zeros[row.matrix] + row.groups(matrices);
#else
      of[half] = row.scales(matrices);
#endif
    }
  }

  // Request the scales of a stage; elements beyond the width get arbitrary ones.
  __device__ __forceinline__ void request(const Matrices& matrices, int stage) {
#pragma unroll
    for (int i = 0; i < GROUPS_OF_ROW; ++i) {
      const int at = min(stage * SPAN + i * GROUP_COLUMNS, matrices.width - 1);
      const int group = WEIGHT_BITS == 4 ? at >> matrices.group_shift : at / SCALE_COLUMNS;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scales[i][half] = __ldg(of[half] + group);
#if WEIGHT_BITS == 4
        zeros[i][half] = __ldg(zeros_of[half] + group);
#endif
      }
    }
  }
};

__device__ __forceinline__ uint4 load_chunk(uint32_t from) {
  uint4 words;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(from));
  return words;
}

__device__ __forceinline__ uint32_t load_pair(uint32_t from) {
  unsigned short codes;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(codes) : "r"(from));
  return codes;
}

constexpr int STEPS = COLUMNS > 96 ? 1 : 2;  // of 16 elements at a time; with more, registers spill
using Fragments = uint32_t[STEPS][4];

// Convert this lane's codes in a stage to scaled weights, from element `at` on. Chunks of 16 bytes
// are swizzled by the number of their row.
__device__ __forceinline__ void convert(Fragments& found, uint32_t stage, int at,
                                        const StageScales& scales) {
  const int group = threadIdx.x % 32 / 4, quad = threadIdx.x % 4;
  const uint32_t row = stage + at / W_PANEL * ROWS * ROW + (threadIdx.x / 32 * 16 + group) * ROW;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const SCALE scale = scales.scales[at / GROUP_COLUMNS][half];
#if WEIGHT_BITS == 4
    static_assert(STEPS == 2, "a chunk has two steps");
    const Group4 of(scale, scales.zeros[at / GROUP_COLUMNS][half]);
    const uint32_t chunk = group * 16 ^ weight_bytes(at % W_PANEL);
    const uint4 words = load_chunk(row + half * 8 * ROW + chunk);
    found[0][half] = of.weights(words.x >> 4 * quad);
    found[0][half + 2] = of.weights(words.y >> 4 * quad);
    found[1][half] = of.weights(words.z >> 4 * quad);
    found[1][half + 2] = of.weights(words.w >> 4 * quad);
#else
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t chunk = group * 16 ^ (at % W_PANEL + k * 16);
        const uint32_t codes = load_pair(row + half * 8 * ROW + chunk + quad * 2 + i * 8);
        const float2 two = unpacked(halves_of(codes).x, __half());
        found[k][half + i * 2] = packed(two.x * scale, two.y * scale, ELEMENT());
      }
#endif
  }
}

// Add products of a stage's elements of a warpgroup's rows of W with all rows of x. Elements of W
// are converted while the products of the preceding elements are computed.
__device__ __forceinline__ void multiply(Sums& sums, uint32_t stage, const StageScales& scales) {
  const uint64_t x = swizzled_rows(stage + X_AT);
  Fragments weights[2];
  pin(sums);
#pragma unroll
  for (int at = 0; at < SPAN; at += STEPS * 16) {
    Fragments& converted = weights[at / (STEPS * 16) % 2];
    convert(converted, stage, at, scales);
    wgmma_begin();
#pragma unroll
    for (int k = 0; k < STEPS; ++k)
      wgmma(sums, converted[k], x + (at / PANEL * COLUMNS * ROW + (at % PANEL + k * 16) * 2) / 16,
            ELEMENT());
    wgmma_commit();
    wgmma_wait<1>();
  }
  wgmma_wait();
  pin(sums);
}
#else
// Add products of a stage's elements of a warpgroup's rows of W with all rows of x.
__device__ __forceinline__ void multiply(Sums& sums, uint32_t stage, int group) {
  const uint64_t weights = swizzled_rows(stage + group * TILE * ROW);
  const uint64_t x = swizzled_rows(stage + X_AT);
  pin(sums);
  wgmma_begin();
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel)
#pragma unroll
    for (int k = 0; k < ROW; k += 32)
      wgmma(sums, weights + (panel * ROWS * ROW + k) / 16, x + (panel * COLUMNS * ROW + k) / 16,
            ELEMENT());
  wgmma_commit();
  wgmma_wait();
  pin(sums);
}
#endif

__device__ __forceinline__ void store_sums(uint32_t at, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(at), "f"(x), "f"(y) : "memory");
}

__device__ __forceinline__ float4 load_sums(uint32_t at) {
  float4 four;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
               : "r"(at));
  return four;
}

// A part: the sums of a warpgroup for the rows of x that a thread block finishes, as (TILE, SHARE)
// in chunks of 16 bytes, swizzled to avoid bank conflicts. `part`: the sender's rank times GROUPS,
// plus the warpgroup.
__device__ __forceinline__ uint32_t part_at(const Ring& ring, int part) {
  int slot = ring.slot + part / TOGETHER;
  if (slot >= ring.depth) slot -= ring.depth;
  return ring.memory + slot * STAGE + part % TOGETHER * SUMS;
}

// What the numbers of a row's chunks are xored with; the same 8 rows further.
__device__ __forceinline__ int swizzle(int row) {
  constexpr int PERIOD = CHUNKS < 8 ? CHUNKS : 8;
  return (CHUNKS & (CHUNKS - 1)) == 0 ? row / (8 / PERIOD) % PERIOD : 0;
}

// Send sums to the thread blocks that finish them, whose barriers `arrived` count them.
__device__ __forceinline__ void send(const Sums& sums, const Ring& ring, uint64_t* arrived) {
  const int thread = threadIdx.x, lane = thread % 32, row = thread % 128 / 32 * 16 + lane / 4;
  const int swizzled = swizzle(row), chunk = lane / 2 % 2 ^ swizzled % 2;
  const uint32_t from = part_at(ring, blockIdx.x % CLUSTER * GROUPS + thread / 128) +
                        (row * CHUNKS + chunk) * 16 + lane % 2 * 8;
#pragma unroll
  for (int rank = 0; rank < CLUSTER; ++rank) {
    const uint32_t part = CLUSTER == 1 ? from : remote_address(from, rank);
    const uint32_t barrier = remote_address(shared_address(arrived), rank);
#pragma unroll
    for (int j = 0; j < SHARE / 8; ++j)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t at = part + (j ^ swizzled / 2) * 32 + half * 8 * CHUNKS * 16;
        const float* pair = &sums[(rank * (SHARE / 8) + j) * 4 + half * 2];
        if (CLUSTER == 1)
          store_sums(at, pair[0], pair[1]);
        else
          store_remote(at, pair[0], pair[1], barrier);
      }
  }
}

// Wait for the sums of the cluster's thread blocks for this one's rows of x, add them and finish
// the outputs. A thread has an output, and four rows at a time. `number`: of the sweep.
__device__ __forceinline__ void add_up(const Params& params, const Ring& ring, const Sweeps& sweep,
                                       uint64_t* arrived, int number) {
  constexpr int ACROSS = OUTPUTS < CONSUMING ? OUTPUTS : CONSUMING, AT_ONCE = CONSUMING / ACROSS;
  constexpr int ITEMS = (CHUNKS + AT_ONCE - 1) / AT_ONCE;
  const Matrices& matrices = params.matrices;
  const int64_t total = matrices.total;
  const int first = blockIdx.x % CLUSTER * SHARE;
#pragma unroll 1
  for (int start = 0; start < OUTPUTS; start += ACROSS) {
    const int output = start + threadIdx.x % ACROSS, chunk = threadIdx.x / ACROSS;
    const int row = output / GRAIN * GRAIN * SIDES + output % GRAIN, swizzled = swizzle(row);
    const Grain grain(matrices, sweep.grain + output / GRAIN);
    const bool exists = output < sweep.grains() * GRAIN && chunk < AT_ONCE &&
                        grain.row + output % GRAIN < matrices.outputs[grain.matrix];
    const int rows = exists ? min(SHARE, params.rows - first) : 0;  // of x
    const int64_t at = first * total + grain.output + output % GRAIN;
    float bias = 0.0f;
    if (exists && matrices.biases[grain.matrix] != nullptr)
      bias = static_cast<float>(matrices.biases[grain.matrix][grain.row + output % GRAIN]);
    ELEMENT residual[GATED ? 1 : ITEMS][4] = {};
    if (!GATED && matrices.residual != nullptr)
#pragma unroll
      for (int i = 0; i < ITEMS; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if ((chunk + i * AT_ONCE) * 4 + j < rows)
            residual[i][j] = matrices.residual[at + ((chunk + i * AT_ONCE) * 4 + j) * total];
    if (start == 0) {
      if (CLUSTER == 1)
        asm volatile("bar.sync 1, %0;" ::"n"(CONSUMING) : "memory");
      else
        barrier_wait(arrived, number % 2);
    }
    uint32_t parts[CLUSTER];
#pragma unroll
    for (int rank = 0; rank < CLUSTER; ++rank)
      parts[rank] = part_at(ring, rank * GROUPS + row / TILE) + row % TILE * CHUNKS * 16;
#pragma unroll(GATED ? 1 : ITEMS)
    for (int i = 0; i < ITEMS; ++i) {
      const int column = (chunk + i * AT_ONCE) * 4;
      if (column >= rows) break;
      float products[4][SIDES] = {};
#pragma unroll
      for (int rank = 0; rank < CLUSTER; ++rank)
#pragma unroll
        for (int side = 0; side < SIDES; ++side) {
          const float4 four =
              load_sums(parts[rank] + side * GRAIN * CHUNKS * 16 + (column / 4 ^ swizzled) * 16);
          products[0][side] += four.x;
          products[1][side] += four.y;
          products[2][side] += four.z;
          products[3][side] += four.w;
        }
      ELEMENT* y = matrices.output + at + column * total;
      ELEMENT four[4];
      if (GATED && matrices.residual != nullptr)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (column + j < rows) residual[0][j] = matrices.residual[at + (column + j) * total];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        four[j] =
            finished(matrices, products[j], bias, static_cast<float>(residual[GATED ? 0 : i][j]));
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (column + j < rows) y[j * total] = four[j];
    }
  }
}

// granted: counts the thread blocks that have granted their slots for sums.
__device__ __forceinline__ void consume(const Params& params, Ring ring, uint64_t* granted,
                                        uint64_t* arrived) {
  const int thread = threadIdx.x, lane = thread % 32, stages = stages_of(params.matrices);
  let_next_begin();
  wait_for_previous();
  int number = 0;
#pragma unroll 1
  for (Sweeps sweep(params); sweep.more(); sweep.next(), ++number) {
    Sums sums = {};
#if WEIGHT_BITS != 16
    const int first = blockIdx.x % CLUSTER * stages;
    StageScales ahead(params.matrices, sweep);
    ahead.request(params.matrices, first);
#endif
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage, ring.next()) {
      if (stage == stages - 1 && thread < 32) {
        if (number == 0) cluster_wait();
        Ring slot = ring;
#pragma unroll 1
        for (int i = 0; i < GRANTS; ++i) {
          slot.next();
          barrier_wait(&slot.full[slot.slot], slot.parity);
        }
        if (lane < CLUSTER) arrive_remote(remote_address(shared_address(granted), lane));
        if (CLUSTER > 1) copy_begin(arrived, ROWS * COLUMNS * 4, lane);
      }
#if WEIGHT_BITS != 16
      const StageScales scales = ahead;
      ahead.request(params.matrices, first + stage + 1);
      barrier_wait(&ring.full[ring.slot], ring.parity);
      multiply(sums, ring.stage(), scales);
#else
      barrier_wait(&ring.full[ring.slot], ring.parity);
      multiply(sums, ring.stage(), thread / 128);
#endif
      if (lane == 0) arrive(&ring.empty[ring.slot]);
    }
    barrier_wait(granted, number % 2);
    send(sums, ring, arrived);
    add_up(params, ring, sweep, arrived, number);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < GRANTS; ++i, ring.next())
      if (lane == 0) arrive(&ring.empty[ring.slot]);
  }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
    linear_cluster(const __grid_constant__ Params params) {
  extern __shared__ __align__(1024) uint8_t memory[];
  uint64_t* full = reinterpret_cast<uint64_t*>(memory + params.depth * STAGE);
  uint64_t *empty = full + params.depth, *granted = empty + params.depth, *arrived = granted + 1;
  const int thread = threadIdx.x;
  if (thread < params.depth) {
    barrier_init(&full[thread], 1);
    barrier_init(&empty[thread], GROUPS * 4);
  }
  if (thread == 0) {
    barrier_init(granted, CLUSTER);
    barrier_init(arrived, 1);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  __syncthreads();
  cluster_arrive();
  const Ring ring{shared_address(memory), full, empty, params.depth};
  if (thread < CONSUMING)
    consume(params, ring, granted, arrived);
  else
    produce(params, ring);
}
