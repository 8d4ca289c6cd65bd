"""Which engine is chosen, and what is refused before anything of ExLlamaV3 is imported."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import torch

from exl3_dflash.cli.app import app
from exl3_dflash.cli.engine_options import EngineName, engine_choice
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.runtime import exllama_library, load
from exl3_dflash.runtime.exllama_library import require_exllamav3
from exl3_dflash.runtime.exllama_model import ExllamaSettings
from exl3_dflash.runtime.load import EngineChoice, load_pair
from quantize import cuda_requirements
from tests.tiny_targets import make_tiny_llama

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_exllama_on_cuda_and_the_reference_elsewhere() -> None:
    assert EngineChoice().resolve(CUDA) == "exllamav3"
    assert EngineChoice().resolve(CPU) == "reference"
    assert EngineChoice("reference").resolve(CUDA) == "reference"
    assert EngineChoice("exllamav3").resolve(CPU) == "exllamav3"  # refused with the reason when it is loaded
    with pytest.raises(Exl3DflashError, match="engine 'vllm' is unknown; expected one of auto, exllamav3, reference"):
        EngineChoice("vllm")


@pytest.mark.parametrize("choice", [EngineChoice(exllama=ExllamaSettings()), EngineChoice(dynamic_draft=True)])
def test_options_of_one_engine_are_refused_for_the_other(choice: EngineChoice) -> None:
    assert choice.resolve(CUDA) == "exllamav3"
    with pytest.raises(Exl3DflashError, match=r"reference engine, which runs on cpu, has no cache options"):
        choice.resolve(CPU)


def test_a_split_that_contradicts_the_machine_or_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    choice = EngineChoice(exllama=ExllamaSettings(gpu_split=(8.0, 8.0)))
    assert choice.resolve(CUDA) == "exllamav3"
    with pytest.raises(Exl3DflashError, match="a GPU split, and the one device cuda:1"):
        choice.resolve(torch.device("cuda:1"))
    with pytest.raises(Exl3DflashError, match="a GPU split over 3 GPUs; expected at most 2"):
        EngineChoice(exllama=ExllamaSettings(gpu_split=(8.0, 8.0, 8.0))).resolve(CUDA)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engine", "exllamav3"], "there is no GPU; fix: install a driver, or use --engine reference$"),
        (["--gpu-split", "20;24"], "--gpu-split '20;24'; expected GB for each GPU"),
    ],
)
def test_the_command_line_is_refused_before_anything_is_imported(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = Exl3DflashError("there is no GPU", fix="install a driver, or use --device cpu")
    monkeypatch.setattr(cuda_requirements, "gpu_problem", lambda _: missing)
    monkeypatch.setattr(load, "load_pair", lambda *_, **__: pytest.fail("the pair was loaded"))
    with pytest.raises(Exl3DflashError, match=message):
        app(["chat", "--target", "demo", "--no-draft", *options], standalone_mode=False)


def test_command_line_options() -> None:
    nothing = engine_choice(EngineName.auto, None, None, None, dynamic_draft=False)
    assert nothing == EngineChoice()
    some = engine_choice(EngineName.exllamav3, 4096, 6, "10,20.5", dynamic_draft=True)
    assert some == EngineChoice("exllamav3", ExllamaSettings(4096, 6, (10.0, 20.5)), dynamic_draft=True)
    with pytest.raises(Exl3DflashError, match=r"--gpu-split '8;8'; expected GB for each GPU"):
        engine_choice(EngineName.auto, None, None, "8;8", dynamic_draft=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cache_bits": 9}, "cache bits: 9; expected 2 to 8"),
        ({"cache_tokens": 0}, "cache tokens: 0"),
        ({"gpu_split": (0.0,)}, "GPU split"),
        ({"gpu_split": ()}, "GPU split"),
        ({"max_batch_size": 0}, "concurrent requests: 0"),
        ({"chunk_tokens": 100}, "chunk tokens: 100; expected a multiple of 256"),
    ],
)
def test_settings_out_of_range(settings: dict[str, object], message: str) -> None:
    with pytest.raises(Exl3DflashError, match=message):
        ExllamaSettings(**settings)  # type: ignore[arg-type]


def test_a_machine_without_cuda_is_told_so_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "load_target", lambda *_, **__: pytest.fail("the target was loaded"))
    monkeypatch.setattr(load, "load_models", lambda *_, **__: pytest.fail("the target was loaded"))
    target = str(make_tiny_llama(tmp_path / "llama"))
    with pytest.raises(Exl3DflashError, match="the engine exllamav3 runs on CUDA, not on cpu"):
        load_pair(target, None, device="cpu", engine=EngineChoice("exllamav3"))
    if not torch.cuda.is_available():
        with pytest.raises(Exl3DflashError, match="CUDA cannot be used"):
            require_exllamav3(CUDA)
    assert "exllamav3" not in sys.modules


@pytest.mark.parametrize(("installed", "refused"), [("1.4.1", True), ("1.4.2", False), ("1.10.0+cu130", False)])
def test_versions_too_old(installed: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exllama_library, "check_cuda_device", lambda *_, **__: None)
    monkeypatch.setattr(exllama_library, "version", lambda _: installed)
    if refused:
        with pytest.raises(Exl3DflashError, match=r"ExLlamaV3 1\.4\.1 is too old .* expected 1\.4\.2 or newer"):
            exllama_library.check_exllamav3(CUDA)
    else:
        exllama_library.check_exllamav3(CUDA)


def test_what_is_missing_can_be_done_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise Exl3DflashError("exllamav3 is not installed", fix="pip install exllamav3")

    monkeypatch.setattr(exllama_library, "check_cuda_device", missing)
    with pytest.raises(Exl3DflashError, match="pip install exllamav3, or run without it: --engine reference"):
        exllama_library.check_exllamav3(CUDA)


def test_sources_on_the_path_have_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(exllama_library, "check_cuda_device", lambda *_, **__: None)
    monkeypatch.setattr(exllama_library, "version", version)
    exllama_library.check_exllamav3(CUDA)


@pytest.mark.parametrize("draft_tokens", [None, 0])
def test_a_dynamic_draft_needs_a_draft(draft_tokens: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "choose_device", lambda _: CUDA)
    drafter = None if draft_tokens is None else "demo"
    with pytest.raises(Exl3DflashError, match="a dynamic draft without drafting"):
        load_pair("demo", drafter, draft_tokens=draft_tokens, engine=EngineChoice(dynamic_draft=True))


def test_precision_is_exllamas_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "choose_device", lambda _: CUDA)
    monkeypatch.setattr(load, "check_exllamav3", lambda _: None)
    with pytest.raises(Exl3DflashError, match="dtype float32 with the engine exllamav3"):
        load_pair(str(tmp_path), None, dtype="float32")
