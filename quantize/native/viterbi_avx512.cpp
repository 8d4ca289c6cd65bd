// The search with AVX-512F: 16 candidates at a time. Compiled with AVX-512F enabled; entered only after a check at
// run time.
#include <immintrin.h>

#include <cmath>

#include "cpu.h"
#include "viterbi_kernel.h"

namespace {

struct Avx512Vector {
    static constexpr int width = 16;
    static constexpr int blocks = 8;
    using Reg = __m512;

    static Reg load(const float* from) { return _mm512_load_ps(from); }
    static void store(float* to, Reg r) { _mm512_store_ps(to, r); }
    static Reg broadcast(float value) { return _mm512_set1_ps(value); }
    static Reg sub(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
    static Reg min(Reg a, Reg b) { return _mm512_min_ps(a, b); }
    static Reg accumulate(Reg distance, Reg cost) { return _mm512_fmadd_ps(distance, distance, cost); }
    static float accumulate_scalar(float distance, float cost) { return std::fma(distance, distance, cost); }
    // Loads are no wider than what is used, so that they do not cross cache lines.
    template <int IN>
    static Reg spread(const float* from) {
        if constexpr (IN == 1) {
            const __m512i lane = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
            return _mm512_permutexvar_ps(lane, _mm512_castps256_ps512(_mm256_load_ps(from)));
        } else if constexpr (IN == 2) {
            const __m512i lane = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
            return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_load_ps(from)), lane);
        } else if constexpr (IN == 3) {
            return _mm512_mask_blend_ps(0xff00, _mm512_set1_ps(from[0]), _mm512_set1_ps(from[1]));
        } else {
            return _mm512_set1_ps(*from);
        }
    }
};

}  // namespace

const exl3::Backend& exl3::avx512_backend() {
    static const Backend backend = make_backend<Avx512Vector>("avx512", exl3::cpu_has_avx512);
    return backend;
}
