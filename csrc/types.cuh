// Names that <stdint.h> and <math.h> would give: NVRTC compiles without a C library.
#pragma once

using uint8_t = unsigned char;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;
using int64_t = long long;

#ifndef INFINITY
#define INFINITY __int_as_float(0x7f800000)
#endif
