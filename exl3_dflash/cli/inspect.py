"""`exl3-dflash inspect`: what a drafter, or any EXL3 directory, holds."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from exl3_dflash.cli.options import PAIR_NAMES, JsonOption, QuietOption, VerboseOption, set_verbosity


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("inspect")(inspect)


def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"A drafter or EXL3 model: {PAIR_NAMES}.")],
    tensors: Annotated[bool, typer.Option("--tensors/--no-tensors", help="Show every tensor in the table.")] = True,
    sha256: Annotated[
        bool, typer.Option("--sha256/--no-sha256", help="Read all weights for their SHA-256 digest.")
    ] = True,
    json_output: JsonOption = False,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show config, tensors, bits, sizes and origin of a drafter or of any EXL3 directory."""
    set_verbosity(verbose, quiet)
    from exl3_dflash.hub.resolve import resolve
    from exl3_dflash.inspection import inspect_model
    from exl3_dflash.inspection_table import render

    found = inspect_model(resolve(model, "drafter"), sha256=sha256)
    typer.echo(json.dumps(found.to_json(), indent=2) if json_output else render(found, every_tensor=tensors))
