"""The probe as a step of a quantization job: what the checkpoint leaves open is measured, used and written down.

What is chosen goes into the config that everything after reads: calibration, measurement, and the output, which pins
`tap_shift` and, where another embedding scale than the target's was chosen, `input_embedding_scale`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from exl3_dflash.calibration.rows import CHAT, RowSet, load_rows
from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.measure.candidates import ReconfiguredCheckpoint
from exl3_dflash.measure.probe import PROBE_ROWS, ProbeResult, open_settings, probe_settings, rescaled
from exl3_dflash.progress import Reporter
from exl3_dflash.target.base import Target

PROBE_COLS = 512
PROBE_ANSWER_TOKENS = 64


def probe_checkpoint(
    checkpoint: DrafterCheckpoint,
    target: Target,
    rows: RowSet,
    target_directory: Path | None,
    seed: int,
    reporter: Reporter,
) -> tuple[DrafterCheckpoint, ProbeResult | None]:
    """Choose what the checkpoint leaves open and say so.

    Args:
        checkpoint: the unquantized drafter.
        target: its target.
        rows: of the job; those that the target wrote are used, and where there are none it writes a few.
        target_directory, seed: for rows.
        reporter: is told every choice with its evidence.

    Returns:
        The checkpoint under the chosen config, and the result; None where there was nothing to choose or nothing to
        choose it on.
    """
    if not open_settings(checkpoint, target):
        return checkpoint, None
    try:
        chosen = probe_rows(target, rows, target_directory, seed)
        result = probe_settings(checkpoint, target, chosen, seed=seed)
    except Exl3DflashError as error:
        reporter.note(f"note: tap shift and embedding scale were not probed, the defaults are kept: {error.what}")
        return checkpoint, None
    for setting in result.settings:
        reporter.note(f"probe, {setting.setting} {setting.choice:g}: {setting.reason}")
    config = checkpoint.config
    shift, scale = result.choice("tap_shift"), result.choice("embedding_scale")
    if shift is not None:
        config = replace(config, tap_shift=int(shift.choice))
    if scale is not None and scale.outcome == "changed":
        config = rescaled(config, scale.choice / scale.default)
    return ReconfiguredCheckpoint(checkpoint, config, {}), result


def probe_notes(result: ProbeResult | None) -> list[str]:
    """What the report must say about choices that were no choices."""
    if result is None:
        return []
    return [choice.reason for choice in result.settings if choice.outcome in ("tie", "failed")]


def probe_rows(target: Target, rows: RowSet, target_directory: Path | None, seed: int) -> Sequence[TokenRow]:
    """A few rows that the target wrote: the job's held-out ones, its calibration ones, or new short answers."""
    written = [row for row in (*rows.held_out, *rows.rows) if row.prompt_length > 0]
    if written:
        return written[:PROBE_ROWS]
    if not target.tokenizer.has_chat_template:
        return (*rows.held_out, *rows.rows)[:PROBE_ROWS]
    answers = load_rows(
        CHAT,
        target,
        rows=0,
        cols=PROBE_COLS,
        seed=seed,
        held_out=PROBE_ROWS,
        answer_tokens=PROBE_ANSWER_TOKENS,
        target_directory=target_directory,
    )
    return answers.held_out
