"""What a check found: the row of a table and the object of a JSON file."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Findings = tuple[bool, dict[str, Any]]  # whether the check passed, and its figures


@dataclass(frozen=True)
class Outcome:
    """One check.

    Attributes:
        name: what was checked.
        state: "passed", "failed", "error" (it could not run) or "skipped" (no time was left).
        figures: what was measured, plain data.
        seconds: wall time.
        reason: of an error or a skip, in one line.
    """

    name: str
    state: str
    figures: dict[str, Any]
    seconds: float = 0.0
    reason: str = ""


def run_check(name: str, check: Callable[[], Findings], seconds_left: float, needs: float) -> Outcome:
    """Run a check unless it `needs` more seconds than are left; an exception becomes an outcome too."""
    if seconds_left < needs:
        return Outcome(name, "skipped", {}, reason=f"{seconds_left:.0f} s left, it needs about {needs:.0f}")
    began = time.perf_counter()
    try:
        passed, figures = check()
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        return Outcome(name, "error", {}, time.perf_counter() - began, reason)
    return Outcome(name, "passed" if passed else "failed", figures, time.perf_counter() - began)


def table(outcomes: Sequence[Outcome]) -> str:
    """One line per check, its figures below it."""
    lines = []
    for outcome in outcomes:
        lines.append(f"{outcome.state:<8} {outcome.seconds:7.1f} s  {outcome.name}")
        if outcome.reason:
            lines.append(f"{'':>20}{outcome.reason}")
        lines += [f"{'':>20}{key}: {_short(value)}" for key, value in outcome.figures.items()]
    return "\n".join(lines)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(item)}" for key, item in value.items())
    return str(value)


def as_json(machine: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """Everything, for later comparison."""
    return json.dumps({"machine": machine, "checks": [asdict(outcome) for outcome in outcomes]}, indent=1)
