"""The checks of tests/gpu on a CPU with stand-ins: they run, pass on what is right, and fail on what is wrong."""

from __future__ import annotations

import json
import shutil
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.errors import Exl3DflashError
from tests.demo_pair import demo_directories
from tests.gpu import cpu_expert, drafting, generation, layers, run_all, speed, tiles
from tests.gpu.outcome import as_json, run_check, table
from tests.quantize.gpu_stand_in import GPU, EncoderStub, fake_gpu

from . import extension_stub, format_decode
from .exllama_pair import Theirs, load_reference, load_theirs

pytestmark = pytest.mark.conformance
CPU = torch.device("cpu")


class Extension(EncoderStub):
    """The encoder's kernels with those that pack and decode, which work on the tensors behind the pretended GPU's."""

    def __init__(self, flipped: bool = False) -> None:
        super().__init__(wave=64)
        self.flipped = flipped

    def pack_trellis(self, packed: Any, states: Any, bits: float) -> None:
        extension_stub.pack_trellis(packed.held, states.held, bits)

    def pack_trellis_frac(self, packed: Any, states: Any, whole: int, mask: int) -> None:
        extension_stub.pack_trellis_frac(packed.held, states.held, whole, mask)

    def reconstruct(self, weight: Any, trellis: Any, bits: float, mcg: bool, mul1: bool) -> None:
        extension_stub.reconstruct(weight.held, trellis.held, bits, mcg, mul1)
        if self.flipped:
            weight.held[0, 0] += 1


@pytest.fixture(scope="module")
def theirs(generator_library: types.ModuleType) -> Theirs:
    return load_theirs(generator_library, *demo_directories())


def test_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "RATES", [(2.5, "mul1"), (6, "mul1"), (4, "mcg")])
    with fake_gpu(Extension()) as extension:
        passed, figures = tiles.compare_tiles(GPU, extension, count=4)
    assert passed
    assert figures["6 bits mul1"]["error_ratio"] == 1.0
    with fake_gpu(Extension(flipped=True)) as extension:
        passed, figures = tiles.compare_tiles(GPU, extension, count=4)
    assert not passed
    assert not figures["2.5 bits mul1"]["decoded"]


class CpuExpert:
    """The expert kernel in float64, by the format's description; `error` is added to its output."""

    def __init__(self, error: float = 0.0) -> None:
        self.error = error

    def exl3_moe_cpu_make_layer(self, *arguments: Any) -> int:
        assert list(arguments[9:]) == [[], [], [], 0, 0.0, 0]
        stored = [part[0] for part in arguments[:9]]
        self.weights = [unrounded(*stored[index : index + 3]) for index in (0, 3, 6)]
        return 1

    def exl3_moe_cpu_forward(self, handle: int, x: Any, selected: Any, weights: Any, out: Any, threads: int) -> None:
        assert selected.dtype == torch.int64
        gate, up, down = self.weights
        out.copy_(((torch.nn.functional.silu(x.double() @ gate) * (x.double() @ up)) @ down) * (1.0 + self.error))

    def exl3_moe_cpu_free_layer(self, handle: int) -> None:
        assert handle == 1


def unrounded(trellis: torch.Tensor, suh: torch.Tensor, svh: torch.Tensor) -> torch.Tensor:
    """A layer with the codebook (byte sum - 510) * k, by the independent decoder's reading of the bits."""

    def codebook_value(states: np.ndarray, codebook: str) -> np.ndarray:
        products = (states.astype(np.uint64) * 0x83DCD12D) & 0xFFFFFFFF
        byte_sums = sum(
            ((products >> np.uint64(shift)) & np.uint64(255)).astype(np.float64) for shift in (0, 8, 16, 24)
        )
        return (byte_sums - 510.0) * float(np.array(0x1EEE, np.uint16).view(np.float16))

    with mock.patch.object(format_decode, "codebook_value", codebook_value):
        weight = format_decode.decode(trellis.numpy(), suh.numpy(), svh.numpy(), trellis.shape[2] / 16, "mul1")
    return torch.from_numpy(weight).double()


def test_the_cpu_expert() -> None:
    passed, figures = cpu_expert.compare_cpu_expert(CpuExpert(), (2.5,))
    assert passed, figures
    assert figures["2.5 bits"]["flipped_bit"] > 1e-3
    passed, _ = cpu_expert.compare_cpu_expert(CpuExpert(error=1e-5), (2.5,))
    assert not passed


def test_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "LAYER_RATES", (6,))
    with fake_gpu(EncoderStub()):
        passed, figures = layers.compare_layers(GPU, size=128, threads=1)
    assert passed
    assert [figures[f"6 bits {sides}"]["error_ratio"] for sides in ("one-sided", "two-sided")] == [1.0, 1.0]


def test_the_demo_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    worse = {"gpu": 1.0}

    def quantize_drafter(job: JobSettings) -> Any:
        shutil.copytree(demo_directories()[1], job.out_dir, dirs_exist_ok=True)
        factor = worse.get(job.out_dir.name, 1.0)
        tensors = [types.SimpleNamespace(proxy_error=0.01 * factor), types.SimpleNamespace(proxy_error=0.02)]
        return types.SimpleNamespace(tensors=tensors, accept_length={"quantized": 3.0 / factor}, seconds=1.0)

    monkeypatch.setattr(layers, "quantize_drafter", quantize_drafter)
    passed, figures = layers.compare_demo(GPU, tmp_path)
    assert passed
    assert figures["same_names_shapes_types"]
    assert figures["error_ratio"] == 1.0
    worse["gpu"] = 1.2
    passed, figures = layers.compare_demo(GPU, tmp_path)
    assert not passed
    assert figures["error_ratio"] == pytest.approx(1.2**0.5)


def test_drafts(theirs: Theirs) -> None:
    engine, drafter = theirs.engine(), demo_directories()[1]
    passed, figures = drafting.compare_drafts(engine, drafter)
    assert passed, figures
    prefixes = drafting.prefixes_of(engine)
    moved = [[*prefix[1:], prefix[0]] for prefix in prefixes]
    ours, others = (drafting.our_hidden(theirs.target, drafter, rows) for rows in (prefixes, moved))
    assert float((ours - others).norm() / ours.norm()) > 10 * drafting.CLOSE


def test_generation(theirs: Theirs) -> None:
    passed, figures = generation.compare_generation(theirs.engine(), load_reference(*demo_directories()), 24)
    assert passed, figures
    assert figures["same_as_plain"] == figures["same_as_reference"] == 1.0
    assert generation._common_share([[1, 2, 3], [4]], [[1, 9, 3], [4]]) == 0.5


def test_engines_in_turn(theirs: Theirs, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = theirs.engine()
    prompts = generation.prompts_of(engine)[:1]
    monkeypatch.setattr(speed, "prompts_of", lambda engine: prompts)
    _, figures = speed.compare_engines(engine, new_tokens=8, rounds=1)
    assert min(figures["tokens_per_second"].values()) > 0


def test_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    monkeypatch.setattr(speed, "_timed", lambda command: (commands.append(command), 10.0 * len(commands))[1])
    small = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
             "head_dim": 64}  # fmt: skip
    passed, figures = speed.compare_encoding(CPU, tmp_path, small)
    assert passed == (figures["seconds"]["ours"] <= 1.25 * 10.0)
    assert figures["seconds"]["exllamav3"] == 10.0
    assert figures["weights"] > 100_000
    assert commands[1][3:5] == ["-i", str(tmp_path / "source")]


def test_their_converter_takes_what_it_is_given(exllama: types.ModuleType) -> None:
    from exllamav3.conversion import convert_model

    given = convert_model.parser.parse_args(["-i", "a", "-o", "b", "-w", "c", "-b", "4", "-d", "0"])
    assert (given.in_dir, given.out_dir, given.work_dir, given.bits, given.devices) == ("a", "b", "c", 4.0, "0")
    compile(speed.CONVERTER, "converter", "exec")
    assert callable(convert_model.prepare)
    assert callable(convert_model.main)


def test_outcomes() -> None:
    good = run_check("good", lambda: (True, {"ratio": 1.23456, "seconds": {"cpu": 2.0}}), 10, 5)
    bad = run_check("bad", lambda: (False, {}), 10, 5)
    error = run_check("error", lambda: 1 / 0, 10, 5)  # type: ignore[arg-type, return-value]
    late = run_check("late", lambda: (True, {}), 4, 5)
    outcomes = [good, bad, error, late]
    assert [outcome.state for outcome in outcomes] == ["passed", "failed", "error", "skipped"]
    assert error.reason == "ZeroDivisionError: division by zero"
    printed = table(outcomes)
    assert "ratio: 1.235" in printed
    assert "seconds: cpu 2" in printed
    assert "4 s left, it needs about 5" in printed
    assert [check["state"] for check in json.loads(as_json({}, outcomes))["checks"]][-1] == "skipped"


def test_the_run_stops_where_the_extension_is_missing_and_goes_on_where_a_check_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [name for name, _, _ in run_all.checks(GPU, tmp_path)]
    assert [name[:3] for name in names] == ["(a)", "(a)", "(b)", "(b)", "(c)", "(c)", "(d)", "(d)", "(e)", "(e)"]
    monkeypatch.setattr(
        run_all, "checks", lambda device, out: [("x", 1, lambda: (False, {})), ("y", 99, lambda: (True, {}))]
    )
    monkeypatch.setattr(run_all, "describe_machine", lambda device: {"gpu": "none"})
    monkeypatch.setattr(run_all, "check_cuda_device", lambda device, kernels: None)

    def states(extension: Any) -> list[str]:
        monkeypatch.setattr(run_all, "load_extension", extension)
        assert run_all.main(["--out", str(tmp_path), "--seconds", "50"]) == 1
        return [check["state"] for check in json.loads((tmp_path / "results.json").read_text())["checks"]]

    def missing(*arguments: Any) -> None:
        raise Exl3DflashError("no nvcc")

    assert states(missing) == ["error"]
    assert states(lambda *arguments: None) == ["passed", "failed", "skipped"]
    assert "failed" in capsys.readouterr().out
