// The fast search in plain C++, with the same results. Compilers turn the short loops over lanes into whatever vector
// instructions the baseline of the target has (SSE2, NEON).
#include "fast_kernel.h"

namespace {

struct PortableWords {
    static constexpr int width = 8;
    static constexpr int blocks = 4;
    static constexpr int regs = 4;
    struct Reg {
        uint16_t lane[width];
    };

    template <class Result>
    static Reg each(Result result) {
        Reg r;
        for (int i = 0; i < width; ++i) r.lane[i] = static_cast<uint16_t>(result(i));
        return r;
    }
    static Reg load(const void* from) {
        Reg r;
        std::memcpy(r.lane, from, sizeof r.lane);
        return r;
    }
    static void store(uint16_t* to, const Reg& r) { std::memcpy(to, r.lane, sizeof r.lane); }
    static Reg held(const Reg& r) { return r; }
    static Reg broadcast(int16_t value) {
        return each([=](int) { return value; });
    }
    static Reg subtract(const Reg& a, const Reg& b) {
        return each([&](int i) { return clamp16(static_cast<int16_t>(a.lane[i]) - static_cast<int16_t>(b.lane[i])); });
    }
    static Reg square(const Reg& r) {
        return each([&](int i) {
            const int32_t difference = static_cast<int16_t>(r.lane[i]);
            return (difference * difference + 0x4000) >> 15;
        });
    }
    static Reg add(const Reg& a, const Reg& b) {
        return each([&](int i) {
            const int sum = a.lane[i] + b.lane[i];
            return sum < kUnreached ? sum : kUnreached;
        });
    }
    static Reg minus(const Reg& a, const Reg& b) {
        return each([&](int i) { return a.lane[i] - b.lane[i]; });
    }
    static Reg min(const Reg& a, const Reg& b) {
        return each([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
    }
    static uint16_t lowest(const Reg& r) {
        uint16_t least = r.lane[0];
        for (int i = 1; i < width; ++i) least = r.lane[i] < least ? r.lane[i] : least;
        return least;
    }

    template <int NODES>
    static Reg repeat(const uint16_t* from) {
        return each([=](int i) { return from[i % NODES]; });
    }
    // Lane l holds node l % nodes and its outgoing node l / nodes; afterwards the other way round.
    template <int IN>
    static Reg in_order(const Reg& r) {
        constexpr int nodes = kNodes<PortableWords, IN>, each_out = width / nodes;
        return each([&](int i) { return r.lane[i % each_out * nodes + i / each_out]; });
    }

    template <int PIECE>
    static Reg unpack(const Reg& a, const Reg& b, int first) {
        return each([&](int i) { return (i / PIECE % 2 ? b : a).lane[first + i / (2 * PIECE) * PIECE + i % PIECE]; });
    }
    static Reg low16(const Reg& a, const Reg& b) { return unpack<1>(a, b, 0); }
    static Reg high16(const Reg& a, const Reg& b) { return unpack<1>(a, b, 4); }
    static Reg low32(const Reg& a, const Reg& b) { return unpack<2>(a, b, 0); }
    static Reg high32(const Reg& a, const Reg& b) { return unpack<2>(a, b, 4); }
    static Reg low64(const Reg& a, const Reg& b) { return unpack<4>(a, b, 0); }
    static Reg high64(const Reg& a, const Reg& b) { return unpack<4>(a, b, 4); }
    static void store_octet(uint16_t* to, const Reg& r, int) { store(to, r); }

    template <int K>
    static void prepare(const uint16_t*, uint8_t*) {}

    template <int K>
    struct Costs {
        const uint16_t* half[2];

        Costs(const uint16_t* row, const uint8_t*, int p, int second_p) : half{row + (p << K), row + (second_p << K)} {}
        void of(const uint8_t* k, Reg* costs) const {
            for (int i = 0; i < kBlock; ++i)
                costs[i / width].lane[i % width] = half[i / 16][K == 4 ? k[i] & 15 : k[i]];
        }
    };
};

}  // namespace

const exl3::Backend& exl3::fast_portable_backend() {
    static const Backend backend = make_fast_backend<PortableWords>("portable", [] { return true; });
    return backend;
}
