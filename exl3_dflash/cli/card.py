"""`exl3-dflash card`: the model card of a quantized drafter, or of a family of bit rates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from exl3_dflash.cli.options import JsonOption, QuietOption, VerboseOption, set_verbosity


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("card")(card)


def card(
    directories: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Written by exl3-dflash quantize; several are a family.")
    ],
    repo: Annotated[str | None, typer.Option("--repo", help="Where it is or will be published: org/name.")] = None,
    branch: Annotated[
        str | None, typer.Option("--branch", help="Its branch there; main for one, the bit rate for each of several.")
    ] = None,
    license_: Annotated[
        str | None, typer.Option("--license", help="License identifier; that of the source's card by default.")
    ] = None,
    license_name: Annotated[str | None, typer.Option("--license-name", help="Its name, for --license other.")] = None,
    license_link: Annotated[str | None, typer.Option("--license-link", help="Its text, for --license other.")] = None,
    base_model: Annotated[
        str | None, typer.Option("--base-model", help="The source drafter's Hub id, if it was a local directory.")
    ] = None,
    quantized_by: Annotated[
        str | None, typer.Option("--quantized-by", help="Person or organisation; that of --repo by default.")
    ] = None,
    upstream: Annotated[
        str | None, typer.Option("--upstream", help="The source's card: a file, org/name[@revision], or none.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="The card's file; README.md in DIR, required for a family.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Do not ask the Hub for the source's card.")] = False,
    json_output: JsonOption = False,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write the card of a quantized drafter from its quantize_report.json; several directories make a family."""
    set_verbosity(verbose, quiet)
    family = len(directories) > 1
    if family and out is None:
        raise typer.BadParameter("a family's card is for its main branch: say where to write it", param_hint="--out")
    if family and branch is not None:
        raise typer.BadParameter("each of several directories has its own branch", param_hint="--branch")
    if license_ is None and (license_name or license_link):
        raise typer.BadParameter("needs --license", param_hint="--license-name")
    from exl3_dflash.hub.cards import CardSettings, make_drafter_and_family_cards
    from model_cards import License

    chosen = License(license_, license_name, license_link) if license_ is not None else None
    settings = CardSettings(repo, branch or "main", chosen, base_model, quantized_by, upstream, offline)
    cards = make_drafter_and_family_cards(directories, settings, out)
    for made in cards:
        made.write()
    if not quiet:
        for note in dict.fromkeys(note for made in cards for note in made.notes):
            typer.echo(f"note: {note}", err=True)
    if json_output:
        typer.echo(json.dumps({"cards": [made.to_json() for made in cards]}, indent=2, default=str))
    else:
        for made in cards:
            typer.echo(f"wrote {made.file}")
