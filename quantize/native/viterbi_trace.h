// The way back through the kept rows of costs. The rows between two kept ones are recomputed for the few nodes that can
// reach the known one, with the same operations as in the forward pass, so the choices are those of the forward pass.
//
// Everything here has internal linkage: each kernel source includes it under its own compiler flags (see
// viterbi_kernel.h).
#pragma once

#include "viterbi_layout.h"

#if defined(__GNUC__) || defined(__clang__)
#define EXL3_FETCH(address) __builtin_prefetch(address)
#else
#define EXL3_FETCH(address) static_cast<void>(address)
#endif

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

// Ask for what the step back from `node` reads: it lies scattered over a row and a table that no near cache holds.
template <class V, class Cost>
void fetch_cone(const Plan& plan, const float* table, int position, int node, const Cost* before) {
    const Cone cone(plan, node, position);
    for (int p = 0; p < 1 << cone.prefix_bits[plan.stride]; ++p) EXL3_FETCH(before + cone.node(plan.stride, p));
    if constexpr (kGroup<V> > 1) return;  // a node's candidates do not lie together
    for (int level = 0; level < plan.stride; ++level) {
        const int here = position - level;
        const float* values = table_for(plan.rate, table, here);
        for (int p = 0; p < 1 << cone.prefix_bits[level]; ++p)
            EXL3_FETCH(values + (static_cast<size_t>(cone.node(level, p)) << plan.shift_out(here)));
    }
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

// From `nodes` (T) of T tiles after step 255 back to those after step `stop`, writing the states (T, 256) on the way.
// Neither the ring's end nor its middle falls within the steps between two kept rows, so positions need no wrapping
// there. The tiles take turns: while one's step is made, what the other's next one needs is fetched.
template <class V, int T, class Cost>
void trace(const Plan& plan, const float* table, const float* weights, int roll, int* nodes, int stop,
           const Rows<Cost>* rows, float unit, int32_t* states) {
    for (int last = kTileWeights - 1; last > stop; last -= plan.stride) {
        const int before = last - plan.stride, position = (last + roll) % kTileWeights;
        for (int t = 0; t < T; ++t) {
            const Cost* row = before < 0 ? rows[t].initial() : rows[t].row(before);
            nodes[t] = trace_back<V>(plan, table, weights + t * kTileWeights, position, nodes[t], row, unit,
                                     states + t * kTileWeights);
            if (before > stop) {
                const int next = before - plan.stride, there = (before + roll) % kTileWeights;
                fetch_cone<V>(plan, table, there, nodes[t], next < 0 ? rows[t].initial() : rows[t].row(next));
            }
        }
    }
}

}  // namespace
