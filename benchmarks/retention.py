"""One drafter at many bit rates, calibrated and not, compared by `exl3-dflash eval`: docs/fidelity.md.

    python benchmarks/retention.py --write
    python benchmarks/retention.py --source DRAFTER --target TARGET --bits 3,4 --data chat --json eval.json

Runs `exl3-dflash quantize` once per rate and mode into a temporary directory, then `exl3-dflash eval` over all of them
with the unquantized drafter as reference, and prints a Markdown table. `--write` puts table and plot into docs/. The
default rows are the embedded pair's held-out prompts, answered by its target; no calibration sees them.
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import tempfile
from pathlib import Path

from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.measure.evaluation import EvalResult, EvalSettings, EvaluatedDrafter, evaluate
from exl3_dflash.measure.plots import check_plot, plot_fidelity
from exl3_dflash.measure.tables import plot_entries
from exl3_dflash.progress import Reporter

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "fidelity.md"
BEGIN, END = "<!-- fidelity: benchmarks/retention.py --write -->", "<!-- end of fidelity -->"
HELD_OUT = str(importlib.resources.files("exl3_dflash").joinpath("demo", "heldout_prompts.jsonl"))
MODES = {"none": "uncalibrated", "target": "calibrated"}


def main() -> None:
    """Quantize, evaluate, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="demo", help="the unquantized drafter")
    parser.add_argument("--target", default="demo", help="its target")
    parser.add_argument("--bits", default="2,2.5,3,4,6", help="comma-separated bits per weight")
    parser.add_argument("--cal-data", default="chat", help="as for exl3-dflash quantize")
    parser.add_argument("--cal-rows", type=int, default=48)
    parser.add_argument("--cal-cols", type=int, default=384)
    parser.add_argument("--data", default=HELD_OUT, help="as for exl3-dflash eval")
    parser.add_argument("--rows", type=int, default=64, help="rows to measure on")
    parser.add_argument("--anchors", type=int, default=48, help="anchors per row")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the result of eval here")
    parser.add_argument("--write", action="store_true", help="put table and plot into docs/fidelity.md")
    options = parser.parse_args()
    if options.write:
        check_plot(DOCUMENT.with_suffix(".png"))
    with tempfile.TemporaryDirectory(prefix="exl3-dflash-retention-") as folder:
        drafters = [options.source, *_quantize_all(options, Path(folder))]
        settings = EvalSettings(
            target=options.target,
            drafters=tuple(drafters),
            rows=options.rows,
            anchors_per_row=options.anchors,
            cols=options.cal_cols,
            data=options.data,
            device="cpu",
            dtype="float32",
            threads=options.threads,
        )
        result = evaluate(settings, Reporter())
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result.to_json(), indent=2) + "\n", encoding="utf-8")
    if options.write:
        title = f"{result.target['name']}: {result.anchors} anchors in {result.rows} held-out rows"
        plot_fidelity(plot_entries(result), DOCUMENT.with_suffix(".png"), title)
        document = DOCUMENT.read_text(encoding="utf-8")
        before, after = document.split(BEGIN)[0], document.split(END)[1]
        DOCUMENT.write_text(f"{before}{BEGIN}\n{table(result)}\n{END}{after}", encoding="utf-8")


def _quantize_all(options: argparse.Namespace, folder: Path) -> list[str]:
    """A directory for every rate and mode."""
    directories = []
    for bits in map(float, options.bits.split(",")):
        for mode, name in MODES.items():
            out = folder / f"{bits:g}-bpw-{name}"
            settings = JobSettings(
                source=options.source,
                target=options.target if mode == "target" else None,
                out_dir=out,
                bits=bits,
                calibration=mode,
                cal_data=options.cal_data,
                cal_rows=options.cal_rows,
                cal_cols=options.cal_cols,
                eval_rows=8 if mode == "target" else 0,
                device="cpu",
                dtype="float32",
                threads=options.threads,
            )
            quantize_drafter(settings, Reporter())
            directories.append(str(out))
    return directories


def table(result: EvalResult) -> str:
    """The result as Markdown: one line per drafter, then position-wise acceptance."""
    packages = ("exl3-dflash", "torch", "transformers")
    versions = ", ".join(f"{name} {result.versions[name]}" for name in packages if name in result.versions)
    positions = range(1, result.block_size)
    return "\n".join(
        [
            f"{result.anchors} anchors in {result.rows} held-out rows, {result.settings['dtype']} on "
            f"{result.target['device']} ({versions}).",
            "",
            "| drafter | accept length | retained, % | top-1 agreement, % | KL, nats |",
            "|---|---|---|---|---|",
            *map(_line, result.drafters),
            "",
            "| accepted at position, % | " + " | ".join(map(str, positions)) + " |",
            "|---" * result.block_size + "|",
            *map(_position_line, result.drafters),
        ]
    )


def _line(row: EvaluatedDrafter) -> str:
    length = f"{row.accept_length:.3f} ({row.ci95[0]:.3f} to {row.ci95[1]:.3f})"
    retained = _percent(row.retention, row.retention_ci95)
    agreement = _percent(row.top1_agreement, row.top1_agreement_ci95)
    return f"| {row.name} | {length} | {retained} | {agreement} | {row.kl:.4f} |"


def _position_line(row: EvaluatedDrafter) -> str:
    return f"| {row.name} | " + " | ".join(f"{100 * value:.1f}" for value in row.position_acceptance) + " |"


def _percent(value: float, interval: tuple[float, float]) -> str:
    return f"{100 * value:.2f} ({100 * interval[0]:.2f} to {100 * interval[1]:.2f})"


if __name__ == "__main__":
    main()
