"""Makes the helpers importable (`from tests.tiny_models import ...`) without shadowing the installed packages."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_ROOT = str(Path(__file__).resolve().parent.parent)
if _ROOT not in sys.path:
    sys.path.append(_ROOT)


@pytest.fixture(autouse=True)
def _one_torch_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, which only wait for each other where the other cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
