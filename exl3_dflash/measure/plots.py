"""Two pictures of a comparison of drafters: position-wise acceptance, and retention over bits per weight.

matplotlib is an extra (`pip install "exl3-dflash[plots]"`) and imported only here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.measure.statistics import Interval

SUFFIXES = (".png", ".svg", ".pdf")
LINE_STYLES = ("--", "-", "-.", ":")


@dataclass(frozen=True)
class PlotEntry:
    """One drafter in the pictures.

    Attributes:
        name: for the legend.
        series: drafters of one series are joined over bits; empty for the reference.
        bits: bits per weight, None where it is not quantized (then it is only in the first picture).
        retention, retention_ci95, position_acceptance: as in `measure.fidelity`.
    """

    name: str
    series: str
    bits: float | None
    retention: float
    retention_ci95: Interval
    position_acceptance: list[float]


def check_plot(path: Path) -> None:
    """Refuse a plot that cannot be made, before anything is measured for it.

    Raises:
        Exl3DflashError: matplotlib is not installed, another file type, or no such directory.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise Exl3DflashError(f"--plot {path}", f"a file ending in {', '.join(SUFFIXES)}", "name it FILE.png")
    if not path.absolute().parent.is_dir():
        raise Exl3DflashError(f"--plot {path}: its directory does not exist", fix="create it first")
    _figure_class()


def plot_fidelity(entries: Sequence[PlotEntry], path: Path, title: str) -> None:
    """Draw both pictures side by side into `path`.

    Args:
        entries: the drafters, the reference first.
        path: .png, .svg or .pdf.
        title: above both.

    Raises:
        Exl3DflashError: as `check_plot`.
    """
    check_plot(path)
    figure = _figure_class()(figsize=(12.5, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_positions(left, entries)
    _draw_retention(right, entries)
    figure.suptitle(title)
    figure.savefig(path, dpi=120, metadata={"Software": None} if path.suffix.lower() == ".png" else None)


def plot_retention(entries: Sequence[PlotEntry], path: Path, title: str) -> None:
    """Draw retention over bits alone, for many drafters.

    Args:
        entries: the drafters, the reference first.
        path: .png, .svg or .pdf.
        title: above the picture.

    Raises:
        Exl3DflashError: as `check_plot`.
    """
    check_plot(path)
    figure = _figure_class()(figsize=(7, 4.6), layout="constrained")
    _draw_retention(figure.subplots(), entries)
    figure.suptitle(title)
    figure.savefig(path, dpi=120, metadata={"Software": None} if path.suffix.lower() == ".png" else None)


def _figure_class() -> Any:
    """matplotlib's figure, used without pyplot: no window, no global state."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Exl3DflashError(
            "plots need matplotlib, which is not installed",
            expected="the extra `plots`",
            fix='pip install "exl3-dflash[plots]", or leave --plot out',
        ) from error
    return Figure


def _draw_positions(axes: Any, entries: Sequence[PlotEntry]) -> None:
    """A colour for every bit rate, a line style for every series; the reference is black."""
    rates = sorted({entry.bits for entry in entries if entry.bits is not None})
    series = list(dict.fromkeys(entry.series for entry in entries if entry.bits is not None))
    for entry in entries:
        positions = range(1, len(entry.position_acceptance) + 1)
        colour, style = "black", "-"
        if entry.bits is not None:
            colour = f"C{rates.index(entry.bits)}"
            style = LINE_STYLES[series.index(entry.series) % len(LINE_STYLES)]
        shares = [100 * value for value in entry.position_acceptance]
        axes.plot(positions, shares, style, color=colour, marker=".", label=entry.name)
    axes.set(xlabel="draft position", ylabel="accepted where all before are, %", title="position-wise acceptance")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_retention(axes: Any, entries: Sequence[PlotEntry]) -> None:
    quantized = [entry for entry in entries if entry.bits is not None]
    for series in dict.fromkeys(entry.series for entry in quantized):
        points = sorted((entry for entry in quantized if entry.series == series), key=lambda entry: entry.bits or 0)
        values = [100 * entry.retention for entry in points]
        below = [100 * max(0.0, entry.retention - entry.retention_ci95[0]) for entry in points]
        above = [100 * max(0.0, entry.retention_ci95[1] - entry.retention) for entry in points]
        axes.errorbar([entry.bits for entry in points], values, [below, above], marker="o", capsize=3, label=series)
    axes.axhline(100, color="black", linewidth=0.8, linestyle=":", label=entries[0].name)
    axes.set(xlabel="bits per weight", ylabel="retained accept length, %", title="retention (95 % interval)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
