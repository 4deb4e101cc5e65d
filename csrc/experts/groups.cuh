// Rows of a batch, grouped by chosen expert: route.cu builds the groups, linear_rows.cu and
// combine.cu use them.
#pragma once

// Group of rows of an expert, or a part of such a group if more rows have chosen the expert than
// are multiplied at a time. A place belongs to a row and one of its experts; an expert's places are
// consecutive.
struct alignas(16) Group {
  int expert, first, rows, unused;
};
