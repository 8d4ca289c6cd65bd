"""`exl3-dflash quantize`: a DFlash drafter in, a calibrated EXL3 directory out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from exl3_dflash.cli.options import (
    PAIR_NAMES,
    BlockSizeOption,
    Dtype,
    DtypeOption,
    JsonOption,
    KernelDeviceOption,
    QuietOption,
    ThreadsOption,
    VerboseOption,
    set_verbosity,
)


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("quantize")(quantize)


def quantize(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help=f"The drafter: {PAIR_NAMES}.")],
    out: Annotated[Path, typer.Option("--out", help="Directory to create.")],
    target: Annotated[str | None, typer.Option("--target", help=f"The drafter's target: {PAIR_NAMES}.")] = None,
    bits: Annotated[
        float | None, typer.Option("--bits", help="Bits per weight: any mean from 1.5 to 8, or 1.", show_default="6.0")
    ] = None,
    plan: Annotated[
        str,
        typer.Option(
            "--plan", help="uniform; mixed: bits where they count; auto: uniform at the rates 1 to 8, 1.5, 2.5, 3.5."
        ),
    ] = "auto",
    recipe: Annotated[
        Path | None,
        typer.Option("--recipe", help="YAML with the bits of every tensor, instead of --bits; see docs/mixed_bits.md."),
    ] = None,
    head_bits: Annotated[
        float | None,
        typer.Option(
            "--head-bits", help="Bits of the drafter's own head; inert where it has none.", show_default="8.0"
        ),
    ] = None,
    codebook: Annotated[str, typer.Option("--codebook", help="mul1, mcg or 3inst.")] = "mul1",
    encoder: Annotated[
        str,
        typer.Option(
            "--encoder",
            help="Tile search on a CPU: fast (2 to 4 times as fast, errors within 0.02 %; mul1 only) or exact.",
        ),
    ] = "fast",
    calibration: Annotated[
        str, typer.Option("--calibration", help="target: run the target; none: as ExLlamaV3's converter does.")
    ] = "target",
    method: Annotated[
        str,
        typer.Option(
            "--method", help="two-sided: weigh errors by what inputs and outputs say; one-sided: inputs only."
        ),
    ] = "two-sided",
    cal_data: Annotated[
        str,
        typer.Option(
            "--cal-data",
            help="default: corpora and prompts; chat: the target's own answers; or a .txt, .jsonl, .safetensors file; "
            "auto: chat below 3 bits and with --tune, else default.",
        ),
    ] = "auto",
    cal_rows: Annotated[int, typer.Option("--cal-rows", help="Calibration rows.")] = 250,
    cal_cols: Annotated[int, typer.Option("--cal-cols", help="Tokens per calibration row.")] = 2048,
    eval_rows: Annotated[
        int, typer.Option("--eval-rows", help="Held-out rows to measure on before and after; 0 to skip.")
    ] = 32,
    thinking: Annotated[
        str, typer.Option("--thinking", help="Of the rows' prompts: on, off, both, or the template's default.")
    ] = "default",
    tune: Annotated[
        bool, typer.Option("--tune", help="Train scales and norms on the calibration rows after encoding.")
    ] = False,
    out_scales: Annotated[
        str, typer.Option("--out-scales", help="Output channel scales: auto, always or never.")
    ] = "auto",
    seed: Annotated[int, typer.Option("--seed", help="Seed of rows, anchors and sign flips.")] = 0,
    work_dir: Annotated[
        Path | None, typer.Option("--work-dir", help="Where finished steps are kept; beside --out by default.")
    ] = None,
    resume: Annotated[
        bool | None,
        typer.Option("--resume/--restart", help="Continue an interrupted job, or throw away what it left."),
    ] = None,
    executor: Annotated[
        str, typer.Option("--executor", help="Where tensors are encoded: local, or ray (a Ray cluster).")
    ] = "local",
    workers: Annotated[
        int,
        typer.Option("--workers", min=0, help="Tensors encoded at a time; 0: one (local), what fits (ray)."),
    ] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing --out.")] = False,
    block_size: BlockSizeOption = None,
    device: KernelDeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    threads: ThreadsOption = 0,
    json_output: JsonOption = False,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Quantize a DFlash drafter to EXL3, calibrated by running its target."""
    set_verbosity(verbose, quiet)
    from exl3_dflash.conversion.job import quantize_drafter
    from exl3_dflash.conversion.recipe import read_recipe
    from exl3_dflash.conversion.settings import DEFAULT_BITS, DEFAULT_HEAD_BITS, JobSettings
    from exl3_dflash.progress import Reporter

    if recipe is not None and (bits is not None or plan != "auto"):
        raise typer.BadParameter("the recipe says the bits of every tensor", param_hint="--bits, --plan with --recipe")
    given = read_recipe(recipe.expanduser()) if recipe is not None else None
    if head_bits is None and given is not None:
        head_bits = given.head_bits
    settings = JobSettings(
        source=source,
        target=target,
        out_dir=out.expanduser(),
        bits=DEFAULT_BITS if bits is None else bits,
        plan=plan,
        recipe=given,
        head_bits=DEFAULT_HEAD_BITS if head_bits is None else head_bits,
        codebook=codebook,
        encoder=encoder,
        out_scales=out_scales,
        calibration=calibration,
        method=method,
        cal_data=cal_data,
        cal_rows=cal_rows,
        cal_cols=cal_cols,
        thinking=thinking,
        tune=tune,
        eval_rows=eval_rows,
        seed=seed,
        block_size=block_size,
        force=force,
        work_dir=work_dir.expanduser() if work_dir is not None else None,
        resume=resume is True,
        restart=resume is False,
        executor=executor,
        workers=workers,
        device=device,
        dtype=dtype.value,
        threads=threads,
    )
    try:
        report = quantize_drafter(settings, Reporter(quiet=quiet))
    except (KeyboardInterrupt, SystemExit):
        if settings.work_path.is_dir():
            typer.echo(f"stopped; {settings.work_path} keeps what is finished: --resume continues", err=True)
        raise
    typer.echo(report.to_json_text() if json_output else report.summary())
