// The search with AVX-512F: 16 candidates at a time. Compiled with AVX-512F enabled; entered only after a check at run time.
#include <immintrin.h>

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
    template <int IN>
    static Reg spread(const float* from) {
        if constexpr (IN >= 4) return _mm512_set1_ps(*from);
        const __m512i lane = _mm512_setr_epi32(0, 1 >> IN, 2 >> IN, 3 >> IN, 4 >> IN, 5 >> IN, 6 >> IN, 7 >> IN, 8 >> IN,
                                               9 >> IN, 10 >> IN, 11 >> IN, 12 >> IN, 13 >> IN, 14 >> IN, 15 >> IN);
        return _mm512_permutexvar_ps(lane, _mm512_loadu_ps(from));
    }
};

}  // namespace

const exl3::Backend& exl3::avx512_backend() {
    static const Backend backend = make_backend<Avx512Vector>("avx512", exl3::cpu_has_avx512);
    return backend;
}
