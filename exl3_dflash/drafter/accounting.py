"""Every tensor of a drafter accounted for, from the headers of its files.

Each tensor in the files must have a place in the model, each one of the model must be in the files, with the right
shape and type. All findings go into one error. This is the guard against the costliest fault there is: a drafter that
runs with a tensor missing is silently slow.
"""

from __future__ import annotations

import torch

from exl3_dflash.drafter.config import DrafterConfig
from exl3_dflash.drafter.dialects import tensor_feature
from exl3_dflash.drafter.layout import (
    DRAFT_TO_TARGET,
    EMBEDDING,
    HEAD,
    MASK_EMBEDDING,
    OPTIONAL_TENSORS,
    SINKS,
    TARGET_TO_DRAFT,
    LinearSpec,
    linear_specs,
    plain_shapes,
)
from exl3_dflash.drafter.stored_tensors import StoredTensors
from exl3_dflash.errors import Exl3DflashError
from quantize.checkpoint import TensorDirectory, layer_tensors, linear_names
from quantize.hadamard import padded_features

FLOAT_TYPES = (torch.bfloat16, torch.float16, torch.float32)
# Types of the tensors that are no weights, and how they are called in messages.
STORED_TYPES = {
    DRAFT_TO_TARGET: ((torch.int64, torch.int32), "int64 or int32"),
    TARGET_TO_DRAFT: ((torch.bool, torch.uint8, torch.int64), "bool"),
}


class TensorAccount:
    """Accounts for every tensor of a directory.

    Attributes:
        stored: its tensors by canonical name.
        linears: the model's, for the width of taps that the files show.
        target_hidden_size: width Ht of one tap.
        problems: what is wrong, so far.
    """

    def __init__(self, config: DrafterConfig, directory: TensorDirectory) -> None:
        self.config = config
        self.directory = directory
        self.stored = StoredTensors(config, directory)
        self.problems = list(self.stored.problems)
        self.quantized = {self.stored.canonical_name(name): facts for name, facts in linear_names(directory).items()}
        self.target_hidden_size = self._tap_width()
        self.linears = linear_specs(config, self.target_hidden_size, self._holds(HEAD))

    def check(self) -> None:
        """Raise one error with every problem, or return."""
        consumed = self._check_plain()
        for spec in self.linears:
            consumed |= self._check_linear(spec)
        self._check_rest(set(self.stored) - consumed)
        rows, mask = self.config.vocab_size, self.config.mask_token_id
        if rows is not None and mask >= rows and MASK_EMBEDDING not in self.stored:
            self.problems.append(
                f"mask_token_id {mask} is not below vocab_size {rows} and there is no {MASK_EMBEDDING}"
            )
        if rows is None and (self._holds(HEAD) or EMBEDDING in self.stored):
            self.problems.append("its own embedding or head needs a vocab_size in config.json")
        if self.problems:
            raise Exl3DflashError(
                f"{self.directory.path} does not hold the drafter that its config.json describes: "
                + "; ".join(self.problems),
                expected="every tensor of the model and no other",
                fix="download the drafter again, and check that config.json belongs to these weights",
            )

    def _holds(self, linear: str) -> bool:
        return f"{linear}.weight" in self.stored or linear in self.quantized

    def _tap_width(self) -> int:
        """Ht: as the config says, or as a plain fc shows, or the drafter's own width (EXL3 may have padded fc)."""
        if self.config.target_hidden_size is not None:
            return self.config.target_hidden_size
        taps = len(self.config.target_layer_ids)
        if "fc.weight" in self.stored:
            shape = self.stored.shape("fc.weight")
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
        self._check_vocabulary_map()
        sinks = {name for name in self.stored if name.endswith(f".{SINKS}")}
        shapes = plain_shapes(config, optional | sinks, self.target_hidden_size)
        for name, shape in shapes.items():
            self._check_tensor(name, shape)
        return set(shapes)

    def _check_vocabulary_map(self) -> None:
        """A head of fewer rows than the vocabulary needs its map; a map needs a head of the drafter's own."""
        rows, vocabulary = self.config.draft_vocab_size, self.config.vocab_size
        mapped = DRAFT_TO_TARGET in self.stored
        if rows != vocabulary and not mapped:
            self.problems.append(f"missing {DRAFT_TO_TARGET} (draft_vocab_size is {rows} of {vocabulary})")
        if (rows != vocabulary or mapped) and not self._holds(HEAD):
            self.problems.append(f"missing {HEAD}.weight (the drafter has a vocabulary of its own)")
        if TARGET_TO_DRAFT in self.stored and not mapped:
            self.problems.append(f"{TARGET_TO_DRAFT} is there without {DRAFT_TO_TARGET}")

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
            stored = self.stored.stored_name(f"{spec.name}.trellis").removesuffix(".trellis")
            consumed |= {self.stored.canonical_name(name) for name in layer_tensors(self.directory, stored)}
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
        seen, dtype = self.stored.shape(name), self.stored.dtype(name)
        if name == MASK_EMBEDDING:
            seen = tuple(size for size in seen if size != 1) or seen
        if seen != shape:
            self.problems.append(f"{name} has shape {list(seen)}, expected {list(shape)}")
        types, expected = STORED_TYPES.get(name, (FLOAT_TYPES, "BF16, FP16 or FP32"))
        if dtype not in types:
            self.problems.append(f"{name} is {dtype}, expected {expected}")

    def _check_rest(self, rest: set[str]) -> None:
        for name in sorted(rest):
            feature = tensor_feature(name)
            if feature is not None:
                self.problems.append(f"{name} is not supported in this version ({feature})")
            elif name.endswith("_proj.bias"):
                self.problems.append(f"unexpected {name} (attention_bias is {self.config.attention_bias})")
            else:
                self.problems.append(f"unexpected {name}")
