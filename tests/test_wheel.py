"""The built wheel, installed away from the checkout, has everything it needs.

Dependencies are borrowed from the running environment through a path file, so nothing is downloaded; the wheel's own
packages come from the wheel and from nowhere else.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA_FILES = (
    "exl3_dflash/py.typed",
    "exl3_dflash/demo/target/model.safetensors",
    "exl3_dflash/demo/target/tokenizer.json",
    "exl3_dflash/demo/target/chat_template.jinja",
    "exl3_dflash/demo/drafter/model.safetensors",
    "exl3_dflash/demo/heldout_prompts.jsonl",
    "calibration_data/prompts/chat.jsonl",
    "model_cards/templates/drafter.md.jinja",
    "model_cards/templates/family.md.jinja",
    "model_cards/licenses.txt",
    "quantize/py.typed",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(out),
        ".",
    ]
    subprocess.run([*command, f"-Cbuild-dir={out / 'build'}"], cwd=ROOT, check=True, timeout=300)
    return next(out.glob("exl3_dflash-*.whl"))


@pytest.fixture(scope="module")
def installed_python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment that holds the wheel's packages and borrows everything else."""
    environment = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True, timeout=60)
    python = environment / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = environment / "lib" / version / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(packages)
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_wheel_carries_data_and_module_but_no_sources(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert set(DATA_FILES) <= names, sorted(set(DATA_FILES) - names)
    assert any(name.startswith("quantize/_native") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "tools/", "benchmarks/")) or name.endswith(".cpp")]


def test_installed_wheel_runs_the_demo_elsewhere(installed_python: Path, tmp_path: Path) -> None:
    command = [str(installed_python), "-m", "exl3_dflash", "demo", "--prompts", "2", "--json", "-q"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert result["quantize"]["accept_length"]["quantized"] > 3
    assert all(drafted["identical"] == drafted["requests"] for drafted in result["runs"][1:])


def test_calibration_text_is_found_by_the_installed_wheel(installed_python: Path, tmp_path: Path) -> None:
    code = "import calibration_data as c, json; print(json.dumps([c.__file__, len(c.load_prompts())]))"
    run = subprocess.run([str(installed_python), "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    where, count = json.loads(run.stdout)
    assert Path(where).is_relative_to(installed_python.parents[1])
    assert count >= 300
