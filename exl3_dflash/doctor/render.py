"""A diagnosis as text: the verdict first, then the table of checks, then what to do."""

from __future__ import annotations

from exl3_dflash.doctor.checks import FAIL, PASS, WARN, Check, Diagnosis

_MARKS = {PASS: "ok", WARN: "warn", FAIL: "FAIL"}


def render(diagnosis: Diagnosis) -> str:
    """The whole diagnosis for a terminal or a log."""
    width = max(len(check.name) for check in diagnosis.checks)
    lines = [f"{diagnosis.drafter} with {diagnosis.target}", ""]
    for check in diagnosis.checks:
        lines += _check_lines(check, width)
    lines += ["", f"verdict: {'healthy' if diagnosis.verdict.healthy else 'NOT healthy'}; {diagnosis.verdict.text}"]
    if diagnosis.verdict.advice:
        lines.append(f"what to do: {diagnosis.verdict.advice}")
    if diagnosis.acceptance is not None:
        acceptance = diagnosis.acceptance
        positions = " ".join(f"{value:.2f}" for value in acceptance.position_acceptance)
        lines += [
            "",
            f"accept length {acceptance.accept_length:.2f} is teacher-forced over {acceptance.anchors} anchors of "
            f"{acceptance.rows} rows that the target wrote: leading draft tokens equal to its greedy token, plus one",
            f"accepted at position 1, 2, ... of those that got there: {positions}",
        ]
    lines += [f"note: {note}" for note in diagnosis.notes]
    return "\n".join(lines)


def _check_lines(check: Check, width: int) -> list[str]:
    lines = [f"{_MARKS.get(check.status, check.status):<5} {check.name:<{width}}  {check.seen}"]
    if check.advice and check.status in (WARN, FAIL):
        lines.append(f"{'':<5} {'':<{width}}  -> {check.advice}")
    return lines
