"""Answers and calibration passes that are cut go on to the same bytes, and are kept as often as it is worth."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exl3_dflash.calibration import onpolicy
from exl3_dflash.calibration.answers import AnswerRequest
from exl3_dflash.calibration.capture import Calibration, calibrate
from exl3_dflash.calibration.fisher import FisherSettings
from exl3_dflash.calibration.onpolicy import generate_answers
from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.calibration.state import PassState
from exl3_dflash.conversion import calibrating
from exl3_dflash.conversion.calibrating import KeptPass
from exl3_dflash.conversion.kept_answers import KeptAnswers
from exl3_dflash.conversion.work_directory import WorkDirectory
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.progress import Reporter
from exl3_dflash.runtime.engine import SamplingSettings
from exl3_dflash.target.load import load_target
from tests.tiny_models import make_tiny_drafter
from tests.tiny_targets import make_tiny_llama

ROWS = 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("pair")
    target = load_target(make_tiny_llama(folder / "target"), device="cpu", dtype="float32")
    checkpoint = DrafterCheckpoint.open(make_tiny_drafter(folder / "drafter", num_hidden_layers=1))
    return target, checkpoint, DrafterModel.from_checkpoint(checkpoint)


def run(pair, work: WorkDirectory | None, two_sided: bool, stop_after: int | None = None) -> Calibration:
    """A pass over rows of several lengths, interrupted in the row after `stop_after` others."""
    target, checkpoint, drafter = pair
    generator = torch.Generator().manual_seed(1)
    rows = [TokenRow(torch.randint(0, 256, (40 + n,), generator=generator), 0, "text") for n in range(ROWS)]

    def stopped():
        for number, row in enumerate(rows):
            if number == stop_after:
                raise KeyboardInterrupt
            yield row

    return calibrate(
        drafter,
        checkpoint.linears,
        target,
        stopped(),
        accept_length=2.0,
        anchors_per_row=5,
        fisher=FisherSettings() if two_sided else None,
        seed=3,
        store=None if work is None else KeptPass(work),
    )


def plain(calibration: Calibration) -> dict[str, object]:
    """Everything of a calibration in a form that can be compared to the bit."""
    parts = {"in": calibration.hessians, "out": calibration.output_hessians}
    sums = {
        f"{side} {name}": (hessian.matrix.numpy().tobytes(), hessian.count, hessian.rows, hessian.dropped_rows)
        for side, hessians in parts.items()
        for name, hessian in hessians.items()
    }
    counts = (calibration.rows, calibration.tokens, calibration.anchors, calibration.dropped_gradients)
    return sums | {"counts": counts}


@pytest.mark.parametrize("two_sided", [True, False])
@pytest.mark.parametrize("stop_after", [1, 3])
def test_a_pass_goes_on_where_it_was_cut(
    pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_sided: bool, stop_after: int
) -> None:
    monkeypatch.setattr(calibrating, "KEEP_SECONDS", 0.0)
    monkeypatch.setattr(calibrating, "KEEP_SHARE", float("inf"))
    with WorkDirectory(tmp_path / "w") as work:
        work.begin({})
        with pytest.raises(KeyboardInterrupt):
            run(pair, work, two_sided, stop_after)
        kept = KeptPass(work).load()
        assert kept is not None
        assert kept.facts["seen"]["rows_done"] == stop_after
        resumed = run(pair, work, two_sided)
        again = run(pair, work, two_sided)  # nothing is left to do
    assert plain(resumed) == plain(again) == plain(run(pair, None, two_sided))


def test_sums_are_written_rarely_and_after_the_last_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a minute where writing is cheap; where it takes 10 s, once in 200 s."""
    now, written = [0.0], []
    monkeypatch.setattr(calibrating.time, "monotonic", lambda: now[0])

    def keep_for(seconds: int, cost: float, keep: Callable[..., None]) -> int:
        def state() -> PassState:
            now[0] += cost
            return PassState({}, {})

        before = len(written)
        for _ in range(seconds):
            now[0] += 1.0
            keep(state, last=False)
        return len(written) - before

    with WorkDirectory(tmp_path / "w") as work:
        work.begin({})
        monkeypatch.setattr(work, "save", lambda *step: written.append(step))
        assert keep_for(600, 0.01, KeptPass(work).keep) in (9, 10)
        assert keep_for(600, 10.0, KeptPass(work).keep) == 3
        KeptPass(work).keep(lambda: PassState({}, {}), last=True)
        assert len(written) in (13, 14)


def test_answers_go_on_where_they_were_cut(pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = pair[0]
    sampled = SamplingSettings(temperature=0.9, seed=5)
    requests = [AnswerRequest(tuple(range(1, 4 + n)), 12, sampled) for n in range(6)]
    answer, batches = onpolicy._BatchedDecoder.answer, []

    def watched(self: Any, batch: Any, advance: Any) -> list[list[int]]:
        batches.append(len(batch))
        if len(batches) == 3:
            raise KeyboardInterrupt
        return answer(self, batch, advance)

    def write(store: KeptAnswers | None) -> list[list[int]]:
        quiet = Reporter(quiet=True)
        return generate_answers(target, requests, batch_tokens=40, reporter=quiet, label="x", store=store)

    expected = write(None)
    monkeypatch.setattr(onpolicy._BatchedDecoder, "answer", watched)
    with WorkDirectory(tmp_path / "w") as work:
        work.begin({})
        with pytest.raises(KeyboardInterrupt):
            write(KeptAnswers(work))
        assert write(KeptAnswers(work)) == expected
        done = len(batches)
        assert write(KeptAnswers(work)) == expected
    assert sum(batches) == len(requests) + batches[2], "only the batch that was cut was written again"
    assert len(batches) == done
