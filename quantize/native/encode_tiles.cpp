// Tables are made once per backend, rate and codebook and kept for the process: lists take a tenth of a second.
// Workspaces, up to 18 MiB each, are kept too: a job encodes a hundred thousand times, a row of tiles at a time.
#include "encode_tiles.h"

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace {

using exl3::Backend;
using exl3::kStates;
using exl3::kTileWeights;
using exl3::Rate;

constexpr std::align_val_t kAlignment{64};
constexpr size_t kTablesKept = 24;
constexpr int kMostTilesPerCall = 2;

struct AlignedDelete {
    void operator()(void* memory) const { ::operator delete(memory, kAlignment); }
};
using Memory = std::unique_ptr<void, AlignedDelete>;

Memory allocate(size_t bytes) { return Memory(::operator new(bytes, kAlignment)); }

struct Table {
    const Backend* backend;
    Rate rate;
    std::vector<float> values;
    Memory memory;

    bool is(const Backend& wanted, Rate r, const float* from) const {
        return backend == &wanted && rate.even == r.even && rate.odd == r.odd &&
               std::memcmp(values.data(), from, kStates * sizeof(float)) == 0;
    }
};

std::shared_ptr<const Table> table_of(const Backend& backend, Rate rate, const float* values) {
    static std::mutex mutex;
    static std::vector<std::shared_ptr<const Table>> kept;
    const std::lock_guard<std::mutex> lock(mutex);
    for (const auto& table : kept)
        if (table->is(backend, rate, values)) return table;
    Memory memory = allocate(backend.table_bytes(rate));
    backend.fill_table(rate, values, memory.get());
    if (kept.size() == kTablesKept) kept.erase(kept.begin());
    kept.push_back(std::make_shared<const Table>(
        Table{&backend, rate, std::vector<float>(values, values + kStates), std::move(memory)}));
    return kept.back();
}

// Borrowed from those that earlier calls left.
class Workspace {
public:
    explicit Workspace(size_t bytes) : bytes_(bytes) {
        {
            const std::lock_guard<std::mutex> lock(mutex());
            for (auto& free : spare())
                if (free.first >= bytes) {
                    std::swap(free, spare().back());
                    bytes_ = spare().back().first;
                    memory_ = std::move(spare().back().second);
                    spare().pop_back();
                    return;
                }
            if (!spare().empty()) spare().pop_back();  // too small: replaced by this one
        }
        memory_ = allocate(bytes);
    }
    ~Workspace() {
        const std::lock_guard<std::mutex> lock(mutex());
        spare().emplace_back(bytes_, std::move(memory_));
    }
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;
    void* get() const { return memory_.get(); }

private:
    static std::mutex& mutex() {
        static std::mutex instance;
        return instance;
    }
    static std::vector<std::pair<size_t, Memory>>& spare() {
        static std::vector<std::pair<size_t, Memory>> instance;
        return instance;
    }
    size_t bytes_;
    Memory memory_;
};

struct Job {
    const Backend& backend;
    Rate rate;
    const float* values;
    const float* weights;
    int32_t* states;
};

// Encode tiles[first .. first + count), which need not lie side by side; those left go to `left`, a flag per tile.
void encode_group(const Job& job, const void* table, const size_t* tiles, size_t count, void* workspace, char* left) {
    alignas(64) float weights[kMostTilesPerCall * kTileWeights];
    alignas(64) int32_t states[kMostTilesPerCall * kTileWeights];
    for (size_t t = 0; t < count; ++t)
        std::memcpy(weights + t * kTileWeights, job.weights + tiles[t] * kTileWeights, kTileWeights * sizeof(float));
    const unsigned kept_back =
        job.backend.encode(job.rate, table, weights, static_cast<int>(count), workspace, states);
    for (size_t t = 0; t < count; ++t) {
        left[tiles[t]] = static_cast<char>(kept_back >> t & 1);
        std::memcpy(job.states + tiles[t] * kTileWeights, states + t * kTileWeights, kTileWeights * sizeof(int32_t));
    }
}

void encode_listed(const Job& job, const std::vector<size_t>& tiles, size_t threads, char* left) {
    if (tiles.empty()) return;
    const size_t group = static_cast<size_t>(job.backend.tiles_per_call);
    const size_t groups = (tiles.size() + group - 1) / group;
    const std::shared_ptr<const Table> table = table_of(job.backend, job.rate, job.values);
    std::atomic<size_t> next{0};
    const auto work = [&] {
        const Workspace workspace(job.backend.workspace_bytes(job.rate));
        for (size_t index = next++; index < groups; index = next++) {
            const size_t first = index * group;
            const size_t count = tiles.size() - first < group ? tiles.size() - first : group;
            encode_group(job, table->memory.get(), tiles.data() + first, count, workspace.get(), left);
        }
    };
    std::vector<std::thread> helpers;
    std::atomic<bool> out_of_memory{false};
    const auto help = [&] {
        try {
            work();
        } catch (const std::bad_alloc&) {  // before it took any tile
            out_of_memory = true;
        }
    };
    try {
        for (size_t i = 1; i < threads && i < groups; ++i) helpers.emplace_back(help);
    } catch (const std::system_error&) {
        // The system gives no more threads: those that run, and this one, do all the work.
    }
    help();
    for (std::thread& helper : helpers) helper.join();
    if (out_of_memory && next < groups) throw std::bad_alloc();
}

}  // namespace

size_t exl3::encode_tiles(const Backend* fast, const Backend& exact, Rate rate, const float* values,
                          const float* weights, size_t tiles, size_t threads, int32_t* states) {
    std::vector<char> left(tiles, 1);
    if (fast) {
        std::vector<size_t> taken;
        for (size_t tile = 0; tile < tiles; ++tile)
            if (fast->accepts(rate, weights + tile * kTileWeights)) taken.push_back(tile);
        encode_listed({*fast, rate, values, weights, states}, taken, threads, left.data());
    }
    std::vector<size_t> rest;
    for (size_t tile = 0; tile < tiles; ++tile)
        if (left[tile]) rest.push_back(tile);
    encode_listed({exact, rate, values, weights, states}, rest, threads, left.data());
    return rest.size();
}
