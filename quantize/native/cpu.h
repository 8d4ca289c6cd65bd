// What the processor and the operating system offer, asked at run time.
#pragma once

namespace exl3 {

bool cpu_has_avx2();    // AVX2 and FMA
bool cpu_has_avx512();  // AVX-512F

}  // namespace exl3
