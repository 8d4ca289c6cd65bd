// Encoding many tiles: threads, tables and workspaces around the searches.
#pragma once

#include "viterbi.h"

namespace exl3 {

// Encode weights (tiles, 256) -> states (tiles, 256), with `fast` where it is not null and takes the tile, otherwise
// with `exact`. Returns how many tiles the exact search encoded. Which thread takes a tile changes nothing.
size_t encode_tiles(const Backend* fast, const Backend& exact, Rate rate, const float* values, const float* weights,
                    size_t tiles, size_t threads, int32_t* states);

}  // namespace exl3
