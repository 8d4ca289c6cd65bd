// The integer search over lists of candidates, from 4 bits on. Written once over a vector type, see viterbi_kernel.h.
//
// The weights are cut into intervals. For each interval and outgoing node, `kListed` candidates nearest to the
// interval's centre are listed: the difference of the value from the centre, 16 bits, and k, 8 bits. A step looks up
// the costs of the incoming nodes by k, which is a byte or word shuffle of a row kept in registers.
//
// Rows. Outgoing node o = p << K | j has the incoming nodes k << (16 - 2K) | p, k = 0 .. 2^K - 1, so a row keeps node
// k << (16 - 2K) | p at [p][k]. In the next row node o goes to [o mod 2^(16 - 2K)][o >> (16 - 2K)]. Outgoing nodes are
// worked on in blocks of 32, four octets, chosen so that octets of the next row come out of register transposes:
// `Blocks<K>` says which nodes. Up to 8 blocks (`kTurned`) whose lanes have to trade places form a group.
//
// The start. After the first steps from a known node, few nodes have been reached and the lists would miss most of
// them: those steps consider all candidates, in float32.
//
// A vector type V offers what fast_full.h lists, and regs (registers of a block), octet loads and stores, `Costs<K>`
// (the costs of one block's incoming nodes), and unpacks within octets.
#pragma once

#include "fast_layout.h"
#include "fast_start.h"

namespace {

constexpr int kBlock = 32;

// As fine as candidates lie, where they lie densest, so that the nearest to the centre are the nearest to any weight.
template <int K>
constexpr int kIntervals = K == 4 ? 64 : K == 5 ? 96 : K == 6 ? 192 : K == 7 ? 256 : 384;

template <int K>
constexpr int kListed = K == 4 ? 4 : K == 6 ? 5 : 6;

// Bits of k that lie outside a block and have to be brought into its octets: 2^bits blocks trade places.
template <int K>
constexpr int kTurned = K <= 5 ? 8 : K == 6 ? 2 : 1;

template <int K>
struct Blocks {
    static constexpr int nodes = kStates >> K;
    static constexpr int rows = 1 << (kStateBits - 2 * K);  // p
    static constexpr int groups = nodes / kBlock / kTurned<K>;

    // The p of a block's half (16 nodes) and the j of its octet c, lane e; `turn` is the block within its group.
    static constexpr int p(int group, int turn, int half) {
        return K == 4 ? half << 7 | turn << 4 | group
             : K == 5 ? (group & 3) << 4 | turn << 1 | group >> 2
             : K == 6 ? (group & 7) << 1 | turn
             : K == 7 ? group >> 2
                      : 0;
    }
    static constexpr int j(int group, int octet, int e) {
        return K == 4 ? (octet & 1) << 3 | e
             : K == 5 ? octet << 3 | e
             : K == 6 ? (e & 3) << 4 | (group >> 3) << 3 | octet << 1 | e >> 2
             : K == 7 ? octet << 5 | e << 2 | (group & 3)
                      : group << 5 | octet << 3 | e;
    }
    // Where in the next row octet c of the block goes, after the turn.
    static constexpr int place(int group, int turn, int octet) {
        return K == 4 ? (group << 4 | (octet & 1) << 3 | turn) << 4 | (octet >> 1) << 3
             : K == 5 ? ((group >> 2) << 5 | octet << 3 | turn) << 5 | (group & 3) << 3
             : K == 6 ? ((group >> 3) << 3 | octet << 1 | turn) << 6 | (group & 7) << 3
             : K == 7 ? (group & 3) << 7 | (group >> 2) << 5 | octet << 3
                      : group << 5 | octet << 3;
    }
};

// The candidates of each node of a block, nearest ones of one interval.
template <int K>
struct alignas(64) BlockList {
    int16_t difference[kListed<K>][kBlock];  // of the value from the interval's centre, in the order of V's registers
    uint8_t k[kListed<K>][kBlock];           // by octet and lane; at K = 4, 16 more in the second half
};

template <int K>
constexpr int kBlocks = kStates / kBlock >> K;

template <int K>
struct Intervals {
    float scale;
    int half_width;

    explicit Intervals(Precision used)
        : scale(used.scale), half_width(to_units(used.weight_limit, used.scale) / kIntervals<K> + 1) {}
    int centre(int interval) const { return (2 * interval + 1 - kIntervals<K>) * half_width; }
    int of(int weight) const { return (weight + kIntervals<K> * half_width) / (2 * half_width); }
};

// Lists, then values by state for the start, then values for the way back.
template <int K>
struct ListTables {
    const BlockList<K>* lists;
    const float* by_state;
    const float* values;

    static constexpr size_t list_bytes = sizeof(BlockList<K>) * kBlocks<K> * kIntervals<K>;
    static constexpr size_t bytes = list_bytes + 2 * kStates * sizeof(float);
    explicit ListTables(const void* memory)
        : lists(static_cast<const BlockList<K>*>(memory)),
          by_state(reinterpret_cast<const float*>(static_cast<const char*>(memory) + list_bytes)),
          values(by_state + kStates) {}
};

// The candidates of one node sorted by value.
template <int K>
struct Sorted {
    int units[1 << K];
    uint8_t k[1 << K];

    Sorted(const float* values, int out, float scale) {
        for (int i = 0; i < 1 << K; ++i) {
            const int unit = to_units(values[i << (kStateBits - K) | out], scale);
            int place = i;
            for (; place > 0 && units[place - 1] > unit; --place) {
                units[place] = units[place - 1];
                k[place] = k[place - 1];
            }
            units[place] = unit;
            k[place] = static_cast<uint8_t>(i);
        }
    }
    // First of the `count` candidates nearest to a centre. Centres only grow from call to call, and so does `first`.
    int nearest(int centre, int count, int first) const {
        while (first + count < 1 << K && units[first + count] - centre < centre - units[first]) ++first;
        return first;
    }
};

template <class V, int K>
void fill_lists(const float* values, Precision used, BlockList<K>* lists) {
    using B = Blocks<K>;
    const Intervals<K> intervals(used);
    const int farthest = 32767 - intervals.half_width;  // less what a step subtracts, it fits 16 bits
    for (int block = 0; block < kBlocks<K>; ++block)
        for (int lane = 0; lane < kBlock; ++lane) {
            const int group = block / kTurned<K>, turn = block % kTurned<K>, octet = lane / 8;
            const int out = B::p(group, turn, octet / 2) << K | B::j(group, octet, lane % 8);
            const Sorted<K> sorted(values, out, used.scale);
            const int word = octet % V::regs * V::width + octet / V::regs * 8 + lane % 8;
            int first = 0;
            for (int interval = 0; interval < kIntervals<K>; ++interval) {
                const int centre = intervals.centre(interval);
                first = sorted.nearest(centre, kListed<K>, first);
                BlockList<K>& to = lists[interval * kBlocks<K> + block];
                for (int m = 0; m < kListed<K>; ++m) {
                    to.difference[m][word] = static_cast<int16_t>(clamp_to(sorted.units[first + m] - centre, farthest));
                    to.k[m][lane] = static_cast<uint8_t>(sorted.k[first + m] + (K == 4 ? lane & 16 : 0));
                }
            }
        }
}

template <class V, int K>
void fill_list_tables(const float* values, Precision used, void* memory) {
    const ListTables<K> tables(memory);
    fill_lists<V, K>(values, used, const_cast<BlockList<K>*>(tables.lists));
    std::memcpy(const_cast<float*>(tables.by_state), values, kStates * sizeof(float));
    fill_table<TraceOrder>(Rate{K, K}, values, const_cast<float*>(tables.values));
}

// One step: `row` -> `next`, both [p][k]. Returns the lowest cost of the new row.
template <class V, int K>
uint16_t advance_lists(const BlockList<K>* list, const uint16_t* row, uint16_t* next, int weight, uint16_t lowest,
                       uint8_t* scratch) {
    using Reg = typename V::Reg;
    using B = Blocks<K>;
    const Reg here = V::broadcast(static_cast<int16_t>(weight)), base = V::broadcast(static_cast<int16_t>(lowest));
    Reg least = V::broadcast(-1);
    V::template prepare<K>(row, scratch);
    for (int group = 0; group < B::groups; ++group) {
        Reg best[kTurned<K>][V::regs];
        EXL3_FULLY for (int turn = 0; turn < kTurned<K>; ++turn, ++list) {
            const typename V::template Costs<K> costs(row, scratch, B::p(group, turn, 0), B::p(group, turn, 1));
            EXL3_FULLY for (int m = 0; m < kListed<K>; ++m) {
                Reg incoming[V::regs];
                costs.of(list->k[m], incoming);
                EXL3_FULLY for (int r = 0; r < V::regs; ++r) {
                    const Reg difference = V::minus(V::load(list->difference[m] + r * V::width), here);
                    const Reg total = V::add(V::square(difference), incoming[r]);
                    best[turn][r] = m == 0 ? total : V::min(best[turn][r], total);
                }
            }
            EXL3_FULLY for (int r = 0; r < V::regs; ++r) {
                best[turn][r] = V::minus(best[turn][r], base);
                least = V::min(least, best[turn][r]);
            }
        }
        EXL3_FULLY for (int r = 0; r < V::regs; ++r) {
            if constexpr (kTurned<K> == 8) turn8<V>(best, r);
            if constexpr (kTurned<K> == 2) turn2<V>(best, r);
        }
        EXL3_FULLY for (int turn = 0; turn < kTurned<K>; ++turn) {
            EXL3_FULLY for (int octet = 0; octet < 4; ++octet) {
                V::store_octet(next + B::place(group, turn, octet), best[turn][octet % V::regs], octet / V::regs);
            }
        }
    }
    return V::lowest(least);
}

// The best state into node `out`, over all candidates, and through it the node before.
template <int K>
int best_state(const float* values, const uint16_t* row, int out, float weight, float unit) {
    constexpr int candidates = 1 << K;
    const float* value = values + (static_cast<size_t>(out) << K);
    const uint16_t* cost = row + (out >> K << K);
    int32_t bits[candidates];  // of the totals, which are not negative: they order as integers
    for (int k = 0; k < candidates; ++k) {
        const float distance = value[k] - weight;
        const float total = distance * distance + path_cost(cost[k], unit);
        std::memcpy(bits + k, &total, sizeof total);
    }
    int32_t least = bits[0];
    for (int k = 1; k < candidates; ++k) least = bits[k] < least ? bits[k] : least;
    int k = 0;
    while (bits[k] != least) ++k;
    return k << (kStateBits - K) | out;
}

// One tile's search: its weights in units, and the rows of costs.
template <class V, int K>
struct ListSearch {
    static constexpr int nodes = kStates >> K;

    ListTables<K> tables;
    Precision used;
    float unit;
    const float* weights;
    uint16_t* costs;
    uint8_t* scratch;
    int interval[kTileWeights];
    int offset[kTileWeights];  // from the interval's centre
    int worst = 0;

    static constexpr size_t scratch_bytes = nodes * 2;
    static constexpr size_t bytes = static_cast<size_t>(kTileWeights + 3) * nodes * sizeof(uint16_t) + scratch_bytes;

    ListSearch(const void* table, const float* tile, void* workspace)
        : tables(table), used(precision(Rate{K, K})), unit(cost_unit(used.scale)), weights(tile),
          costs(static_cast<uint16_t*>(workspace)),
          scratch(reinterpret_cast<uint8_t*>(costs + (kTileWeights + 3) * nodes)) {
        const Intervals<K> intervals(used);
        for (int i = 0; i < kTileWeights; ++i) {
            const int weight = to_units(weights[i], used.scale);
            interval[i] = intervals.of(weight);
            offset[i] = weight - intervals.centre(interval[i]);
        }
    }

    // Costs after a step; -1 is before the first. Those of steps before `keep_from` need not last.
    uint16_t* row(int step, int keep_from) const {
        return costs + static_cast<size_t>(step >= keep_from ? step + 1 : kTileWeights + 1 + (step & 1)) * nodes;
    }

    void forward(int from, int roll, int keep_from, uint16_t lowest) {
        for (int step = from; step < kTileWeights; ++step) {
            const int position = (step + roll) % kTileWeights;
            lowest = advance_lists<V, K>(tables.lists + interval[position] * kBlocks<K>, row(step - 1, keep_from),
                                         row(step, keep_from), offset[position], lowest, scratch);
            worst = lowest > worst ? lowest : worst;
        }
    }

    int trace(int roll, int node, int stop, int keep_from, int32_t* states) const {
        for (int step = kTileWeights - 1; step > stop; --step) {
            const int position = (step + roll) % kTileWeights;
            states[position] =
                best_state<K>(tables.values, row(step - 1, keep_from), node, weights[position], unit);
            node = states[position] >> K;
        }
        return node;
    }

    int lowest_end(int keep_from) const {
        const uint16_t* cost = row(kTileWeights - 1, keep_from);
        int best = 0;
        for (int at = 1; at < nodes; ++at)
            if (cost[at] < cost[best]) best = at;
        return (best & ((1 << K) - 1)) << (kStateBits - 2 * K) | best >> K;
    }

    // Far more error than such a tile costs at this rate: its weights are where the lists are poor, many far out.
    bool poor(const int32_t* states) const {
        constexpr float usual = 1.0f / (1 << K) / (1 << K);  // per weight
        float error = 0.0f;
        for (int i = 0; i < kTileWeights; ++i) {
            const float distance = tables.by_state[states[i]] - weights[i];
            error += distance * distance;
        }
        return error > 3.0f * usual * kTileWeights;
    }

    // False if the tile has to be left to the exact search.
    bool encode(int32_t* states) {
        constexpr int half = kTileWeights / 2;
        std::memset(row(-1, half - 1), 0, nodes * sizeof(uint16_t));
        forward(0, half, half - 1, 0);
        const int seam = trace(half, lowest_end(half - 1), half - 1, half - 1, states);
        const int started = start_rows<K>(tables.by_state, weights, seam, unit, costs);
        forward(started, 0, -1, 0);
        const int end = (seam & ((1 << (kStateBits - 2 * K)) - 1)) << K | seam >> (kStateBits - 2 * K);
        if (worst > kCostLimit || row(kTileWeights - 1, -1)[end] > kCostLimit) return false;
        return trace(0, seam, -1, -1, states) == seam && !poor(states);
    }
};

template <class V, int K>
unsigned encode_list_tiles(const void* table, const float* weights, int count, void* workspace, int32_t* states) {
    unsigned left = 0;
    for (int t = 0; t < count; ++t) {
        ListSearch<V, K> search(table, weights + t * kTileWeights, workspace);
        if (!search.encode(states + t * kTileWeights)) left |= 1u << t;
    }
    return left;
}

}  // namespace
