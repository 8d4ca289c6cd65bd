// The Python module quantize._native: checks shapes, spreads tiles over threads, and calls the best kernel the
// processor runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <memory>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "viterbi.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using exl3::Backend;
using exl3::kTileWeights;
using exl3::Rate;

using Weights = nb::ndarray<const float, nb::shape<-1, kTileWeights>, nb::c_contig, nb::device::cpu>;
using Values = nb::ndarray<const float, nb::shape<exl3::kStates>, nb::c_contig, nb::device::cpu>;
using States = nb::ndarray<int32_t, nb::shape<-1, kTileWeights>, nb::c_contig, nb::device::cpu>;

constexpr std::align_val_t kAlignment{64};

struct AlignedDelete {
    void operator()(float* memory) const { ::operator delete[](memory, kAlignment); }
};
using Floats = std::unique_ptr<float[], AlignedDelete>;

Floats allocate(size_t count) {
    return Floats(static_cast<float*>(::operator new[](count * sizeof(float), kAlignment)));
}

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

// Each group of tiles is encoded by itself, so which thread takes it changes nothing in the result.
void encode_all(const Backend& backend, Rate rate, const float* values, const float* weights, size_t tiles,
                size_t threads, int32_t* states) {
    const size_t group = static_cast<size_t>(backend.tiles_per_call);
    const size_t groups = (tiles + group - 1) / group;
    if (threads > groups) threads = groups;
    const Floats table = allocate(backend.table_floats(rate));
    backend.fill_table(rate, values, table.get());
    std::vector<Floats> workspaces;
    for (size_t i = 0; i < threads; ++i) workspaces.push_back(allocate(backend.workspace_floats(rate)));

    std::atomic<size_t> next{0};
    const auto work = [&](float* workspace) {
        for (size_t index = next++; index < groups; index = next++) {
            const size_t first = index * group;
            const size_t count = tiles - first < group ? tiles - first : group;
            backend.encode(rate, table.get(), weights + first * kTileWeights, static_cast<int>(count), workspace,
                           states + first * kTileWeights);
        }
    };
    std::vector<std::thread> helpers;
    helpers.reserve(threads);
    try {
        for (size_t i = 1; i < threads; ++i) helpers.emplace_back(work, workspaces[i].get());
    } catch (const std::system_error&) {
        // The system gives no more threads: those that run, and this one, do all the work.
    }
    work(workspaces[0].get());
    for (std::thread& helper : helpers) helper.join();
}

void encode(Weights weights, Values values, States states, int even_bits, int odd_bits, int threads,
            const std::string& path) {
    const bool whole = even_bits >= 1 && even_bits <= exl3::kMaxBits && odd_bits == even_bits;
    const bool half = even_bits >= 1 && even_bits <= 3 && odd_bits == even_bits + 1;
    if (!whole && !half) throw nb::value_error("unsupported bits of even and odd positions");
    if (weights.shape(0) != states.shape(0)) throw nb::value_error("weights and states differ in tiles");
    if (threads < 1) throw nb::value_error("threads must be at least 1");
    const Backend& backend = backend_named(path);
    if (weights.shape(0) == 0) return;
    nb::gil_scoped_release release;
    encode_all(backend, Rate{even_bits, odd_bits}, values.data(), weights.data(), weights.shape(0),
               static_cast<size_t>(threads), states.data());
}

std::vector<std::string> paths() {
    std::vector<std::string> names;
    for (const Backend* backend : supported_backends()) names.emplace_back(backend->name);
    return names;
}

}  // namespace

NB_MODULE(_native, module) {
    module.doc() = "Exact trellis search for EXL3 tiles.";
    module.def("encode", &encode, "weights"_a.noconvert(), "values"_a.noconvert(), "states"_a.noconvert(),
               "even_bits"_a, "odd_bits"_a, "threads"_a, "path"_a = "",
               "Write the best states of each tile of weights (n, 256) into states (n, 256).");
    module.def("paths", &paths, "Names of the kernels that this processor runs, best first.");
}
