"""The quantization job: plan, calibrate, quantize, write, audit, measure, report (`exl3-dflash quantize`)."""
