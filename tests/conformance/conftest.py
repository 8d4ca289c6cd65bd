"""ExLlamaV3 on a CPU for the tests of this folder, and only while they run."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest

from .exllama_cpu import exllama_on_cpu, why_not
from .generation_stub import generating


@pytest.fixture(scope="module")
def exllama() -> Iterator[types.ModuleType]:
    """The `exllamav3` package with its extension replaced; skips, with the reason, where it cannot run."""
    reason = why_not()
    if reason:
        pytest.skip(f"ExLlamaV3 cannot run on this machine: {reason}")
    with exllama_on_cpu() as package:
        yield package


@pytest.fixture(scope="module")
def generator_library(exllama: types.ModuleType) -> Iterator[types.ModuleType]:
    """`exllamav3` whose generator can run as well."""
    with generating():
        yield exllama
