"""Tiny targets of many families by name, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from exl3_dflash.target.transformers_target import TransformersTarget
from tests import tiny_targets

MakeTarget = Callable[[str], TransformersTarget]


def make_directory(directory: Path, family: str) -> Path:
    """Write the tiny target of a family in `tiny_targets.FAMILIES`, "qwen3_next" or "constant"."""
    if family == "qwen3_next":
        return tiny_targets.make_tiny_qwen3_next(directory)
    if family == "constant":
        return tiny_targets.make_constant_target(directory)
    return tiny_targets.make_tiny_family(directory, family)
