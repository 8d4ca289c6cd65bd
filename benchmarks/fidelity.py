"""Retention over bits and methods on one pair: EXL3 in several ways, and GGUF. The tables of docs/fidelity_grid.md.

    python benchmarks/fidelity.py --source demo --target demo --cal-data chat --bits 2,3,4 --out grid --write demo
    python benchmarks/fidelity.py --source DRAFTER --target TARGET --cal-rows 32 --cal-cols 256 --data ROWS.safetensors

Prints Markdown tables. `--out DIR` keeps every finished variant: the same command goes on where it was stopped. `--json
FILE` writes every figure, `--write SECTION` puts tables and plot into docs/fidelity_grid.md. The methods are those of
`exl3_dflash.measure.grid`; each is compared with the one before it at the same bits, paired, in the order of
`--methods`. Held-out rows come from the source of the calibration rows (no prompt is on both sides) or from `--data`,
whose prompts are then left out of the calibration rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch

from exl3_dflash.calibration.rows import RowSet, load_rows
from exl3_dflash.conversion.report import package_versions
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.conversion.tuning import TuningSettings
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub.resolve import ResolvedModel, resolve
from exl3_dflash.measure.gguf_baseline import GGUF_BITS, check_gguf
from exl3_dflash.measure.grid import METHODS, REFERENCE, GridResult, Variant, run_grid
from exl3_dflash.measure.grid_store import GridStore
from exl3_dflash.measure.plots import PlotEntry, check_plot, plot_retention
from exl3_dflash.pairing import check_pairing
from exl3_dflash.progress import Reporter
from exl3_dflash.target.base import Target
from exl3_dflash.target.load import load_target

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "fidelity_grid.md"


def main() -> None:
    """Run the grid and print its tables."""
    options = _options()
    reporter = Reporter()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    plot = DOCUMENT.with_name(f"{DOCUMENT.stem}_{options.write}.png")
    if options.write:
        check_plot(plot)
    checkpoint = DrafterCheckpoint.open(resolve(options.source, "drafter").path)
    variants = _variants(options)
    if any(variant.method in GGUF_BITS for variant in variants):
        check_gguf(checkpoint.linears)
    resolved = resolve(options.target, "target")
    target = load_target(resolved.path, device=options.device, dtype=options.dtype, name=resolved.name)
    check_pairing(checkpoint, target.facts)
    rows = _rows(options, target, resolved, reporter)
    settings = JobSettings(
        source=options.source,
        target=options.target,
        out_dir=Path(),
        cal_data=options.cal_data,
        encoder=options.encoder,
        seed=options.seed,
        threads=options.threads,
    )
    store = GridStore(options.out, _identity(options, checkpoint, target, rows)) if options.out else None
    result = run_grid(checkpoint, target, rows, variants, settings, reporter, store, options.anchors)
    text = tables(result)
    print(text)
    if options.json:
        options.json.write_text(json.dumps(result.to_json() | {"versions": package_versions()}, indent=2) + "\n")
    if options.write:
        title = f"{target.facts.name}: {result.anchors} anchors in {result.rows} held-out rows"
        plot_retention(plot_entries(result), plot, title)
        write_section(options.write, text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="demo", help="the unquantized drafter")
    parser.add_argument("--target", default="demo", help="its target")
    parser.add_argument("--bits", default="2,3,4", help="comma-separated bits per weight")
    parser.add_argument("--methods", default="uncalibrated,one-sided,two-sided", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--tuned", default="", help="bits at which two-sided is also followed by --tune")
    parser.add_argument("--cal-data", default="chat", help="as for exl3-dflash quantize")
    parser.add_argument("--cal-rows", type=int, default=96)
    parser.add_argument("--cal-cols", type=int, default=512)
    parser.add_argument("--data", help="held-out rows from here instead of --cal-data")
    parser.add_argument("--eval-rows", type=int, default=120)
    parser.add_argument("--anchors", type=int, help="anchors measured per row; every one by default")
    parser.add_argument("--encoder", default="fast", help="fast or exact")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--out", type=Path, help="keep finished variants here, and go on from those that are there")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--write", default="", help="put tables and plot into this section of docs/fidelity_grid.md")
    return parser.parse_args()


def _variants(options: argparse.Namespace) -> list[Variant]:
    methods = options.methods.split(",")
    rates = [float(bits) for bits in options.bits.split(",")]
    tuned = [float(bits) for bits in options.tuned.split(",") if bits]
    made = [Variant(bits, method) for bits in rates for method in methods if method not in GGUF_BITS]
    made += [Variant(bits, "two-sided-tuned") for bits in tuned]
    made += [Variant(GGUF_BITS[method], method) for method in methods if method in GGUF_BITS]
    return sorted(made, key=lambda variant: variant.bits)


def _rows(options: argparse.Namespace, target: Target, resolved: ResolvedModel, reporter: Reporter) -> RowSet:
    """Calibration and held-out rows, no prompt on both sides."""

    def load(source: str, rows: int, held_out: int) -> RowSet:
        return load_rows(
            source,
            target,
            rows=rows,
            cols=options.cal_cols,
            held_out=held_out,
            seed=options.seed,
            progress=reporter,
            target_directory=resolved.path,
        )

    if options.data is None:
        return load(options.cal_data, options.cal_rows, options.eval_rows)
    measured = load(options.data, 0, options.eval_rows).held_out
    prompts = {tuple(row.ids[: row.prompt_length].tolist()) for row in measured}
    given = load(options.cal_data, options.cal_rows, 0)
    kept = [row for row in given.rows if tuple(row.ids[: row.prompt_length].tolist()) not in prompts]
    return replace(given, rows=tuple(kept), held_out=measured)


def _identity(
    options: argparse.Namespace, checkpoint: DrafterCheckpoint, target: Target, rows: RowSet
) -> dict[str, object]:
    """What makes the figures of a grid what they are."""
    digest = hashlib.sha256()
    for row in (*rows.rows, *rows.held_out):
        digest.update(f"{row.prompt_length} {len(row.ids)} ".encode() + row.ids.numpy().tobytes())
    return {
        "drafter": checkpoint.sha256,
        "target": target.facts.sha256 or target.facts.name,
        "rows": digest.hexdigest(),
        "calibration_rows": len(rows.rows),
        "anchors": options.anchors,
        "encoder": options.encoder,
        "dtype": options.dtype,
        "seed": options.seed,
        "tuning": asdict(TuningSettings()) if options.tuned else None,
        "versions": package_versions(),
    }


def markers(section: str) -> tuple[str, str]:
    """The comments around a generated section."""
    return f"<!-- grid {section}: benchmarks/fidelity.py --write {section} -->", f"<!-- end of grid {section} -->"


def write_section(section: str, text: str) -> None:
    """Replace a section of the document.

    Raises:
        Exl3DflashError: there is no such section.
    """
    begin, end = markers(section)
    document = DOCUMENT.read_text(encoding="utf-8")
    if begin not in document or end not in document:
        raise Exl3DflashError(f"--write {section}", f"a section of {DOCUMENT.name} between its two comments")
    before, after = document.split(begin)[0], document.split(end)[1]
    DOCUMENT.write_text(f"{before}{begin}\n{text}\n{end}{after}", encoding="utf-8")


def tables(result: GridResult) -> str:
    """The grid as Markdown: a line per variant, methods compared, errors by tensor."""
    lines = [
        f"{result.anchors} held-out anchors in {result.rows} rows; calibration: {result.calibration_rows} rows, "
        f"{result.source}; 95 % bootstrap over rows, paired.",
        "",
        "| drafter | stored bpw | accept length | retained, % | top-1 agreement, % | KL | output error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result.fidelity:
        errors = result.output_errors.get(row.name)
        error = f"{sum(errors.values()) / len(errors):.4f}" if errors else "0"
        bpw = f"{result.bpw[row.name]:.2f}" if row.name in result.bpw else "16"
        lines.append(
            f"| {row.name} | {bpw} | {row.accept_length:.3f} ({row.ci95[0]:.3f} to {row.ci95[1]:.3f}) "
            f"| {_percent(row.retention, row.retention_ci95)} "
            f"| {_percent(row.top1_agreement, row.top1_agreement_ci95)} | {row.kl:.4f} | {error} |"
        )
    return "\n".join([*lines, "", *_comparison_table(result), "", *_tensor_table(result)])


def plot_entries(result: GridResult) -> list[PlotEntry]:
    """Every variant at its stored bits per weight, in one series per method."""
    return [
        PlotEntry(
            name=row.name,
            series=row.name.partition(", ")[2],
            bits=None if row.name == REFERENCE else result.bpw[row.name],
            retention=row.retention,
            retention_ci95=row.retention_ci95,
            position_acceptance=row.position_acceptance,
        )
        for row in result.fidelity
    ]


def _comparison_table(result: GridResult) -> list[str]:
    """Each method against the one before it."""
    lines = ["| method | against | accept length, ratio in % |", "|---|---|---|"]
    return lines + [f"| {c.better} | {c.base} | {_percent(c.ratio, c.ci95)} |" for c in result.comparisons]


def _tensor_table(result: GridResult) -> list[str]:
    """Held-out output error of every tensor, a line per variant."""
    tensors = list(dict.fromkeys(name for errors in result.output_errors.values() for name in errors))
    lines = ["| held-out output error | " + " | ".join(tensors) + " |", "|---" * (len(tensors) + 1) + "|"]
    for variant, errors in result.output_errors.items():
        cells = " | ".join(f"{errors[name]:.4f}" if name in errors else "copied" for name in tensors)
        lines.append(f"| {variant} | {cells} |")
    return lines


def _percent(value: float, interval: tuple[float, float]) -> str:
    return f"{100 * value:.2f} ({100 * interval[0]:.2f} to {100 * interval[1]:.2f})"


if __name__ == "__main__":
    main()
