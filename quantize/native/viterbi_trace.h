// The way back through the kept rows of costs. The rows between two kept ones are recomputed for the few nodes that can
// reach the known one, with the same operations as in the forward pass, so the choices are those of the forward pass.
//
// Everything here has internal linkage: each kernel source includes it under its own compiler flags (see
// viterbi_kernel.h).
#pragma once

#include "viterbi_layout.h"

namespace {

// The nodes that can lead to a known node, level by level: level j lies j steps before it.
//
// The low bits of such a node are the high bits of the known one (its tail); the bits above are free and number the
// nodes of the level: node = prefix << free_shift | tail. A step back puts the candidate k above the prefix.
struct Cone {
    int prefix_bits[kConeBits + 1] = {};
    int free_shift[kConeBits + 1] = {};
    int tail[kConeBits + 1] = {};

    Cone(const Plan& plan, int known_node, int position) {
        int prefix = 0, shifted = 0;
        for (int level = 0; level <= plan.stride; ++level, --position) {
            prefix_bits[level] = prefix;
            free_shift[level] = kStateBits - plan.shift_out(position) - prefix;
            tail[level] = known_node >> shifted;
            prefix += plan.shift_out(position);
            shifted += plan.rate.shift(position);
        }
    }
    int node(int level, int prefix) const { return prefix << free_shift[level] | tail[level]; }
};

constexpr uint16_t kUnreached = 65535;  // of integer costs

// A kept cost in float32; `unit` is what one of an integer cost stands for.
inline float path_cost(float cost, float) { return cost; }
inline float path_cost(uint16_t cost, float unit) {
    return cost == kUnreached ? kInfinity : static_cast<float>(cost) * unit;
}

// The best candidate of one outgoing node and its cost; `cost` of candidate k is at [k * cost_stride].
template <class V>
int best_candidate(const float* table, int out, int candidates, float weight, const float* cost, int cost_stride,
                   float* best_cost) {
    constexpr int group = kGroup<V>;
    const float* value = table + static_cast<size_t>(out / group) * candidates * group + out % group;
    int best = 0;
    *best_cost = kInfinity;
    for (int k = 0; k < candidates; ++k) {
        const float total = V::accumulate_scalar(value[k * group] - weight, cost[k * cost_stride]);
        if (total < *best_cost) {
            *best_cost = total;
            best = k;
        }
    }
    return best;
}

// The way back to the previous kept row: write the states of the `stride` positions that end with `position`, after
// which the path is in `node`, and return the node before them. `before` is the kept row.
template <class V, class Cost>
int trace_back(const Plan& plan, const float* table, const float* weights, int position, int node, const Cost* before,
               float unit, int32_t* states) {
    const Cone cone(plan, node, position);
    uint8_t choice[kConeBits][1 << kConeBits];
    float cost[1 << kConeBits];
    for (int p = 0; p < 1 << cone.prefix_bits[plan.stride]; ++p)
        cost[p] = path_cost(before[cone.node(plan.stride, p)], unit);
    for (int level = plan.stride - 1; level >= 0; --level) {
        const int here = position - level;
        const int prefixes = 1 << cone.prefix_bits[level];
        const float* values = table_for(plan.rate, table, here);
        for (int p = 0; p < prefixes; ++p) {  // overwrites only the cost that it alone reads
            float best;
            const int k = best_candidate<V>(values, cone.node(level, p), 1 << plan.shift_out(here), weights[here],
                                            cost + p, prefixes, &best);
            choice[level][p] = static_cast<uint8_t>(k);
            cost[p] = best;
        }
    }
    int p = 0;
    for (int level = 0; level < plan.stride; ++level) {
        const int here = position - level;
        const int k = choice[level][p];
        states[here] = k << (kStateBits - plan.shift_out(here)) | cone.node(level, p);
        p |= k << cone.prefix_bits[level];
    }
    return cone.node(plan.stride, p);
}

// From `node` after step 255 back to the node after step `stop`, writing the states on the way. Neither the ring's
// end nor its middle falls within the steps between two kept rows, so positions need no wrapping there.
template <class V, class Cost>
int trace(const Plan& plan, const float* table, const float* weights, int roll, int node, int stop,
          const Rows<Cost>& rows, float unit, int32_t* states) {
    for (int last = kTileWeights - 1; last > stop; last -= plan.stride) {
        const int before = last - plan.stride;
        const Cost* row = before < 0 ? rows.initial() : rows.row(before);
        const int position = (last + roll) % kTileWeights;
        node = trace_back<V>(plan, table, weights, position, node, row, unit, states);
    }
    return node;
}

}  // namespace
