"""What quantizing a large drafter takes: CPU time, wall time and peak memory, for the shapes of Qwen3.6-35B-A3B-DFlash.

The drafter is made, not loaded: 8 layers of hidden size 2048 with an MLP of 6144 and 32 query and 4 key-value heads of
128, and an `fc` over five taps, 0.47 B weights in 57 linears. Weights are Student's t with four degrees of freedom
times uneven channel scales; Hessians are correlated (a power law over an eighth of the dimensions, at most 640) with
uneven and a few very loud features. What does not depend on values costs the same as for the real drafter; what does
(the scale search, outlier tiles) meets worse weights than real ones.

Linears go through the job's own executors with the job's settings, one after the other, and their inputs are made just
before: the time for that is measured and left out. With `--layers` below 8 the rest is extrapolated: `fc` once, layers
times 8. Peak memory is that of this process, plus that of the largest worker process times their number.

Run `python benchmarks/large_drafter.py --bits 6 --threads 2 --json`.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import platform
import pstats
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from exl3_dflash.conversion.executor import LinearTask, make_executor
from quantize.encoder import ENCODERS, encoder_paths
from quantize.hessian import Hessian
from quantize.linear import QuantSettings

HIDDEN, MLP, TAPS, LAYERS = 2048, 6144, 5, 8
QUERY, KEY_VALUE = 32 * 128, 4 * 128
LAYER_SHAPES = {
    "self_attn.q_proj": (HIDDEN, QUERY),
    "self_attn.k_proj": (HIDDEN, KEY_VALUE),
    "self_attn.v_proj": (HIDDEN, KEY_VALUE),
    "self_attn.o_proj": (QUERY, HIDDEN),
    "mlp.gate_proj": (HIDDEN, MLP),
    "mlp.up_proj": (HIDDEN, MLP),
    "mlp.down_proj": (MLP, HIDDEN),
}
CALIBRATION_ROWS = 250 * 2048
METHODS = ("two-sided", "one-sided")


@dataclass(frozen=True)
class Tensor:
    """One linear: its size (in, out), wall and CPU seconds (the latter only without `--workers`), and errors."""

    name: str
    rows: int
    columns: int
    seconds: float
    cpu: float | None
    proxy_error: float
    weight_error: float


@dataclass(frozen=True)
class Report:
    """The measured layers and `fc`, and what follows for the whole drafter. Times in seconds, memory in GiB."""

    bits: float
    method: str
    encoder: str
    threads: int
    workers: int
    layers_measured: int
    weights_measured: int
    wall: float
    cpu: float
    peak_memory: float
    making_inputs: float
    whole_wall: float
    whole_cpu: float
    tensors: tuple[Tensor, ...]


def make_weight(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Heavy-tailed: Student's t with four degrees of freedom, lognormal channel scales on both sides, (in, out)."""
    random = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=random)
    chi = torch.zeros(rows, columns)
    for _ in range(4):
        chi.add_(torch.randn(rows, columns, generator=random).square_())
    weight.div_(chi.div_(4).sqrt_()).mul_(0.02)
    weight.mul_(torch.exp(0.3 * torch.randn(rows, 1, generator=random)))
    return weight.mul_(torch.exp(0.3 * torch.randn(columns, generator=random)))


def make_hessian(features: int, seed: int) -> Hessian:
    """Correlated: a power law over some dimensions, white noise over all, uneven features and six loud ones."""
    random = torch.Generator().manual_seed(seed)
    rank = min(features // 8, 640)
    mixing = torch.randn(features, rank, generator=random) * (1.0 + torch.arange(rank)) ** -0.5
    matrix = mixing @ mixing.T
    matrix.diagonal().add_(0.1)
    scales = torch.exp(0.5 * torch.randn(features, generator=random))
    scales[:: features // 6] *= 5.0
    matrix.mul_(scales[:, None]).mul_(scales)
    return Hessian(matrix, float(CALIBRATION_ROWS), CALIBRATION_ROWS, 0)


def linears(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Names and sizes (in, out) of `fc` and the first layers, or of those that `--only` names."""
    found = [("fc", TAPS * HIDDEN, HIDDEN)]
    for layer in range(options.layers):
        found += [(f"layers.{layer}.{name}", *shape) for name, shape in LAYER_SHAPES.items()]
    return [linear for linear in found if not options.only or linear[0] in options.only]


class Tasks:
    """The linears as tasks, each made when it is asked for; `seconds` counts the CPU and wall time of that."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.cpu_seconds = self.wall_seconds = 0.0

    def __iter__(self) -> Iterator[LinearTask]:
        for index, (name, rows, columns) in enumerate(linears(self.options)):
            cpu, wall = time.process_time(), time.perf_counter()
            settings = QuantSettings(
                bits=self.options.bits, seed=index, threads=self.options.threads, encoder=self.options.encoder
            )
            outputs = make_hessian(columns, 3 * index + 2) if self.options.method == "two-sided" else None
            weight, inputs = make_weight(rows, columns, 3 * index), make_hessian(rows, 3 * index + 1)
            task = LinearTask(name, weight, inputs, outputs, None, settings)
            self.cpu_seconds += time.process_time() - cpu
            self.wall_seconds += time.perf_counter() - wall
            yield task


def measure(options: argparse.Namespace) -> Report:
    """Quantize `fc` and the first layers."""
    tasks, sizes = Tasks(options), {name: (rows, columns) for name, rows, columns in linears(options)}
    executor = make_executor("local", options.workers, options.threads)
    done: list[Tensor] = []
    wall, cpu_before = time.perf_counter(), cpu_seconds()
    for name, result in executor.run(tasks):
        cpu = None
        if options.workers < 2:
            cpu = round(cpu_seconds() - cpu_before - tasks.cpu_seconds - sum(tensor.cpu or 0.0 for tensor in done), 2)
        done.append(Tensor(name, *sizes[name], result.seconds, cpu, result.proxy_error, result.weight_error))
        print(f"{name:<26} {done[-1].rows:>6} x {done[-1].columns:<6} {result.seconds:7.1f} s", file=sys.stderr)
    wall = time.perf_counter() - wall - tasks.wall_seconds
    all_cpu = cpu_seconds() - cpu_before - tasks.cpu_seconds
    own, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    whole = 1.0 if options.only else whole_share([tensor.seconds for tensor in done], options.layers)
    whole_cpu = whole
    if not options.only and options.workers < 2:
        whole_cpu = whole_share([tensor.cpu or 0.0 for tensor in done], options.layers)
    return Report(
        bits=options.bits,
        method=options.method,
        encoder=options.encoder,
        threads=options.threads,
        workers=options.workers,
        layers_measured=options.layers,
        weights_measured=sum(tensor.rows * tensor.columns for tensor in done),
        wall=round(wall, 1),
        cpu=round(all_cpu, 1),
        peak_memory=round((own + max(options.workers, 1) * children) / 2**20, 2),
        making_inputs=round(tasks.wall_seconds, 1),
        whole_wall=round(wall * whole, 1),
        whole_cpu=round(all_cpu * whole_cpu, 1),
        tensors=tuple(done),
    )


def profiled(options: argparse.Namespace) -> Report:
    """As `measure`; the functions in which most CPU time was spent go to standard error."""
    profile = cProfile.Profile(time.process_time)
    report = profile.runcall(measure, options)
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(15)
    return report


def cpu_seconds() -> float:
    """CPU time of this process and of those that it has waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def whole_share(seconds: list[float], layers: int) -> float:
    """How many times as long as `fc` (the first) and these layers the whole drafter takes."""
    fc = seconds[0] / sum(seconds)
    return fc + (1.0 - fc) * LAYERS / layers


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bits", type=float, default=6)
    parser.add_argument("--layers", type=int, choices=range(1, LAYERS + 1), default=LAYERS, help="how many to measure")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these linears alone, with nothing extrapolated")
    parser.add_argument("--method", choices=METHODS, default=METHODS[0])
    parser.add_argument("--encoder", choices=ENCODERS, default=ENCODERS[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--workers", type=int, default=0, help="tensors at a time, in processes that share the threads")
    parser.add_argument("--profile", action="store_true", help="where CPU time goes; of use with --threads 1")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    options = parser.parse_args(arguments)
    if not linears(options):
        parser.error("--only names none of the linears, such as fc or layers.0.mlp.up_proj")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Measure; print a summary, or one JSON object with `--json`."""
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    report = profiled(options) if options.profile else measure(options)
    if options.json:
        facts = {"instruction_sets": encoder_paths(), "torch": torch.__version__, "python": platform.python_version()}
        print(json.dumps({**facts, **asdict(report)}))
    else:
        print(f"{len(report.tensors)} linears, {report.weights_measured / 1e6:.0f} M weights:")
        print(f"{report.wall:.0f} s wall, {report.cpu:.0f} s CPU, {report.peak_memory:.2f} GiB at the peak")
        if not options.only:
            print(f"whole drafter: {report.whole_wall / 60:.1f} min wall, {report.whole_cpu / 60:.1f} min CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())
