// The search with AVX2: 8 candidates at a time. Compiled with AVX2 and FMA enabled; entered only after a check at run time.
#include <immintrin.h>

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
    template <int IN>
    static Reg spread(const float* from) {
        if constexpr (IN >= 3) return _mm256_broadcast_ss(from);
        const __m256i lane = _mm256_setr_epi32(0, 1 >> IN, 2 >> IN, 3 >> IN, 4 >> IN, 5 >> IN, 6 >> IN, 7 >> IN);
        return _mm256_permutevar8x32_ps(_mm256_loadu_ps(from), lane);
    }
};

}  // namespace

const exl3::Backend& exl3::avx2_backend() {
    static const Backend backend = make_backend<Avx2Vector>("avx2", exl3::cpu_has_avx2);
    return backend;
}
