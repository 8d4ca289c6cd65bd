// The exact trellis search: interface shared by the Python module and the kernels of each instruction set.
//
// What is computed. A tile is a ring of 256 weights w[i]. Position i owns `shift(i)` bits of a circular bit stream,
// and its state is the 16-bit window of the stream that ends with its own bits. The search finds the stream that
// minimizes
//   sum_i (values[state_i] - w[i])^2
// by dynamic programming over nodes, a node being the 16 - shift(i + 1) bits that the states i and i + 1 share. A
// ring has no beginning, so two passes are made: one over the ring rolled by half a turn with a free start, whose
// best path tells the node between positions 255 and 0; and one that starts and ends in that node. That is the usual
// tail-biting approximation, and what ExLlamaV3 does. Within each pass the search is exact, in float32, with one
// defined order of operations:
//   cost_out[o] = min over k of fma(d, d, cost_in[s >> shift_in]),  d = values[s] - w,  s = (k << (16 - shift_out)) | o
// with the subtraction and the fused multiply-add rounded once each, so every instruction set produces the same bits.
// Among equal costs the lowest k wins, and in the free pass the lowest end node.
#pragma once

#include <cstddef>
#include <cstdint>

namespace exl3 {

constexpr int kTileWeights = 256;
constexpr int kStateBits = 16;
constexpr int kStates = 1 << kStateBits;
constexpr int kMaxBits = 8;
// Cost rows may be read this many costs past their end (and the surplus is ignored).
constexpr int kRowPadding = 32;

// Bits owned by even and by odd ring positions: equal for whole rates, one apart for half rates.
struct Rate {
    int even;
    int odd;

    int shift(int position) const { return position & 1 ? odd : even; }
    int bits_per_pair() const { return even + odd; }
};

// One implementation of a search. Tables and workspaces are plain memory aligned to 64 bytes.
struct Backend {
    const char* name;
    bool (*supported)();
    // Bytes of the tables for a rate: what the search derives from `values`, in the order in which it reads them.
    size_t (*table_bytes)(Rate rate);
    void (*fill_table)(Rate rate, const float* values, void* table);
    // Bytes of workspace that one thread needs.
    size_t (*workspace_bytes)(Rate rate);
    // Whether a tile's weights (256) lie within the range of the search.
    bool (*accepts)(Rate rate, const float* weights);
    // How many tiles one call encodes at best speed.
    int tiles_per_call;
    // Encode `count` tiles, 1 <= count <= tiles_per_call: weights (count, 256) -> states (count, 256). Bit t of the
    // result is set where tile t has to be left to the exact search; that one leaves none.
    unsigned (*encode)(Rate rate, const void* table, const float* weights, int count, void* workspace, int32_t* states);
};

const Backend& portable_backend();
#if defined(EXL3_X86)
const Backend& avx2_backend();
const Backend& avx512_backend();
#endif

}  // namespace exl3
