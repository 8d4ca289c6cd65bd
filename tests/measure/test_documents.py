"""Generated documents hold what their commands make: every variant with intervals, and the plots."""

from __future__ import annotations

import pytest

from benchmarks import fidelity
from benchmarks.retention import BEGIN, DOCUMENT, END, MODES


@pytest.mark.parametrize("bits", ["2", "2.5", "3", "4", "6"])
@pytest.mark.parametrize("mode", MODES.values())
def test_every_variant_has_a_line_with_intervals(bits: str, mode: str) -> None:
    text = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    lines = [line for line in text.splitlines() if line.startswith(f"| {bits}-bpw-{mode} |")]
    assert len(lines) == 2, "one line of figures and one of positions"
    assert lines[0].count(" to ") == 3


def test_the_plot_is_there() -> None:
    assert DOCUMENT.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


METHODS = ("uncalibrated", "two-sided")
GGUF = ("4.5 bpw, gguf-q4_0", "8.5 bpw, gguf-q8_0")
GRIDS = {
    "demo": (
        "2 bpw, two-sided-tuned",
        *GGUF,
        *(f"{b} bpw, {m}" for b in ("2", "2.5", "3", "4") for m in (*METHODS, "one-sided", "mixed")),
    ),
    "smollm2": (
        "2 bpw, two-sided-tuned",
        *GGUF,
        *(f"{b} bpw, {m}" for b in ("2", "3", "4") for m in (*METHODS, "one-sided", "mixed")),
    ),
}


@pytest.mark.parametrize("section", GRIDS)
def test_the_grids_have_every_variant_with_intervals(section: str) -> None:
    begin, end = fidelity.markers(section)
    text = fidelity.DOCUMENT.read_text(encoding="utf-8").split(begin)[1].split(end)[0]
    for variant in GRIDS[section]:
        lines = [line for line in text.splitlines() if line.startswith(f"| {variant} |")]
        assert lines, variant
        assert lines[0].count(" to ") == 3, variant
    plot = fidelity.DOCUMENT.with_name(f"fidelity_grid_{section}.png")
    assert plot.read_bytes().startswith(b"\x89PNG")
