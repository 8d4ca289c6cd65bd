"""Predicted against measured retention, and mixed plans against uniform ones: docs/mixed_bits.md.

    python benchmarks/mixed_bits.py --uniform 2,2.5,3,4 --mixed 2.25,2.5,3,3.5

Calibrates once, then decides, encodes and measures every plan on the same held-out rows, which decide nothing. Where a
mixed and a uniform plan have the same bits they are compared, paired.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from exl3_dflash.calibration.capture import calibrate
from exl3_dflash.calibration.fisher import FisherSettings
from exl3_dflash.calibration.rows import load_rows
from exl3_dflash.conversion.deciding import Pair, decide
from exl3_dflash.conversion.encoding import quantize_tensor
from exl3_dflash.conversion.plan import QuantizationPlan, make_plan
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.hub.resolve import resolve
from exl3_dflash.measure.fidelity import TallyTable, measure_fidelity, summarize, tally_rows
from exl3_dflash.measure.statistics import Interval
from exl3_dflash.pairing import check_pairing
from exl3_dflash.progress import Reporter
from exl3_dflash.target.load import load_target
from quantize.linear import decode_linear

EXACT = "unquantized"


def main() -> None:
    """Decide, encode, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="demo", help="the unquantized drafter")
    parser.add_argument("--target", default="demo", help="its target")
    parser.add_argument("--uniform", default="2,2.5,3,4", help="comma-separated bits per weight")
    parser.add_argument("--mixed", default="2.25,2.5,3,3.5", help="comma-separated mean bits per weight")
    parser.add_argument("--cal-data", default="chat", help="as for exl3-dflash quantize")
    parser.add_argument("--cal-rows", type=int, default=96)
    parser.add_argument("--cal-cols", type=int, default=512)
    parser.add_argument("--eval-rows", type=int, default=120)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()

    checkpoint = DrafterCheckpoint.open(resolve(options.source, "drafter").path)
    pair = _calibrated(options, checkpoint)
    plans, drafters = {}, {EXACT: pair.drafter}
    for kind in ("uniform", "mixed"):
        for bits in map(float, filter(None, getattr(options, kind).split(","))):
            settings = JobSettings(
                options.source, options.target, Path(), bits=bits, plan=kind, threads=options.threads
            )
            name = f"{bits:g} bits, {kind}"
            plans[name] = decide(settings, checkpoint, make_plan(checkpoint, settings), pair, Reporter(quiet=True))
            drafters[name] = _encoded(settings, checkpoint, plans[name], pair)
    print(report(tally_rows(pair.target, drafters, pair.rows.held_out), plans))


def _calibrated(options: argparse.Namespace, checkpoint: DrafterCheckpoint) -> Pair:
    resolved = resolve(options.target, "target")
    target = load_target(resolved.path, device="cpu", dtype="float32", name=resolved.name)
    check_pairing(checkpoint, target.facts)
    sizes = {"rows": options.cal_rows, "cols": options.cal_cols, "held_out": options.eval_rows}
    rows = load_rows(options.cal_data, target, seed=0, progress=Reporter(), target_directory=resolved.path, **sizes)
    drafter = DrafterModel.from_checkpoint(checkpoint, dtype=target.dtype, device=target.device)
    accept_length = measure_fidelity(target, {EXACT: drafter}, rows.held_out).drafters[0].accept_length
    calibration = calibrate(
        drafter, checkpoint.linears, target, rows.rows, accept_length=accept_length, fisher=FisherSettings()
    )
    return Pair(target, drafter, rows, calibration)


def _encoded(settings: JobSettings, checkpoint: DrafterCheckpoint, plan: QuantizationPlan, pair: Pair) -> DrafterModel:
    """The drafter with the plan carried out."""
    assert pair.calibration is not None
    drafter = DrafterModel.from_checkpoint(checkpoint, dtype=pair.drafter.dtype, device=pair.drafter.device)
    for tensor in plan.quantized:
        hessian = pair.calibration.hessians.get(tensor.linear.group)
        outputs = pair.calibration.output_hessians.get(tensor.linear.name)
        linear = quantize_tensor(settings, checkpoint, tensor, hessian, outputs)
        drafter.set_linear_weight(tensor.linear.name, decode_linear(linear))
    return drafter


def report(table: TallyTable, plans: dict[str, QuantizationPlan]) -> str:
    """Two Markdown tables, and the bits of every mixed plan."""
    result = summarize(table)
    lines = [
        f"{result.anchors} anchors in {result.rows} held-out rows.",
        "",
        "| plan | mean bits | predicted, % | measured, % |",
        "|---|---|---|---|",
    ]
    for row in result.drafters[1:]:
        plan = plans[row.name]
        assert plan.predicted_retention is not None
        measured = _percent(row.retention, row.retention_ci95)
        lines.append(f"| {row.name} | {plan.mean_bits:.3f} | {100 * plan.predicted_retention:.2f} | {measured} |")
    lines += ["", "| mixed against uniform | accept length, ratio in % |", "|---|---|"]
    for name in plans:
        base = name.replace("mixed", "uniform")
        if base != name and base in plans:
            both = replace(table, tallies={key: table.tallies[key] for key in (base, name)})
            row = summarize(both).drafters[1]
            lines.append(f"| {name.split(',')[0]} | {_percent(row.retention, row.retention_ci95)} |")
    linears = [tensor.linear.name for tensor in next(iter(plans.values())).body]
    mixed = [name for name in plans if name.endswith("mixed")]
    lines += ["", "| tensor | " + " | ".join(mixed) + " |", "|---" * (len(mixed) + 1) + "|"]
    bits = {name: {tensor.linear.name: tensor.bits for tensor in plans[name].body} for name in mixed}
    lines += [f"| {linear} | " + " | ".join(f"{bits[name][linear]:g}" for name in mixed) + " |" for linear in linears]
    return "\n".join(lines)


def _percent(value: float, interval: Interval) -> str:
    return f"{100 * value:.2f} ({100 * interval[0]:.2f} to {100 * interval[1]:.2f})"


if __name__ == "__main__":
    main()
