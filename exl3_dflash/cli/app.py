"""The `exl3-dflash` program: its commands, and the one place where errors become a line and an exit code.

Commands raise `Exl3DflashError` for what a user can mend. It is printed here as one line on stderr with exit code 1;
usage errors exit with 2 (typer), Ctrl-C with 130. Any other exception is a bug: one line as well, and a traceback with
`EXL3_DFLASH_DEBUG=1`. Modules of `exl3_dflash.cli` import nothing heavy at the top, so `--help` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from types import FrameType
from typing import Annotated

import typer

from exl3_dflash.cli import card, chat, demo, dequantize, doctor, eval, inspect, publish, quantize
from quantize.errors import Exl3DflashError

app = typer.Typer(
    name="exl3-dflash",
    help="Quantize DFlash drafters to EXL3 with calibration from their target, and run them with it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

for command_module in (quantize, chat, doctor, eval, demo, card, publish, inspect, dequantize):
    command_module.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        from exl3_dflash import __version__

        typer.echo(f"exl3-dflash {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Quantize DFlash drafters to EXL3 with calibration from their target, and run them with it."""


def debug_wanted() -> bool:
    """True when `EXL3_DFLASH_DEBUG` asks for tracebacks."""
    return os.environ.get("EXL3_DFLASH_DEBUG", "") not in ("", "0")


def main(args: list[str] | None = None) -> None:
    """Run the program and exit: 0 done, 1 a reported error, 2 wrong usage, 130 interrupted.

    Args:
        args: the arguments after the program's name; `sys.argv[1:]` if None.
    """
    previous = signal.signal(signal.SIGTERM, _stop)
    try:
        app(args=args, prog_name="exl3-dflash")
    except Exl3DflashError as error:
        _report(f"error: {error}")
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        sys.exit(130)
    except OSError as error:
        _report(f"error: {error}")
    except Exception as error:
        if _is_out_of_memory(error):
            _report(
                f"error: out of memory ({error}); expected: room for the models and for what they compute at once; "
                "fix: end other programs, give shorter rows or a smaller --dtype where the command has them"
            )
        _report(f"internal error: {type(error).__name__}: {error} (a bug: EXL3_DFLASH_DEBUG=1 shows where)")
    finally:
        signal.signal(signal.SIGTERM, previous)


def _stop(_number: int, _frame: FrameType | None) -> None:
    """SIGTERM ends the program as an exception does, so that nothing half-written stays."""
    sys.exit(128 + signal.SIGTERM)


def _is_out_of_memory(error: Exception) -> bool:
    """Whether Python, PyTorch or a GPU had no memory left. PyTorch has no class of errors for that on a CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _report(line: str) -> None:
    """Print one error line, with the traceback above it when asked for, and exit with code 1."""
    if debug_wanted():
        traceback.print_exc()
    typer.echo(" ".join(line.split()), err=True)
    sys.exit(1)
