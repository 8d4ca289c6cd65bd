"""`eval` for people: one line per drafter, then the groups."""

from __future__ import annotations

from collections.abc import Sequence

from exl3_dflash.measure.evaluation import EvalResult, GroupFidelity
from exl3_dflash.measure.plots import PlotEntry
from exl3_dflash.measure.tallies import DrafterFidelity

_HEADER = f"{'accept length (95 %)':>24} {'retained, % (95 %)':>26} {'top-1, %':>9} {'KL':>7}"


def render(result: EvalResult) -> str:
    """The result as plain text."""
    width = max(len(drafter.name) for drafter in result.drafters)
    lines = [f"{'drafter':<{width}} {_HEADER}", *_lines(result.drafters, width)]
    lines += ["", f"accepted at draft position 1 to {result.block_size - 1}, of those that got there, %:"]
    for drafter in result.drafters:
        positions = " ".join(f"{100 * value:5.1f}" for value in drafter.position_acceptance)
        lines.append(f"{drafter.name:<{width}} {positions}")
    for title, groups in (("by kind of prompt", result.by_kind), ("by thinking", result.by_thinking)):
        if groups:
            lines += ["", f"{title}: accept length (retained, %)", *_group_lines(groups)]
    lines += [
        "",
        f"{result.anchors} anchors in {result.rows} rows, teacher-forced, paired; intervals are bootstraps over rows",
    ]
    if result.dropped_rows:
        lines.append(f"{result.dropped_rows} rows were dropped: features that are not finite")
    return "\n".join(lines)


def plot_entries(result: EvalResult) -> list[PlotEntry]:
    """The drafters as the plot wants them."""
    return [
        PlotEntry(
            name=drafter.name,
            series=_series(drafter.calibration),
            bits=drafter.bits,
            retention=drafter.retention,
            retention_ci95=drafter.retention_ci95,
            position_acceptance=drafter.position_acceptance,
        )
        for drafter in result.drafters
    ]


def _series(calibration: str | None) -> str:
    return {"target": "calibrated", "none": "uncalibrated"}.get(calibration or "", "EXL3")


def _lines(drafters: Sequence[DrafterFidelity], width: int) -> list[str]:
    lines = []
    for drafter in drafters:
        length = f"{drafter.accept_length:.3f} ({drafter.ci95[0]:.3f} to {drafter.ci95[1]:.3f})"
        low, high = drafter.retention_ci95
        retained = f"{100 * drafter.retention:.2f} ({100 * low:.2f} to {100 * high:.2f})"
        top1 = 100 * drafter.top1_agreement
        lines.append(f"{drafter.name:<{width}} {length:>24} {retained:>26} {top1:>9.2f} {drafter.kl:>7.4f}")
    return lines


def _group_lines(groups: dict[str, GroupFidelity]) -> list[str]:
    width = max(len(name) for name in groups)
    return [
        f"{name:<{width}} {group.rows:>4} rows  "
        + "  ".join(f"{item.name} {item.accept_length:.3f} ({100 * item.retention:.1f})" for item in group.drafters)
        for name, group in groups.items()
    ]
