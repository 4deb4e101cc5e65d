// Shared memory of a thread block of decode.
#pragma once

#include "decode/params.cuh"

constexpr int SLOTS = (WARPS + 1) / 2;

struct Shared {
  alignas(128) uint8_t buffers[BUFFERS][(BUFFER_BYTES + 127) / 128 * 128];
  alignas(16) float merge[SLOTS][USED_COLUMNS][RECORD];
  alignas(16) ELEMENT plain[COLUMNS][HEAD_DIM];  // unchanged queries
  Queries query;
  Assignment part;          // at the beginning; here, to leave registers for the pages
  uint64_t full[BUFFERS];
  uint32_t turns[BUFFERS];  // turn (item number of this thread block) that a buffer is for
  int uses[BUFFERS];        // tokens in use there, as in Params::items
  int is_last;
};
