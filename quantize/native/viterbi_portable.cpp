// The search in plain C++, for machines without AVX2 and for other architectures. Compilers turn the short loops over
// lanes into whatever vector instructions the baseline of the target has (SSE2, NEON).
#include <cmath>
#include <cstring>

#include "viterbi_kernel.h"

namespace {

// distance * distance + cost with a single rounding, the definition that the vector units follow.
#if defined(FP_FAST_FMAF) || defined(__FMA__) || defined(__aarch64__) || defined(_M_ARM64)
inline float fused_square_add(float distance, float cost) { return std::fma(distance, distance, cost); }
#else
// Without the instruction std::fma is a slow call. The square is exact in double, so rounding the sum to double and
// then to float goes wrong only where the double lies half-way between two floats and is itself inexact: then what it
// lost decides.
inline float fused_square_add(float distance, float cost) {
    const double square = static_cast<double>(distance) * distance;
    const double sum = square + cost;
    int64_t bits;
    std::memcpy(&bits, &sum, sizeof bits);
    if ((bits & 0x1fffffff) == 0x10000000) {
        const double back = sum - square;
        const double lost = (square - (sum - back)) + (cost - back);  // exact: Knuth's two-sum
        bits += (lost > 0.0) - (lost < 0.0);                          // the sum is positive here
        double nudged;
        std::memcpy(&nudged, &bits, sizeof nudged);
        return static_cast<float>(nudged);
    }
    return static_cast<float>(sum);
}
#endif

struct PortableVector {
    static constexpr int width = 4;
    static constexpr int blocks = 4;
    struct Reg {
        float lane[width];
    };

    static Reg load(const float* from) {
        Reg r;
        for (int i = 0; i < width; ++i) r.lane[i] = from[i];
        return r;
    }
    static void store(float* to, const Reg& r) {
        for (int i = 0; i < width; ++i) to[i] = r.lane[i];
    }
    static Reg broadcast(float value) {
        Reg r;
        for (int i = 0; i < width; ++i) r.lane[i] = value;
        return r;
    }
    static Reg sub(const Reg& a, const Reg& b) {
        Reg r;
        for (int i = 0; i < width; ++i) r.lane[i] = a.lane[i] - b.lane[i];
        return r;
    }
    static Reg min(const Reg& a, const Reg& b) {
        Reg r;
        for (int i = 0; i < width; ++i) r.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
        return r;
    }
    static Reg accumulate(const Reg& distance, const Reg& cost) {
        Reg r;
        for (int i = 0; i < width; ++i) r.lane[i] = accumulate_scalar(distance.lane[i], cost.lane[i]);
        return r;
    }
    static float accumulate_scalar(float distance, float cost) { return fused_square_add(distance, cost); }
    template <int IN>
    static Reg spread(const float* from) {
        Reg r;
        for (int i = 0; i < width; ++i) r.lane[i] = from[i >> IN];
        return r;
    }
};

}  // namespace

const exl3::Backend& exl3::portable_backend() {
    static const Backend backend = make_backend<PortableVector>("portable", [] { return true; });
    return backend;
}
