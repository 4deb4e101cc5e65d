// Shared memory of a thread block of decode.
#pragma once

#include "decode/params.cuh"

constexpr int SLOTS = (WARPS + 1) / 2;
constexpr int TEAMS = WARPS / TEAM;
static_assert(WARPS % TEAM == 0 && (STREAM || TEAM == 1), "no such teams");
using Records = float[USED_COLUMNS][RECORD];  // of a state

// With more than 128 channels, few pages fit. So that one more fits, the last buffers take the
// records at the end of a segment.
#define RECORDS_IN_BUFFERS (HEAD_DIM > 128)
constexpr int BUFFER_PLACE = (BUFFER_BYTES + 127) / 128 * 128;
constexpr int FREE_BUFFERS =
    RECORDS_IN_BUFFERS
        ? BUFFERS - (SLOTS * static_cast<int>(sizeof(Records)) + BUFFER_PLACE - 1) / BUFFER_PLACE
        : BUFFERS;
static_assert(FREE_BUFFERS >= 0, "the records fit");

struct Shared {
  alignas(128) uint8_t buffers[BUFFERS][BUFFER_PLACE];
#if !RECORDS_IN_BUFFERS
  alignas(16) Records records[SLOTS];
#endif
  alignas(16) ELEMENT plain[COLUMNS][HEAD_DIM];  // unchanged queries
  Queries query;
  Assignment part;          // at the beginning; here, to leave registers for the pages
  uint64_t full[BUFFERS];
  uint32_t turns[BUFFERS];  // turn (item number of this thread block) that a buffer is for
  int uses[BUFFERS];        // tokens in use there, as in Params::items
  int left[BUFFERS];        // warps of the team that have attended to it
  int is_last;
};

// Records of SLOTS states.
__device__ __forceinline__ Records* records_of(Shared& shared) {
#if RECORDS_IN_BUFFERS
  return reinterpret_cast<Records*>(shared.buffers[FREE_BUFFERS]);
#else
  return shared.records;
#endif
}
