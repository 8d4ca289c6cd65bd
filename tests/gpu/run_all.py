"""Everything that can only be checked on a GPU, in one run: `tests/gpu/run_all.sh`, or `python -m tests.gpu.run_all`.

    (a) tiles on GPU and CPU         (b) layers and the demo drafter on GPU and CPU       (c) the drafter's logits
    (d) greedy generation            (e) time of encoding and of generating

Checks run in this order until the time is up; each is a function of the modules beside this one. Prints a table, writes
JSON, and exits with 1 if a check failed or could not run. Skipped checks are said, and do not count as passed.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from exl3_dflash.conversion.report import package_versions
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub.resolve import resolve
from exl3_dflash.runtime.engine import Engine
from exl3_dflash.runtime.load import load_pair
from quantize.cuda_extension import load_extension
from quantize.cuda_requirements import check_cuda_device, is_precompiled

from . import cpu_expert, drafting, generation, layers, speed, tiles
from .outcome import Findings, Outcome, as_json, run_check, table


@cache
def pair(device: str, drafter: str = "demo") -> Any:
    """The demo target with a drafter in ExLlamaV3's engine."""
    return load_pair("demo", drafter, device=device).engine()


def reference(drafter: str = "demo") -> Engine:
    """The same pair in the reference engine, FP32 on the CPU."""
    return load_pair("demo", drafter, device="cpu", dtype="float32").engine()


def checks(device: torch.device, out: Path) -> list[tuple[str, float, Callable[[], Findings]]]:
    """Every check: its name, the seconds that it may need, and the check. `out` keeps what they write."""
    name, demo = str(device), resolve("demo", "drafter").path
    quantized = out / "demo" / "gpu"  # made by (b)

    def drafts(drafter: Path) -> Findings:
        return drafting.compare_drafts(pair(name, str(drafter)), drafter)

    def text(drafter: Path) -> Findings:
        return generation.compare_generation(pair(name, str(drafter)), reference(str(drafter)))

    return [
        ("(a) tiles", 20, lambda: tiles.compare_tiles(device, load_extension(name))),
        (
            "(a) layers as the CPU expert kernel reads them",
            20,
            lambda: cpu_expert.compare_cpu_expert(load_extension(name)),
        ),
        ("(b) layers of 2048 x 2048", 60, partial(layers.compare_layers, device)),
        ("(b) demo drafter, calibrated", 60, partial(layers.compare_demo, device, out / "demo")),
        ("(c) logits of the demo drafter", 20, partial(drafts, demo)),
        ("(c) logits of the quantized drafter", 20, partial(drafts, quantized)),
        ("(d) generation with the demo drafter", 30, partial(text, demo)),
        ("(d) generation with the quantized drafter", 30, partial(text, quantized)),
        ("(e) engine against a bare loop", 30, lambda: speed.compare_engines(pair(name, str(demo)))),
        ("(e) encoding 0.5 B", 180, lambda: speed.compare_encoding(device, out / "half_billion")),
    ]


def extension_ready(device: str) -> Findings:
    """Import ExLlamaV3's extension, compiling it where that has not been done."""
    compiled: list[int] = []

    def progress(done: int, total: int) -> None:
        compiled.append(done)
        print(f"compiling ExLlamaV3's extension: {done} of {total} files", file=sys.stderr, flush=True)

    load_extension(device, progress)
    return True, {"compiled_now": bool(compiled), "precompiled": is_precompiled()}


def describe_machine(device: torch.device) -> dict[str, Any]:
    """What the numbers belong to."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "gpu_memory_gib": round(properties.total_memory / 2**30, 1),
        "cuda": torch.version.cuda,
        "cpu": platform.processor() or platform.machine(),
        "versions": package_versions(),
    }


def run(device: torch.device, out: Path, seconds: float) -> list[Outcome]:
    """Build the extension, then run all checks within `seconds`."""
    began = time.perf_counter()
    outcomes = [run_check("extension", partial(extension_ready, str(device)), seconds, 0)]
    if outcomes[0].state == "passed":
        for name, needs, check in checks(device, out):
            outcomes.append(run_check(name, check, seconds - (time.perf_counter() - began), needs))
            print(table(outcomes[-1:]), file=sys.stderr, flush=True)
    return outcomes


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="tests.gpu.run_all", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"), help="directory for what is written")
    parser.add_argument(
        "--seconds", type=float, default=570.0, help="time for everything, the extension's build included"
    )
    given = parser.parse_args(arguments)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        check_cuda_device(given.device, kernels=True)
    except Exl3DflashError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    given.out.mkdir(parents=True, exist_ok=True)
    device = torch.device(given.device)
    outcomes, machine = run(device, given.out, given.seconds), describe_machine(device)
    (given.out / "results.json").write_text(as_json(machine, outcomes) + "\n")
    print(json.dumps(machine))
    print(table(outcomes))
    return int(any(outcome.state in ("failed", "error") for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
