"""How fast the exact trellis encoder is on one core, against the same search in numpy.

Both numpy searches are exact and find the same states; they differ in how they are written:

- `plain` is the definition line by line in float64: for every step a table of candidates, their costs gathered by
  index, an argmin, and back pointers. It is what one writes first, and the reference that the ratio is usually quoted
  for.
- `tuned` gathers nothing, keeps all costs in place by reshaping, and has no back pointers: the best that numpy does
  here.

The three take turns in one process, `--rounds` times, and the fastest round of each counts; time is CPU time of the
process, so that other work on the machine disturbs little, with wall time beside it. numpy runs on one core here by
nature, and the encoder with `--threads`, one by default. Run
`python benchmarks/encode_numpy.py [--json]`; for the fast search against the exact one see `encode.py`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch

from quantize.codebook import CODEBOOKS, codebook_values
from quantize.encoder import encode_tiles, encoder_paths
from quantize.trellis import SUPPORTED_BITS, check_bits, position_bits

Pass = Callable[[np.ndarray, np.ndarray, tuple[int, int], int | None], list[int]]


@dataclass(frozen=True)
class Timing:
    """Fastest round, per tile."""

    cpu_ms: float
    wall_ms: float


@dataclass(frozen=True)
class Row:
    """One rate: the encoder, both numpy searches, and how many times faster (CPU time) the encoder is."""

    bits: float
    encoder: Timing
    encoder_tiles_per_second: float
    plain: Timing
    tuned: Timing
    ratio_to_plain: float
    ratio_to_tuned: float
    same_states: bool


def plain_pass(values: np.ndarray, weights: np.ndarray, shift: tuple[int, int], start: int | None) -> list[int]:
    """Best states of one pass over the ring; `start` is the node between its ends, or None for a free start."""
    cost = np.zeros(65536 >> shift[0])
    if start is not None:
        cost[:] = np.inf
        cost[start] = 0.0
    choices = []
    for position in range(256):
        shift_in, shift_out = shift[position % 2], shift[(position + 1) % 2]
        nodes = 65536 >> shift_out
        candidates = (np.arange(1 << shift_out)[:, None] << (16 - shift_out)) | np.arange(nodes)[None, :]
        totals = cost[candidates >> shift_in] + (values[candidates] - weights[position]) ** 2
        choice = totals.argmin(axis=0)
        choices.append(choice)
        cost = totals[choice, np.arange(nodes)]
    node = int(cost.argmin()) if start is None else start
    states = [0] * 256
    for position in reversed(range(256)):
        shift_out = shift[(position + 1) % 2]
        states[position] = int(choices[position][node]) << (16 - shift_out) | node
        node = states[position] >> shift[position % 2]
    return states


def tuned_pass(values: np.ndarray, weights: np.ndarray, shift: tuple[int, int], start: int | None) -> list[int]:
    """As `plain_pass`, written for numpy's strengths."""
    cost = np.zeros(65536 >> shift[0])
    if start is not None:
        cost[:] = np.inf
        cost[start] = 0.0
    rows = []
    totals = np.empty(65536)
    for position in range(256):
        shift_in, shift_out = shift[position % 2], shift[(position + 1) % 2]
        rows.append(cost)
        np.subtract(values, weights[position], out=totals)
        np.multiply(totals, totals, out=totals)
        by_incoming_node = totals.reshape(-1, 1 << shift_in)
        by_incoming_node += cost[:, None]
        cost = totals.reshape(1 << shift_out, -1).min(axis=0)
    node = int(cost.argmin()) if start is None else start
    states = [0] * 256
    for position in reversed(range(256)):
        shift_in, shift_out = shift[position % 2], shift[(position + 1) % 2]
        candidates = (np.arange(1 << shift_out) << (16 - shift_out)) | node
        ends = rows[position][candidates >> shift_in] + (values[candidates] - weights[position]) ** 2
        states[position] = int(candidates[ends.argmin()])
        node = states[position] >> shift_in
    return states


def numpy_encode(search: Pass, values: np.ndarray, tiles: np.ndarray, bits: float) -> list[list[int]]:
    """Both passes for every tile, float64 (tiles, 256)."""
    shift = position_bits(bits)
    streams = []
    for weights in tiles:
        rolled = search(values, np.roll(weights, -128), shift, None)
        streams.append(search(values, weights, shift, rolled[128] >> shift[0]))
    return streams


def encoder_states(tiles: torch.Tensor, bits: float, options: argparse.Namespace) -> list[list[int]]:
    """Encode all tiles; the states of those that numpy encodes too."""
    _, states = encode_tiles(tiles, bits, options.codebook, options.threads, path=options.path)
    return states[: options.numpy_tiles].tolist()


def timed(work: Callable[[], list[list[int]]], tiles: int) -> tuple[Timing, list[list[int]]]:
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    scale = 1e3 / tiles
    return Timing((time.process_time() - cpu) * scale, (time.perf_counter() - wall) * scale), result


def fastest(rounds: list[Timing]) -> Timing:
    return Timing(min(timing.cpu_ms for timing in rounds), min(timing.wall_ms for timing in rounds))


def measure(bits: float, options: argparse.Namespace) -> Row:
    """Time one rate, the three searches in turns."""
    generator = torch.Generator().manual_seed(0)
    tiles = torch.randn(options.tiles, 256, generator=generator) * 0.9
    few = tiles[: options.numpy_tiles].double().numpy()
    values = codebook_values(options.codebook).double().numpy()
    jobs: dict[str, tuple[Callable[[], list[list[int]]], int]] = {
        "encoder": (partial(encoder_states, tiles, bits, options), len(tiles)),
        "plain": (partial(numpy_encode, plain_pass, values, few, bits), len(few)),
        "tuned": (partial(numpy_encode, tuned_pass, values, few, bits), len(few)),
    }
    rounds: dict[str, list[Timing]] = {name: [] for name in jobs}
    found: dict[str, list[list[int]]] = {}
    for _ in range(options.rounds):
        for name, (work, count) in jobs.items():
            timing, found[name] = timed(work, count)
            rounds[name].append(timing)
    encoder, plain, tuned = (fastest(rounds[name]) for name in ("encoder", "plain", "tuned"))
    return Row(
        bits=bits,
        encoder=encoder,
        encoder_tiles_per_second=1e3 / encoder.wall_ms,
        plain=plain,
        tuned=tuned,
        ratio_to_plain=plain.cpu_ms / encoder.cpu_ms,
        ratio_to_tuned=tuned.cpu_ms / encoder.cpu_ms,
        same_states=found["encoder"] == found["plain"] == found["tuned"],
    )


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bits", type=float, nargs="+", default=list(SUPPORTED_BITS), help="rates to measure")
    parser.add_argument("--codebook", choices=CODEBOOKS, default="mul1")
    parser.add_argument("--tiles", type=int, default=128, help="tiles per round of the encoder")
    parser.add_argument("--numpy-tiles", type=int, default=1, help="tiles per round of each numpy search")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="encoder threads; ratios are per core with 1")
    parser.add_argument("--path", choices=encoder_paths(), default=encoder_paths()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args(arguments)
    for bits in options.bits:
        check_bits(bits, options.codebook)
    if min(options.tiles, options.numpy_tiles, options.rounds, options.threads) < 1:
        parser.error("--tiles, --numpy-tiles, --rounds and --threads must be at least 1")
    return options


def table_line(row: Row) -> str:
    return (
        f"{row.bits:<4g} {row.encoder.cpu_ms:9.3f} {row.encoder_tiles_per_second:8.0f} {row.plain.cpu_ms:9.1f} "
        f"{row.tuned.cpu_ms:9.1f} {row.ratio_to_plain:9.0f} {row.ratio_to_tuned:9.0f}   {row.same_states}"
    )


def main(arguments: list[str] | None = None) -> int:
    """Measure every rate; print a table, or one JSON object with `--json`. Exit code 1 if any states differ."""
    options = parse(arguments)
    torch.set_num_threads(1)
    notes = sys.stderr if options.json else sys.stdout
    print(f"{options.codebook}, {options.path}, {options.threads} thread(s); ms of CPU time per tile", file=notes)
    print("bits   encoder  tiles/s     plain     tuned   x plain   x tuned   same states", file=notes)
    rows = []
    for bits in options.bits:
        rows.append(measure(bits, options))
        print(table_line(rows[-1]), file=notes, flush=True)
    if options.json:
        facts = {name: getattr(options, name) for name in ("codebook", "path", "threads", "tiles", "rounds")}
        versions = {"python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__}
        print(json.dumps({**facts, "versions": versions, "rows": [asdict(row) for row in rows]}))
    return 0 if all(row.same_states for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
