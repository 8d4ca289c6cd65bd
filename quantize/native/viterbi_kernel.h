// The search itself, written once over a vector type. Each kernel source includes this file with its own vector type and its own
// compiler flags, so everything here has internal linkage: a function compiled for AVX2 must never be the one
// that the linker picks for a machine without it. For the same reason no standard containers are used.
//
// Memory: only every `stride`-th row of costs is kept (see Plan), and no back pointers at all. On the way back the rows between two
// kept ones are recomputed for the few nodes that can reach the known one, with the same operations in the same order,
// so the choices are those of the forward pass. That bounds the workspace to about 6 MiB per tile, where all rows would need
// 32 MiB at one bit, and spares the search the memory traffic.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>

#include "viterbi.h"

#if defined(__clang__)
#define EXL3_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define EXL3_UNROLL _Pragma("GCC unroll 16")
#else
#define EXL3_UNROLL
#endif

namespace {

using exl3::kMaxBits;
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
    int stride;        // steps between kept rows, a power of two
    int row_floats;    // of the widest row, padded

    explicit Plan(Rate r) : rate(r), stride(1) {
        while (stride * r.bits_per_pair() <= kConeBits) stride *= 2;
        const int narrow = r.even < r.odd ? r.even : r.odd;
        row_floats = (kStates >> narrow) + kRowPadding;
    }

    int nodes_before(int position) const { return kStates >> rate.shift(position); }
    int kept_rows() const { return kTileWeights / stride; }
    // The kept rows, two for the steps between them, and the initial one.
    size_t floats_per_tile() const { return static_cast<size_t>(kept_rows() + 3) * row_floats; }
};

// The value tables hold, for each parity of the position, values[(k << (16 - shift_out)) | o] at
// [o / group][k][o % group]: the order in which `advance` reads them.
template <class V>
constexpr int kGroup = V::blocks * V::width;

inline int shift_out(Rate rate, int position) { return rate.shift(position + 1); }

template <class V>
size_t table_floats(Rate rate) {
    return static_cast<size_t>(kStates) * (rate.even == rate.odd ? 1 : 2);
}

template <class V>
const float* table_for(Rate rate, const float* table, int position) {
    return rate.even == rate.odd || !(position & 1) ? table : table + kStates;
}

template <class V>
void fill_table(Rate rate, const float* values, float* table) {
    constexpr int group = kGroup<V>;
    for (int parity = 0; parity < (rate.even == rate.odd ? 1 : 2); ++parity) {
        const int out_bits = kStateBits - shift_out(rate, parity);
        float* write = table + static_cast<size_t>(parity) * kStates;
        for (int first = 0; first < 1 << out_bits; first += group)
            for (int k = 0; k < kStates >> out_bits; ++k)
                for (int lane = 0; lane < group; ++lane) *write++ = values[(k << out_bits) | (first + lane)];
    }
}

// One step for T tiles: cost_in (nodes before) -> cost_out (nodes after), all 65536 candidate states.
template <class V, int IN, int OUT, int T>
void advance(const float* table, const float* const* cost_in, float* const* cost_out, const float* weights) {
    using Reg = typename V::Reg;
    constexpr int blocks = V::blocks;
    constexpr int group = kGroup<V>;
    constexpr int nodes_out = kStates >> OUT;
    constexpr int candidates = 1 << OUT;
    constexpr int candidate_stride = nodes_out >> IN;  // of the incoming node, from one k to the next
    constexpr bool one_cost = (1 << IN) >= group;      // the whole group comes from one incoming node
    Reg weight[T];
    EXL3_UNROLL for (int t = 0; t < T; ++t) weight[t] = V::broadcast(weights[t]);
    for (int first = 0; first < nodes_out; first += group) {
        Reg best[T][blocks];
        EXL3_UNROLL for (int t = 0; t < T; ++t)
            EXL3_UNROLL for (int b = 0; b < blocks; ++b) best[t][b] = V::broadcast(kInfinity);
        for (int k = 0; k < candidates; ++k) {
            const int node = k * candidate_stride + (first >> IN);
            Reg incoming[T];
            if (one_cost) {
                EXL3_UNROLL for (int t = 0; t < T; ++t) incoming[t] = V::broadcast(cost_in[t][node]);
            }
            EXL3_UNROLL for (int b = 0; b < blocks; ++b) {
                const Reg value = V::load(table);
                table += V::width;
                EXL3_UNROLL for (int t = 0; t < T; ++t) {
                    if (!one_cost) incoming[t] = V::template spread<IN>(cost_in[t] + node + ((b * V::width) >> IN));
                    const Reg distance = V::sub(value, weight[t]);
                    best[t][b] = V::min(best[t][b], V::accumulate(distance, incoming[t]));
                }
            }
        }
        EXL3_UNROLL for (int t = 0; t < T; ++t)
            EXL3_UNROLL for (int b = 0; b < blocks; ++b) V::store(cost_out[t] + first + b * V::width, best[t][b]);
    }
}

template <int T>
using Advance = void (*)(const float*, const float* const*, float* const*, const float*);

template <class V, int T>
Advance<T> advance_for(int in, int out) {
    switch (in * 16 + out) {
        case 0x11: return advance<V, 1, 1, T>;
        case 0x12: return advance<V, 1, 2, T>;
        case 0x21: return advance<V, 2, 1, T>;
        case 0x22: return advance<V, 2, 2, T>;
        case 0x23: return advance<V, 2, 3, T>;
        case 0x32: return advance<V, 3, 2, T>;
        case 0x33: return advance<V, 3, 3, T>;
        case 0x34: return advance<V, 3, 4, T>;
        case 0x43: return advance<V, 4, 3, T>;
        case 0x44: return advance<V, 4, 4, T>;
        case 0x55: return advance<V, 5, 5, T>;
        case 0x66: return advance<V, 6, 6, T>;
        case 0x77: return advance<V, 7, 7, T>;
        default: return advance<V, 8, 8, T>;
    }
}

// The cost rows of one tile. Step n works at ring position (n + roll) % 256; row n holds the costs after it.
struct Rows {
    const Plan* plan;
    float* memory;

    float* row(int step) const {
        const bool kept = (step + 1) % plan->stride == 0;
        return slot(kept ? (step + 1) / plan->stride - 1 : plan->kept_rows() + (step & 1));
    }
    // The costs before the first step.
    float* initial() const { return slot(plan->kept_rows() + 2); }
    float* slot(int index) const { return memory + static_cast<size_t>(index) * plan->row_floats; }
};

// Forward over all 256 steps for T tiles. `start` is the node each tile starts in, or null for a free start.
template <class V, int T>
void forward(const Plan& plan, const float* table, const float* weights, int roll, const int* start, const Rows* rows) {
    const float* cost_in[T];
    float* cost_out[T];
    for (int t = 0; t < T; ++t) {
        float* initial = rows[t].initial();
        const int nodes = plan.nodes_before(roll);
        for (int node = 0; node < nodes; ++node) initial[node] = start ? kInfinity : 0.0f;
        if (start) initial[start[t]] = 0.0f;
        cost_in[t] = initial;
    }
    const Advance<T> step_at[2] = {
        advance_for<V, T>(plan.rate.even, plan.rate.odd),
        advance_for<V, T>(plan.rate.odd, plan.rate.even),
    };
    for (int step = 0; step < kTileWeights; ++step) {
        const int position = (step + roll) % kTileWeights;
        float here[T];
        for (int t = 0; t < T; ++t) {
            here[t] = weights[t * kTileWeights + position];
            cost_out[t] = rows[t].row(step);
        }
        step_at[position & 1](table_for<V>(plan.rate, table, position), cost_in, cost_out, here);
        for (int t = 0; t < T; ++t) cost_in[t] = cost_out[t];
    }
}

// The way back over one kept row: from `node` after step `last`, write the states of the `stride` steps that end with
// it and return the node before them. `before` is the row of costs before these steps.
//
// The nodes j steps back that lead to `node` are those whose low bits are the high bits of `node`; they are counted by their
// free prefix p: node_j(p) = (p << free_j) | (node >> shifted_j). A predecessor adds its k above the prefix.
template <class V>
int trace_back(const Plan& plan, const float* table, const float* weights, int last, int roll, int node,
               const float* before, int32_t* states) {
    constexpr int group = kGroup<V>;
    uint8_t choice[kConeBits][1 << kConeBits];
    int prefix_bits[kConeBits + 1], free_bits[kConeBits + 1], tail[kConeBits + 1];
    prefix_bits[0] = tail[0] = 0;
    int shifted = 0;
    for (int j = 0; j <= plan.stride; ++j) {
        const int position = (last - j + roll + kTileWeights) % kTileWeights;  // step whose out-node level j is
        free_bits[j] = kStateBits - shift_out(plan.rate, position) - prefix_bits[j];
        tail[j] = node >> shifted;
        if (j == plan.stride) break;
        shifted += plan.rate.shift(position);
        prefix_bits[j + 1] = prefix_bits[j] + shift_out(plan.rate, position);
    }
    float cost[1 << kMaxBits];
    for (int p = 0; p < 1 << prefix_bits[plan.stride]; ++p)
        cost[p] = before[(p << free_bits[plan.stride]) | tail[plan.stride]];
    for (int j = plan.stride - 1; j >= 0; --j) {
        const int position = (last - j + roll + kTileWeights) % kTileWeights;
        const int candidates = 1 << shift_out(plan.rate, position);
        const float* values = table_for<V>(plan.rate, table, position);
        const float weight = weights[position];
        for (int p = 0; p < 1 << prefix_bits[j]; ++p) {
            const int out = (p << free_bits[j]) | tail[j];
            const float* value = values + static_cast<size_t>(out / group) * candidates * group + out % group;
            float best = kInfinity;
            int best_k = 0;
            for (int k = 0; k < candidates; ++k) {
                const float distance = value[k * group] - weight;
                const float total = V::accumulate_scalar(distance, cost[(k << prefix_bits[j]) | p]);
                if (total < best) {
                    best = total;
                    best_k = k;
                }
            }
            choice[j][p] = static_cast<uint8_t>(best_k);
            cost[p] = best;
        }
    }
    int p = 0;
    for (int j = 0; j < plan.stride; ++j) {
        const int position = (last - j + roll + kTileWeights) % kTileWeights;
        const int k = choice[j][p];
        const int out_bits = kStateBits - shift_out(plan.rate, position);
        states[position] = (k << out_bits) | (p << free_bits[j]) | tail[j];
        p |= k << prefix_bits[j];
    }
    return (p << free_bits[plan.stride]) | tail[plan.stride];
}

// From `node` after step 255 back to the node after step `stop`, writing the states on the way.
template <class V>
int trace(const Plan& plan, const float* table, const float* weights, int roll, int node, int stop, const Rows& rows,
          int32_t* states) {
    for (int last = kTileWeights - 1; last > stop; last -= plan.stride) {
        const int before = last - plan.stride;
        const float* row = before < 0 ? rows.initial() : rows.row(before);
        node = trace_back<V>(plan, table, weights, last, roll, node, row, states);
    }
    return node;
}

inline int lowest_cost_node(const float* cost, int nodes) {
    int best = 0;
    for (int node = 1; node < nodes; ++node)
        if (cost[node] < cost[best]) best = node;
    return best;
}

template <class V, int T>
void encode_tiles(const Plan& plan, const float* table, const float* weights, float* workspace, int32_t* states) {
    constexpr int half = kTileWeights / 2;
    Rows rows[T];
    for (int t = 0; t < T; ++t) rows[t] = Rows{&plan, workspace + plan.floats_per_tile() * t};
    forward<V, T>(plan, table, weights, half, nullptr, rows);
    int seam[T];
    for (int t = 0; t < T; ++t) {
        const int end = lowest_cost_node(rows[t].row(kTileWeights - 1), plan.nodes_before(half));
        seam[t] = trace<V>(plan, table, weights + t * kTileWeights, half, end, half - 1, rows[t],
                           states + t * kTileWeights);
    }
    forward<V, T>(plan, table, weights, 0, seam, rows);
    for (int t = 0; t < T; ++t)
        trace<V>(plan, table, weights + t * kTileWeights, 0, seam[t], -1, rows[t], states + t * kTileWeights);
}

constexpr int kTilesPerCall = 2;  // two tiles share every load of a value; more would not fit the registers

template <class V>
size_t workspace_floats(Rate rate) {
    return Plan(rate).floats_per_tile() * kTilesPerCall;
}

template <class V>
void encode(Rate rate, const float* table, const float* weights, int count, float* workspace, int32_t* states) {
    const Plan plan(rate);
    if (count == kTilesPerCall)
        encode_tiles<V, kTilesPerCall>(plan, table, weights, workspace, states);
    else
        encode_tiles<V, 1>(plan, table, weights, workspace, states);
}

template <class V>
exl3::Backend make_backend(const char* name, bool (*supported)()) {
    return {name, supported, table_floats<V>, fill_table<V>, workspace_floats<V>, kTilesPerCall, encode<V>};
}

}  // namespace
