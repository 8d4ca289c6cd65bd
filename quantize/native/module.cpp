// The Python module quantize._native: checks shapes, and picks the best kernels that the processor
// runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "clock.h"
#include "encode_tiles.h"
#include "fast.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using exl3::Backend;
using exl3::kTileWeights;
using exl3::Rate;

using Weights = nb::ndarray<const float, nb::shape<-1, kTileWeights>, nb::c_contig, nb::device::cpu>;
using Values = nb::ndarray<const float, nb::shape<exl3::kStates>, nb::c_contig, nb::device::cpu>;
using States = nb::ndarray<int32_t, nb::shape<-1, kTileWeights>, nb::c_contig, nb::device::cpu>;

// Best first.
std::vector<const Backend*> supported_backends() {
    std::vector<const Backend*> found;
#if defined(EXL3_X86)
    for (const Backend* backend : {&exl3::avx512_backend(), &exl3::avx2_backend()})
        if (backend->supported()) found.push_back(backend);
#endif
    found.push_back(&exl3::portable_backend());
    return found;
}

const Backend& backend_named(const std::string& name) {
    for (const Backend* backend : supported_backends())
        if (name.empty() || name == backend->name) return *backend;
    throw nb::value_error(("no such path on this processor: " + name).c_str());
}

// The fast search for the instruction set of an exact one, or the next best that this processor runs.
const Backend& fast_beside(const Backend& exact) {
#if defined(EXL3_X86)
    const bool widest = &exact == &exl3::avx512_backend();
    if (widest && exl3::fast_avx512_backend().supported()) return exl3::fast_avx512_backend();
    if (widest || &exact == &exl3::avx2_backend()) return exl3::fast_avx2_backend();
#endif
    return exl3::fast_portable_backend();
}

size_t encode(Weights weights, Values values, States states, int even_bits, int odd_bits, int threads,
              const std::string& path, bool fast) {
    const bool whole = even_bits >= 1 && even_bits <= exl3::kMaxBits && odd_bits == even_bits;
    const bool half = even_bits >= 1 && even_bits <= 3 && odd_bits == even_bits + 1;
    if (!whole && !half) throw nb::value_error("unsupported bits of even and odd positions");
    if (weights.shape(0) != states.shape(0)) throw nb::value_error("weights and states differ in tiles");
    if (threads < 1) throw nb::value_error("threads must be at least 1");
    const Backend& backend = backend_named(path);
    nb::gil_scoped_release release;
    return exl3::encode_tiles(fast ? &fast_beside(backend) : nullptr, backend, Rate{even_bits, odd_bits}, values.data(),
                              weights.data(), weights.shape(0), static_cast<size_t>(threads), states.data());
}

std::vector<std::string> paths() {
    std::vector<std::string> names;
    for (const Backend* backend : supported_backends()) names.emplace_back(backend->name);
    return names;
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "Exact and fast trellis search for EXL3 tiles.";
    module.def("encode", &encode, "weights"_a.noconvert(), "values"_a.noconvert(), "states"_a.noconvert(),
               "even_bits"_a, "odd_bits"_a, "threads"_a, "path"_a = "", "fast"_a = false,
               "Write the best states of each tile of weights (n, 256) into states (n, 256); returns how many tiles the "
               "exact search encoded.");
    module.def("clock", &exl3::measure_clock, "Cycles per second of the core at work, 0 if unknown; takes a few ms.");
    module.def("paths", &paths, "Names of the kernels that this processor runs, best first.");
}
