"""`exl3-dflash demo`: the main job on the embedded pair, in a minute on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from exl3_dflash.cli.options import JsonOption, QuietOption, ThreadsOption, VerboseOption, set_verbosity


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("demo")(demo)


def demo(
    out: Annotated[Path | None, typer.Option("--out", help="Keep the quantized drafter in this directory.")] = None,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Held-out prompts to generate from.")] = 32,
    threads: ThreadsOption = 1,
    json_output: JsonOption = False,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Quantize the embedded drafter, check it, and compare drafted with plain decoding."""
    set_verbosity(verbose, quiet)
    from exl3_dflash.demonstration import render, run_demo
    from exl3_dflash.progress import Reporter

    result = run_demo(Reporter(quiet=quiet), out=out, prompts=prompts, threads=threads)
    typer.echo(json.dumps(result.to_json(), indent=2, allow_nan=False) if json_output else render(result))
