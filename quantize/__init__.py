"""EXL3 quantization of linear layers: codebooks, trellis coding, Hadamard rotation, LDLQ, and tensor files.

This package knows linear layers and Hessians and nothing of drafters; it imports nothing of `exl3_dflash`.
"""
