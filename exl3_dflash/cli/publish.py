"""`exl3-dflash publish`: quantized drafters onto the Hugging Face Hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from exl3_dflash.cli.options import JsonOption, QuietOption, VerboseOption, set_verbosity


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("publish")(publish)


def publish(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="DIR... REPO", help="Directories with their cards, then org/name; several are a branch each."
        ),
    ],
    branch: Annotated[
        str | None, typer.Option("--branch", help="Branch for one directory, for example 6.00bpw; main by default.")
    ] = None,
    private: Annotated[bool, typer.Option("--private", help="Create the repository private.")] = False,
    pull_request: Annotated[bool, typer.Option("--pr", help="Open a pull request on main instead.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would happen; needs no network.")] = False,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Commit message.")] = None,
    card: Annotated[Path | None, typer.Option("--card", help="The family's card; made anew by default.")] = None,
    json_output: JsonOption = False,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check quantized drafters and their cards, upload them, and verify what arrived."""
    set_verbosity(verbose, quiet)
    if len(names) < 2:
        raise typer.BadParameter("give at least one directory, and the repository last", param_hint="DIR... REPO")
    if quiet:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()
    from exl3_dflash.hub.publish import publish as publish_drafters
    from exl3_dflash.hub.publishing_plan import PublishSettings, directories_of
    from exl3_dflash.progress import Reporter

    settings = PublishSettings(
        directories=directories_of([Path(name) for name in names[:-1]]),
        repository=names[-1],
        branch=branch,
        private=private,
        pull_request=pull_request,
        message=message,
        card=card,
    )
    result = publish_drafters(settings, dry_run=dry_run, reporter=Reporter(quiet=quiet))
    typer.echo(json.dumps(result.to_json(), indent=2) if json_output else result.summary())
