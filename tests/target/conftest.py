"""Tiny targets, each made and loaded once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from exl3_dflash.target.load import load_target
from exl3_dflash.target.transformers_target import TransformersTarget
from tests.target.families import MakeTarget, make_directory


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices of 32 columns: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> MakeTarget:
    """A function from a family's name to its loaded tiny target."""
    loaded: dict[str, TransformersTarget] = {}

    def make(family: str) -> TransformersTarget:
        if family not in loaded:
            path = make_directory(tmp_path_factory.mktemp(family) / family, family)
            loaded[family] = load_target(path, device="cpu")
        return loaded[family]

    return make
