// delta: one decode step of a Gated DeltaNet layer between its projections: convolution and SiLU,
// L2 norm of queries and keys, gates, recurrent state, gated RMSNorm. Each row's states have their
// own addresses; those after the step are written in their place or elsewhere.
//
// With decay a, key k, value v, query q and state S (KEYS, VALUES) of a value head:
//   u = beta (v - a S^T k),  S <- a S + k u^T,  y = S^T q = a (S_before^T q) + (k . q) u
// so one pass over S, which is read and written once, gives both products. Columns of S are
// independent: a thread block computes EACH items of COLUMNS columns. The thread blocks of a
// cluster share a key head. They write its convolution state when all of them have read it, and add
// up the squares of outputs for the norm.
//
// With TOKENS above 1, TOKENS consecutive rows are tokens of one sequence. They share a thread
// block, which reads the states before the first of them and writes those after each.
//
// Rounding is the same as in transformers' modules.
//
// Compiled with: KEYS, VALUES (channels of a head, multiples of 32), GROUP (value heads per key
// head), CLUSTER (thread blocks per key head; 1 before sm_90), TOKENS (rows of a sequence), ELEMENT
// (__half, __nv_bfloat16).

#include "common/cluster.cuh"
#include "common/overlap.cuh"
#include "common/rounding.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;
constexpr int COLUMNS = 32;                      // columns of an item
constexpr int LANES = COLUMNS / 4;               // threads per row of an item
constexpr int LINES = THREADS / LANES;           // rows of an item that are loaded at a time
constexpr int ROWS = KEYS / LINES;               // rows of a thread
constexpr int STEP = LINES * VALUES / 4;         // between two rows of a thread
constexpr int SPLIT = VALUES / COLUMNS;          // items of a value head
constexpr int EACH = GROUP * SPLIT / CLUSTER;    // items of a thread block
constexpr int TAPS = 4;                          // inputs of the convolution
constexpr float TINY = 1e-6f;                    // epsilon of the L2 norm
constexpr int CHANNELS = 2 * KEYS + EACH * COLUMNS;  // of the convolution, in a thread block
constexpr int TURNS = (CHANNELS + THREADS - 1) / THREADS;

static_assert(GROUP * SPLIT % CLUSTER == 0, "all thread blocks have as many items");
static_assert(EACH * LANES <= THREADS, "a thread for each four outputs");
static_assert(KEYS % LINES == 0 && VALUES % COLUMNS == 0, "whole items");

// Where the parts of key heads begin in a row.
struct Part {
  int offset, stride;

  __device__ __forceinline__ int at(int key_head) const { return offset + key_head * stride; }
};

struct Params {
  const ELEMENT* mixed;        // (rows, mixed_stride): queries, keys, values and gates z
  const ELEMENT* gates;        // (rows, gates_stride): b and a of each value head
  const uint64_t* states;      // (4, rows): addresses of convolution states (channels, TAPS), of
                               // recurrent states (value heads, KEYS, VALUES), and of both after
                               // the row's token, which may be the same; 0: no new token
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
  __shared__ float all_channels[TOKENS][TURNS * THREADS];  // queries, keys, values
  __shared__ float decays[TOKENS][EACH], betas[TOKENS][EACH];
  __shared__ float4 partial[2][WARPS][LANES];
  __shared__ float4 outputs[TOKENS][EACH * LANES];
  __shared__ float squares[TOKENS][GROUP * SPLIT];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % LANES;
  const int key_head = blockIdx.x / CLUSTER, first = blockIdx.x % CLUSTER * EACH;
  const int first_head = key_head * GROUP, heads = gridDim.x / CLUSTER * GROUP;
  const int first_row = blockIdx.y * TOKENS, rows = gridDim.y * TOKENS;
  const auto address = [&](int kind, int token) {
    return params.states[kind * rows + first_row + token];
  };
  const uint2* const windows = reinterpret_cast<const uint2*>(address(0, 0));
  const float* const state = reinterpret_cast<const float*>(address(1, 0));
  uint2* next_windows[TOKENS];
  float* next_states[TOKENS];
#pragma unroll
  for (int token = 0; token < TOKENS; ++token) {
    next_windows[token] = reinterpret_cast<uint2*>(address(2, token));
    next_states[token] = reinterpret_cast<float*>(address(3, token));
  }
  ELEMENT* const output =
      params.output + (static_cast<int64_t>(first_row) * heads + first_head) * VALUES;
  const bool has_token = windows != nullptr;
  // Place of a thread's first four numbers of an item in a recurrent state.
  const auto place = [&](int item) {
    const int line = (first_head + item / SPLIT) * KEYS + thread / LANES;
    return line * VALUES + item % SPLIT * COLUMNS + lane * 4;
  };
  const auto load = [&](float4(&to)[ROWS], int item) {
    const float4* const from = reinterpret_cast<const float4*>(state + place(item));
#pragma unroll
    for (int i = 0; i < ROWS; ++i) to[i] = from[i * STEP];
  };

  // No earlier kernel of this step writes to states or weights, so these reads need not wait: a
  // step begins with kernels that do not overlap with kernels of the previous step.
  float4 s[EACH > 1 ? 2 : 1][ROWS];
  uint2 window[TOKENS][TURNS], weights[TURNS];  // of the convolution, after each token
  float rate = 0.0f, bias = 0.0f;
  const int own_head = (first + thread) / SPLIT;  // of the item of a thread below EACH
  if (has_token) {
    load(s[0], first);
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int number = turn * THREADS + thread;
      if (number >= CHANNELS) continue;
      const int channel = Channel(params, key_head, first, number).index;
      window[0][turn] = windows[channel];
      weights[turn] = reinterpret_cast<const uint2*>(params.convolution)[channel];
    }
    if (thread < EACH) {
      rate = static_cast<float>(params.decay[first_head + own_head]);
      bias = static_cast<float>(params.bias[first_head + own_head]);
    }
  }
  let_next_begin();
  wait_for_previous();
  if (!has_token) {
    for (int token = 0; token < TOKENS; ++token)
      for (int i = thread; i < EACH * COLUMNS; i += THREADS)
        output[token * heads * VALUES + first * COLUMNS + i] = ELEMENT(0.0f);
    return;
  }

  const auto mixed = [&](int token) {
    return params.mixed + (first_row + token) * params.mixed_stride;
  };
  ELEMENT x[TOKENS][TURNS];
#pragma unroll
  for (int token = 0; token < TOKENS; ++token) {
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int number = turn * THREADS + thread;
      if (number < CHANNELS)
        x[token][turn] = mixed(token)[Channel(params, key_head, first, number).at];
    }
    if (thread < EACH) {
      const ELEMENT* const gates = params.gates + (first_row + token) * params.gates_stride;
      const float a = static_cast<float>(gates[params.a.at(key_head) + own_head]);
      const float b = static_cast<float>(gates[params.b.at(key_head) + own_head]);
      decays[token][thread] = expf(-expf(rate) * softplus(a + bias));
      betas[token][thread] = rounded(sigmoid(b));
    }
  }
#pragma unroll
  for (int token = 0; token < TOKENS; ++token) {
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int number = turn * THREADS + thread;
      if (number >= CHANNELS) continue;
      const uint32_t bits = *reinterpret_cast<const unsigned short*>(&x[token][turn]);
      const uint2 before = window[token > 0 ? token - 1 : 0][turn];
      // The oldest input leaves the window.
      window[token][turn].x = __funnelshift_r(before.x, before.y, 16);
      window[token][turn].y = before.y >> 16 | bits << 16;
      const float4 inputs = four(window[token][turn]), by = four(weights[turn]);
      float sum = inputs.x * by.x;
      sum = fmaf(inputs.y, by.y, sum);
      sum = fmaf(inputs.z, by.z, sum);
      sum = rounded(fmaf(inputs.w, by.w, sum));
      all_channels[token][number] = rounded(sum * sigmoid(sum));
    }
  }
  __syncthreads();
  arrive();  // This thread block has read its part of the convolution state.

  float of_keys[TOKENS], of_queries[TOKENS], products[TOKENS];
#pragma unroll
  for (int token = 0; token < TOKENS; ++token) {
    const float* const channels = all_channels[token];
    float query_squares = 0.0f, key_squares = 0.0f, product = 0.0f;
#pragma unroll
    for (int i = 0; i < KEYS; i += 32) {
      const float q = channels[i + thread % 32], k = channels[KEYS + i + thread % 32];
      query_squares = fmaf(q, q, query_squares);
      key_squares = fmaf(k, k, key_squares);
      product = fmaf(q, k, product);
    }
    of_keys[token] = rsqrtf(warp_sum(key_squares) + TINY);
    of_queries[token] = rsqrtf(warp_sum(query_squares) + TINY) * rsqrtf(float(KEYS));
    products[token] = warp_sum(product) * of_queries[token] * of_keys[token];
  }

#pragma unroll
  for (int turn = 0; turn < EACH * TOKENS; ++turn) {
    const int number = turn / TOKENS, token = turn % TOKENS;
    const int item = first + number;
    float4(&now)[ROWS] = s[number % 2 * (EACH > 1)];
    if (token == 0 && number + 1 < EACH) load(s[(number + 1) % 2], item + 1);
    const float* const channels = all_channels[token];
    const float of_key = of_keys[token], of_query = of_queries[token];
    float4 by_key = {0.0f, 0.0f, 0.0f, 0.0f}, by_query = by_key;
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const int channel = i * LINES + thread / LANES;
      add(by_query, now[i], channels[channel]);
      add(by_key, now[i], channels[KEYS + channel]);
    }
#pragma unroll
    for (int step = LANES; step < 32; step *= 2) {
      by_key = plus_shuffled(by_key, step);
      by_query = plus_shuffled(by_query, step);
    }
    // The sums of the previous item, or token, have been read.
    if (turn > 0) __syncthreads();
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
    const float decay = decays[token][number], beta = betas[token][number];
    const float* const values = channels + 2 * KEYS + number * COLUMNS + lane * 4;
    float4 update;
    update.x = (values[0] - by_key.x * decay * of_key) * beta;
    update.y = (values[1] - by_key.y * decay * of_key) * beta;
    update.z = (values[2] - by_key.z * decay * of_key) * beta;
    update.w = (values[3] - by_key.w * decay * of_key) * beta;
    float4* const next = reinterpret_cast<float4*>(next_states[token] + place(item));
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      const float k = channels[KEYS + i * LINES + thread / LANES] * of_key;
      now[i].x *= decay, now[i].y *= decay, now[i].z *= decay, now[i].w *= decay;
      add(now[i], update, k);
      next[i * STEP] = now[i];
    }
    if (thread < LANES) {
      float4 y = {0.0f, 0.0f, 0.0f, 0.0f};
      add(y, by_query, decay * of_query);
      add(y, update, products[token]);
      outputs[token][number * LANES + lane] = {rounded(y.x), rounded(y.y), rounded(y.z),
                                               rounded(y.w)};
    }
  }
  __syncthreads();

  // A thread finishes four columns of each token.
  const int item = first + thread / LANES, column = item % SPLIT * COLUMNS + lane * 4;
  const bool finishes = thread < EACH * LANES;
  float sums[TOKENS];
  uint2 weight = {0, 0}, gate_words[TOKENS];
  if (finishes) weight = *reinterpret_cast<const uint2*>(params.norm + column);
#pragma unroll
  for (int token = 0; token < TOKENS; ++token) {
    float4 y = {0.0f, 0.0f, 0.0f, 0.0f};
    if (finishes) {
      y = outputs[token][thread];
      gate_words[token] = *reinterpret_cast<const uint2*>(
          mixed(token) + params.z.at(key_head) + item * COLUMNS + lane * 4);
    }
    float sum = fmaf(y.x, y.x, fmaf(y.y, y.y, fmaf(y.z, y.z, y.w * y.w)));
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
    sums[token] = sum;
  }
  wait();  // All thread blocks of the cluster have read the convolution state.
  if (finishes) {
#pragma unroll
    for (int token = 0; token < TOKENS; ++token)
      for (int rank = lane; rank < CLUSTER; rank += LANES)
        store_at(&squares[token][item], rank, sums[token]);
  }
  arrive();
#pragma unroll
  for (int token = 0; token < TOKENS; ++token) {
#pragma unroll
    for (int turn = 0; turn < TURNS; ++turn) {
      const int number = turn * THREADS + thread;
      // Queries and keys are the same in all thread blocks of the cluster.
      if (number < CHANNELS && (number >= 2 * KEYS || first == 0))
        next_windows[token][Channel(params, key_head, first, number).index] = window[token][turn];
    }
  }
  wait();
  if (!finishes) return;
  const float4 by = four(weight);
#pragma unroll
  for (int token = 0; token < TOKENS; ++token) {
    const float4 y = outputs[token][thread], gate = four(gate_words[token]);
    float sum = 0.0f;
#pragma unroll
    for (int part = 0; part < SPLIT; ++part) sum += squares[token][item / SPLIT * SPLIT + part];
    const float scale = rsqrtf(sum / VALUES + params.epsilon);
    uint2 words;
    ELEMENT* found = reinterpret_cast<ELEMENT*>(&words);
    found[0] = ELEMENT(rounded(rounded(y.x * scale) * by.x) * (gate.x * sigmoid(gate.x)));
    found[1] = ELEMENT(rounded(rounded(y.y * scale) * by.y) * (gate.y * sigmoid(gate.y)));
    found[2] = ELEMENT(rounded(rounded(y.z * scale) * by.z) * (gate.z * sigmoid(gate.z)));
    found[3] = ELEMENT(rounded(rounded(y.w * scale) * by.w) * (gate.w * sigmoid(gate.w)));
    *reinterpret_cast<uint2*>(output + token * heads * VALUES + item * COLUMNS + lane * 4) = words;
  }
}
