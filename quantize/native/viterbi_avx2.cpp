// The search with AVX2: 8 candidates at a time. Compiled with AVX2 and FMA enabled; entered only after a check at run
// time.
#include <immintrin.h>

#include <cmath>

#include "cpu.h"
#include "viterbi_kernel.h"

namespace {

struct Avx2Vector {
    static constexpr int width = 8;
    static constexpr int blocks = 4;
    using Reg = __m256;

    static Reg load(const float* from) { return _mm256_load_ps(from); }
    static void store(float* to, Reg r) { _mm256_store_ps(to, r); }
    static Reg broadcast(float value) { return _mm256_set1_ps(value); }
    static Reg sub(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
    static Reg min(Reg a, Reg b) { return _mm256_min_ps(a, b); }
    static Reg accumulate(Reg distance, Reg cost) { return _mm256_fmadd_ps(distance, distance, cost); }
    static float accumulate_scalar(float distance, float cost) { return std::fma(distance, distance, cost); }
    // Loads are no wider than what is used, so that they do not cross cache lines.
    template <int IN>
    static Reg spread(const float* from) {
        if constexpr (IN == 1) {
            const __m256i lane = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
            return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_load_ps(from)), lane);
        } else if constexpr (IN == 2) {
            const __m128 pair = _mm_castsi128_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
            const __m256i lane = _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1);
            return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(pair), lane);
        } else {
            return _mm256_broadcast_ss(from);
        }
    }
};

}  // namespace

const exl3::Backend& exl3::avx2_backend() {
    static const Backend backend = make_backend<Avx2Vector>("avx2", exl3::cpu_has_avx2);
    return backend;
}
