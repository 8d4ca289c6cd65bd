// The fast trellis search: the same problem as viterbi.h, solved in 16-bit integers.
//
// What is computed. Distances (values[state] - w)^2 and path costs are multiples of one unit: with d the difference
// times `scale`, kept within 16 bits, the distance is d * d / 2^15, rounded, and costs add up with saturation. Every
// few steps the lowest cost of an earlier row is subtracted. Both passes of viterbi.h are made, and the way
// back chooses among all candidates in float32, so that integers decide only which costs a node had.
//
// - Up to 3.5 bits every candidate is considered (fast_full.h).
// - From 4 bits on, most candidates of a node are far from the weight. For every interval of weights and every node, a
//   table lists the few nearest ones (fast_lists.h).
//
// The integers are the same on every instruction set and so are the states. Integers of 16 bits resolve what the mul1
// codebook needs near its own range; a tile with a weight beyond its limit (fast_layout.h), or whose best path cost
// saturates or does not close the ring, or is far above what the rate usually costs, is left to the exact search.
#pragma once

#include "viterbi.h"

namespace exl3 {

#if defined(EXL3_X86)
const Backend& fast_avx2_backend();
const Backend& fast_avx512_backend();
#endif
const Backend& fast_portable_backend();

}  // namespace exl3
