// What both fast searches share: the scale of their integers, where tables and rows lie, and the operations that the
// rows' 16-bit costs and the float32 way back agree on. Internal linkage throughout, see viterbi_kernel.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>


#include "fast.h"
#include "viterbi_trace.h"

#if defined(__clang__)
#define EXL3_FULLY _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define EXL3_FULLY _Pragma("GCC unroll 16")
#else
#define EXL3_FULLY
#endif

namespace {

// A row whose lowest cost is beyond this has met, or is about to meet, the end of the integers.
constexpr int kCostLimit = 32000;
constexpr int kFastTilesPerCall = 2;

// Up to 2 bits distances are so large that a coarse unit will do, in which no difference exceeds 16 bits.
constexpr bool narrow(Rate rate) { return rate.even + rate.odd <= 4; }

// Precision against range, by bits of the even positions: distances grow with fewer bits.
struct Precision {
    float scale;         // of differences
    float weight_limit;  // of |w|
};

inline Precision precision(Rate rate) {
    constexpr Precision by_bits[] = {{},            {},            {9400, 3.4f},   {9400, 3.4f},  {20000, 3.4f},
                                     {40000, 3.3f}, {60000, 3.3f}, {180000, 3.2f}, {250000, 3.2f}};
    return narrow(rate) ? Precision{4390, 4.0f} : by_bits[rate.even];  // (4.0 + 3.4532) * 4390 < 2^15
}

inline float cost_unit(float scale) { return 32768.0f / (scale * scale); }

inline int to_units(float value, float scale) { return static_cast<int>(std::lrint(value * scale)); }

inline int clamp_to(int value, int limit) { return value < -limit ? -limit : value > limit ? limit : value; }
inline int clamp16(int value) { return value < -32768 ? -32768 : value > 32767 ? 32767 : value; }

inline bool accepts(Rate rate, const float* weights) {
    float largest = 0.0f;
    for (int i = 0; i < kTileWeights; ++i) {
        const float size = weights[i] < 0.0f ? -weights[i] : weights[i];
        largest = size > largest ? size : largest;
    }
    return largest <= precision(rate).weight_limit;
}

// The way back reads values[(k << (16 - shift_out)) | o] at [o][k]: the layout of viterbi_layout.h with groups of one.
struct TraceOrder {
    static constexpr int width = 1;
    static constexpr int blocks = 1;
    static float accumulate_scalar(float distance, float cost) { return distance * distance + cost; }
};

inline size_t aligned(size_t bytes) { return (bytes + 63) & ~static_cast<size_t>(63); }

}  // namespace
