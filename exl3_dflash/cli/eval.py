"""`exl3-dflash eval`: how well drafters predict one target, paired and with intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from exl3_dflash.cli.options import (
    PAIR_NAMES,
    BlockSizeOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    JsonOption,
    QuietOption,
    ThreadsOption,
    VerboseOption,
    set_verbosity,
)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("eval")(evaluate)


def evaluate(
    target: Annotated[str, typer.Option("--target", help=f"The drafters' target: {PAIR_NAMES}.")],
    drafter: Annotated[
        list[str], typer.Option("--drafter", help=f"A drafter, repeatable; the first is the reference: {PAIR_NAMES}.")
    ],
    rows: Annotated[int, typer.Option("--rows", min=1, help="Rows to measure on.")] = 32,
    cols: Annotated[int, typer.Option("--cols", min=32, help="Most tokens of a row.")] = 1024,
    data: Annotated[
        str,
        typer.Option("--data", help="chat or default: answers of the target; or a .txt, .jsonl, .safetensors file."),
    ] = "chat",
    thinking: Annotated[str, typer.Option("--thinking", help="on, off, both, or the template's default.")] = "default",
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Write a plot (.png, .svg, .pdf) here; needs the extra 'plots'.")
    ] = None,
    anchors: Annotated[
        int | None, typer.Option("--anchors", min=1, help="Anchors drawn per row; every one by default.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of rows and anchors.")] = 0,
    block_size: BlockSizeOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    threads: ThreadsOption = 0,
    json_output: JsonOption = False,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compare drafters of one target: accept length, retention, agreement, teacher-forced on the same anchors."""
    set_verbosity(verbose, quiet)
    from exl3_dflash.measure.plots import check_plot, plot_fidelity

    if plot is not None:
        check_plot(plot)
    from exl3_dflash.measure import evaluation, tables
    from exl3_dflash.progress import Reporter

    settings = evaluation.EvalSettings(
        target=target,
        drafters=tuple(drafter),
        rows=rows,
        cols=cols,
        data=data,
        thinking=thinking,
        anchors_per_row=anchors,
        seed=seed,
        block_size=block_size,
        device=device,
        dtype=dtype.value,
        threads=threads,
    )
    result = evaluation.evaluate(settings, Reporter(quiet=quiet))
    if plot is not None:
        title = f"{result.anchors} anchors in {result.rows} rows of {result.target['name']}"
        plot_fidelity(tables.plot_entries(result), plot, title)
    typer.echo(json.dumps(result.to_json(), indent=2, allow_nan=False) if json_output else tables.render(result))
