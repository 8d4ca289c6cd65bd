// The first steps of the list search from a known node, over all candidates in float32, and the register transposes.
// Internal linkage throughout, see viterbi_kernel.h.
#pragma once

#include "fast_layout.h"

namespace {

// Write the rows before and after the steps that it takes to reach every node from `seam`; returns their number.
// Rows are [p][k], one after another from `rows` on; costs are in units above the lowest of their row.
template <int K>
int start_rows(const float* values, const float* weights, int seam, float unit, uint16_t* rows) {
    constexpr int node_bits = kStateBits - K, nodes = 1 << node_bits;
    constexpr int steps = (node_bits + K - 1) / K;
    float before[nodes], after[nodes];
    int first = seam, reached = 1;  // a range of nodes
    before[seam] = 0.0f;
    for (int node = 0; node < nodes; ++node) rows[node] = kUnreached;
    rows[(seam & ((1 << (kStateBits - 2 * K)) - 1)) << K | seam >> (kStateBits - 2 * K)] = 0;
    for (int step = 0; step < steps; ++step) {
        for (int node = 0; node < nodes; ++node) after[node] = kInfinity;
        for (int node = first; node < first + reached; ++node) {
            const float* value = values + (node << K);
            float* cost = after + ((node << K) & (nodes - 1));
            for (int j = 0; j < 1 << K; ++j) {
                const float distance = value[j] - weights[step];
                const float total = distance * distance + before[node];
                cost[j] = total < cost[j] ? total : cost[j];
            }
        }
        const bool all = (step + 1) * K >= node_bits;
        first = all ? 0 : (first << K) & (nodes - 1);
        reached = all ? nodes : reached << K;
        float least = kInfinity;
        for (int node = 0; node < nodes; ++node) {
            before[node] = after[node];
            least = after[node] < least ? after[node] : least;
        }
        rows += nodes;
        for (int node = 0; node < nodes; ++node) {
            const float cost = (after[node] - least) / unit + 0.5f;
            rows[(node & ((1 << (kStateBits - 2 * K)) - 1)) << K | node >> (kStateBits - 2 * K)] =
                cost < static_cast<float>(kUnreached) ? static_cast<uint16_t>(cost) : kUnreached;
        }
    }
    return steps;
}

// Lane e of block t becomes lane t of block e, within each octet.
template <class V>
inline void turn8(typename V::Reg (*block)[V::regs], int r) {
    using Reg = typename V::Reg;
    Reg pair[8], quad[8];
    EXL3_FULLY for (int i = 0; i < 4; ++i) {
        pair[2 * i] = V::low16(block[2 * i][r], block[2 * i + 1][r]);
        pair[2 * i + 1] = V::high16(block[2 * i][r], block[2 * i + 1][r]);
    }
    EXL3_FULLY for (int i = 0; i < 2; ++i) {
        EXL3_FULLY for (int side = 0; side < 2; ++side) {
            quad[4 * i + 2 * side] = V::low32(pair[4 * i + side], pair[4 * i + 2 + side]);
            quad[4 * i + 2 * side + 1] = V::high32(pair[4 * i + side], pair[4 * i + 2 + side]);
        }
    }
    EXL3_FULLY for (int i = 0; i < 4; ++i) {
        block[2 * i][r] = V::low64(quad[i], quad[4 + i]);
        block[2 * i + 1][r] = V::high64(quad[i], quad[4 + i]);
    }
}

// The halves of octets of two blocks trade places.
template <class V>
inline void turn2(typename V::Reg (*block)[V::regs], int r) {
    const typename V::Reg low = V::low64(block[0][r], block[1][r]);
    block[1][r] = V::high64(block[0][r], block[1][r]);
    block[0][r] = low;
}

}  // namespace
