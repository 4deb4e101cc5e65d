// store: 16-bit keys and values of tokens -> slots of stream pages. One warp for the keys and one
// for the values of each job (up to 16 tokens of a tile) and KV head.
//
// Lanes have the elements whose codes they write (page.cuh, pages/fragments.py): a quarter of the
// channels of two tokens for keys, an eighth of the channels of four tokens for values. The keys of
// eight tokens, or the values of four, are in registers at a time; the rotation's butterflies run
// over the elements of a lane and, by shuffles, over the lanes that share a token, and so do the
// sums of the fit. A whole tile is written in whole words, single tokens byte by byte.
//
// store_layers: the same jobs in each of several layers, for tokens that are stored there in 16-bit
// precision.
//
// centers: the mean of some tokens' keys -> the center of a page; without tokens, the mean of the
// keys that another page stores. One warp per page and KV head. If there are few jobs, as in a
// decode step, each job looks for its page among those that begin and computes the center itself:
// this saves a launch, although two jobs of a page both do it and write the same bytes.
//
// (oscar_mm/ops/store.py defines jobs; pages/codecs/stream.py does all of this in PyTorch.)
//
// Compiled with, in addition to page.cuh's macros (of stream pages): KEY_BITS, VALUE_BITS, ELEMENT
// (__half, __nv_bfloat16), ROTATE, FIT (0 min-max, 1 least squares), KEY_START, VALUE_START and
// LSQ_ROUNDS (quant/fit.py), UNBIASED_KEYS, UNBIASED_VALUES (0, 1), SCORE_CHANGES (0 for none) and
// SCORE_FLOOR (score_error.cuh).

#include "common/hadamard.cuh"
#include "common/overlap.cuh"
#include "common/rounding.cuh"
#include "common/rows.cuh"
#include "store/fit.cuh"
#include "store/score_error.cuh"

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;
constexpr int RUNS = HEAD_DIM / 32;     // runs of 32 channels
constexpr int OF_KEY = HEAD_DIM / 4;    // channels of a token per lane
constexpr int OF_VALUE = HEAD_DIM / 8;
constexpr int JOB_HEAD = 4;             // integers of a job, or a beginning, before its sources
constexpr int CENTER_TOKENS = 32;
constexpr int STORED_CENTER = 64;       // first of as many tokens of another page, for its keys
constexpr int NOTHING = -2147483647 - 1;  // source of a place that does not change
using P = Page<KEY_BITS, VALUE_BITS>;

constexpr int MAX_LAYERS = 96;         // maximum layers of a launch, which has 4 KiB of parameters

// Parameters that are the same in all layers.
struct Work {
  const ELEMENT* keys;  // (batch, KV heads, tokens, HEAD_DIM), strides in elements
  const ELEMENT* values;
  const int* jobs;      // (count, 20): page, tile, row, 0, sources of 16 tokens
  const int* begins;    // (begin_count, 36): page, row, tokens, another page, their sources
  int64_t key_stride[3];
  int64_t value_stride[3];
  int count, begin_count, kv_heads;  // begin_count: 0 if `centers` is launched before
};

struct Layer {
  const ELEMENT* recent;  // (slots, 2, KV heads, HEAD_DIM)
  uint8_t* pages;         // (slots, page_bytes)
  const float* sigma;     // (batch or 1, KV heads or 1, HEAD_DIM) or null
  int* not_finite;        // set to 1 if a center, scale or zero is not a finite float16
  int sigma_row_stride, sigma_head_stride;  // 0 if all rows, or heads, share one
};

struct Params {
  Work work;
  Layer layer;
};

struct LayersParams {
  Work work;
  Layer layers[MAX_LAYERS];
};
static_assert(sizeof(LayersParams) <= 4096, "what every driver takes");

__device__ __forceinline__ uint8_t* head_of(const Work& work, const Layer& layer, int slot,
                                            int head) {
  return layer.pages + static_cast<int64_t>(slot) * P::page_bytes(work.kv_heads) +
         static_cast<int64_t>(head) * P::head_bytes;
}

// Offset in `sigma` of the vector of a row and head. A pointer would take more registers.
__device__ __forceinline__ int sigma_index(const Layer& layer, int row, int head) {
  return row * layer.sigma_row_stride + head * layer.sigma_head_stride;
}

// Write a token's scale and zero, by one lane. Return NaN if one of them is not finite, else 0.
__device__ __forceinline__ float write_fit(uint8_t* scales, uint8_t* zeros, int place,
                                           const Fit& fit, bool negative) {
  const uint32_t scale = __half_as_ushort(__float2half_rn(fit.scale));
  reinterpret_cast<unsigned short*>(scales)[place] = scale | (negative ? 0x8000u : 0u);
  reinterpret_cast<__half*>(zeros)[place] = __float2half_rn(fit.zero);
  return (fit.scale + fit.zero) * 0.0f;
}

// Pass on the elements of a page's center for a lane's part of a token's keys: take(i, first,
// second).
template <typename Take>
__device__ __forceinline__ void for_center(const uint8_t* page, int quad, Take take) {
#pragma unroll
  for (int run = 0; run < RUNS; ++run) {
    const uint4 eight = load16(page + P::center + (run * 4 + quad) * 16);
    const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 center = __half22float2(*reinterpret_cast<const __half2*>(&pairs[i]));
      take(8 * run + 2 * i, center.x, center.y);
    }
  }
}

__device__ __forceinline__ float store_keys(const Work& work, const Layer& layer, const int* job,
                                            int head, ScoreShared& shared, int lane) {
  const int group = lane >> 2, quad = lane & 3, tile = job[1];
  const Source rows = Source::of(work.keys, work.key_stride, layer.recent, 0, job[2], head,
                                 work.kv_heads);
  const float* sigma = layer.sigma == nullptr
                           ? nullptr
                           : layer.sigma + sigma_index(layer, job[2], head) + 2 * quad;
  uint8_t* page = head_of(work, layer, job[0], head);
  Codes<KEY_BITS> codes = {};
  uint32_t has = 0;  // a bit for each half
  float not_finite = 0.0f;
#if SCORE_CHANGES && CENTER
  keep_center_energy(page + P::center, shared, lane);
#endif
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const int source = job[JOB_HEAD + 8 * half + group];
    const bool is_token = source != NOTHING;
    if (!__any_sync(~0u, is_token)) continue;
    has |= is_token << half;
    const uint8_t* row = rows.row(is_token ? source : 0) + quad * 4;
    // Elements of a lane: step, half of 8 channels, odd.
    float x[OF_KEY];
#pragma unroll
    for (int i = 0; i < OF_KEY; i += 2) {
      const uint32_t two = is_token ? *reinterpret_cast<const uint32_t*>(row + 8 * i) : 0u;
      const float2 pair = unpacked(two, ELEMENT());
      x[i] = pair.x, x[i + 1] = pair.y;
      if (sigma != nullptr) x[i] *= reciprocal(sigma[4 * i]), x[i + 1] *= reciprocal(sigma[4 * i + 1]);
    }
#if SCORE_CHANGES
    keep_energy(x, shared, lane);
#endif
#if ROTATE
    hadamard<OF_KEY, 1, 4>(x, lane);
#endif
    Fit fit;
    RawCodes<KEY_BITS, true> raw;
    bool centered = false;
    // First the keys themselves, then relative to the center. (One loop, as this is most of the
    // code.)
#pragma unroll 1
    for (int apart = 0; apart <= CENTER; ++apart) {
#if CENTER
      if (apart)
        for_center(page, quad,
                   [&](int i, float even, float odd) { x[i] -= even, x[i + 1] -= odd; });
#endif
      RawCodes<KEY_BITS, true> its_codes;
      its_codes.clear();
      const Fit found = fit_group<KEY_BITS, 1, 4, UNBIASED_KEYS, CENTER, 0, OF_KEY>(
          x, KEY_START,
          [&](int i, float raised) { its_codes.add(raised, i / 4, i / 2 % 2, i % 2); });
      if (!apart || found.error < fit.error) fit = found, raw = its_codes, centered = apart;
    }
#if SCORE_CHANGES
#if CENTER
    const float share = centered ? 0.0f : 1.0f;
    for_center(page, quad, [&](int i, float even, float odd) {
      x[i] = fmaf(share, even, x[i]), x[i + 1] = fmaf(share, odd, x[i + 1]);
    });
#endif
    lower_score_error(raw, x, fit, shared, lane);
#endif
    raw.join(codes, half);
    const int place = tile / 4 * 64 + group * 8 + tile % 4 * 2 + half;
    if (is_token && quad == 0)
      not_finite += write_fit(page + P::key_scales, page + P::key_zeros, place, fit, centered);
  }
  uint8_t* target = page + P::key_codes;
  if (__all_sync(~0u, has == 3)) {
    codes.save(target, tile, lane);
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (has >> half & 1) {
        codes.save_byte(target, tile, lane, half);
        codes.save_byte(target, tile, lane, half + 2);
      }
  }
  return not_finite;
}

// Fit the value groups from GROUP on.
template <int GROUP = 0>
__device__ __forceinline__ float store_groups(RawCodes<VALUE_BITS, false>& raw,
                                              const float (&x)[OF_VALUE], uint8_t* page, int place,
                                              bool leaves) {
  if constexpr (GROUP < VALUE_GROUPS) {
    constexpr int COUNT = VALUE_GROUP / 8, AT = GROUP * COUNT;
    const Fit fit = fit_group<VALUE_BITS, 4, 32, UNBIASED_VALUES, false, AT, COUNT>(
        x, VALUE_START,
        [&](int i, float raised) { raw.add(raised, (AT + i) / 2, (AT + i) % 2, 0); });
    float not_finite = 0.0f;
    if (leaves)
      not_finite = write_fit(page + P::value_scales, page + P::value_zeros,
                             place + GROUP * PAGE_TOKENS, fit, false);
    return not_finite + store_groups<GROUP + 1>(raw, x, page, place, leaves);
  }
  return 0.0f;
}

__device__ __forceinline__ float store_values(const Work& work, const Layer& layer,
                                              const int* job, int head, int lane) {
  const int group = lane >> 2, quad = lane & 3, tile = job[1];
  const Source rows = Source::of(work.values, work.value_stride, layer.recent, 1, job[2], head,
                                 work.kv_heads);
  uint8_t* page = head_of(work, layer, job[0], head);
  Codes<VALUE_BITS> codes = {};
  uint32_t has = 0;  // a bit for each byte
  float not_finite = 0.0f;
#pragma unroll 1
  for (int byte = 0; byte < 4; ++byte) {
    const int half = byte % 2, odd = byte / 2;
    const int source = job[JOB_HEAD + 8 * half + 2 * quad + odd];
    const bool is_token = source != NOTHING;
    if (!__any_sync(~0u, is_token)) continue;
    has |= is_token << byte;
    const uint8_t* row = rows.row(is_token ? source : 0) + group / 2 * 16;
    // Elements of a lane: (step, half of the channels). A lane and its neighbour read the same 16
    // bytes, and each uses every other element.
    float x[OF_VALUE];
#pragma unroll
    for (int run = 0; run < RUNS; ++run) {
      uint4 eight = {};
      if (is_token) eight = load16(row + run * 64);
      const uint32_t pairs[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpacked(pairs[i], ELEMENT());
        x[4 * run + i] = group & 1 ? pair.y : pair.x;
      }
    }
#if ROTATE
    hadamard<OF_VALUE, 4, 32>(x, lane);
#endif
    RawCodes<VALUE_BITS, false> raw;
    raw.clear();
    const int place = tile / 2 * 32 + quad * 8 + tile % 2 * 4 + half * 2 + odd;
    not_finite += store_groups(raw, x, page, place, is_token && group == 0);
    raw.join(codes, byte);
  }
  uint8_t* target = page + P::value_codes;
  if (__all_sync(~0u, has == 15)) {
    codes.save(target, tile, lane);
  } else {
#pragma unroll
    for (int byte = 0; byte < 4; ++byte)
      if (has >> byte & 1) codes.save_byte(target, tile, lane, byte);
  }
  return not_finite;
}

#if CENTER
// Set a page's center to the mean of keys that another page stores; called by one warp. Lanes have
// the elements whose codes they read, as in unpack.cu.
__device__ __forceinline__ float take_mean(uint8_t* center, const uint8_t* other, int lane) {
  const int group = lane >> 2, quad = lane & 3;
  float sums[OF_KEY] = {}, zeros = 0.0f, centered = 0.0f;
#pragma unroll 1
  for (int tile = STORED_CENTER / TILE; tile < (STORED_CENTER + CENTER_TOKENS) / TILE; ++tile) {
    Codes<KEY_BITS> codes;
    codes.load(other + P::key_codes, tile, lane);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int place = tile / 4 * 64 + group * 8 + tile % 4 * 2 + half;
      const __half* scales = reinterpret_cast<const __half*>(other + P::key_scales);
      const float scale = __half2float(scales[place]);
      zeros += __half2float(reinterpret_cast<const __half*>(other + P::key_zeros)[place]);
      centered += signbit(scale) ? 1.0f : 0.0f;
#pragma unroll
      for (int i = 0; i < OF_KEY; ++i)
        sums[i] = fmaf(code_of(codes, i / 4, i / 2 % 2, half + 2 * (i % 2)), fabsf(scale), sums[i]);
    }
  }
  zeros = sum_of_lanes<4, 32>(zeros), centered = sum_of_lanes<4, 32>(centered);
  float not_finite = 0.0f;
#pragma unroll
  for (int i = 0; i < OF_KEY; i += 2) {
    const int at = ((i / 8 * 4 + quad) * 8 + i % 8) * 2;  // a center has the elements' order
    const float2 before = __half22float2(*reinterpret_cast<const __half2*>(other + P::center + at));
    const float first = fmaf(centered, before.x, sum_of_lanes<4, 32>(sums[i]) + zeros);
    const float second = fmaf(centered, before.y, sum_of_lanes<4, 32>(sums[i + 1]) + zeros);
    const __half2 pair = __floats2half2_rn(first / CENTER_TOKENS, second / CENTER_TOKENS);
    if (group == 0) *reinterpret_cast<__half2*>(center + at) = pair;
    const float2 stored = __half22float2(pair);
    not_finite += (stored.x + stored.y) * 0.0f;
  }
  return not_finite;
}

// Set a page's center; called by one warp.
__device__ __forceinline__ float store_center(const Work& work, const Layer& layer,
                                              const int* begin, int head, int lane) {
  const Source rows = Source::of(work.keys, work.key_stride, layer.recent, 0, begin[1], head,
                                 work.kv_heads);
  const int count = begin[2];
  uint8_t* center = head_of(work, layer, begin[0], head) + P::center;
  if (count == 0) return take_mean(center, head_of(work, layer, begin[3], head), lane);
  // A lane has PER_LANE consecutive channels.
  float sums[PER_LANE] = {};
#pragma unroll 8
  for (int token = 0; token < count; ++token) {
    const uint8_t* row = rows.row(begin[JOB_HEAD + token]) + lane * PER_LANE * 2;
#pragma unroll
    for (int i = 0; i < PER_LANE; i += 2) {
      const float2 pair = unpacked(*reinterpret_cast<const uint32_t*>(row + 2 * i), ELEMENT());
      sums[i] += pair.x, sums[i + 1] += pair.y;
    }
  }
  const int first = sigma_index(layer, begin[1], head) + lane * PER_LANE;
#pragma unroll
  for (int i = 0; i < PER_LANE; ++i) {
    if (layer.sigma != nullptr) sums[i] *= reciprocal(layer.sigma[first + i]);
    sums[i] /= count;
  }
#if ROTATE
  hadamard(sums, lane);
#endif
  float not_finite = 0.0f;
#pragma unroll
  for (int i = 0; i < PER_LANE; i += 2) {
    // Place of a pair in a run of 32 channels: quad, step % 2, half.
    const int channel = lane * PER_LANE + i, within = channel % 32;
    const int place = channel - within + within / 2 % 4 * 8 + within / 16 * 4 + within / 8 % 2 * 2;
    const __half2 pair = __floats2half2_rn(sums[i], sums[i + 1]);
    *reinterpret_cast<__half2*>(center + place * 2) = pair;
    const float2 stored = __half22float2(pair);
    not_finite += (stored.x + stored.y) * 0.0f;
  }
  return not_finite;
}

// Set the center of the job's page, if the page is one of those that begin.
__device__ __forceinline__ float begin_page(const Work& work, const Layer& layer, const int* job,
                                            int head, int lane) {
  for (int first = 0; first < work.begin_count; first += 32) {
    const int* begin =
        work.begins + static_cast<int64_t>(first + lane) * (JOB_HEAD + CENTER_TOKENS);
    const bool is_same = first + lane < work.begin_count && begin[0] == job[0];
    const uint32_t same = __ballot_sync(~0u, is_same);
    if (same == 0) continue;
    const int line = first + __ffs(same) - 1;
    const float not_finite = store_center(
        work, layer, work.begins + static_cast<int64_t>(line) * (JOB_HEAD + CENTER_TOKENS), head,
        lane);
    __syncwarp();  // other lanes read the center
    return not_finite;
  }
  return 0.0f;
}
#endif

__device__ __forceinline__ void store_jobs(const Work& work, const Layer& layer) {
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int item = blockIdx.x * WARPS + warp, side = item % 2;
  // Only every other warp has keys.
  __shared__ ScoreShared shared[WARPS / 2];
  const int which = item / 2 / work.kv_heads, head = item / 2 % work.kv_heads;
  if (which >= work.count) return;
  const int* job = work.jobs + static_cast<int64_t>(which) * (JOB_HEAD + TILE);
  if (job[0] < 0) return;
  float not_finite = 0.0f;
#if CENTER
  if (!side) not_finite = begin_page(work, layer, job, head, lane);
#endif
  not_finite += side ? store_values(work, layer, job, head, lane)
                     : store_keys(work, layer, job, head, shared[warp / 2], lane);
  if (isnan(not_finite)) *layer.not_finite = 1;
}

// Thread blocks per multiprocessor: the compiler's own choice spills a register on some GPUs.
#if HEAD_DIM > 256
constexpr int BLOCKS = 1;  // a lane has four times as many elements
#elif HEAD_DIM > 128
constexpr int BLOCKS = 2;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int BLOCKS = 3;
#else
constexpr int BLOCKS = 4;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    store(const __grid_constant__ Params params) {
  let_next_begin();
  wait_for_previous();
  store_jobs(params.work, params.layer);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    store_layers(const __grid_constant__ LayersParams params) {
  let_next_begin();
  wait_for_previous();
  store_jobs(params.work, params.layers[blockIdx.y]);
}

#if CENTER
extern "C" __global__ void __launch_bounds__(THREADS)
    centers(const __grid_constant__ Params params) {
  let_next_begin();
  wait_for_previous();
  const Work& work = params.work;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const int item = blockIdx.x * WARPS + warp;
  const int which = item / work.kv_heads, head = item % work.kv_heads;
  if (which >= work.begin_count) return;
  const int* begin = work.begins + static_cast<int64_t>(which) * (JOB_HEAD + CENTER_TOKENS);
  if (begin[0] < 0) return;
  if (isnan(store_center(work, params.layer, begin, head, lane))) *params.layer.not_finite = 1;
}
#endif
