"""The grid of variants on a tiny pair: every method runs as named, and methods are compared at equal bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from exl3_dflash.calibration.rowset import RowSet, TokenRow
from exl3_dflash.conversion.plan import TensorPlan
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.measure import grid_variants
from exl3_dflash.measure.gguf_baseline import GGUF_BITS, check_gguf, gguf_weights
from exl3_dflash.measure.grid import REFERENCE, GridResult, Variant, run_grid
from exl3_dflash.measure.grid_store import GridStore
from exl3_dflash.measure.grid_variants import VariantMaker
from exl3_dflash.progress import Reporter
from exl3_dflash.target.base import Target
from exl3_dflash.target.load import load_target
from quantize.linear import QuantizedLinear
from tests.tiny_models import make_tiny_drafter
from tests.tiny_targets import make_tiny_llama


def text_rows(count: int, seed: int) -> tuple[TokenRow, ...]:
    random = torch.Generator().manual_seed(seed)
    return tuple(TokenRow(torch.randint(0, 256, (32,), generator=random), 0, "text") for _ in range(count))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[DrafterCheckpoint, Target]:
    folder = tmp_path_factory.mktemp("pair")
    make_tiny_llama(folder / "target")
    checkpoint = DrafterCheckpoint.open(make_tiny_drafter(folder / "drafter", num_hidden_layers=1))
    return checkpoint, load_target(folder / "target", device="cpu", dtype="float32")


def run(
    pair: tuple[DrafterCheckpoint, Target], variants: list[Variant], store: GridStore | None = None, rows: int = 2
) -> GridResult:
    settings = JobSettings(source="drafter", target="target", out_dir=Path("out"), threads=1, encoder="fast")
    row_set = RowSet(text_rows(rows, 1), "rows", text_rows(3, 2))
    return run_grid(*pair, row_set, variants, settings, Reporter(quiet=True), store)


def test_methods_on_one_pair(pair: tuple[DrafterCheckpoint, Target]) -> None:
    variants = [Variant(6, "uncalibrated"), Variant(6, "one-sided"), Variant(6, "two-sided")]
    result = run(pair, variants)
    names = [variant.name for variant in variants]
    assert [row.name for row in result.fidelity] == [REFERENCE, *names]
    assert [(c.base, c.better) for c in result.comparisons] == [(names[0], names[1]), (names[1], names[2])]
    accept_length = {row.name: row.accept_length for row in result.fidelity}
    for compared in result.comparisons:
        ratio = accept_length[compared.better] / accept_length[compared.base]
        assert compared.ratio == pytest.approx(ratio)
        assert compared.ci95[0] <= compared.ratio <= compared.ci95[1]
    means = [sum(result.output_errors[name].values()) for name in names]
    assert means[1] < means[0]
    assert set(result.seconds) == set(result.bpw) == set(names)


def test_unknown_methods_are_refused() -> None:
    with pytest.raises(Exl3DflashError, match="three-sided"):
        Variant(4, "three-sided")


def test_a_stopped_grid_goes_on_with_what_is_missing(
    pair: tuple[DrafterCheckpoint, Target], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variants = [Variant(8, "uncalibrated"), Variant(8, "two-sided"), Variant(6, "two-sided")]
    done: dict[tuple[object, ...], QuantizedLinear] = {}
    quantize = grid_variants.quantize_tensor

    def remembered(settings: JobSettings, checkpoint: DrafterCheckpoint, tensor: TensorPlan, *sides: object):
        key = (settings.bits, tensor.linear.name, *(side is None for side in sides))
        if key not in done:
            done[key] = quantize(settings, checkpoint, tensor, *sides)
        return done[key]

    monkeypatch.setattr(grid_variants, "quantize_tensor", remembered)
    whole = run(pair, variants)
    store = GridStore(tmp_path / "grid", {"pair": "tiny"})
    first = run(pair, variants[:2], store)
    assert first.fidelity == whole.fidelity[:3]

    made = []
    make = VariantMaker.make
    monkeypatch.setattr(VariantMaker, "make", lambda self, *what: made.append(what) or make(self, *what))
    (tmp_path / "grid" / "6-bpw-two-sided.json.partial").write_text("{")  # killed while it was written
    resumed = run(pair, variants, store)
    assert made == [(6, "two-sided")]
    assert resumed.fidelity == whole.fidelity
    assert resumed.comparisons == whole.comparisons
    assert resumed.output_errors == whole.output_errors
    made.clear()
    assert run(pair, variants, store).fidelity == whole.fidelity
    assert made == []


def test_cells_of_another_grid_are_not_mixed_in(tmp_path: Path) -> None:
    GridStore(tmp_path, {"pair": "tiny", "rows": 3})
    with pytest.raises(Exl3DflashError, match="another grid: rows differ"):
        GridStore(tmp_path, {"pair": "tiny", "rows": 4})


def test_tuning_mixed_bits_and_another_format(pair: tuple[DrafterCheckpoint, Target]) -> None:
    pytest.importorskip("gguf")
    variants = [Variant(2, "two-sided"), Variant(2, "two-sided-tuned"), Variant(2, "mixed")]
    with pytest.raises(Exl3DflashError, match="48 inputs"):  # the tiny MLP is no multiple of 32 wide
        run(pair, [Variant(4.5, "gguf-q4_0")])
    result = run(pair, variants, rows=8)
    assert set(result.tuning) == {"2 bpw, two-sided-tuned"}
    assert result.bpw["2 bpw, two-sided"] == result.bpw["2 bpw, two-sided-tuned"] >= result.bpw["2 bpw, mixed"]


def test_the_other_format_is_what_its_package_makes(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    folder = make_tiny_drafter(tmp_path / "drafter", num_hidden_layers=1, intermediate_size=64)
    checkpoint = DrafterCheckpoint.open(folder)
    check_gguf(checkpoint.linears)
    errors = []
    for method in GGUF_BITS:
        weights = gguf_weights(checkpoint, method)
        assert {name: tuple(weight.shape) for name, weight in weights.items()} == {
            spec.name: (spec.in_features, spec.out_features) for spec in checkpoint.linears
        }
        original = checkpoint.load("fc.weight").float().T
        errors.append(float((weights["fc"] - original).norm() / original.norm()))
    assert 0.05 < errors[0] < 0.15
    assert errors[1] < 0.01
    with pytest.raises(Exl3DflashError, match=r"4\.5"):
        Variant(4, "gguf-q4_0")
