// The fast search as one backend: the full search or the lists, by rate. See fast.h for what is computed.
#pragma once

#include "fast_full.h"
#include "fast_lists.h"

namespace {

inline bool listed(Rate rate) { return rate.even == rate.odd && rate.even >= 4; }

template <class V>
size_t fast_table_bytes(Rate rate) {
    if (!listed(rate)) return FullTables::bytes(rate);
    switch (rate.even) {
        case 4: return ListTables<4>::bytes;
        case 5: return ListTables<5>::bytes;
        case 6: return ListTables<6>::bytes;
        case 7: return ListTables<7>::bytes;
        default: return ListTables<8>::bytes;
    }
}

template <class V>
void fast_fill_table(Rate rate, const float* values, void* table) {
    if (!listed(rate)) return fill_full<V>(rate, values, table);
    const Precision used = precision(rate);
    switch (rate.even) {
        case 4: return fill_list_tables<V, 4>(values, used, table);
        case 5: return fill_list_tables<V, 5>(values, used, table);
        case 6: return fill_list_tables<V, 6>(values, used, table);
        case 7: return fill_list_tables<V, 7>(values, used, table);
        default: return fill_list_tables<V, 8>(values, used, table);
    }
}

template <class V>
size_t fast_workspace_bytes(Rate rate) {
    if (!listed(rate)) return Plan(rate, kIntegerConeBits).costs_per_tile() * kFastTilesPerCall * sizeof(uint16_t);
    switch (rate.even) {
        case 4: return ListSearch<V, 4>::bytes;
        case 5: return ListSearch<V, 5>::bytes;
        case 6: return ListSearch<V, 6>::bytes;
        case 7: return ListSearch<V, 7>::bytes;
        default: return ListSearch<V, 8>::bytes;
    }
}

template <class V>
unsigned fast_encode(Rate rate, const void* table, const float* weights, int count, void* workspace, int32_t* states) {
    if (!listed(rate)) return encode_full_tiles<V>(rate, table, weights, count, workspace, states);
    switch (rate.even) {
        case 4: return encode_list_tiles<V, 4>(table, weights, count, workspace, states);
        case 5: return encode_list_tiles<V, 5>(table, weights, count, workspace, states);
        case 6: return encode_list_tiles<V, 6>(table, weights, count, workspace, states);
        case 7: return encode_list_tiles<V, 7>(table, weights, count, workspace, states);
        default: return encode_list_tiles<V, 8>(table, weights, count, workspace, states);
    }
}

template <class V>
exl3::Backend make_fast_backend(const char* name, bool (*supported)()) {
    return {name,    supported,         fast_table_bytes<V>, fast_fill_table<V>, fast_workspace_bytes<V>,
            accepts, kFastTilesPerCall, fast_encode<V>};
}

}  // namespace
