"""`exl3-dflash doctor`: what is wrong with a drafter or its pairing, and the likely cause."""

from __future__ import annotations

import json
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
    app.command("doctor")(doctor)


def doctor(
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help=f"The drafter: {PAIR_NAMES}.")],
    target: Annotated[str, typer.Option("--target", help=f"The target to pair it with: {PAIR_NAMES}.")],
    rows: Annotated[
        int, typer.Option("--rows", min=0, help="Answers of the target to measure on; 0 looks at files only.")
    ] = 16,
    cols: Annotated[int, typer.Option("--cols", min=32, help="Most tokens of a measured row.")] = 512,
    seed: Annotated[int, typer.Option("--seed", help="Seed of rows and anchors.")] = 0,
    block_size: BlockSizeOption = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    threads: ThreadsOption = 0,
    json_output: JsonOption = False,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check a drafter and its target; exit code 0 if healthy, 1 if not."""
    set_verbosity(verbose, quiet)
    from exl3_dflash.doctor.render import render
    from exl3_dflash.doctor.run import DoctorSettings, diagnose
    from exl3_dflash.progress import Reporter

    settings = DoctorSettings(
        rows=rows, cols=cols, seed=seed, device=device, dtype=dtype.value, threads=threads, block_size=block_size
    )
    diagnosis = diagnose(drafter, target, settings, Reporter(quiet=quiet))
    typer.echo(json.dumps(diagnosis.to_json(), indent=2, allow_nan=False) if json_output else render(diagnosis))
    raise typer.Exit(0 if diagnosis.verdict.healthy else 1)
