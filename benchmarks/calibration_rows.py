"""How retention depends on what the calibration rows are and how many there are: docs/calibration_methods.md.

    python benchmarks/calibration_rows.py --source demo --target demo --bits 2,3 --rows 10,30,100,250

Sources are `chat` (the target's own answers), `default` (corpora and prompts, none of it written by the target) and a
mixture, half of each. Fewer rows are the first of more. All drafters are measured on the same held-out answers of the
target, to prompts that are in no calibration row; each source is compared with `default` at the same rows, paired.
Seconds are those of making 250 rows (or the most that is asked for), and of the calibration pass over them.
"""

from __future__ import annotations

import argparse
import time
from itertools import chain
from pathlib import Path

import torch

from exl3_dflash.calibration.rows import CHAT, DEFAULT, RowSet, load_rows
from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.hub.resolve import resolve
from exl3_dflash.measure.fidelity import measure_fidelity, tally_rows
from exl3_dflash.measure.grid_variants import VariantMaker
from exl3_dflash.measure.tallies import TallyTable, summarize
from exl3_dflash.progress import Reporter
from exl3_dflash.target.load import load_target

REFERENCE, MIXTURE = "unquantized", "mixture"


def main() -> None:
    """Quantize once per source, number of rows and bit rate; measure all together; print."""
    options = _options()
    reporter = Reporter()
    torch.set_num_threads(options.threads or torch.get_num_threads())
    checkpoint = DrafterCheckpoint.open(resolve(options.source, "drafter").path)
    resolved = resolve(options.target, "target")
    target = load_target(resolved.path, device="cpu", dtype="float32", name=resolved.name)
    drafter = DrafterModel.from_checkpoint(checkpoint)
    settings = JobSettings(
        source=options.source, target=options.target, out_dir=Path(), encoder="fast", threads=options.threads
    )
    counts = [int(count) for count in options.rows.split(",")]
    rows: dict[str, tuple[TokenRow, ...]] = {}
    held_out: tuple[TokenRow, ...] = ()
    for source in (CHAT, DEFAULT):
        start = time.perf_counter()
        made = load_rows(
            source,
            target,
            rows=max(counts),
            cols=options.cols,
            held_out=options.eval_rows,
            progress=reporter,
            target_directory=resolved.path,
        )
        print(f"{source}: {len(made.rows)} rows, {made.tokens} tokens, {time.perf_counter() - start:.0f} s")
        rows[source] = made.rows
        held_out = held_out or made.held_out
    rows[MIXTURE] = tuple(chain.from_iterable(zip(rows[CHAT], rows[DEFAULT], strict=False)))
    accept_length = measure_fidelity(target, {REFERENCE: drafter}, held_out).drafters[0].accept_length
    drafters = {REFERENCE: drafter}
    for source, all_rows in rows.items():
        for count in counts:
            start = time.perf_counter()
            chosen = RowSet(all_rows[:count], source, held_out[:1])
            maker = VariantMaker(checkpoint, drafter, target, chosen, settings, accept_length, reporter)
            for bits in map(float, options.bits.split(",")):
                drafters[_name(source, count, bits)] = maker.make(bits, "two-sided").drafter
            print(f"{source}, {count} rows: {time.perf_counter() - start:.0f} s")
    table = tally_rows(target, drafters, held_out)
    print(_table(table, list(rows), counts, [float(bits) for bits in options.bits.split(",")]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="demo", help="the unquantized drafter")
    parser.add_argument("--target", default="demo", help="its target")
    parser.add_argument("--bits", default="2,3", help="comma-separated bits per weight")
    parser.add_argument("--rows", default="10,30,100,250", help="comma-separated numbers of rows")
    parser.add_argument("--cols", type=int, default=512)
    parser.add_argument("--eval-rows", type=int, default=120)
    parser.add_argument("--threads", type=int, default=0)
    return parser.parse_args()


def _name(source: str, count: int, bits: float) -> str:
    return f"{source} {count} {bits:g}"


def _table(table: TallyTable, sources: list[str], counts: list[int], rates: list[float]) -> str:
    """Retention, and the ratio to `default`, as Markdown."""
    retained = {row.name: row for row in summarize(table).drafters}
    lines = ["| bits | rows | " + " | ".join(f"{s}, %" for s in sources) + " | chat / default | mixture / default |"]
    lines.append("|---" * (len(sources) + 4) + "|")
    for bits in rates:
        for count in counts:
            cells = [retained[_name(source, count, bits)] for source in sources]
            figures = [_percent(cell.retention, cell.retention_ci95) for cell in cells]
            ratios = [_ratio(table, _name(DEFAULT, count, bits), _name(s, count, bits)) for s in (CHAT, MIXTURE)]
            lines.append(f"| {bits:g} | {count} | {' | '.join([*figures, *ratios])} |")
    return "\n".join(lines)


def _ratio(table: TallyTable, base: str, other: str) -> str:
    both = TallyTable((), {name: table.tallies[name] for name in (base, other)}, 0, table.block_size)
    row = summarize(both).drafters[1]
    return _percent(row.retention, row.retention_ci95)


def _percent(value: float, interval: tuple[float, float]) -> str:
    return f"{100 * value:.1f} ({100 * interval[0]:.1f} to {100 * interval[1]:.1f})"


if __name__ == "__main__":
    main()
