"""`exl3-dflash dequantize`: an EXL3 drafter back to plain weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from exl3_dflash.cli.options import JsonOption, QuietOption, VerboseOption, set_verbosity


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("dequantize")(dequantize)


def dequantize(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="An EXL3 drafter: a directory or org/name[@revision].")
    ],
    out: Annotated[Path, typer.Option("--out", help="Directory to create.")],
    dtype: Annotated[str, typer.Option("--dtype", help="Stored type: bfloat16, float16 or float32.")] = "bfloat16",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing --out.")] = False,
    json_output: JsonOption = False,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Decode an EXL3 drafter into plain weights that other engines and converters read."""
    set_verbosity(verbose, quiet)
    from exl3_dflash.dequantization import dequantize_drafter
    from exl3_dflash.progress import Reporter

    report = dequantize_drafter(source, out, dtype=dtype, force=force, reporter=Reporter(quiet=quiet))
    typer.echo(json.dumps(report.to_json(), indent=2) if json_output else report.summary())
