"""`run_all.sh` on a machine without a GPU: one line that says what is missing, and nothing else happens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantize.cuda_requirements import gpu_problem, kernel_problem

SCRIPT = Path(__file__).with_name("run_all.sh")


@pytest.mark.skipif(os.name == "nt", reason="a bash script")
def test_without_a_gpu(tmp_path: Path) -> None:
    problem = gpu_problem() or kernel_problem()
    if problem is None:
        pytest.skip("there is a GPU")
    out = tmp_path / "results"
    environment = {**os.environ, "PYTHON": sys.executable}
    run = subprocess.run(
        ["bash", str(SCRIPT), "--out", str(out)], capture_output=True, text=True, env=environment, timeout=120
    )
    assert (run.returncode, run.stdout) == (1, "")
    assert run.stderr == f"error: {problem}\n"
    assert not out.exists()
