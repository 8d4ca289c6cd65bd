// The fast search with AVX2: 16 candidates at a time, costs looked up by byte shuffles. Compiled with AVX2 enabled;
// entered only after a check at run time.
#include <immintrin.h>

#include "cpu.h"
#include "fast_kernel.h"

namespace {

struct Avx2Words {
    static constexpr int width = 16;
    static constexpr int blocks = 4;
    static constexpr int regs = 2;
    using Reg = __m256i;

    static Reg load(const void* from) { return _mm256_load_si256(static_cast<const __m256i*>(from)); }
    static void store(uint16_t* to, Reg r) { _mm256_store_si256(reinterpret_cast<__m256i*>(to), r); }
    static Reg held(Reg r) {
#if defined(__GNUC__)
        __asm__("" : "+x"(r));
#endif
        return r;
    }
    static Reg broadcast(int16_t value) { return _mm256_set1_epi16(value); }
    static Reg subtract(Reg a, Reg b) { return _mm256_subs_epi16(a, b); }
    static Reg square(Reg r) { return _mm256_mulhrs_epi16(r, r); }
    static Reg add(Reg a, Reg b) { return _mm256_adds_epu16(a, b); }
    static Reg minus(Reg a, Reg b) { return _mm256_sub_epi16(a, b); }
    static Reg min(Reg a, Reg b) { return _mm256_min_epu16(a, b); }
    static uint16_t lowest(Reg r) {
        const __m128i halves = _mm_min_epu16(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
        return static_cast<uint16_t>(_mm_cvtsi128_si32(_mm_minpos_epu16(halves)));
    }

    template <int NODES>
    static Reg repeat(const uint16_t* from) {
        if constexpr (NODES == 1) return _mm256_set1_epi16(static_cast<int16_t>(*from));
        if constexpr (NODES == 2) return _mm256_set1_epi32(at<int32_t>(from));
        if constexpr (NODES == 4) return _mm256_set1_epi64x(at<int64_t>(from));
        if constexpr (NODES == 8) return _mm256_broadcastsi128_si256(_mm_load_si128(vector128(from)));
    }
    // Lane l holds node l % nodes and its outgoing node l / nodes; afterwards the other way round.
    template <int IN>
    static Reg in_order(Reg r) {
        if constexpr (IN == 1) {
            const __m256i halves = _mm256_permute4x64_epi64(r, 0xd8);  // lane 0: words 0-3, 8-11
            const __m256i mix = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15, 0, 1, 8, 9, 2, 3,
                                                 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
            return _mm256_shuffle_epi8(halves, mix);
        } else if constexpr (IN == 2) {
            const __m256i mix = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15, 0, 1, 8, 9, 2, 3,
                                                 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
            const __m256i pairs = _mm256_shuffle_epi8(r, mix);  // of outgoing nodes, by incoming node
            return _mm256_permutevar8x32_epi32(pairs, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        } else if constexpr (IN == 3) {
            const __m256i mix = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15, 0, 1, 4, 5, 8, 9,
                                                 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
            return _mm256_permute4x64_epi64(_mm256_shuffle_epi8(r, mix), 0xd8);
        } else {
            return r;
        }
    }

    static Reg low16(Reg a, Reg b) { return _mm256_unpacklo_epi16(a, b); }
    static Reg high16(Reg a, Reg b) { return _mm256_unpackhi_epi16(a, b); }
    static Reg low32(Reg a, Reg b) { return _mm256_unpacklo_epi32(a, b); }
    static Reg high32(Reg a, Reg b) { return _mm256_unpackhi_epi32(a, b); }
    static Reg low64(Reg a, Reg b) { return _mm256_unpacklo_epi64(a, b); }
    static Reg high64(Reg a, Reg b) { return _mm256_unpackhi_epi64(a, b); }
    static void store_octet(uint16_t* to, Reg r, int lane) {
        const __m128i octet = lane ? _mm256_extracti128_si256(r, 1) : _mm256_castsi256_si128(r);
        _mm_store_si128(reinterpret_cast<__m128i*>(to), octet);
    }

    // A row's costs as tables for byte shuffles of 16 entries: low bytes, then high bytes. At K = 4 the tables of p
    // and p + 128 lie side by side. Otherwise an entry is the change from the table before, up to 8 tables in a chain:
    // a shuffle gives 0 for a negative index, so the changes up to an index add up (by exclusive or) to its entry.
    template <int K>
    static void prepare(const uint16_t* row, uint8_t* scratch) {
        constexpr int nodes = exl3::kStates >> K;
        constexpr int chain = K >= 7 ? 128 : 1 << K;
        Reg low_before{}, high_before{};
        for (int first = 0; first < nodes; first += 32) {
            const int a = K == 4 ? first / 2 : first, b = K == 4 ? first / 2 + nodes / 2 : first + 16;
            Reg low = bytes(load(row + a), load(row + b)), high = high_bytes(load(row + a), load(row + b));
            if constexpr (K > 4) {
                if (first % chain == 0) low_before = high_before = _mm256_setzero_si256();
                const Reg low_here = low, high_here = high;
                low = _mm256_xor_si256(low, _mm256_permute2x128_si256(low_before, low, 0x21));
                high = _mm256_xor_si256(high, _mm256_permute2x128_si256(high_before, high, 0x21));
                low_before = low_here;
                high_before = high_here;
            }
            _mm256_store_si256(reinterpret_cast<__m256i*>(scratch + first), low);
            _mm256_store_si256(reinterpret_cast<__m256i*>(scratch + nodes + first), high);
        }
    }

    template <int K>
    struct Costs {
        static constexpr int nodes = exl3::kStates >> K;
        const uint8_t* low;

        Costs(const uint16_t*, const uint8_t* scratch, int p, int) : low(scratch + (K == 4 ? p * 32 : p << K)) {}

        void of(const uint8_t* k, Reg* costs) const {
            const Reg index = load(k);
            Reg low_bytes, high_bytes;
            if constexpr (K == 4) {
                low_bytes = _mm256_shuffle_epi8(load(low), index);
                high_bytes = _mm256_shuffle_epi8(load(low + nodes), index);
            } else if constexpr (K < 8) {
                look_up<(1 << K) / 16>(low, index, &low_bytes, &high_bytes);
            } else {
                Reg low_second, high_second;
                const Reg within = _mm256_and_si256(index, _mm256_set1_epi8(0x7f));
                look_up<8>(low, within, &low_bytes, &high_bytes);
                look_up<8>(low + 128, within, &low_second, &high_second);
                low_bytes = _mm256_blendv_epi8(low_bytes, low_second, index);
                high_bytes = _mm256_blendv_epi8(high_bytes, high_second, index);
            }
            costs[0] = _mm256_unpacklo_epi8(low_bytes, high_bytes);
            costs[1] = _mm256_unpackhi_epi8(low_bytes, high_bytes);
        }

        template <int TABLES>
        static void look_up(const uint8_t* table, Reg index, Reg* low_bytes, Reg* high_bytes) {
            *low_bytes = _mm256_shuffle_epi8(both(table), index);
            *high_bytes = _mm256_shuffle_epi8(both(table + nodes), index);
            EXL3_FULLY for (int t = 1; t < TABLES; ++t) {
                const Reg rest = _mm256_sub_epi8(index, _mm256_set1_epi8(static_cast<char>(16 * t)));
                *low_bytes = _mm256_xor_si256(*low_bytes, _mm256_shuffle_epi8(both(table + 16 * t), rest));
                *high_bytes = _mm256_xor_si256(*high_bytes, _mm256_shuffle_epi8(both(table + nodes + 16 * t), rest));
            }
        }
    };

private:
    static const __m128i* vector128(const void* from) { return static_cast<const __m128i*>(from); }
    template <class T>
    static T at(const void* from) {
        T value;
        std::memcpy(&value, from, sizeof value);
        return value;
    }
    static Reg both(const uint8_t* table) { return _mm256_broadcastsi128_si256(_mm_load_si128(vector128(table))); }
    static Reg bytes(Reg a, Reg b) {
        const Reg mask = _mm256_set1_epi16(0xff);
        const Reg packed = _mm256_packus_epi16(_mm256_and_si256(a, mask), _mm256_and_si256(b, mask));
        return _mm256_permute4x64_epi64(packed, 0xd8);
    }
    static Reg high_bytes(Reg a, Reg b) {
        const Reg packed = _mm256_packus_epi16(_mm256_srli_epi16(a, 8), _mm256_srli_epi16(b, 8));
        return _mm256_permute4x64_epi64(packed, 0xd8);
    }
};

}  // namespace

const exl3::Backend& exl3::fast_avx2_backend() {
    static const Backend backend = make_fast_backend<Avx2Words>("avx2", exl3::cpu_has_avx2);
    return backend;
}
