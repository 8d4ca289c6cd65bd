#include "clock.h"

#include <cstdint>
#include <ctime>

double exl3::measure_clock() {
#if defined(__GNUC__)
    constexpr int additions = 8000000, rounds = 8;
    double best = 0.0;
    for (int round = 0; round < rounds; ++round) {  // the fastest round is the least disturbed
        uint64_t sum = static_cast<uint64_t>(round), step = 1;
        const std::clock_t start = std::clock();
        for (int i = 0; i < additions / 8; ++i) {
            for (int j = 0; j < 8; ++j) {
                sum += step;
                __asm__ volatile("" : "+r"(sum), "+r"(step));  // what is added is not known, so no two become one
            }
        }
        const double seconds = static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
        if (seconds > 0.0 && additions / seconds > best) best = additions / seconds;
    }
    return best;
#else
    return 0.0;
#endif
}
