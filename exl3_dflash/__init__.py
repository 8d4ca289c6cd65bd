"""exl3-dflash: calibrated EXL3 quantization of DFlash drafters, and a runtime that pairs them with their target."""

__version__ = "0.1.0"
