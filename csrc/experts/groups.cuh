// Rows of a batch by the experts that they choose: route.cu finds them, linear_rows.cu and combine.cu
// work on them.
#pragma once

// Of an expert, or of a part of one that more rows have chosen than are multiplied at a time. A
// place is that of a row and one of its experts; an expert's places follow each other.
struct alignas(16) Group {
  int expert, first, rows, unused;
};
