"""A stub Hub that the real client talks to, and small quantized drafters to publish."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub.constants
import pytest

from exl3_dflash.cli.app import main
from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.settings import JobSettings
from tests.hub.stub_hub import StubHub
from tests.tiny_models import make_tiny_drafter

TOKEN = "hf_SecretSecretSecretSecretSecret00"
UPSTREAM = "---\nlicense: apache-2.0\nlanguage:\n- en\n---\n\n# Tiny drafter\n\nSee [the paper](paper.pdf).\n"

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def quantized_originals(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One tiny drafter at 4 and at 2 bits, with the source's card beside the weights; do not change them."""
    folder = tmp_path_factory.mktemp("quantized")
    source = make_tiny_drafter(folder / "tiny-drafter", num_hidden_layers=1)
    (source / "README.md").write_text(UPSTREAM)
    (source / "LICENSE").write_text("Apache License\n")
    made = []
    for bits in (4, 2):
        out = folder / f"tiny-exl3-{bits}"
        quantize_drafter(JobSettings(str(source), None, out, bits=bits, calibration="none", threads=1))
        made.append(out)
    return made[0], made[1]


@pytest.fixture
def drafters(quantized_originals: tuple[Path, Path], tmp_path: Path, run: Run) -> tuple[Path, Path]:
    """Copies with their cards, ready to be published."""
    copies = []
    for original in quantized_originals:
        shutil.copytree(original, tmp_path / original.name)
        copies.append(tmp_path / original.name)
        assert run("card", copies[-1], "--repo", "me/tiny-exl3", "-q")[0] == 0
    return copies[0], copies[1]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Run:
    """The program: exit code, stdout, stderr; nothing it writes or logs may hold a token or a signature."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        for secret in (TOKEN, TOKEN[3:], "secret-signature"):
            assert secret not in captured.out + captured.err + caplog.text
        return int(stop.value.code or 0), captured.out, captured.err

    return call


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StubHub]:
    """A running stub, as the Hub that huggingface_hub talks to; waiting between its retries takes no time."""
    stub = StubHub(TOKEN)
    stop = stub.start()
    constants = huggingface_hub.constants
    monkeypatch.setattr(constants, "ENDPOINT", stub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", stub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield stub
    stop()
