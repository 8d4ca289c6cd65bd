"""EXL3 checkpoints: read from safetensors directories strictly, written as ExLlamaV3's converter writes them.

One name for what four modules hold:

- `quantize.tensor_directory`: the tensors of a directory, one file or shards with an index;
- `quantize.exl3_tensors`: the quantized linear layers among them;
- `quantize.quantization_config`: what the configuration files say;
- `quantize.checkpoint_writer`: a directory that appears complete or not at all.
"""

from quantize.checkpoint_writer import (
    CheckpointWriter,
    check_destination,
    make_parents,
    remove_empty,
    require_space,
    writing,
)
from quantize.exl3_tensors import StoredLinear, layer_tensors, linear_names, read_linear
from quantize.quantization_config import FORMAT_VERSION, QuantizationConfig, mean_bits, tensor_storage
from quantize.tensor_directory import TensorDirectory

__all__ = [
    "FORMAT_VERSION",
    "CheckpointWriter",
    "QuantizationConfig",
    "StoredLinear",
    "TensorDirectory",
    "check_destination",
    "layer_tensors",
    "linear_names",
    "make_parents",
    "mean_bits",
    "read_linear",
    "remove_empty",
    "require_space",
    "tensor_storage",
    "writing",
]
