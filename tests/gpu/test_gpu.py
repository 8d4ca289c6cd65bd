"""The checks of `run_all`, one test each, where there is a GPU that can run them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exl3_dflash.errors import Exl3DflashError
from quantize.cuda_requirements import check_cuda_device

from . import run_all

DEVICE = torch.device("cuda")
NAMES = [name for name, _, _ in run_all.checks(DEVICE, Path())]


def why_not() -> str:
    try:
        check_cuda_device("cuda", kernels=True)
    except Exl3DflashError as error:
        return str(error)
    return ""


pytestmark = [pytest.mark.gpu, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shared, because later checks use what earlier ones wrote."""
    return tmp_path_factory.mktemp("gpu")


@pytest.mark.parametrize("name", NAMES)
def test_check(name: str, out: Path) -> None:
    check = {title: function for title, _, function in run_all.checks(DEVICE, out)}[name]
    passed, figures = check()
    assert passed, figures
