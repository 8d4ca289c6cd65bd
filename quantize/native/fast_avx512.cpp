// The fast search with AVX-512BW: 32 candidates at a time, costs looked up by word permutations. Compiled with
// AVX-512F and BW enabled; entered only after a check at run time.
#include <immintrin.h>

#include "cpu.h"
#include "fast_kernel.h"

namespace {

struct Avx512Words {
    static constexpr int width = 32;
    static constexpr int blocks = 8;
    static constexpr int regs = 1;
    using Reg = __m512i;

    static Reg load(const void* from) { return _mm512_load_si512(from); }
    static void store(uint16_t* to, Reg r) { _mm512_store_si512(to, r); }
    static Reg held(Reg r) {
#if defined(__GNUC__)
        __asm__("" : "+v"(r));
#endif
        return r;
    }
    static Reg broadcast(int16_t value) { return _mm512_set1_epi16(value); }
    static Reg subtract(Reg a, Reg b) { return _mm512_subs_epi16(a, b); }
    static Reg square(Reg r) { return _mm512_mulhrs_epi16(r, r); }
    static Reg add(Reg a, Reg b) { return _mm512_adds_epu16(a, b); }
    static Reg minus(Reg a, Reg b) { return _mm512_sub_epi16(a, b); }
    static Reg min(Reg a, Reg b) { return _mm512_min_epu16(a, b); }
    static uint16_t lowest(Reg r) {
        const __m256i halves = _mm256_min_epu16(_mm512_castsi512_si256(r), _mm512_extracti64x4_epi64(r, 1));
        const __m128i quarters = _mm_min_epu16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
        return static_cast<uint16_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(quarters)));
    }

    template <int NODES>
    static Reg repeat(const uint16_t* from) {
        if constexpr (NODES == 2) return _mm512_set1_epi32(at<int32_t>(from));
        if constexpr (NODES == 4) return _mm512_set1_epi64(at<int64_t>(from));
        if constexpr (NODES == 8) return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(from)));
        if constexpr (NODES == 16) return _mm512_broadcast_i64x4(half(from));
    }
    // Lane l holds node l % nodes and its outgoing node l / nodes; afterwards the other way round.
    template <int IN>
    static Reg in_order(Reg r) {
        alignas(64) static constexpr Order order = ordered(width >> IN);
        return _mm512_permutexvar_epi16(load(order.lane), r);
    }

    static Reg low16(Reg a, Reg b) { return _mm512_unpacklo_epi16(a, b); }
    static Reg high16(Reg a, Reg b) { return _mm512_unpackhi_epi16(a, b); }
    static Reg low32(Reg a, Reg b) { return _mm512_unpacklo_epi32(a, b); }
    static Reg high32(Reg a, Reg b) { return _mm512_unpackhi_epi32(a, b); }
    static Reg low64(Reg a, Reg b) { return _mm512_unpacklo_epi64(a, b); }
    static Reg high64(Reg a, Reg b) { return _mm512_unpackhi_epi64(a, b); }
    static void store_octet(uint16_t* to, Reg r, int lane) {
        __m128i octet;
        switch (lane) {
            case 0: octet = _mm512_castsi512_si128(r); break;
            case 1: octet = _mm512_extracti32x4_epi32(r, 1); break;
            case 2: octet = _mm512_extracti32x4_epi32(r, 2); break;
            default: octet = _mm512_extracti32x4_epi32(r, 3); break;
        }
        _mm_store_si128(reinterpret_cast<__m128i*>(to), octet);
    }

    template <int K>
    static void prepare(const uint16_t*, uint8_t*) {}

    template <int K>
    struct Costs {
        static constexpr int tables = K == 4 ? 1 : (1 << K) / 32;
        Reg table[tables];

        Costs(const uint16_t* row, const uint8_t*, int p, int second_p) {
            if constexpr (K == 4) {
                table[0] = _mm512_inserti64x4(_mm512_castsi256_si512(half(row + p * 16)), half(row + second_p * 16), 1);
            } else {
                EXL3_FULLY for (int t = 0; t < tables; ++t) table[t] = load(row + (p << K) + t * 32);
            }
        }
        void of(const uint8_t* k, Reg* costs) const {
            const Reg index = _mm512_cvtepu8_epi16(_mm256_load_si256(reinterpret_cast<const __m256i*>(k)));
            if constexpr (K <= 5) {
                *costs = _mm512_permutexvar_epi16(index, table[0]);
            } else if constexpr (K == 6) {
                *costs = of64(0, index);
            } else if constexpr (K == 7) {
                *costs = of128(0, index);
            } else {
                const __mmask32 upper = _mm512_test_epi16_mask(index, _mm512_set1_epi16(128));
                *costs = _mm512_mask_blend_epi16(upper, of128(0, index), of128(4, index));
            }
        }
        Reg of64(int first, Reg index) const {
            return _mm512_permutex2var_epi16(table[first], index, table[first + 1]);
        }
        Reg of128(int first, Reg index) const {
            const __mmask32 upper = _mm512_test_epi16_mask(index, _mm512_set1_epi16(64));
            return _mm512_mask_blend_epi16(upper, of64(first, index), of64(first + 2, index));
        }
    };

private:
    struct Order {
        int16_t lane[width];
    };
    static constexpr Order ordered(int nodes) {
        Order order{};
        for (int l = 0; l < width; ++l)
            order.lane[l] = static_cast<int16_t>(l % (width / nodes) * nodes + l / (width / nodes));
        return order;
    }
    template <class T>
    static T at(const void* from) {
        T value;
        std::memcpy(&value, from, sizeof value);
        return value;
    }
    static __m256i half(const uint16_t* from) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(from)); }
};

}  // namespace

const exl3::Backend& exl3::fast_avx512_backend() {
    static const Backend backend = make_fast_backend<Avx512Words>("avx512", exl3::cpu_has_avx512bw);
    return backend;
}
