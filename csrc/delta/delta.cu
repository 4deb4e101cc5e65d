// delta: one decode step of a Gated DeltaNet layer between its projections: convolution and SiLU,
// L2 norm of queries and keys, gates, recurrent state, gated RMSNorm. States are updated in place,
// each row's at its own address.
//
// With decay a, key k, value v, query q and state S (KEYS, VALUES) of a value head:
//   u = beta (v - a S^T k),  S <- a S + k u^T,  y = S^T q = a (S_before^T q) + (k . q) u
// so one pass over S, which is read and written once, gives both products. Columns of S are
// independent: a thread block computes EACH items of COLUMNS columns. The thread blocks of a
// cluster share a key head. They write its convolution state when all of them have read it, and add
// up the squares of outputs for the norm.
//
// Rounding is the same as in transformers' modules.
//
// Compiled with: KEYS, VALUES (channels of a head, multiples of 32), GROUP (value heads per key
// head), CLUSTER (thread blocks per key head; 1 before sm_90), ELEMENT (__half, __nv_bfloat16).

#include "common/cluster.cuh"
#include "common/overlap.cuh"
#include "common/rounding.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int COLUMNS = 32;                      // columns of an item
constexpr int LANES = COLUMNS / 4;               // threads per row of an item
constexpr int LINES = THREADS / LANES;           // rows of an item that are loaded at a time
constexpr int ROWS = KEYS / LINES;               // rows of a thread
constexpr int SPLIT = VALUES / COLUMNS;          // items of a value head
constexpr int EACH = GROUP * SPLIT / CLUSTER;    // items of a thread block
constexpr int TAPS = 4;                          // inputs of the convolution
constexpr float TINY = 1e-6f;                    // epsilon of the L2 norm
constexpr int CHANNELS = 2 * KEYS + EACH * COLUMNS;  // of the convolution, in a thread block
constexpr int TURNS = (CHANNELS + THREADS - 1) / THREADS;

static_assert(GROUP * SPLIT % CLUSTER == 0, "all thread blocks have as many items");
static_assert(KEYS % LINES == 0 && VALUES % COLUMNS == 0, "whole items");

// Where the parts of key heads begin in a row.
struct Part {
  int offset, stride;

  __device__ __forceinline__ int at(int key_head) const { return offset + key_head * stride; }
};

struct Params {
  const ELEMENT* mixed;        // (rows, mixed_stride): queries, keys, values and gates z
  const ELEMENT* gates;        // (rows, gates_stride): b and a of each value head
  const uint64_t* states;      // (2, rows): addresses of convolution states (channels, TAPS) and of
                               // recurrent states (value heads, KEYS, VALUES); 0: no new token
  const ELEMENT* convolution;  // (channels, TAPS): weights
  const ELEMENT* decay;        // (value heads): logarithm of A
  const ELEMENT* bias;         // (value heads), added to a
  const ELEMENT* norm;         // (VALUES): weight
  ELEMENT* output;             // (rows, value heads * VALUES)
  int64_t mixed_stride, gates_stride;
  Part query, key, value, z, b, a;
  float epsilon;  // of the norm
};

__device__ __forceinline__ void arrive() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait() {
#if CLUSTER > 1
  cluster_wait();
#else
  __syncthreads();
#endif
}

// Write to the same place in the shared memory of the cluster's thread block `rank`.
__device__ __forceinline__ void store_at(float* target, int rank, float x) {
#if CLUSTER > 1
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(
                   remote_address(shared_address(target), rank)),
               "f"(x)
               : "memory");
#else
  *target = x;
#endif
}

__device__ __forceinline__ void add(float4& sum, float4 x, float by) {
  sum.x = fmaf(x.x, by, sum.x), sum.y = fmaf(x.y, by, sum.y);
  sum.z = fmaf(x.z, by, sum.z), sum.w = fmaf(x.w, by, sum.w);
}

__device__ __forceinline__ float4 plus_shuffled(float4 x, int step) {
  x.x += __shfl_xor_sync(~0u, x.x, step), x.y += __shfl_xor_sync(~0u, x.y, step);
  x.z += __shfl_xor_sync(~0u, x.z, step), x.w += __shfl_xor_sync(~0u, x.w, step);
  return x;
}

__device__ __forceinline__ float4 four(uint2 words) {
  const float2 first = unpacked(words.x, ELEMENT()), second = unpacked(words.y, ELEMENT());
  return {first.x, first.y, second.x, second.y};
}

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// A channel of the convolution: its place among all channels, and in `mixed`.
struct Channel {
  int index, at;

  __device__ __forceinline__ Channel(const Params& params, int key_head, int first_item,
                                     int number) {
    const int key_heads = gridDim.x / CLUSTER;
    const bool is_query = number < KEYS;
    if (number < 2 * KEYS) {
      const Part part = is_query ? params.query : params.key;
      const int inner = number % KEYS;
      index = ((is_query ? 0 : key_heads) + key_head) * KEYS + inner;
      at = part.at(key_head) + inner;
    } else {
      const int inner = first_item * COLUMNS + number - 2 * KEYS;
      index = 2 * key_heads * KEYS + key_head * GROUP * VALUES + inner;
      at = params.value.at(key_head) + inner;
    }
  }
};

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS) delta(const __grid_constant__ Params params) {
  __shared__ float channels[TURNS * THREADS];  // queries, keys, values
  __shared__ float4 partial[2][WARPS][LANES];
  __shared__ float squares[GROUP * SPLIT];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % LANES;
  const int key_head = blockIdx.x / CLUSTER, first = blockIdx.x % CLUSTER * EACH;
  const int first_head = key_head * GROUP, heads = gridDim.x / CLUSTER * GROUP;
  const int row = blockIdx.y;
  uint2* const windows = reinterpret_cast<uint2*>(params.states[row]);
  float* const state = reinterpret_cast<float*>(params.states[gridDim.y + row]);
  ELEMENT* const output =
      params.output + (static_cast<int64_t>(row) * heads + first_head) * VALUES;
  const bool has_token = windows != nullptr;
  const auto place = [&](int item, int i) {
    const int64_t line = (first_head + item / SPLIT) * KEYS + i * LINES + thread / LANES;
    return reinterpret_cast<float4*>(state + line * VALUES + item % SPLIT * COLUMNS) + lane;
  };

  // No kernel of this step writes to states or weights, so these reads need not wait.
  float4 s[ROWS];
  uint2 window[TURNS], weights[TURNS];
  float rates[EACH], biases[EACH];
  if (has_token) {
#pragma unroll
    for (int i = 0; i < ROWS; ++i) s[i] = *place(first, i);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int number = turn * THREADS + thread;
      if (number >= CHANNELS) continue;
      const int channel = Channel(params, key_head, first, number).index;
      window[turn] = windows[channel];
      weights[turn] = reinterpret_cast<const uint2*>(params.convolution)[channel];
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int head = first_head + (first + i) / SPLIT;
      rates[i] = static_cast<float>(params.decay[head]);
      biases[i] = static_cast<float>(params.bias[head]);
    }
  }
  let_next_begin();
  wait_for_previous();
  if (!has_token) {
    if (thread < EACH * COLUMNS) output[first * COLUMNS + thread] = ELEMENT(0.0f);
    return;
  }

  const ELEMENT* const mixed = params.mixed + row * params.mixed_stride;
  const ELEMENT* const gates = params.gates + row * params.gates_stride;
  float b[EACH], a[EACH];
  uint2 z[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int head = (first + i) / SPLIT, column = (first + i) * COLUMNS + lane * 4;
    b[i] = static_cast<float>(gates[params.b.at(key_head) + head]);
    a[i] = static_cast<float>(gates[params.a.at(key_head) + head]);
    z[i] = *reinterpret_cast<const uint2*>(mixed + params.z.at(key_head) + column);
  }
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int number = turn * THREADS + thread;
    if (number >= CHANNELS) continue;
    const ELEMENT x = mixed[Channel(params, key_head, first, number).at];
    const uint32_t bits = *reinterpret_cast<const unsigned short*>(&x);
    // The oldest input leaves the window.
    window[turn].x = __funnelshift_r(window[turn].x, window[turn].y, 16);
    window[turn].y = window[turn].y >> 16 | bits << 16;
    const float2 earlier = unpacked(window[turn].x, ELEMENT());
    const float2 later = unpacked(window[turn].y, ELEMENT());
    const float2 before = unpacked(weights[turn].x, ELEMENT());
    const float2 after = unpacked(weights[turn].y, ELEMENT());
    float sum = earlier.x * before.x;
    sum = fmaf(earlier.y, before.y, sum);
    sum = fmaf(later.x, after.x, sum);
    sum = rounded(fmaf(later.y, after.y, sum));
    channels[number] = rounded(sum * sigmoid(sum));
  }
  __syncthreads();
  arrive();  // This thread block has read its part of the convolution state.

  float query_squares = 0.0f, key_squares = 0.0f, product = 0.0f;
#pragma unroll
  for (int i = thread % 32; i < KEYS; i += 32) {
    const float q = channels[i], k = channels[KEYS + i];
    query_squares = fmaf(q, q, query_squares);
    key_squares = fmaf(k, k, key_squares);
    product = fmaf(q, k, product);
  }
  const float of_key = rsqrtf(warp_sum(key_squares) + TINY);
  const float of_query = rsqrtf(warp_sum(query_squares) + TINY) * rsqrtf(float(KEYS));
  product = warp_sum(product) * of_query * of_key;

  float4 y[EACH];
#pragma unroll
  for (int number = 0; number < EACH; ++number) {
    const int item = first + number;
    if (number > 0) {
#pragma unroll
      for (int i = 0; i < ROWS; ++i) s[i] = *place(item, i);
    }
    float4 by_key = {0.0f, 0.0f, 0.0f, 0.0f}, by_query = by_key;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int channel = i * LINES + thread / LANES;
      add(by_query, s[i], channels[channel]);
      add(by_key, s[i], channels[KEYS + channel]);
    }
#pragma unroll
    for (int step = LANES; step < 32; step *= 2) {
      by_key = plus_shuffled(by_key, step);
      by_query = plus_shuffled(by_query, step);
    }
    if (number > 0) __syncthreads();  // The sums of the previous item have been read.
    if (thread % 32 < LANES) {
      partial[0][warp][lane] = by_key;
      partial[1][warp][lane] = by_query;
    }
    __syncthreads();
    by_key = by_query = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < WARPS; ++i) {
      add(by_key, partial[0][i][lane], 1.0f);
      add(by_query, partial[1][i][lane], 1.0f);
    }
    const float decay = expf(-expf(rates[number]) * softplus(a[number] + biases[number]));
    const float beta = rounded(sigmoid(b[number]));
    const float* const values = channels + 2 * KEYS + number * COLUMNS + lane * 4;
    float4 update;
    update.x = (values[0] - by_key.x * decay * of_key) * beta;
    update.y = (values[1] - by_key.y * decay * of_key) * beta;
    update.z = (values[2] - by_key.z * decay * of_key) * beta;
    update.w = (values[3] - by_key.w * decay * of_key) * beta;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const float k = channels[KEYS + i * LINES + thread / LANES] * of_key;
      s[i].x *= decay, s[i].y *= decay, s[i].z *= decay, s[i].w *= decay;
      add(s[i], update, k);
      *place(item, i) = s[i];
    }
    y[number] = {0.0f, 0.0f, 0.0f, 0.0f};
    add(y[number], by_query, decay * of_query);
    add(y[number], update, product);
    y[number] = {rounded(y[number].x), rounded(y[number].y), rounded(y[number].z),
                 rounded(y[number].w)};
  }

  wait();  // All thread blocks of the cluster have read the convolution state.
#pragma unroll
  for (int turn = 0; turn < TURNS; ++turn) {
    const int number = turn * THREADS + thread;
    // Queries and keys are the same in all of them.
    if (number < CHANNELS && (number >= 2 * KEYS || first == 0))
      windows[Channel(params, key_head, first, number).index] = window[turn];
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    float sum = y[i].x * y[i].x;
    sum = fmaf(y[i].y, y[i].y, sum);
    sum = fmaf(y[i].z, y[i].z, sum);
    sum = fmaf(y[i].w, y[i].w, sum);
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (thread < CLUSTER) store_at(&squares[first + i], thread, sum);
  }
  arrive();
  wait();
  if (thread >= LANES) return;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int item = first + i, column = item % SPLIT * COLUMNS + lane * 4;
    float sum = 0.0f;
    for (int part = 0; part < SPLIT; ++part) sum += squares[item / SPLIT * SPLIT + part];
    const float scale = rsqrtf(sum / VALUES + params.epsilon);
    const uint2 norm = *reinterpret_cast<const uint2*>(params.norm + column);
    const float4 by = four(norm), gate = four(z[i]);
    uint2 words;
    ELEMENT* found = reinterpret_cast<ELEMENT*>(&words);
    found[0] = ELEMENT(rounded(rounded(y[i].x * scale) * by.x) * (gate.x * sigmoid(gate.x)));
    found[1] = ELEMENT(rounded(rounded(y[i].y * scale) * by.y) * (gate.y * sigmoid(gate.y)));
    found[2] = ELEMENT(rounded(rounded(y[i].z * scale) * by.z) * (gate.z * sigmoid(gate.z)));
    found[3] = ELEMENT(rounded(rounded(y[i].w * scale) * by.w) * (gate.w * sigmoid(gate.w)));
    *reinterpret_cast<uint2*>(output + item * COLUMNS + lane * 4) = words;
  }
}
