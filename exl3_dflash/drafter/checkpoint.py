"""A drafter on disk: BF16, FP16, FP32, or EXL3 (also a mixture, as converters leave some layers unquantized).

`DrafterCheckpoint.open` reads the config and the files' headers and accounts for every tensor (`drafter.accounting`).
Canonical names are those of `drafter.layout`, wherever and however a tensor is stored (`drafter.stored_tensors`).
Values are read on demand.

A scale on V (`attention_value_scale`) multiplies the attention output of every head alike, so it is folded into o_proj
here: an unquantized o_proj is scaled when it is loaded. EXL3 files hold it folded, ours and those that ExLlamaV3 makes.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

import torch

from exl3_dflash.drafter.accounting import TensorAccount
from exl3_dflash.drafter.config import DrafterConfig
from exl3_dflash.drafter.layout import (
    DRAFT_TO_TARGET,
    EMBEDDING,
    HEAD,
    MASK_EMBEDDING,
    TARGET_TO_DRAFT,
    LinearSpec,
    plain_shapes,
)
from exl3_dflash.drafter.stored_tensors import StoredTensors, output_name
from exl3_dflash.errors import Exl3DflashError
from quantize.checkpoint import TensorDirectory, layer_tensors, read_linear
from quantize.linear import QuantizedLinear, decode_linear

__all__ = ["DrafterCheckpoint", "LinearSpec"]


class DrafterCheckpoint:
    """A checked drafter directory. Made by `open`.

    Attributes:
        config: its config.
        directory: its tensor files, under the names they have there.
        linears: every linear layer, in the order in which an input passes them.
        target_hidden_size: width Ht of one tap.
    """

    def __init__(
        self,
        config: DrafterConfig,
        directory: TensorDirectory,
        stored: StoredTensors,
        linears: tuple[LinearSpec, ...],
        target_hidden_size: int,
    ) -> None:
        self.config = config
        self.directory = directory
        self.linears = linears
        self.target_hidden_size = target_hidden_size
        self._stored = stored
        self._specs = {spec.name: spec for spec in linears}

    @classmethod
    def open(cls, path: str | Path, block_size: int | None = None) -> DrafterCheckpoint:
        """Read config and headers under `path` and account for every tensor.

        Args:
            path: the drafter's directory.
            block_size: what the user says it is, for a config without one (`DrafterConfig.with_block_size`).

        Raises:
            Exl3DflashError: what `DrafterConfig.from_directory` and `TensorDirectory.open` refuse; tensors that are
                missing, unknown, unsupported, or of a wrong shape or type, all in one message.
        """
        config = DrafterConfig.from_directory(path)
        config = config if block_size is None else config.with_block_size(block_size)
        directory = TensorDirectory.open(path)
        account = TensorAccount(config, directory)
        account.check()
        return cls(config, directory, account.stored, account.linears, account.target_hidden_size)

    @property
    def is_exl3(self) -> bool:
        """Whether any linear is quantized."""
        return any(self.is_quantized(spec.name) for spec in self.linears)

    @property
    def has_head(self) -> bool:
        """Whether the drafter scores with a head of its own and not with the target's."""
        return HEAD in self._specs

    @property
    def has_embedding(self) -> bool:
        """Whether the drafter embeds with a table of its own and not with the target's."""
        return EMBEDDING in self._stored

    @property
    def has_mask_embedding(self) -> bool:
        """Whether mask rows are a learned vector and not the embedding of mask_token_id."""
        return MASK_EMBEDDING in self._stored

    @cached_property
    def sha256(self) -> str:
        """One digest of the weight files."""
        return self.directory.sha256()

    def is_quantized(self, linear: str) -> bool:
        """Whether the linear is stored as EXL3."""
        return f"{linear}.trellis" in self._stored

    def tensor_names(self) -> tuple[str, ...]:
        """Canonical names of all tensors that `load` gives; quantized linears appear as their `.weight`."""
        weights = [f"{spec.name}.weight" for spec in self.linears]
        biases = [f"{spec.name}.bias" for spec in self.linears if spec.bias]
        return (*weights, *biases, *plain_shapes(self.config, self._stored, self.target_hidden_size))

    def output_name(self, name: str) -> str:
        """The name under which a canonical tensor or linear is written; ExLlamaV3 reads it there."""
        return output_name(self.config, name)

    def nbytes(self, name: str) -> int:
        """Stored bytes of a tensor of `tensor_names`; of a quantized weight, all its parts together."""
        linear = self._quantized_linear(name)
        if linear is None:
            return self._stored.nbytes(name)
        parts = layer_tensors(self.directory, self._stored_linear(linear))
        return sum(self.directory.nbytes(part) for part in parts if not part.endswith(".bias"))

    def load(self, name: str) -> torch.Tensor:
        """One tensor in the file's orientation, [out, in] for a weight; float32 where it is decoded from EXL3.

        Raises:
            Exl3DflashError: it holds NaN or infinity.
        """
        linear = self._quantized_linear(name)
        if linear is not None:
            tensor = decode_linear(self.quantized(linear)).T
        else:
            tensor = self._stored.get(name)
            if name == MASK_EMBEDDING:
                tensor = tensor.reshape(-1)
            elif name.endswith(".self_attn.o_proj.weight") and self.config.attention_value_scale != 1.0:
                tensor = (tensor.float() * self.config.attention_value_scale).to(tensor.dtype)
            elif name.endswith(".bias"):
                tensor = tensor[: self._specs[name.removesuffix(".bias")].out_features]  # EXL3 stores it padded
        if not torch.isfinite(tensor).all():
            raise Exl3DflashError(
                f"tensor {name} of {self.directory.path} holds NaN or infinity",
                expected="finite weights",
                fix="download the drafter again, or take another revision",
            )
        return tensor

    def draft_token_ids(self) -> torch.Tensor | None:
        """Target ids of the drafter's own vocabulary, int64 (D,); None where the two vocabularies are one.

        Raises:
            Exl3DflashError: an id is negative or not below vocab_size, or `t2d` marks other ids than `d2t` leads to.
        """
        if DRAFT_TO_TARGET not in self._stored:
            return None
        offsets = self._stored.get(DRAFT_TO_TARGET).to(torch.int64)
        ids = offsets + torch.arange(len(offsets))
        if int(ids.min()) < 0 or int(ids.max()) >= (self.config.vocab_size or 0):
            raise Exl3DflashError(
                f"{DRAFT_TO_TARGET} of {self.directory.path} leads to token {int(ids.min())} to {int(ids.max())}",
                expected=f"ids below vocab_size {self.config.vocab_size}, stored as target id - draft id",
            )
        if TARGET_TO_DRAFT in self._stored:
            marked = self._stored.get(TARGET_TO_DRAFT).bool().nonzero().flatten()
            if not torch.equal(marked, ids.unique()):
                raise Exl3DflashError(
                    f"{TARGET_TO_DRAFT} of {self.directory.path} marks {len(marked)} tokens, but {DRAFT_TO_TARGET} "
                    f"leads to {len(ids.unique())}",
                    expected="the same tokens",
                    fix="download the drafter again",
                )
        return ids

    def quantized(self, linear: str) -> QuantizedLinear:
        """The stored EXL3 tensors of a quantized linear."""
        spec = self._specs[linear]
        return read_linear(self.directory, self._stored_linear(linear), spec.in_features, spec.out_features)

    def _quantized_linear(self, name: str) -> str | None:
        """The EXL3 linear whose weight `name` is, if it is one."""
        linear = name.removesuffix(".weight")
        return linear if linear != name and self.is_quantized(linear) else None

    def _stored_linear(self, linear: str) -> str:
        """The name of a quantized linear in the files."""
        return self._stored.stored_name(f"{linear}.trellis").removesuffix(".trellis")
