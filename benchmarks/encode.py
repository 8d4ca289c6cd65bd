"""How much faster the fast tile search is than the exact one, how close to the machine's limit, and what it loses.

Time. Both searches take turns in one process on the same tiles, `--rounds` times, on every instruction set that the
processor has; the fastest round of each counts. Time is CPU time of the process, so that other work on the machine
disturbs little.

The limit is what a search cannot beat on this machine: its vector instructions, each of the widest kind, issued to all
vector pipes in every cycle, with loads, stores and everything else for free. Both passes of the tail-biting search
visit 512 steps of 2^16 candidates. Instructions per register of candidates:

- exact: 3 on float32 (difference, fused square and sum, minimum);
- fast below 4 bits: 4 on 16-bit integers (difference, square, sum, minimum);
- fast from 4 bits on: those 4, of the listed candidates only (4 to 6 per node), and what looks their costs up.

The clock is measured (a chain of dependent additions, one a cycle); how many vector instructions a core starts in a
cycle is given with `--vector-pipes`: 4 on AMD since Zen 3 (of 512 bits since Zen 5), on Intel 3, or 2 of 512 bits.

Errors. Mean squared errors of both searches on `--error-tiles` tiles of a Gaussian and of Student's t with four degrees
of freedom, both of spread 0.85, where tensors end up after the scale search. Of the latter, tiles with outliers are
given to the exact search, from 4 bits on most of them.

Run `python benchmarks/encode.py [--json]`. For the exact search against numpy see `encode_numpy.py`.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from quantize.encoder import ENCODERS, clock_hertz, encode_tiles, encoder_paths
from quantize.trellis import SUPPORTED_BITS, check_bits

CANDIDATES = 512 * 65536
LANES = {"avx512": 64, "avx2": 32}  # bytes in a register
LISTED = {4: 4, 5: 6, 6: 5, 7: 6, 8: 6}  # candidates per node, quantize/native/fast_lists.h
# Instructions that look up the costs of a register of listed candidates.
LOOK_UP: dict[str, dict[int, float]] = {
    "avx512": {4: 2, 5: 2, 6: 2, 7: 5, 8: 11},
    "avx2": {4: 2, 5: 4.5, 6: 9.5, 7: 19.5, 8: 39.5},
}
SPREAD = 0.85


@dataclass(frozen=True)
class Speed:
    """One rate on one instruction set: CPU ms per tile, their ratio, and the shares of the limit that are reached."""

    bits: float
    path: str
    exact_ms: float
    fast_ms: float
    ratio: float
    exact_of_limit: float | None
    fast_of_limit: float | None


@dataclass(frozen=True)
class Loss:
    """Mean squared error of the fast search above that of the exact one, in percent."""

    bits: float
    gaussian_percent: float
    student_percent: float


def gaussian(count: int, seed: int) -> torch.Tensor:
    """Tiles (count, 256)."""
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(seed)) * SPREAD


def student(count: int, seed: int) -> torch.Tensor:
    """Tiles (count, 256) of Student's t with four degrees of freedom (variance 2)."""
    normal = torch.randn(5, count, 256, generator=torch.Generator().manual_seed(seed))
    return normal[0] / normal[1:].square().mean(0).sqrt() / 2**0.5 * SPREAD


def limit_ms(bits: float, path: str, encoder: str, hertz: float, pipes: float) -> float | None:
    """The least milliseconds of a tile, None where the instruction set has no registers of a known width."""
    if path not in LANES:
        return None
    if encoder == "exact":
        instructions = 3 * CANDIDATES / (LANES[path] / 4)
    elif bits < 4:
        instructions = 4 * CANDIDATES / (LANES[path] / 2)
    else:
        listed = CANDIDATES * LISTED[int(bits)] / 2**bits
        instructions = (4 + LOOK_UP[path][int(bits)]) * listed / (LANES[path] / 2)
    return 1e3 * instructions / (pipes * hertz)


def cpu_ms(tiles: torch.Tensor, bits: float, encoder: str, options: argparse.Namespace, path: str) -> float:
    """CPU milliseconds per tile of one round."""
    start = time.process_time()
    encode_tiles(tiles, bits, options.codebook, 1, encoder=encoder, path=path)
    return 1e3 * (time.process_time() - start) / len(tiles)


def measure_speed(bits: float, path: str, options: argparse.Namespace) -> Speed:
    """Both searches in turns."""
    tiles = gaussian(options.tiles, 0)
    for encoder in ENCODERS:
        cpu_ms(tiles[:2], bits, encoder, options, path)  # builds the tables
    rounds = [[cpu_ms(tiles, bits, encoder, options, path) for encoder in ENCODERS] for _ in range(options.rounds)]
    best = dict(zip(ENCODERS, (min(times) for times in zip(*rounds, strict=True)), strict=True))
    limits = {name: limit_ms(bits, path, name, clock_hertz(), options.vector_pipes) for name in ENCODERS}
    shares = {name: None if limit is None else limit / best[name] for name, limit in limits.items()}
    ratio = best["fast"] / best["exact"]
    return Speed(bits, path, best["exact"], best["fast"], ratio, shares["exact"], shares["fast"])


def measure_loss(bits: float, options: argparse.Namespace) -> Loss:
    """Errors of both searches on both kinds of tiles."""

    def percent(make: Callable[[int, int], torch.Tensor]) -> float:
        tiles = make(options.error_tiles, options.seed)
        errors = [
            float((encode_tiles(tiles, bits, options.codebook, encoder=encoder)[0] - tiles).double().square().mean())
            for encoder in ("fast", "exact")
        ]
        return 100.0 * (errors[0] / errors[1] - 1.0)

    return Loss(bits, percent(gaussian), percent(student))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bits", type=float, nargs="+", default=list(SUPPORTED_BITS), help="rates to measure")
    parser.add_argument("--tiles", type=int, default=100, help="tiles per round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--paths", choices=encoder_paths(), nargs="+", help="instruction sets; all but portable")
    parser.add_argument("--vector-pipes", type=float, default=4, help="vector instructions that start in a cycle")
    parser.add_argument("--error-tiles", type=int, default=4000, help="tiles to compare errors on, 0 for none")
    parser.add_argument("--seed", type=int, default=1, help="of these tiles")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args(arguments)
    options.codebook = "mul1"  # the only one that the fast search is for
    for bits in options.bits:
        check_bits(bits, options.codebook)
    if min(options.tiles, options.rounds) < 1 or options.error_tiles < 0 or options.vector_pipes <= 0:
        parser.error("--tiles, --rounds and --vector-pipes must be positive, and --error-tiles not negative")
    options.paths = options.paths or [path for path in encoder_paths() if path != "portable"] or ["portable"]
    return options


def speed_line(speed: Speed) -> str:
    shares = (speed.exact_of_limit, speed.fast_of_limit)
    reached = " ".join("      -" if share is None else f"{100 * share:6.0f}%" for share in shares)
    return f"{speed.bits:<4g} {speed.path:<8} {speed.exact_ms:7.3f} {speed.fast_ms:7.3f} {speed.ratio:7.3f}  {reached}"


def main(arguments: list[str] | None = None) -> int:
    """Measure; print two tables, or one JSON object with `--json`."""
    options = parse(arguments)
    torch.set_num_threads(1)
    notes = sys.stderr if options.json else sys.stdout
    print(f"clock {clock_hertz() / 1e9:.2f} GHz, {options.vector_pipes:g} vector instructions a cycle", file=notes)
    print("CPU ms per tile             ratio  reached of the limit", file=notes)
    print("bits path       exact    fast            exact    fast", file=notes)
    speeds, losses = [], []
    for bits in options.bits:
        for path in options.paths:
            speeds.append(measure_speed(bits, path, options))
            print(speed_line(speeds[-1]), file=notes, flush=True)
    if options.error_tiles:
        print(f"error above the exact search's, {options.error_tiles} tiles\nbits  Gaussian  Student t", file=notes)
        for bits in options.bits:
            losses.append(measure_loss(bits, options))
            loss = losses[-1]
            print(f"{bits:<4g} {loss.gaussian_percent:+8.4f}% {loss.student_percent:+8.4f}%", file=notes, flush=True)
    if options.json:
        facts = {name: getattr(options, name) for name in ("tiles", "rounds", "vector_pipes", "error_tiles", "seed")}
        facts |= {"clock_hertz": clock_hertz(), "processor": platform.processor() or platform.machine()}
        tables = {"speed": [asdict(speed) for speed in speeds], "loss": [asdict(loss) for loss in losses]}
        print(json.dumps({**facts, "torch": torch.__version__, **tables}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
