"""A DFlash v1 drafter on disk: BF16, FP16, FP32, or EXL3 (also a mixture, as converters leave some layers unquantized).

`DrafterCheckpoint.open` reads the config and the files' headers and accounts for every tensor: each one in the files
must have a place in the model, each one of the model must be in the files, with the right shape and type. All findings
go into one error. This is the guard against the costliest fault there is: a drafter that runs with a tensor missing is
silently slow. A leading `model.` is stripped; canonical names are those of `drafter.layout`. Values are read on demand.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import torch

from exl3_dflash.drafter.config import DrafterConfig
from exl3_dflash.drafter.dialects import tensor_feature
from exl3_dflash.drafter.layout import (
    EMBEDDING,
    HEAD,
    MASK_EMBEDDING,
    OPTIONAL_TENSORS,
    LinearSpec,
    linear_specs,
    plain_shapes,
)
from exl3_dflash.errors import Exl3DflashError
from quantize.checkpoint import TensorDirectory, layer_tensors, linear_names, read_linear
from quantize.hadamard import padded_features
from quantize.linear import QuantizedLinear, decode_linear

__all__ = ["DrafterCheckpoint", "LinearSpec"]

PREFIX = "model."
FLOAT_TYPES = (torch.bfloat16, torch.float16, torch.float32)


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
        stored_names: Mapping[str, str],
        linears: tuple[LinearSpec, ...],
        target_hidden_size: int,
    ) -> None:
        self.config = config
        self.directory = directory
        self.linears = linears
        self.target_hidden_size = target_hidden_size
        self._stored = dict(stored_names)
        self._specs = {spec.name: spec for spec in linears}

    @classmethod
    def open(cls, path: str | Path) -> DrafterCheckpoint:
        """Read config and headers under `path` and account for every tensor.

        Raises:
            Exl3DflashError: what `DrafterConfig.from_directory` and `TensorDirectory.open` refuse; tensors that are
                missing, unknown, unsupported, or of a wrong shape or type, all in one message.
        """
        config = DrafterConfig.from_directory(path)
        directory = TensorDirectory.open(path)
        audit = _Audit(config, directory)
        audit.run()
        return cls(config, directory, audit.stored, audit.linears, audit.target_hidden_size)

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
        return (*weights, *biases, *plain_shapes(self.config, self._stored))

    def nbytes(self, name: str) -> int:
        """Stored bytes of a tensor of `tensor_names`; of a quantized weight, all its parts together."""
        linear = self._quantized_linear(name)
        if linear is None:
            return self.directory.nbytes(self._stored[name])
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
            tensor = self.directory.get(self._stored[name])
            if name == MASK_EMBEDDING:
                tensor = tensor.reshape(-1)
            elif name.endswith(".bias"):
                tensor = tensor[: self._specs[name.removesuffix(".bias")].out_features]  # EXL3 stores it padded
        if not torch.isfinite(tensor).all():
            raise Exl3DflashError(
                f"tensor {name} of {self.directory.path} holds NaN or infinity",
                expected="finite weights",
                fix="download the drafter again, or take another revision",
            )
        return tensor

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
        return self._stored[f"{linear}.trellis"].removesuffix(".trellis")


class _Audit:
    """Accounts for every tensor of a directory; `problems` collects what is wrong."""

    def __init__(self, config: DrafterConfig, directory: TensorDirectory) -> None:
        self.config = config
        self.directory = directory
        self.problems: list[str] = []
        self.stored = self._canonical_names()
        self.quantized = {name.removeprefix(PREFIX): facts for name, facts in linear_names(directory).items()}
        self.target_hidden_size = self._tap_width()
        self.linears = linear_specs(config, self.target_hidden_size, self._holds(HEAD))

    def run(self) -> None:
        """Raise one error with every problem, or return."""
        consumed = self._check_plain()
        for spec in self.linears:
            consumed |= self._check_linear(spec)
        self._check_rest(set(self.stored) - consumed)
        if not 0 <= self.config.mask_token_id < self.config.vocab_size and MASK_EMBEDDING not in self.stored:
            self.problems.append(
                f"mask_token_id {self.config.mask_token_id} is not below vocab_size {self.config.vocab_size} "
                f"and there is no {MASK_EMBEDDING}"
            )
        if self.problems:
            raise Exl3DflashError(
                f"{self.directory.path} does not hold the drafter that its config.json describes: "
                + "; ".join(self.problems),
                expected="every tensor of the model and no other",
                fix="download the drafter again, and check that config.json belongs to these weights",
            )

    def _canonical_names(self) -> dict[str, str]:
        names: dict[str, str] = {}
        for stored in self.directory.names():
            canonical = stored.removeprefix(PREFIX)
            if canonical in names:
                self.problems.append(f"{canonical} is there twice, also as {PREFIX}{canonical}")
            names[canonical] = stored
        return names

    def _holds(self, linear: str) -> bool:
        return f"{linear}.weight" in self.stored or linear in self.quantized

    def _tap_width(self) -> int:
        """Ht: as the config says, or as a plain fc shows, or the drafter's own width (EXL3 may have padded fc)."""
        if self.config.target_hidden_size is not None:
            return self.config.target_hidden_size
        taps = len(self.config.target_layer_ids)
        if "fc.weight" in self.stored:
            shape = self.directory.shape(self.stored["fc.weight"])
            if len(shape) == 2 and shape[1] % taps == 0 and shape[1]:
                return shape[1] // taps
        return self.config.hidden_size

    def _check_plain(self) -> set[str]:
        config = self.config
        optional = {name for name in OPTIONAL_TENSORS if name in self.stored}
        # exllamav3's converter leaves an own embedding and head out, since it always uses the target's.
        unquantized = not self.quantized
        if unquantized and config.raw.get("has_embed_tokens") is True:
            optional.add(EMBEDDING)
        if unquantized and config.raw.get("has_lm_head") is True and not self._holds(HEAD):
            self.problems.append(f"missing {HEAD}.weight (has_lm_head is true)")
        shapes = plain_shapes(config, optional)
        for name, shape in shapes.items():
            self._check_tensor(name, shape)
        return set(shapes)

    def _check_linear(self, spec: LinearSpec) -> set[str]:
        consumed = set()
        if spec.name in self.quantized:
            layer = self.quantized[spec.name]
            seen = layer.in_features, layer.out_features
            wanted = padded_features(spec.in_features), padded_features(spec.out_features)
            if seen != wanted:
                self.problems.append(
                    f"{spec.name}.trellis holds {seen[0]} x {seen[1]} weights, expected {wanted[0]} x {wanted[1]}"
                )
            stored = self.stored[f"{spec.name}.trellis"].removesuffix(".trellis")
            consumed |= {name.removeprefix(PREFIX) for name in layer_tensors(self.directory, stored)}
        else:
            self._check_tensor(f"{spec.name}.weight", (spec.out_features, spec.in_features))
            consumed.add(f"{spec.name}.weight")
        bias = f"{spec.name}.bias"
        if not spec.bias:
            return consumed - {bias}
        if bias not in consumed:  # that of a quantized layer is checked with its other tensors
            self._check_tensor(bias, (spec.out_features,))
        return consumed | {bias}

    def _check_tensor(self, name: str, shape: tuple[int, ...]) -> None:
        if name not in self.stored:
            self.problems.append(f"missing {name}")
            return
        seen, dtype = self.directory.shape(self.stored[name]), self.directory.dtype(self.stored[name])
        if name == MASK_EMBEDDING:
            seen = tuple(size for size in seen if size != 1) or seen
        if seen != shape:
            self.problems.append(f"{name} has shape {list(seen)}, expected {list(shape)}")
        if dtype not in FLOAT_TYPES:
            self.problems.append(f"{name} is {dtype}, expected BF16, FP16 or FP32")

    def _check_rest(self, rest: set[str]) -> None:
        for name in sorted(rest):
            feature = tensor_feature(name)
            if feature is not None:
                self.problems.append(f"{name} is not supported in this version ({feature})")
            elif name.endswith("_proj.bias"):
                self.problems.append(f"unexpected {name} (attention_bias is {self.config.attention_bias})")
            else:
                self.problems.append(f"unexpected {name}")
