"""Recipes: the bits of every tensor as YAML, in the form that ExLlamaV3's converter reads.

    target_bpw: 3.0            # what was asked for; optional
    achieved_bpw: 2.9853       # what came out; optional
    head_bits: 8               # optional
    tensors:
      fc: 3
      layers.0.self_attn.q_proj: 3.5
      "layers.*.mlp.*": 2

Keys of `tensors` are names as in the files, or patterns with `*`, `?` and `[...]`; of several entries that match a
tensor the last one decides. 16 leaves a tensor unquantized. Every linear but the head must be covered and every entry
must match, as ExLlamaV3 demands; checked beyond it: k and v, and gate and up, share their bits, since its kernels run
such pairs as one (its own recipe maker ties the same pairs).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from exl3_dflash.errors import Exl3DflashError
from quantize.trellis import SUPPORTED_BITS

RECIPE_FILE = "recipe.yaml"
UNQUANTIZED_BITS = 16
KEYS = ("target_bpw", "achieved_bpw", "head_bits", "tensors")
TIED = (("k_proj", "v_proj"), ("gate_proj", "up_proj"))
WILDCARDS = frozenset("*?[")


@dataclass(frozen=True)
class Recipe:
    """Bits by tensor name or pattern, in order; None for what is not stated."""

    tensors: Mapping[str, float]
    target_bpw: float | None = None
    achieved_bpw: float | None = None
    head_bits: float | None = None

    def to_yaml(self) -> str:
        """The file's text."""
        stated = {key: getattr(self, key) for key in KEYS if getattr(self, key) is not None}
        stated["tensors"] = {name: _plain(bits) for name, bits in self.tensors.items()}
        return yaml.safe_dump({key: _plain(value) for key, value in stated.items()}, sort_keys=False)


@dataclass(frozen=True)
class RecipeTensor:
    """A linear that a recipe has to cover: its name in the files, and why it must stay unquantized, if it must."""

    name: str
    copy_reason: str = ""


def read_recipe(path: Path) -> Recipe:
    """Read and check what can be checked without a drafter.

    Raises:
        Exl3DflashError: not readable, no YAML, no `tensors`, unknown keys, or values that are no numbers or no rates.
    """
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise Exl3DflashError(f"the recipe {path} cannot be read: {error}", "a YAML file", "check --recipe") from error
    except (yaml.YAMLError, ValueError) as error:  # the latter for dates that there are not
        place = " ".join(str(error).split())
        raise Exl3DflashError(
            f"the recipe {path} is no YAML: {place}", "keys that begin with * in quotes", "correct the file"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("tensors"), dict) or not content["tensors"]:
        raise Exl3DflashError(f"the recipe {path} has no bits", "a mapping `tensors` of names to bits")
    unknown = sorted(str(key) for key in content if key not in KEYS)
    if unknown:
        raise Exl3DflashError(f"the recipe {path} has the unknown key {unknown[0]}", f"only {', '.join(KEYS)}")
    for key, value in content.items():
        if key != "tensors" and value is not None:
            _check_number(path, key, value, SUPPORTED_BITS if key == "head_bits" else None)
    tensors = {str(name): value for name, value in content["tensors"].items()}
    for name, value in tensors.items():
        _check_number(path, name, value, (*SUPPORTED_BITS, UNQUANTIZED_BITS))
    return Recipe(tensors, **{key: content.get(key) for key in KEYS if key != "tensors"})


def resolve_recipe(recipe: Recipe, tensors: Sequence[RecipeTensor], codebook: str) -> dict[str, float]:
    """Bits of every tensor by its name in the files; `UNQUANTIZED_BITS` for those that are copied.

    Raises:
        Exl3DflashError: a tensor without an entry, an entry that matches no tensor or asks for the impossible, tied
            tensors with different bits, half rates with another codebook than mul1.
    """
    names = {tensor.name for tensor in tensors}
    for entry in recipe.tensors:
        if not any(_matches(entry, name) for name in names):
            raise Exl3DflashError(
                f"the recipe's entry {entry} matches no tensor", f"names such as {min(names)}", "correct the recipe"
            )
    bits = {tensor.name: _bits_of(recipe, tensor) for tensor in tensors}
    _check_ties(bits)
    if codebook != "mul1":
        for name, value in bits.items():
            if value != int(value):
                raise Exl3DflashError(
                    f"the recipe gives {name} {value:g} bits, with --codebook {codebook}",
                    expected="the mul1 codebook at half rates",
                    fix="use --codebook mul1 or whole bits",
                )
    return bits


def _bits_of(recipe: Recipe, tensor: RecipeTensor) -> float:
    exact = recipe.tensors.get(tensor.name)
    if tensor.copy_reason:
        if exact is not None and exact != UNQUANTIZED_BITS:
            raise Exl3DflashError(
                f"the recipe gives {tensor.name} {exact:g} bits", f"16: {tensor.copy_reason}", "correct the recipe"
            )
        return UNQUANTIZED_BITS
    matching = [bits for entry, bits in recipe.tensors.items() if _matches(entry, tensor.name)]
    if not matching:
        raise Exl3DflashError(
            f"the recipe says nothing about {tensor.name}", "bits for every linear but the head", "add an entry"
        )
    return matching[-1]


def _check_ties(bits: Mapping[str, float]) -> None:
    for first, second in TIED:
        for name, value in bits.items():
            if name.endswith(f".{first}"):
                other = name.removesuffix(first) + second
                if other in bits and UNQUANTIZED_BITS not in (value, bits[other]) and bits[other] != value:
                    raise Exl3DflashError(
                        f"the recipe gives {name} {value:g} bits and {other} {bits[other]:g}",
                        expected="the same bits for both, since ExLlamaV3 runs them as one kernel",
                        fix="make them equal",
                    )


def _matches(entry: str, name: str) -> bool:
    return fnmatchcase(name, entry) if WILDCARDS & set(entry) else name == entry


def _check_number(path: Path, name: str, value: Any, rates: Sequence[float] | None) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
    if not number or (rates is not None and value not in rates):
        expected = "a number" if rates is None else f"one of {', '.join(f'{rate:g}' for rate in rates)}"
        raise Exl3DflashError(f"the recipe {path} gives {name} the value {value!r}", expected, "correct the recipe")


def _plain(value: Any) -> Any:
    """A number as a person would write it: 3 for 3.0."""
    return int(value) if isinstance(value, float) and value == int(value) else value
