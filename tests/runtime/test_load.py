"""Loading a pair by name: what fits loads and says what it is, what does not is refused before weights are read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from exl3_dflash.drafter.taps import tap_layer_indices
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.runtime import load
from exl3_dflash.runtime.engine import SamplingSettings, StopSettings
from exl3_dflash.runtime.load import load_pair
from tests.tiny_models import make_tiny_drafter
from tests.tiny_targets import make_tiny_llama


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_llama(tmp_path_factory.mktemp("target") / "llama"))


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_pair_loads_generates_and_describes_itself(target: str, tmp_path: Path) -> None:
    drafter = make_tiny_drafter(tmp_path / "drafter")
    pair = load_pair(target, str(drafter), device="cpu", dtype="float32", threads=1)
    engine = pair.engine(draft_tokens=2)
    steps = list(engine.generate([1, 2, 3], SamplingSettings(), StopSettings(6)))
    assert sum(len(step.token_ids) for step in steps) == 6
    facts = pair.describe()
    assert (facts["target"], facts["drafter"], facts["dtype"], facts["threads"]) == ("llama", "drafter", "float32", 1)
    assert len(str(facts["drafter_sha256"])) == len(str(facts["target_sha256"])) == 64


def test_target_alone(target: str) -> None:
    pair = load_pair(target, None, device="cpu", threads=1)
    assert pair.drafter is None
    assert pair.describe()["drafter"] is None
    assert pair.engine().max_draft_tokens == 0


def test_wrong_pairs_are_refused_before_any_weight_is_read(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "load_target", lambda *_, **__: pytest.fail("the target was loaded"))
    good = str(make_tiny_drafter(tmp_path / "good"))
    wrong = {
        "width": make_tiny_drafter(tmp_path / "width", target_hidden_size=48),
        "layers": make_tiny_drafter(tmp_path / "layers", num_target_layers=9),
        "vocabulary": make_tiny_drafter(tmp_path / "vocabulary", vocab_size=5000),
    }
    for path in wrong.values():
        with pytest.raises(Exl3DflashError, match="does not fit the target llama"):
            load_pair(target, str(path), device="cpu")
    with pytest.raises(Exl3DflashError, match="draft tokens: 4; expected 0 to 3"):
        load_pair(target, good, device="cpu", draft_tokens=4)
    with pytest.raises(Exl3DflashError, match="dtype 'int4'"):
        load_pair(target, good, dtype="int4")
    with pytest.raises(Exl3DflashError, match=r"no config\.json"):
        load_pair(target, str(tmp_path), device="cpu")


def tap_config(shift: int | None, layers: int | None = 8) -> SimpleNamespace:
    return SimpleNamespace(target_layer_ids=(1, 6, 3), tap_shift=shift, num_target_layers=layers)


def test_tap_shift_has_exllamav3s_meaning() -> None:
    """exllamav3 exports the output of layer id + tap_shift; ids without a shift are outputs of the layers they name."""
    assert tap_layer_indices(tap_config(None)) == tap_layer_indices(tap_config(0)) == (1, 6, 3)
    assert tap_layer_indices(tap_config(1)) == (2, 7, 4)
    assert tap_layer_indices(tap_config(0), tap_shift=1) == (2, 7, 4)
    assert tap_layer_indices(tap_config(2, layers=None)) == (3, 8, 5)
    for config in (tap_config(2), tap_config(-2)):
        with pytest.raises(Exl3DflashError, match=r"with tap_shift -?2 read layer"):
            tap_layer_indices(config)
