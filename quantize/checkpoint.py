"""EXL3 checkpoints: safetensors directories read strictly, and (see the modules named here) written as ExLlamaV3 does.

- `quantize.tensor_directory`: the tensors of a directory, one file or shards with an index.
"""

from quantize.tensor_directory import TensorDirectory

__all__ = ["TensorDirectory"]
