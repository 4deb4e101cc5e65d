// Products of weights with a row of x on matrix units, in pieces: 8 rows of weights and 256 columns.
// They go from memory to the registers of a warp, in whole lines of 128 bytes, and from there to
// matrix units, as the 16-row operand. In the four lines of a load, eight lanes share a line; four
// of them have its left half, and the other four its right half. So the operand's even rows are left
// halves of rows of weights, and its odd rows are right halves. The other operand's even columns are
// the same part of x that belongs to left halves, its odd columns that of right halves.
//
// Compiled with the macros of weights.cuh, and GROUP_COLUMNS (INT4: columns of a group: 32, 64, or
// 128 for larger groups too).
#pragma once

#include "common/factors.cuh"

constexpr int PIECE = 256;  // columns
constexpr int BLOCK = 128;  // elements of x that are converted together, and columns of FP8 scales
// A lane loads LOADS times WORDS words of a row in a piece. Its elements, and with INT4 those of all
// four lanes of a half, have the same scale.
constexpr int WORDS = WEIGHT_BITS == 4 ? GROUP_COLUMNS / 32 : 4;
constexpr int LOADS = PIECE / 8 * WEIGHT_BITS / 32 / WORDS;
constexpr int EACH = WORDS * 32 / WEIGHT_BITS;  // elements of a load
constexpr int CHUNKS = EACH / 8;                // 16 bytes of x for a load
constexpr int GROUPS = WEIGHT_BITS == 4 ? BLOCK / GROUP_COLUMNS : 1;  // of a block

#if WEIGHT_BITS == 16
using FACTOR = ELEMENT;
#else
using FACTOR = __half;
#endif

// Policy for data that are read once per step: they are evicted from L2 first.
__device__ __forceinline__ uint64_t read_once() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

template <int COUNT>
__device__ __forceinline__ void load_words(uint32_t (&words)[COUNT], const uint8_t* from,
                                           uint64_t policy) {
  if constexpr (COUNT == 4)
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "l"(from), "l"(policy));
  // The next load is of the same 32 or 64 bytes.
  else if constexpr (COUNT == 2)
    asm volatile("ld.global.nc.L2::cache_hint.v2.b32 {%0, %1}, [%2], %3;"
                 : "=r"(words[0]), "=r"(words[1])
                 : "l"(from), "l"(policy));
  else
    asm volatile("ld.global.nc.L2::cache_hint.b32 %0, [%1], %2;"
                 : "=r"(words[0])
                 : "l"(from), "l"(policy));
}

// Load four elements per lane of a block of x. L1 is bypassed: a preceding kernel may have written
// them while this one was running.
__device__ __forceinline__ uint2 four_of(const ELEMENT* x, int block, int lane) {
  return __ldcg(reinterpret_cast<const uint2*>(x) + block * 32 + lane);
}

// What products with a block of x need besides its factors.
struct BlockOfX {
  float undo;            // number by which products must be multiplied
  float totals[GROUPS];  // INT4: sums of a group's factors
};

// Blocks of x in shared memory, in the order in which lanes load them.
struct Blocks {
  uint2* factors;  // of four elements; with weights of 16 bits, the elements themselves
  BlockOfX* others;

  // Store a block, of which each lane has four elements.
  __device__ __forceinline__ void store(int block, uint2 four, int lane) const {
    // Elements of a piece that follow each other: load, half, quad, chunk of eight, element.
    const int chunk = block % 2 * 16 + lane / 2;
    const int load = chunk / (8 * CHUNKS), owner = chunk / CHUNKS % 8;
    const int place = (load * CHUNKS + chunk % CHUNKS) * 8 + owner;
#if WEIGHT_BITS != 16
    const Conversion conversion = Conversion::of<32>(Conversion::larger(four.x, four.y));
    four = {conversion.factors(four.x, false), conversion.factors(four.y, true)};
    if (lane == 0) others[block].undo = conversion.undo();
#endif
#if WEIGHT_BITS == 4
    constexpr int LANES = 32 / GROUPS;
    const float2 even = unpacked(four.x, __half()), odd = unpacked(four.y, __half());
    float total = even.x + even.y + 16.0f * (odd.x + odd.y);
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) total += __shfl_xor_sync(~0u, total, step);
    if (lane % LANES == 0) others[block].totals[lane / LANES] = total;
#endif
    factors[block / 2 * 64 + place * 2 + lane % 2] = four;
  }

  // Load eight elements of a piece: a chunk of this lane's load.
  __device__ __forceinline__ uint4 load(int piece, int load, int chunk, int lane) const {
    return reinterpret_cast<const uint4*>(factors)[piece * 32 + (load * CHUNKS + chunk) * 8 +
                                                   lane % 8];
  }
};

// A row of weights, and its scales and zero points.
struct RowOfWeights {
  const WEIGHT* weights;
  const SCALE* scales;
  const uint8_t* zeros;
};

// This lane's part of a piece of weights: of rows lane / 8 and lane / 8 + 4.
struct Piece {
  uint32_t words[2][LOADS][WORDS];
#if WEIGHT_BITS != 16
  SCALE scales[2][LOADS];
#endif
#if WEIGHT_BITS == 4
  uint8_t zeros[2][LOADS];
#endif

  // First column in the piece of the half line that this lane shares with three others.
  __device__ __forceinline__ static int column(int load, int lane) {
    return load * 8 * EACH + lane / 4 % 2 * 4 * EACH;
  }

  // Request a part of one of this lane's rows. group_shift: INT4: log2 of the columns of a group;
  // 31: as wide as the matrix.
  __device__ __forceinline__ void request(int which, const RowOfWeights& row, int group_shift,
                                          int piece, uint64_t policy, int lane) {
    const uint8_t* from = reinterpret_cast<const uint8_t*>(row.weights) +
                          piece * weight_bytes(PIECE) + lane % 8 * WORDS * 4;
#pragma unroll
    for (int i = 0; i < LOADS; ++i) load_words(words[which][i], from + i * WORDS * 32, policy);
#if WEIGHT_BITS == 8
    const float2 two = __ldg(reinterpret_cast<const float2*>(row.scales) + piece);
    scales[which][0] = two.x, scales[which][1] = two.y;
#elif WEIGHT_BITS == 4
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      const int group = (piece * PIECE + column(i, lane)) >> group_shift;
      scales[which][i] = __ldg(row.scales + group);
      zeros[which][i] = __ldg(row.zeros + group);
    }
#endif
  }

  // Factors of a load of a row, in pairs.
  __device__ __forceinline__ void factors(uint32_t (&pairs)[EACH / 2], int which, int load) const {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const uint32_t word = words[which][load][i];
#if WEIGHT_BITS == 16
      pairs[i] = word;
#elif WEIGHT_BITS == 8
      const uint2 two = halves_of(word);
      pairs[2 * i] = two.x, pairs[2 * i + 1] = two.y;
#else
      const uint4 four = halves_of_word(word);
      pairs[4 * i] = four.x, pairs[4 * i + 1] = four.y;
      pairs[4 * i + 2] = four.z, pairs[4 * i + 3] = four.w;
#endif
    }
  }

  // Return products of half lines of the two rows with a piece of x; four lanes have the same.
  __device__ __forceinline__ float2 times(const Blocks& blocks, int piece, int lane) const {
    const bool right = lane / 4 % 2;
    float found[2] = {}, sums[2][4] = {};  // sums: of even and odd products, which do not wait
#pragma unroll
    for (int i = 0; i < LOADS; ++i) {
      uint32_t a[EACH / 2], b[EACH / 2];
      factors(a, 0, i), factors(b, 1, i);
#pragma unroll
      for (int j = 0; j < CHUNKS; ++j) {
        const uint4 x = blocks.load(piece, i, j, lane);
        const int at = j * 4;
        mma(sums[0], a[at], b[at], a[at + 1], b[at + 1], x.x, x.y, FACTOR());
        mma(sums[1], a[at + 2], b[at + 2], a[at + 3], b[at + 3], x.z, x.w, FACTOR());
      }
#if WEIGHT_BITS == 16
      if (i + 1 < LOADS) continue;  // Sums of all loads.
#endif
#pragma unroll
      for (int which = 0; which < 2; ++which) {
        float sum = right ? sums[0][which * 2 + 1] + sums[1][which * 2 + 1]
                          : sums[0][which * 2] + sums[1][which * 2];
#if WEIGHT_BITS == 16
        found[which] = sum;
#else
        const int column = Piece::column(i, lane);
        const BlockOfX& other = blocks.others[piece * 2 + column / BLOCK];
        const float scale = static_cast<float>(scales[which][i]) * other.undo;
#if WEIGHT_BITS == 4
        const float zero = static_cast<float>(zeros[which][i]);
        sum = fmaf(sum, 0x1p24f, -zero * other.totals[column % BLOCK / GROUP_COLUMNS]);
#endif
        found[which] = fmaf(scale, sum, found[which]);
#endif
      }
#if WEIGHT_BITS != 16
#pragma unroll
      for (int k = 0; k < 4; ++k) sums[0][k] = sums[1][k] = 0.0f;
#endif
    }
    return {found[0], found[1]};
  }
};
