"""The cheap half of the doctor: everything that files tell, before any weight is read.

`quantize`, `chat` and the doctor itself begin here, through the same functions: the drafter's config and tensor headers
(`open_drafter`), the target's config and tokenizer (`sketch_target`), and the two held against each other
(`check_papers`). The first two commands stop at the first failure (`require_papers`); the doctor reports all of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from exl3_dflash.doctor.checks import FAIL, PASS, WARN, Check
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.config import SLIDING, DrafterConfig
from exl3_dflash.drafter.taps import tap_layer_indices
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.pairing import check_pairing, find_pairing
from exl3_dflash.target.load import TargetSketch
from quantize.checkpoint import TensorDirectory, linear_names

LEAST_BITS = 2.0  # mean bits per weight below which no drafter that was measured kept its acceptance
LEAST_RETENTION = 0.9  # a quantization that kept less is named as the cause
REPORT_FILE = "quantize_report.json"

# A config that cannot be read is blamed on the fact that its error names.
_CONFIG_CAUSES = (
    ("block_size", "block size"),
    ("--block-size", "block size"),
    ("target_layer_ids", "taps"),
    ("tap_shift", "taps"),
    ("rope", "rope"),
    ("mask_token_id", "mask token"),
    ("sliding_window", "window"),
    ("layer_types", "window"),
    ("causal", "causality"),
)
_PAIRING_ADVICE = "pair it with the target that it was trained for (its model card names it)"


def open_drafter(path: Path, block_size: int | None = None) -> tuple[list[Check], DrafterCheckpoint | None]:
    """Checks `config`, `files` and `tensors` of a drafter's directory, and the checkpoint if all passed.

    block_size: what the user says it is, for a config that does not.
    """
    try:
        checkpoint = DrafterCheckpoint.open(path, block_size)
        rows = checkpoint.config.block_size
    except Exl3DflashError:
        return _locate(path, block_size), None
    config = checkpoint.config
    directory = checkpoint.directory
    return [
        Check("config", PASS, f"{config.architecture}: {config.num_layers} layers, blocks of {rows}"),
        Check("files", PASS, f"{len(directory.names())} tensors, {directory.nbytes() / 2**20:.1f} MiB"),
        Check("tensors", PASS, "every tensor of the model is there, and no other"),
    ], checkpoint


def _locate(path: Path, block_size: int | None) -> list[Check]:
    """Which of the steps of opening a drafter fails."""
    checks = []
    for name, step in (
        ("config", lambda: _runnable_config(path, block_size)),
        ("files", lambda: TensorDirectory.open(path)),
        ("tensors", lambda: DrafterCheckpoint.open(path, block_size)),
    ):
        try:
            step()
        except Exl3DflashError as error:
            text = error.what if error.expected is None else f"{error.what}; expected {error.expected}"
            cause = next((c for key, c in _CONFIG_CAUSES if name == "config" and key in error.what), name)
            if "mask_token_id" in error.what and "missing" not in error.what:
                cause = "mask token"
            checks.append(Check(name, FAIL, text, error.fix or "download the drafter again", cause))
            return checks
        checks.append(Check(name, PASS, "readable"))
    return checks


def _runnable_config(path: Path, block_size: int | None) -> int:
    """Read the config and its block size, or raise."""
    config = DrafterConfig.from_directory(path)
    return (config if block_size is None else config.with_block_size(block_size)).block_size


def check_papers(checkpoint: DrafterCheckpoint, target: TargetSketch) -> list[Check]:
    """Every check of a pair that needs no weights, in a fixed order."""
    return [
        *_pairing_checks(checkpoint, target),
        _taps(checkpoint.config),
        *_mask_token(checkpoint, target),
        _rope(checkpoint.config, target),
        _window(checkpoint.config),
        _template(target),
        _quantization(checkpoint),
    ]


def require_papers(checkpoint: DrafterCheckpoint, target: TargetSketch) -> tuple[str, ...]:
    """What someone who is about to use the pair should know.

    Raises:
        Exl3DflashError: the drafter has no block size; the pair does not fit, one message with every reason.
    """
    _ = checkpoint.config.block_size  # raises where nobody has said it
    notes = check_pairing(checkpoint, target)
    known = {"dimensions", "layers", "vocabulary"}  # `check_pairing` has said these
    warned = [check for check in check_papers(checkpoint, target) if check.status != PASS and check.name not in known]
    return (*notes, *(f"{check.name}: {check.seen}" for check in warned if check.name in ("mask token", "window")))


def _pairing_checks(checkpoint: DrafterCheckpoint, target: TargetSketch) -> Iterator[Check]:
    findings = find_pairing(checkpoint, target)
    fine = {
        "dimensions": f"taps of width {checkpoint.target_hidden_size} as the target's layers",
        "layers": f"all tapped layers are among the target's {target.num_layers}",
        "vocabulary": f"{target.vocab_size} rows on both sides",
    }
    for name, seen in fine.items():
        found = [finding for finding in findings if finding.area == name]
        problems = [finding.text for finding in found if not finding.fits]
        notes = [finding.text for finding in found if finding.fits]
        if problems:
            yield Check(name, FAIL, "; ".join(problems), _PAIRING_ADVICE, "target")
        elif notes:
            yield Check(name, WARN, "; ".join(notes), "nothing to do here: padding rows are never drafted")
        else:
            yield Check(name, PASS, seen)


def _taps(config: DrafterConfig) -> Check:
    ids = list(config.target_layer_ids)
    if config.tap_shift is None:
        return Check("taps", PASS, f"outputs of layers {ids}; tap_shift is not pinned")
    read = list(tap_layer_indices(config))
    return Check("taps", PASS, f"ids {ids} with tap_shift {config.tap_shift}: outputs of layers {read}")


def _mask_token(checkpoint: DrafterCheckpoint, target: TargetSketch) -> Iterator[Check]:
    if checkpoint.has_mask_embedding:
        yield Check("mask token", PASS, "mask rows are a learned vector")
        return
    token = checkpoint.config.mask_token_id
    problems = [finding.text for finding in find_pairing(checkpoint, target) if finding.area == "mask token"]
    named = [index for index, text in target.special_tokens.items() if "mask" in text.lower()]
    special = target.special_tokens.get(token)
    advice = "set mask_token_id to the id that the drafter was trained with"
    if named:
        advice += f" ({target.special_tokens[named[0]]} is {named[0]})"
    if problems:
        yield Check("mask token", FAIL, "; ".join(problems), advice)
    elif token < target.tokenizer_size and special is None:
        yield Check("mask token", WARN, f"mask_token_id {token} is an ordinary token of the tokenizer", advice)
    else:
        yield Check("mask token", PASS, f"{token}, {special or 'a row that the tokenizer does not use'}")


def _rope(config: DrafterConfig, target: TargetSketch) -> Check:
    theta, theirs = config.rope.theta, target.rope_theta
    kind = "" if config.rope.type == "default" else f", {config.rope.type}"
    if theirs is not None and theirs != theta:
        seen = f"theta {theta:g}{kind}, the target's is {theirs:g}"
        return Check("rope", WARN, seen, "drafters nearly always share their target's theta: compare with the card")
    return Check("rope", PASS, f"theta {theta:g}{kind}" + (", as the target" if theirs is not None else ""))


def _window(config: DrafterConfig) -> Check:
    sliding = sum(kind == SLIDING for kind in config.layer_types)
    full = config.num_layers - sliding
    causal = sum(config.layer_is_causal(index) for index in range(config.num_layers))
    inside = f"{causal} of {config.num_layers} causal inside the block"
    unused = unused_window(config)
    if unused is not None:
        seen = f"the config names a window of {unused}, but no layer slides; {inside}"
        return Check("window", WARN, seen, "if the drafter was trained with it, add layer_types (sliding_attention)")
    window = f" with a window of {config.sliding_window}" if sliding else ""
    return Check("window", PASS, f"{full} full and {sliding} sliding layers{window}; {inside}")


def unused_window(config: DrafterConfig) -> int | None:
    """A window that the config names and that no layer uses, unless it says itself that it is not used."""
    if SLIDING in config.layer_types:
        return None
    for place in (config.raw.get("dflash_config") or {}, config.raw):
        off = place.get("use_sliding_window") is False or place.get("use_swa") is False
        value = place.get("sliding_window") or place.get("swa_window_size")
        if isinstance(value, int) and not off:
            return value
    return None


def _template(target: TargetSketch) -> Check:
    if not target.has_chat_template:
        return Check(
            "template",
            WARN,
            "the target has no chat template, so it cannot be asked: text is measured on that it did not write",
            "add chat_template.jinja to the target",
        )
    if target.supports_thinking:
        return Check("template", PASS, "a chat template with a thinking switch; both ways are measured")
    return Check("template", PASS, "a chat template without a thinking switch")


def _quantization(checkpoint: DrafterCheckpoint) -> Check:
    bits = stored_bits(checkpoint)
    if bits is None:
        return Check("quantization", PASS, "not quantized")
    report = quantize_report(checkpoint.directory.path)
    mode, retention = (report.get("calibration") or {}).get("mode"), _retention(report)
    seen = f"EXL3, {bits:.2f} bits per weight"
    if mode is not None:
        seen += ", uncalibrated" if mode == "none" else ", calibrated"
    advice = "quantize with more bits, calibrated by the target (exl3-dflash quantize --bits 4)"
    if retention is not None:
        seen += f"; its report says that {100 * retention:.1f} % of the accept length were kept"
    if bits < LEAST_BITS or (retention is not None and retention < LEAST_RETENTION):
        return Check("quantization", FAIL, seen, advice)
    return Check("quantization", PASS, seen)


def stored_bits(checkpoint: DrafterCheckpoint) -> float | None:
    """Mean bits per stored weight of the quantized linears, scales apart; None where nothing is quantized."""
    if not checkpoint.is_exl3:
        return None
    sizes = [
        (layer.bits, layer.in_features * layer.out_features) for layer in linear_names(checkpoint.directory).values()
    ]
    return sum(bits * weights for bits, weights in sizes) / sum(weights for _, weights in sizes)


def quantize_report(directory: Path) -> dict[str, Any]:
    """The report in a directory that this project wrote; empty for any other."""
    try:
        report = json.loads((directory / REPORT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return report if isinstance(report, dict) else {}


def _retention(report: dict[str, Any]) -> float | None:
    """Accept length after over before, as a report says."""
    lengths = report.get("accept_length")
    return lengths["quantized"] / lengths["unquantized"] if isinstance(lengths, dict) else None
