"""Faults injected into the embedded pair: each is named with its cause, and none is raised on the healthy pair."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.doctor_faults import (
    BEGIN,
    DOCUMENT,
    END,
    SETTINGS,
    Fault,
    Outcome,
    measured_faults,
    run_fault,
    table_names,
    with_sliding_layer,
)
from exl3_dflash.doctor.run import PreparedTarget, diagnose, prepare
from exl3_dflash.progress import Reporter
from exl3_dflash.target.load import sketch_target
from tests.demo_pair import demo_directories


@pytest.fixture(scope="module")
def prepared() -> PreparedTarget:
    target, _ = demo_directories()
    return prepare(target, sketch_target(target), SETTINGS, Reporter(quiet=True))


def test_the_healthy_pair_has_no_finding(prepared: PreparedTarget) -> None:
    outcome = Outcome(None, diagnose("demo", "demo", SETTINGS, prepared=prepared))
    assert outcome.named, outcome.diagnosis.failed() + outcome.diagnosis.warned()


def test_a_drafter_with_a_sliding_layer_is_healthy_too(prepared: PreparedTarget) -> None:
    """The sound half of the fault `window ignored`."""
    sound = Fault("sliding", None, "window", lambda drafter, _: with_sliding_layer(drafter))
    found = run_fault(sound, prepared).diagnosis
    assert found.verdict.healthy
    assert not found.warned()


@pytest.mark.parametrize("fault", measured_faults(), ids=lambda fault: fault.name)
def test_the_cause_is_named(prepared: PreparedTarget, fault: Fault) -> None:
    found = run_fault(fault, prepared)
    assert found.named, (found.diagnosis.verdict, found.diagnosis.failed(), found.diagnosis.warned())
    assert found.diagnosis.verdict.healthy == (fault.cause is None)


def test_the_documented_table_has_every_fault_and_all_of_them_are_right() -> None:
    demo_directories()
    text = Path(DOCUMENT).read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert rows[1:] == table_names()
    right, _, total = next(line for line in text.splitlines() if " are right" in line).split()[:3]
    assert right == total
