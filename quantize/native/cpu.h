// What the processor offers and the operating system keeps, asked at run time. x86-64 only.
#pragma once

namespace exl3 {

bool cpu_has_avx2();      // AVX2 and FMA
bool cpu_has_avx512();    // AVX-512F, AVX2 and FMA
bool cpu_has_avx512bw();  // AVX-512BW as well

}  // namespace exl3
