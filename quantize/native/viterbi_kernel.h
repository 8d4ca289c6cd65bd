// The search itself, written once over a vector type. Each kernel source includes this file with its own vector type
// and its own compiler flags, so everything here has internal linkage: a function compiled for AVX2 must never be the
// one that the linker picks for a machine without it. For the same reason no standard containers are used.
//
// A vector type V offers: width (floats in a register), blocks (registers of outgoing nodes worked on at once), Reg,
// load, store, broadcast, sub, min, accumulate (fma(d, d, cost)), accumulate_scalar, and spread<IN>, which gives each
// outgoing lane i the cost of incoming node i >> IN.
#pragma once

#include "viterbi_layout.h"
#include "viterbi_trace.h"

#if defined(__clang__)
#define EXL3_UNROLL _Pragma("clang loop unroll(full)")
#elif defined(__GNUC__)
#define EXL3_UNROLL _Pragma("GCC unroll 16")
#else
#define EXL3_UNROLL
#endif

namespace {

// One candidate of each node in a group: for lane i of block b, the state whose incoming node is
// node + ((b * width + i) >> IN). FIRST sets the best costs, later candidates lower them.
template <class V, int IN, int T, bool FIRST>
inline void consider(const float* values, const float* const* cost_in, int node, const typename V::Reg* weight,
                     typename V::Reg (*best)[V::blocks]) {
    using Reg = typename V::Reg;
    constexpr bool one_cost = (1 << IN) >= kGroup<V>;  // the whole group comes from one incoming node
    Reg incoming[T];
    if constexpr (one_cost) {
        EXL3_UNROLL for (int t = 0; t < T; ++t) incoming[t] = V::broadcast(cost_in[t][node]);
    }
    EXL3_UNROLL for (int b = 0; b < V::blocks; ++b) {
        const Reg value = V::load(values + b * V::width);
        EXL3_UNROLL for (int t = 0; t < T; ++t) {
            if constexpr (!one_cost) incoming[t] = V::template spread<IN>(cost_in[t] + node + ((b * V::width) >> IN));
            const Reg total = V::accumulate(V::sub(value, weight[t]), incoming[t]);
            if constexpr (FIRST)
                best[t][b] = total;
            else
                best[t][b] = V::min(best[t][b], total);
        }
    }
}

// One step for T tiles: cost_in (nodes before) -> cost_out (nodes after), all 65536 candidate states.
template <class V, int IN, int OUT, int T>
void advance(const float* table, const float* const* cost_in, float* const* cost_out, const float* weights) {
    using Reg = typename V::Reg;
    constexpr int group = kGroup<V>;
    constexpr int nodes_out = kStates >> OUT;
    constexpr int candidate_stride = nodes_out >> IN;  // of the incoming node, from one k to the next
    Reg weight[T];
    EXL3_UNROLL for (int t = 0; t < T; ++t) weight[t] = V::broadcast(weights[t]);
    for (int first = 0; first < nodes_out; first += group) {
        Reg best[T][V::blocks];
        int node = first >> IN;
        consider<V, IN, T, true>(table, cost_in, node, weight, best);
        for (int k = 1; k < 1 << OUT; ++k) {
            table += group;
            node += candidate_stride;
            consider<V, IN, T, false>(table, cost_in, node, weight, best);
        }
        table += group;
        EXL3_UNROLL for (int t = 0; t < T; ++t)
            EXL3_UNROLL for (int b = 0; b < V::blocks; ++b) V::store(cost_out[t] + first + b * V::width, best[t][b]);
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

// Forward over all 256 steps for T tiles. `start` is the node each tile starts in, or null for a free start.
template <class V, int T>
void forward(const Plan& plan, const float* table, const float* weights, int roll, const int* start,
             const Rows<float>* rows) {
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
        step_at[position & 1](table_for(plan.rate, table, position), cost_in, cost_out, here);
        for (int t = 0; t < T; ++t) cost_in[t] = cost_out[t];
    }
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
    Rows<float> rows[T];
    for (int t = 0; t < T; ++t) rows[t] = Rows<float>{&plan, workspace + plan.costs_per_tile() * t, half - 1};
    forward<V, T>(plan, table, weights, half, nullptr, rows);
    int seam[T];
    for (int t = 0; t < T; ++t)
        seam[t] = lowest_cost_node(rows[t].row(kTileWeights - 1), plan.nodes_before(half));
    trace<V, T>(plan, table, weights, half, seam, half - 1, rows, 1.0f, states);
    for (int t = 0; t < T; ++t) rows[t].keep_from = 0;
    forward<V, T>(plan, table, weights, 0, seam, rows);
    trace<V, T>(plan, table, weights, 0, seam, -1, rows, 1.0f, states);
}

constexpr int kTilesPerCall = 2;  // two tiles share every load of a value; more would not fit the registers

template <class V>
size_t exact_table_bytes(Rate rate) {
    return table_values(rate) * sizeof(float);
}

template <class V>
void exact_fill_table(Rate rate, const float* values, void* table) {
    fill_table<V>(rate, values, static_cast<float*>(table));
}

template <class V>
size_t exact_workspace_bytes(Rate rate) {
    return Plan(rate).costs_per_tile() * kTilesPerCall * sizeof(float);
}

template <class V>
unsigned exact_encode(Rate rate, const void* table, const float* weights, int count, void* workspace, int32_t* states) {
    const Plan plan(rate);
    const float* values = static_cast<const float*>(table);
    float* costs = static_cast<float*>(workspace);
    if (count == kTilesPerCall)
        encode_tiles<V, kTilesPerCall>(plan, values, weights, costs, states);
    else
        encode_tiles<V, 1>(plan, values, weights, costs, states);
    return 0;
}

inline bool accepts_all(Rate, const float*) { return true; }

template <class V>
exl3::Backend make_backend(const char* name, bool (*supported)()) {
    return {name, supported, exact_table_bytes<V>, exact_fill_table<V>, exact_workspace_bytes<V>,
            accepts_all, kTilesPerCall, exact_encode<V>};
}

}  // namespace
