// The integer search over all candidates, for up to 3.5 bits. Written once over a vector type, see viterbi_kernel.h.
//
// A register holds width >> IN incoming nodes' candidates, interleaved so that one broadcast load brings their costs:
// lane l belongs to incoming node l % nodes and is its outgoing node l / nodes. `in_order` puts finished costs in order.
//
// A vector type V offers: width, blocks (registers of outgoing nodes worked on at once), Reg, load, store, broadcast,
// held (of a value that several tiles use: compilers would rather load it again), subtract (signed, saturating),
// square (rounded d * d / 2^15), add (unsigned, saturating), minus, min (unsigned), lowest, repeat<NODES> (lane l gets
// the cost at l % NODES) and in_order<IN>.
#pragma once

#include "fast_layout.h"

namespace {

// Steps between rows whose lowest cost is subtracted: costs grow little on the way, and it takes time.
inline int level_every(Rate rate) { return narrow(rate) ? 16 : 4; }
constexpr int kIntegerConeBits = 6;  // rows are half as large as in float32, so more of them are kept

// Incoming nodes in one register.
template <class V, int IN>
constexpr int kNodes = (V::width >> IN) > 1 ? V::width >> IN : 1;

// Saturating subtractions have half the throughput of plain ones.
template <int IN, int OUT>
constexpr bool kNarrow = narrow(Rate{IN, OUT});

// One candidate of each node in a group.
template <class V, int IN, int OUT, int T, bool FIRST>
inline void consider16(const int16_t* values, const uint16_t* const* cost_in, int node, const typename V::Reg* weight,
                       typename V::Reg (*best)[V::blocks]) {
    using Reg = typename V::Reg;
    EXL3_FULLY for (int b = 0; b < V::blocks; ++b) {
        const Reg value = V::held(V::load(values + b * V::width));
        EXL3_FULLY for (int t = 0; t < T; ++t) {
            const Reg incoming = V::template repeat<kNodes<V, IN>>(cost_in[t] + node + ((b * V::width) >> IN));
            const Reg difference = kNarrow<IN, OUT> ? V::minus(value, weight[t]) : V::subtract(value, weight[t]);
            const Reg total = V::add(V::square(difference), incoming);
            best[t][b] = FIRST ? total : V::min(best[t][b], total);
        }
    }
}

// One step for T tiles. With LEVEL, `lowest` is subtracted from the costs and becomes the lowest of the new row.
template <class V, int IN, int OUT, int T, bool LEVEL>
void advance16(const int16_t* table, const uint16_t* const* cost_in, uint16_t* const* cost_out, const int16_t* weights,
               uint16_t* lowest) {
    using Reg = typename V::Reg;
    constexpr int group = kGroup<V>;
    constexpr int nodes_out = kStates >> OUT;
    constexpr int candidate_stride = nodes_out >> IN;
    Reg weight[T], base[T], least[T];
    EXL3_FULLY for (int t = 0; t < T; ++t) {
        weight[t] = V::broadcast(weights[t]);
        base[t] = V::broadcast(static_cast<int16_t>(lowest[t]));
        least[t] = V::broadcast(-1);
    }
    for (int first = 0; first < nodes_out; first += group) {
        Reg best[T][V::blocks];
        int node = first >> IN;
        consider16<V, IN, OUT, T, true>(table, cost_in, node, weight, best);
        for (int k = 1; k < 1 << OUT; ++k) {
            table += group;
            node += candidate_stride;
            consider16<V, IN, OUT, T, false>(table, cost_in, node, weight, best);
        }
        table += group;
        EXL3_FULLY for (int t = 0; t < T; ++t) {
            EXL3_FULLY for (int b = 0; b < V::blocks; ++b) {
                if constexpr (LEVEL) {
                    best[t][b] = V::minus(best[t][b], base[t]);
                    least[t] = V::min(least[t], best[t][b]);
                }
                V::store(cost_out[t] + first + b * V::width, V::template in_order<IN>(best[t][b]));
            }
        }
    }
    if constexpr (LEVEL) {
        EXL3_FULLY for (int t = 0; t < T; ++t) lowest[t] = V::lowest(least[t]);
    }
}

template <int T>
using Advance16 = void (*)(const int16_t*, const uint16_t* const*, uint16_t* const*, const int16_t*, uint16_t*);

template <class V, int T, bool LEVEL>
Advance16<T> advance16_for(int in, int out) {
    switch (in * 16 + out) {
        case 0x11: return advance16<V, 1, 1, T, LEVEL>;
        case 0x12: return advance16<V, 1, 2, T, LEVEL>;
        case 0x21: return advance16<V, 2, 1, T, LEVEL>;
        case 0x22: return advance16<V, 2, 2, T, LEVEL>;
        case 0x23: return advance16<V, 2, 3, T, LEVEL>;
        case 0x32: return advance16<V, 3, 2, T, LEVEL>;
        case 0x33: return advance16<V, 3, 3, T, LEVEL>;
        case 0x34: return advance16<V, 3, 4, T, LEVEL>;
        default: return advance16<V, 4, 3, T, LEVEL>;
    }
}

// The tables: values in units for each parity, ordered as the search reads them, then float32 for the way back.
struct FullTables {
    const int16_t* units;
    const float* values;

    static size_t unit_bytes(Rate rate) { return aligned(table_values(rate) * sizeof(int16_t)); }
    static size_t bytes(Rate rate) { return unit_bytes(rate) + table_values(rate) * sizeof(float); }
    FullTables(Rate rate, const void* memory)
        : units(static_cast<const int16_t*>(memory)),
          values(reinterpret_cast<const float*>(static_cast<const char*>(memory) + unit_bytes(rate))) {}
    const int16_t* units_for(Rate rate, int position) const {
        return rate.even == rate.odd || !(position & 1) ? units : units + kStates;
    }
};

template <class V>
void fill_full(Rate rate, const float* values, void* memory) {
    const FullTables tables(rate, memory);
    fill_table<TraceOrder>(rate, values, const_cast<float*>(tables.values));
    const float scale = precision(rate).scale;
    constexpr int group = kGroup<V>;
    for (int parity = 0; parity < (rate.even == rate.odd ? 1 : 2); ++parity) {
        const int in = rate.shift(parity), out_bits = kStateBits - rate.shift(parity + 1);
        const int nodes = V::width >> in > 1 ? V::width >> in : 1;
        int16_t* write = const_cast<int16_t*>(tables.units_for(rate, parity));
        for (int first = 0; first < 1 << out_bits; first += group)
            for (int k = 0; k < kStates >> out_bits; ++k)
                for (int lane = 0; lane < group; ++lane) {
                    const int l = lane % V::width, start = first + lane - l;
                    const int out = start + l % nodes * (V::width / nodes) + l / nodes;
                    *write++ = static_cast<int16_t>(clamp16(to_units(values[(k << out_bits) | out], scale)));
                }
    }
}

// Forward over all 256 steps for T tiles; the highest of the rows' lowest costs of each tile goes to `worst`.
template <class V, int T>
void forward16(const Plan& plan, const FullTables& tables, const int16_t* weights, int roll, const int* start,
               const Rows<uint16_t>* rows, int* worst) {
    const uint16_t* cost_in[T];
    uint16_t* cost_out[T];
    uint16_t lowest[T] = {};
    for (int t = 0; t < T; ++t) {
        uint16_t* initial = rows[t].initial();
        std::memset(initial, start ? 0xff : 0, plan.nodes_before(roll) * sizeof(uint16_t));
        if (start) initial[start[t]] = 0;
        cost_in[t] = initial;
    }
    const int even = plan.rate.even, odd = plan.rate.odd;
    const int every = level_every(plan.rate);
    const Advance16<T> step_at[2] = {advance16_for<V, T, false>(even, odd), advance16_for<V, T, false>(odd, even)};
    const Advance16<T> level_at[2] = {advance16_for<V, T, true>(even, odd), advance16_for<V, T, true>(odd, even)};
    for (int step = 0; step < kTileWeights; ++step) {
        const int position = (step + roll) % kTileWeights;
        int16_t here[T];
        for (int t = 0; t < T; ++t) {
            here[t] = weights[t * kTileWeights + position];
            cost_out[t] = rows[t].row(step);
        }
        const bool level = step % every == every - 1;
        (level ? level_at : step_at)[position & 1](tables.units_for(plan.rate, position), cost_in, cost_out, here, lowest);
        for (int t = 0; t < T; ++t) {
            cost_in[t] = cost_out[t];
            worst[t] = lowest[t] > worst[t] ? lowest[t] : worst[t];
        }
    }
}

inline int lowest_node(const uint16_t* cost, int nodes) {
    uint16_t least = cost[0];
    for (int node = 1; node < nodes; ++node) least = cost[node] < least ? cost[node] : least;
    int best = 0;
    while (cost[best] != least) ++best;
    return best;
}

template <class V, int T>
unsigned encode_full(const Plan& plan, const FullTables& tables, const float* weights, uint16_t* costs,
                     int32_t* states) {
    constexpr int half = kTileWeights / 2;
    const Precision used = precision(plan.rate);
    const float unit = cost_unit(used.scale);
    Rows<uint16_t> rows[T];
    alignas(64) int16_t units[T * kTileWeights];
    for (int i = 0; i < T * kTileWeights; ++i)
        units[i] = static_cast<int16_t>(clamp16(to_units(weights[i], used.scale)));
    for (int t = 0; t < T; ++t) rows[t] = Rows<uint16_t>{&plan, costs + plan.costs_per_tile() * t, half - 1};
    int seam[T], worst[T] = {};
    forward16<V, T>(plan, tables, units, half, nullptr, rows, worst);
    for (int t = 0; t < T; ++t) {
        const int end = lowest_node(rows[t].row(kTileWeights - 1), plan.nodes_before(half));
        seam[t] = trace<TraceOrder>(plan, tables.values, weights + t * kTileWeights, half, end, half - 1, rows[t], unit,
                                    states + t * kTileWeights);
        rows[t].keep_from = 0;
    }
    forward16<V, T>(plan, tables, units, 0, seam, rows, worst);
    unsigned left = 0;
    for (int t = 0; t < T; ++t) {
        const int cost = rows[t].row(kTileWeights - 1)[seam[t]];
        const int begin = trace<TraceOrder>(plan, tables.values, weights + t * kTileWeights, 0, seam[t], -1, rows[t],
                                            unit, states + t * kTileWeights);
        if (begin != seam[t] || cost > kCostLimit || worst[t] > kCostLimit) left |= 1u << t;
    }
    return left;
}

template <class V>
unsigned encode_full_tiles(Rate rate, const void* table, const float* weights, int count, void* workspace,
                           int32_t* states) {
    const Plan plan(rate, kIntegerConeBits);
    const FullTables tables(rate, table);
    uint16_t* costs = static_cast<uint16_t*>(workspace);
    if (count == 2) return encode_full<V, 2>(plan, tables, weights, costs, states);
    return encode_full<V, 1>(plan, tables, weights, costs, states);
}

}  // namespace
