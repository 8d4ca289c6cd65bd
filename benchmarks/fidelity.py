"""Retention over bits and methods on one pair: uncalibrated, one-sided and two-sided calibration.

    python benchmarks/fidelity.py --source demo --target demo --cal-data chat --bits 2,3,4 --json fidelity.json

Prints Markdown tables; `--json FILE` also writes every figure. The methods are those of `exl3_dflash.measure.grid`;
each is compared with the one before it at the same bits, paired, in the order of `--methods`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from exl3_dflash.calibration.rows import load_rows
from exl3_dflash.conversion.report import package_versions
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.hub.resolve import resolve
from exl3_dflash.measure.grid import METHODS, GridResult, Variant, run_grid
from exl3_dflash.pairing import check_pairing
from exl3_dflash.progress import Reporter
from exl3_dflash.target.load import load_target


def main() -> None:
    """Run the grid and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="demo", help="the unquantized drafter")
    parser.add_argument("--target", default="demo", help="its target")
    parser.add_argument("--bits", default="2,3,4", help="comma-separated bits per weight")
    parser.add_argument("--methods", default="uncalibrated,one-sided,two-sided", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--cal-data", default="chat", help="as for exl3-dflash quantize")
    parser.add_argument("--cal-rows", type=int, default=96)
    parser.add_argument("--cal-cols", type=int, default=512)
    parser.add_argument("--eval-rows", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args()

    reporter = Reporter()
    settings = JobSettings(
        source=options.source, target=options.target, out_dir=Path(), cal_data=options.cal_data, seed=options.seed
    )
    checkpoint = DrafterCheckpoint.open(resolve(options.source, "drafter").path)
    resolved = resolve(options.target, "target")
    target = load_target(resolved.path, device="cpu", dtype="float32", name=resolved.name)
    check_pairing(checkpoint, target.facts)
    rows = load_rows(
        options.cal_data,
        target,
        rows=options.cal_rows,
        cols=options.cal_cols,
        seed=options.seed,
        held_out=options.eval_rows,
        progress=reporter,
        target_directory=resolved.path,
    )
    methods = options.methods.split(",")
    variants = [Variant(float(bits), method) for bits in options.bits.split(",") for method in methods]
    result = run_grid(checkpoint, target, rows, variants, settings, reporter)
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result.to_json() | {"versions": package_versions()}, indent=2) + "\n")


def table(result: GridResult) -> str:
    """The grid as Markdown."""
    lines = [
        f"{result.anchors} held-out anchors in {result.rows} rows; calibration: {result.calibration_rows} rows, "
        f"{result.source}; 95 % bootstrap over rows, paired.",
        "",
        "| drafter | stored bpw | accept length | retained, % | top-1 agreement, % | KL | output error | seconds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result.fidelity:
        errors = result.output_errors.get(row.name)
        error = f"{sum(errors.values()) / len(errors):.4f}" if errors else "0"
        bpw = f"{result.bpw[row.name]:.2f}" if row.name in result.bpw else "16"
        lines.append(
            f"| {row.name} | {bpw} | {row.accept_length:.3f} ({row.ci95[0]:.3f} to {row.ci95[1]:.3f}) "
            f"| {_percent(row.retention, row.retention_ci95)} "
            f"| {_percent(row.top1_agreement, row.top1_agreement_ci95)} "
            f"| {row.kl:.4f} | {error} | {result.seconds.get(row.name, 0.0):.1f} |"
        )
    return "\n".join([*lines, "", *comparison_table(result), "", *tensor_table(result)])


def comparison_table(result: GridResult) -> list[str]:
    """Each method against the one before it."""
    lines = ["| method | against | accept length, ratio in % |", "|---|---|---|"]
    return lines + [f"| {c.better} | {c.base} | {_percent(c.ratio, c.ci95)} |" for c in result.comparisons]


def tensor_table(result: GridResult) -> list[str]:
    """Held-out output error of every tensor, a column per variant."""
    names = list(result.output_errors)
    lines = ["| held-out output error | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for tensor in result.output_errors[names[0]]:
        cells = " | ".join(f"{result.output_errors[name][tensor]:.4f}" for name in names)
        lines.append(f"| {tensor} | {cells} |")
    return lines


def _percent(value: float, interval: tuple[float, float]) -> str:
    return f"{100 * value:.2f} ({100 * interval[0]:.2f} to {100 * interval[1]:.2f})"


if __name__ == "__main__":
    main()
