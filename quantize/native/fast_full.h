// The integer search over all candidates, for up to 3.5 bits. Written once over a vector type, see viterbi_kernel.h.
//
// A register holds width >> IN incoming nodes' candidates, interleaved so that one broadcast load brings their costs:
// lane l belongs to incoming node l % nodes and is its outgoing node l / nodes. `in_order` puts costs in order.
//
// A vector type V offers: width, blocks (registers of outgoing nodes worked on at once), Reg, load, store, broadcast,
// held (of a value that several tiles use: compilers would rather load it again), subtract (signed, saturating),
// square (rounded d * d / 2^15), add (unsigned, saturating), minus, min (unsigned), lowest, repeat<NODES> (lane l gets
// the cost at l % NODES) and in_order<IN>.
#pragma once

#include "fast_layout.h"

namespace {

// Steps between rows whose lowest cost is subtracted: costs grow little on the way, and it takes time.
inline int level_every(Rate rate) { return narrow(rate) ? 32 : 4; }
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

// The outgoing nodes that a call of `advance16` works on, and where the costs lie.
struct Part {
    int first, end;   // whole groups
    int in_offset;    // of the first node in the row of incoming costs
    int stride;       // between the costs of a node's candidates
    int out_offset;   // of the first node in the row of outgoing costs
};

// One step of T tiles. With LEVEL, `lowest` is subtracted from the costs, and `least` holds the lowest in each lane.
template <class V, int IN, int OUT, int T, bool LEVEL>
inline void advance16(const int16_t* table, const uint16_t* const* cost_in, uint16_t* const* cost_out, const Part& part,
                      const int16_t* weights, const uint16_t* lowest, typename V::Reg* least) {
    using Reg = typename V::Reg;
    constexpr int group = kGroup<V>;
    const uint16_t* in[T];  // copies, which stores to rows cannot change
    uint16_t* out[T];
    Reg weight[T], base[T];
    EXL3_FULLY for (int t = 0; t < T; ++t) {
        in[t] = cost_in[t] - part.in_offset;
        out[t] = cost_out[t] - part.out_offset;
        weight[t] = V::broadcast(weights[t]);
        base[t] = V::broadcast(static_cast<int16_t>(lowest[t]));
    }
    table += part.first << OUT;
    for (int first = part.first; first < part.end; first += group) {
        Reg best[T][V::blocks];
        int node = first >> IN;
        consider16<V, IN, OUT, T, true>(table, in, node, weight, best);
        for (int k = 1; k < 1 << OUT; ++k) {
            table += group;
            node += part.stride;
            consider16<V, IN, OUT, T, false>(table, in, node, weight, best);
        }
        table += group;
        EXL3_FULLY for (int t = 0; t < T; ++t) {
            EXL3_FULLY for (int b = 0; b < V::blocks; ++b) {
                if constexpr (LEVEL) {
                    best[t][b] = V::minus(best[t][b], base[t]);
                    least[t] = V::min(least[t], best[t][b]);
                }
                V::store(out[t] + first + b * V::width, V::template in_order<IN>(best[t][b]));
            }
        }
    }
}

// What a pair of steps works on: of each, the table and the weights (T); of T tiles the rows before, between and after.
template <int T>
struct Pair {
    const int16_t* table[2];
    int16_t weights[2][T];
    const uint16_t* before[T];
    uint16_t* between[T];  // null if the way back does not need it
    uint16_t* after[T];
    uint16_t lowest[T];  // of the last row that was levelled
    uint64_t reached;    // a bit per part, set if any tile's path can be there; other nodes get the highest cost
};

// Two steps for T tiles, the first of them at an even position.
//
// The nodes after both are worked on in parts of `kPart`. What a part reads of the row between is made just before it,
// for each candidate a stretch of nodes, and kept side by side in little memory: whole rows do not fit the nearest
// cache, and half of their traffic is saved. Where the way back needs the row between, it is written whole.
constexpr int kPart = 1024;

template <class V>
constexpr int part_length(int odd) {
    return kGroup<V> << odd > kPart ? kGroup<V> << odd : kPart;
}

template <class V, int EVEN, int ODD, int T, bool LEVEL>
void advance_pair(Pair<T>& pair) {
    constexpr int nodes = kStates >> EVEN, nodes_between = kStates >> ODD, candidates = 1 << EVEN;
    constexpr int length = part_length<V>(ODD), stretch = length >> ODD;
    alignas(64) uint16_t little[T][candidates * stretch];
    const bool whole = pair.between[0] != nullptr;
    uint16_t* between[T];
    const uint16_t* written[T];
    typename V::Reg least[T];
    EXL3_FULLY for (int t = 0; t < T; ++t) {
        written[t] = between[t] = whole ? pair.between[t] : little[t];
        least[t] = V::broadcast(-1);
    }
    for (int first = 0; first < nodes; first += length) {
        if (!(pair.reached >> first / length & 1)) {
            for (int t = 0; t < T; ++t) std::memset(pair.after[t] + first, 0xff, length * sizeof(uint16_t));
            continue;
        }
        const int begin = first >> ODD;
        for (int k = 0; k < candidates; ++k) {
            const int at = k * (nodes >> ODD) + begin;
            const Part part{at, at + stretch, 0, nodes_between >> EVEN, whole ? 0 : at - k * stretch};
            advance16<V, EVEN, ODD, T, false>(pair.table[0], pair.before, between, part, pair.weights[0],
                                              pair.lowest, least);
        }
        const Part part{first, first + length, whole ? 0 : begin, whole ? nodes >> ODD : stretch, 0};
        advance16<V, ODD, EVEN, T, LEVEL>(pair.table[1], written, pair.after, part, pair.weights[1],
                                          pair.lowest, least);
    }
    if constexpr (LEVEL) {
        EXL3_FULLY for (int t = 0; t < T; ++t) pair.lowest[t] = V::lowest(least[t]);
    }
}

template <int T>
using AdvancePair = void (*)(Pair<T>&);

template <class V, int T, bool LEVEL>
AdvancePair<T> advance_pair_for(Rate rate) {
    switch (rate.even * 16 + rate.odd) {
        case 0x11: return advance_pair<V, 1, 1, T, LEVEL>;
        case 0x12: return advance_pair<V, 1, 2, T, LEVEL>;
        case 0x21: return advance_pair<V, 2, 1, T, LEVEL>;
        case 0x22: return advance_pair<V, 2, 2, T, LEVEL>;
        case 0x23: return advance_pair<V, 2, 3, T, LEVEL>;
        case 0x32: return advance_pair<V, 3, 2, T, LEVEL>;
        case 0x33: return advance_pair<V, 3, 3, T, LEVEL>;
        case 0x34: return advance_pair<V, 3, 4, T, LEVEL>;
        default: return advance_pair<V, 4, 3, T, LEVEL>;
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

constexpr uint64_t kAllParts = ~uint64_t{0};

// The parts that any of T tiles can have reached from `start` (T) after an even number of steps: the bits chosen since
// are the low ones of a node.
template <class V, int T>
uint64_t reached_parts(Rate rate, const int* start, int steps) {
    const int chosen = steps / 2 * rate.bits_per_pair(), length = part_length<V>(rate.odd);
    if (chosen >= kStateBits - rate.even) return kAllParts;
    uint64_t parts = 0;
    for (int t = 0; t < T; ++t) {
        const int first = (start[t] << chosen) & ((kStates >> rate.even) - 1);
        for (int part = first / length; part * length < first + (1 << chosen); ++part) parts |= uint64_t{1} << part;
    }
    return parts;
}

// Forward over all 256 steps for T tiles; the highest of the rows' lowest costs of each tile goes to `worst`.
template <class V, int T>
void forward16(const Plan& plan, const FullTables& tables, const int16_t* weights, int roll, const int* start,
               const Rows<uint16_t>* rows, int* worst) {
    Pair<T> pair = {};
    for (int t = 0; t < T; ++t) {
        uint16_t* initial = rows[t].initial();
        std::memset(initial, start ? 0xff : 0, plan.nodes_before(roll) * sizeof(uint16_t));
        if (start) initial[start[t]] = 0;
        pair.before[t] = initial;
    }
    const AdvancePair<T> advance = advance_pair_for<V, T, false>(plan.rate);
    const AdvancePair<T> advance_and_level = advance_pair_for<V, T, true>(plan.rate);
    for (int step = 0; step < kTileWeights; step += 2) {
        for (int parity = 0; parity < 2; ++parity) {
            const int position = (step + roll) % kTileWeights + parity;
            pair.table[parity] = tables.units_for(plan.rate, position);
            for (int t = 0; t < T; ++t) pair.weights[parity][t] = weights[t * kTileWeights + position];
        }
        for (int t = 0; t < T; ++t) {
            pair.between[t] = rows[t].kept(step) ? rows[t].row(step) : nullptr;
            pair.after[t] = rows[t].kept(step + 1) ? rows[t].row(step + 1) : rows[t].spare(step / 2);
        }
        const bool level = (step + 2) % level_every(plan.rate) == 0;
        const bool few = start && !level && !pair.between[0];
        pair.reached = few ? reached_parts<V, T>(plan.rate, start, step + 2) : kAllParts;
        (level ? advance_and_level : advance)(pair);
        for (int t = 0; t < T; ++t) {
            pair.before[t] = pair.after[t];
            worst[t] = pair.lowest[t] > worst[t] ? pair.lowest[t] : worst[t];
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
    for (int t = 0; t < T; ++t) seam[t] = lowest_node(rows[t].row(kTileWeights - 1), plan.nodes_before(half));
    trace<TraceOrder, T>(plan, tables.values, weights, half, seam, half - 1, rows, unit, states);
    for (int t = 0; t < T; ++t) rows[t].keep_from = 0;
    forward16<V, T>(plan, tables, units, 0, seam, rows, worst);
    int begin[T];
    std::copy_n(seam, T, begin);
    trace<TraceOrder, T>(plan, tables.values, weights, 0, begin, -1, rows, unit, states);
    unsigned left = 0;
    for (int t = 0; t < T; ++t) {
        const int cost = rows[t].row(kTileWeights - 1)[seam[t]];
        if (begin[t] != seam[t] || cost > kCostLimit || worst[t] > kCostLimit) left |= 1u << t;
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
