"""What the doctor reports: checks in the order they were made, and a verdict."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from exl3_dflash.measure.candidates import CandidateFigures
from exl3_dflash.measure.statistics import Interval

PASS, WARN, FAIL, SKIP = "pass", "warn", "fail", "skip"


@dataclass(frozen=True)
class Check:
    """One check.

    Attributes:
        name: what was looked at.
        status: PASS, WARN (works, but should be known), FAIL, or SKIP (could not be looked at).
        seen: what was found.
        advice: what to do; empty where nothing is to be done.
        cause: the likely cause a verdict names if this check fails; `name` unless that is too narrow.
    """

    name: str
    status: str
    seen: str
    advice: str = ""
    cause: str = ""

    @property
    def likely_cause(self) -> str:
        """`cause`, or the name."""
        return self.cause or self.name


@dataclass(frozen=True)
class Acceptance:
    """Teacher-forced acceptance of the drafter as it is configured (definitions in `measure.fidelity`)."""

    accept_length: float
    ci95: Interval
    position_acceptance: list[float]
    anchors: int
    rows: int


@dataclass(frozen=True)
class Verdict:
    """The answer: `cause` is None where the pair is healthy."""

    healthy: bool
    cause: str | None
    text: str
    advice: str


@dataclass(frozen=True)
class Diagnosis:
    """Everything the doctor found.

    Attributes:
        drafter, target: names.
        verdict: the answer.
        checks: in the order of their cost, which is the order in which they were made.
        acceptance: None where the pair could not be run.
        alternatives: what other settings accept on the same anchors, as far as they were tried.
        notes: of the rows.
        versions: of the installed packages.
        seconds: how long it took.
    """

    drafter: str
    target: str
    verdict: Verdict
    checks: list[Check]
    acceptance: Acceptance | None = None
    alternatives: list[CandidateFigures] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {"healthy": self.verdict.healthy, **asdict(self)}

    def failed(self) -> list[Check]:
        """Checks that failed, in order."""
        return [check for check in self.checks if check.status == FAIL]

    def warned(self) -> list[Check]:
        """Checks with a warning, in order."""
        return [check for check in self.checks if check.status == WARN]
