"""docs/fidelity.md holds what its command makes: ten variants with intervals, and the plot."""

from __future__ import annotations

import pytest

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
