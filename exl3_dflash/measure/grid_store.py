"""Finished cells of a grid on disk, one JSON file each, so that a grid that dies goes on where it was.

    grid.json          what the grid is: drafter, target, rows, settings, versions
    <cell>.json        one variant: what it is, what it cost, and its tallies, row by row, next to the reference's

A file appears under its name complete or not at all. Cells of another grid are refused, not mixed in.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.measure.tallies import RowTally

IDENTITY = "grid.json"
_NUMBERS = ("anchors", "emitted")


@dataclass(frozen=True)
class Cell:
    """One variant, measured.

    Attributes:
        name: of the variant; the reference's own cell has the reference's name.
        bits, method: what was asked for.
        bpw: stored bits per weight of all linears, scales and copied linears included.
        seconds: of quantizing.
        output_errors: relative output error on held-out inputs, by linear.
        tuning: facts of `--tune`, None where it did not run.
        tallies: per held-out row.
    """

    name: str
    bits: float
    method: str
    bpw: float
    seconds: float
    output_errors: dict[str, float]
    tuning: dict[str, Any] | None
    tallies: list[RowTally]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        tallies = [{key: np.asarray(value).tolist() for key, value in asdict(tally).items()} for tally in self.tallies]
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, "tallies": tallies}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Cell:
        """The inverse of `to_json`."""
        tallies = [_tally(tally) for tally in data["tallies"]]
        return cls(**{**data, "tallies": tallies})


def _tally(data: Mapping[str, Any]) -> RowTally:
    values: dict[str, Any] = {key: value if key in _NUMBERS else np.array(value) for key, value in data.items()}
    return RowTally(**values)


class GridStore:
    """Cells of one grid.

    Args:
        folder: made where it does not exist.
        identity: plain data that says what the grid is.

    Raises:
        Exl3DflashError: the folder holds another grid.
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        wanted = json.loads(json.dumps(identity))
        file = folder / IDENTITY
        if not file.is_file():
            self._write(file, wanted)
        earlier = json.loads(file.read_text("utf-8"))
        differing = sorted(key for key in {*earlier, *wanted} if earlier.get(key) != wanted.get(key))
        if differing:
            raise Exl3DflashError(
                f"{folder} holds another grid: {', '.join(differing)} differ",
                expected="the same pair, rows, settings and versions",
                fix="give another directory",
            )

    def load(self, name: str) -> Cell | None:
        """A finished cell; None where there is none."""
        file = self._file(name)
        return Cell.from_json(json.loads(file.read_text("utf-8"))) if file.is_file() else None

    def save(self, cells: Sequence[Cell]) -> None:
        """Keep finished cells."""
        for cell in cells:
            self._write(self._file(cell.name), cell.to_json())

    def _file(self, name: str) -> Path:
        return self._folder / f"{name.replace(' ', '-').replace(',', '')}.json"

    @staticmethod
    def _write(file: Path, data: Mapping[str, Any]) -> None:
        partial = file.with_name(file.name + ".partial")
        with partial.open("w", encoding="utf-8") as handle:
            json.dump(data, handle, indent=1)
            handle.flush()
            os.fsync(handle.fileno())
        partial.replace(file)
