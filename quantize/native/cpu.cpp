// Asked with the CPUID instruction itself: the compilers' own helpers exist everywhere but do not answer everywhere.
#include "cpu.h"

#include <cstdint>

#if defined(_MSC_VER)
#include <intrin.h>
#else
#include <cpuid.h>
#endif

namespace {

struct Registers {
    uint32_t a, b, c, d;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf) {
#if defined(_MSC_VER)
    int info[4];
    __cpuidex(info, static_cast<int>(leaf), static_cast<int>(subleaf));
    return {static_cast<uint32_t>(info[0]), static_cast<uint32_t>(info[1]), static_cast<uint32_t>(info[2]),
            static_cast<uint32_t>(info[3])};
#else
    Registers r{};
    __cpuid_count(leaf, subleaf, r.a, r.b, r.c, r.d);
    return r;
#endif
}

// XCR0: the registers that the operating system saves for a thread. Legal only where CPUID reports OSXSAVE.
uint64_t saved_registers() {
#if defined(_MSC_VER)
    return _xgetbv(0);
#else
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
#endif
}

bool has_all(uint64_t bits, uint64_t wanted) { return (bits & wanted) == wanted; }

bool cpu_has(uint32_t leaf7_features, uint64_t registers) {
    constexpr uint32_t fma_osxsave_avx = 1u << 12 | 1u << 27 | 1u << 28;
    return cpuid(0, 0).a >= 7 && has_all(cpuid(1, 0).c, fma_osxsave_avx) && has_all(saved_registers(), registers) &&
           has_all(cpuid(7, 0).b, leaf7_features);
}

constexpr uint32_t kAvx2 = 1u << 5;
constexpr uint32_t kAvx512F = 1u << 16;
constexpr uint32_t kAvx512Bw = 1u << 30;
constexpr uint64_t kYmmState = 0x06;  // SSE and AVX
constexpr uint64_t kZmmState = 0xe6;  // and the AVX-512 masks and upper halves

}  // namespace

bool exl3::cpu_has_avx2() { return cpu_has(kAvx2, kYmmState); }
bool exl3::cpu_has_avx512() { return cpu_has(kAvx2 | kAvx512F, kZmmState); }
bool exl3::cpu_has_avx512bw() { return cpu_has(kAvx2 | kAvx512F | kAvx512Bw, kZmmState); }
