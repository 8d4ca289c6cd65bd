// Where the search keeps what: sizes that follow from a rate, the order of the value tables, and the rows of costs.
//
// Only every `stride`-th row of costs is kept, and no back pointers at all; viterbi_trace.h recomputes what lies
// between. That bounds the workspace to 9 MiB per tile, where all rows would need 32 MiB at one bit, and spares the
// search the memory traffic.
//
// Everything here has internal linkage: each kernel source includes it under its own compiler flags (see
// viterbi_kernel.h).
#pragma once

#include <limits>

#include "viterbi.h"

namespace {

using exl3::kRowPadding;
using exl3::kStateBits;
using exl3::kStates;
using exl3::kTileWeights;
using exl3::Rate;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr int kConeBits = 8;  // at most 2^8 nodes are recomputed per kept row

// Sizes that follow from a rate.
struct Plan {
    Rate rate;
    int stride;      // steps between kept rows, a power of two
    int row_costs;  // in the widest row, padded

    explicit Plan(Rate r, int cone_bits = kConeBits) : rate(r), stride(1) {
        while (stride * r.bits_per_pair() <= cone_bits) stride *= 2;
        const int narrow = r.even < r.odd ? r.even : r.odd;
        row_costs = (kStates >> narrow) + kRowPadding;
    }

    int shift_out(int position) const { return rate.shift(position + 1); }
    int nodes_before(int position) const { return kStates >> rate.shift(position); }
    int kept_rows() const { return kTileWeights / stride; }
    // The kept rows, two for the steps between them, and the initial one.
    size_t costs_per_tile() const { return static_cast<size_t>(kept_rows() + 3) * row_costs; }
};

// The value tables hold, for each parity of the position, values[(k << (16 - shift_out)) | o] at
// [o / group][k][o % group]: the order in which `advance` reads them.
template <class V>
constexpr int kGroup = V::blocks * V::width;

inline size_t table_values(Rate rate) {
    return static_cast<size_t>(kStates) * (rate.even == rate.odd ? 1 : 2);
}

inline const float* table_for(Rate rate, const float* table, int position) {
    return rate.even == rate.odd || !(position & 1) ? table : table + kStates;
}

template <class V>
void fill_table(Rate rate, const float* values, float* table) {
    constexpr int group = kGroup<V>;
    for (int parity = 0; parity < (rate.even == rate.odd ? 1 : 2); ++parity) {
        const int out_bits = kStateBits - rate.shift(parity + 1);
        float* write = table + static_cast<size_t>(parity) * kStates;
        for (int first = 0; first < 1 << out_bits; first += group)
            for (int k = 0; k < kStates >> out_bits; ++k)
                for (int lane = 0; lane < group; ++lane) *write++ = values[(k << out_bits) | (first + lane)];
    }
}

// The cost rows of one tile. Step n works at ring position (n + roll) % 256; row n holds the costs after it.
template <class Cost>
struct Rows {
    const Plan* plan;
    Cost* memory;
    int keep_from;  // rows of earlier steps are not needed on the way back

    bool kept(int step) const { return step >= keep_from && (step + 1) % plan->stride == 0; }
    Cost* row(int step) const { return kept(step) ? slot((step + 1) / plan->stride - 1) : spare(step); }
    // One of the two rows that are not kept.
    Cost* spare(int number) const { return slot(plan->kept_rows() + (number & 1)); }
    // The costs before the first step.
    Cost* initial() const { return slot(plan->kept_rows() + 2); }
    Cost* slot(int index) const { return memory + static_cast<size_t>(index) * plan->row_costs; }
};

}  // namespace
