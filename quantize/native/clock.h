// The clock of the core at work, which operating systems tell only in part: for benchmarks that name a limit.
#pragma once

namespace exl3 {

// Cycles per second of CPU time, from a chain of dependent additions, each of which takes one cycle. 0 if unknown.
double measure_clock();

}  // namespace exl3
