#include "cpu.h"

#if defined(_MSC_VER) && !defined(__clang__)
#include <immintrin.h>
#include <intrin.h>

namespace {

// Bits of CPUID leaf 7, and of XCR0, which says which registers the operating system saves.
bool has(int leaf7_ebx_bits, unsigned long long saved_registers) {
    int info[4];
    __cpuid(info, 0);
    if (info[0] < 7) return false;
    __cpuid(info, 1);
    const int osxsave_avx_fma = 1 << 27 | 1 << 28 | 1 << 12;
    if ((info[2] & osxsave_avx_fma) != osxsave_avx_fma) return false;
    if ((_xgetbv(0) & saved_registers) != saved_registers) return false;
    __cpuidex(info, 7, 0);
    return (info[1] & leaf7_ebx_bits) == leaf7_ebx_bits;
}

}  // namespace

bool exl3::cpu_has_avx2() { return has(1 << 5, 0x6); }
bool exl3::cpu_has_avx512() { return has(1 << 5 | 1 << 16, 0xe6); }

#else

bool exl3::cpu_has_avx2() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
bool exl3::cpu_has_avx512() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f");
}

#endif
