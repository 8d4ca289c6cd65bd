"""What a card says about a quantized drafter, read from its `quantize_report.json`.

The report is the only source of numbers. Whatever it lacks is an error here, so that a template never has to guess, and
what it says was not done (no calibration, no measurement, no head) is kept as such.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from quantize.errors import Exl3DflashError

REPORT_NAME = "quantize_report.json"
_NOT_IN_EXLLAMAV3 = re.compile(r"ExLlamaV3 \S+ has no class|cannot run it")
KNOWN_CALIBRATION_DATA = ("default", "chat")


@dataclass(frozen=True)
class Accuracy:
    """One drafter on the held-out anchors: accept length and what is kept of the reference's, with 95 % intervals."""

    accept_length: float
    accept_length_interval: tuple[float, float]
    retention: float
    retention_interval: tuple[float, float]
    top1_agreement: float
    kl: float


@dataclass(frozen=True)
class Measurement:
    """The paired, teacher-forced comparison of the unquantized with the quantized drafter."""

    unquantized: Accuracy
    quantized: Accuracy
    anchors: int
    rows: int
    dropped_rows: int
    block_size: int


@dataclass(frozen=True)
class Calibration:
    """The calibration that was really run; `mode` is "target" or "none". `data` is a kind or a file's name, `method`
    "two-sided" or "one-sided" (errors weighed by inputs and outputs, or inputs only), None where none was run;
    `thinking` is what `--thinking` said of the rows' prompts."""

    mode: str
    method: str | None
    data: str
    rows: int
    cols: int
    tokens: int
    anchors: int
    dropped_rows: int
    thinking: str

    @property
    def was_run(self) -> bool:
        """Whether the target was run to see what the drafter's layers receive."""
        return self.mode == "target"


@dataclass(frozen=True)
class Tuning:
    """Scales and norms were trained on `rows`; where that was `asked` for and not `kept`, `reason` says why."""

    asked: bool
    kept: bool
    reason: str
    rows: int
    parameters: int


@dataclass(frozen=True)
class CardFacts:
    """The facts of one quantized drafter; names are those of the report (`exl3_dflash.conversion.report`).

    `fallbacks` are tensors that were quantized without a usable Hessian of their inputs, and why, `output_fallbacks` of
    their outputs; `copied` those left unquantized, and why; `probe` settings that the source left open, what was chosen
    for each, and why; `fingerprint` is the SHA-256 of the report file, by which a card is known to belong to it.
    """

    source: str
    source_revision: str | None
    source_sha256: str
    target: str | None
    bits: float
    plan: str
    bpw: float
    head_bits: float
    head_quantized: bool
    codebook: str
    out_scales: str
    size_bytes: int
    source_bytes: int
    tensor_count: int
    fallbacks: tuple[tuple[str, str], ...]
    output_fallbacks: tuple[tuple[str, str], ...]
    copied: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]
    calibration: Calibration
    tuning: Tuning
    tap_shift: int
    probe: tuple[tuple[str, float, str], ...]
    measurement: Measurement | None
    seed: int
    versions: tuple[tuple[str, str], ...]
    fingerprint: str

    @property
    def runs_in_exllamav3(self) -> bool:
        """Whether the report's notes leave ExLlamaV3 able to run the drafter."""
        return not any(_NOT_IN_EXLLAMAV3.search(note) for note in self.notes)


def read_report(directory: Path) -> CardFacts:
    """The facts of a directory that `exl3-dflash quantize` wrote.

    Raises:
        Exl3DflashError: there is no report, it is damaged, or it lacks a fact.
    """
    file = directory / REPORT_NAME
    if not file.is_file():
        raise Exl3DflashError(
            f"{directory} has no {REPORT_NAME}",
            "a directory written by exl3-dflash quantize: its report is the source of every number in a card",
            "quantize the drafter with exl3-dflash",
        )
    content = file.read_bytes()
    try:
        report = json.loads(content)
        return _facts(report, hashlib.sha256(content).hexdigest())
    except KeyError as error:
        raise Exl3DflashError(f"{file} lacks {error}", "a complete report", "quantize the drafter again") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise Exl3DflashError(f"{file} is damaged: {error}", "a report of exl3-dflash quantize") from error


def _facts(report: Mapping[str, Any], fingerprint: str) -> CardFacts:
    tensors = report["tensors"]
    return CardFacts(
        source=report["source"],
        source_revision=report["source_revision"],
        source_sha256=report["source_sha256"],
        target=report["target"],
        bits=float(report["bits"]),
        plan=report.get("plan", "uniform"),
        bpw=float(report["bpw"]),
        head_bits=float(report["head_bits"]),
        head_quantized=bool(report["head_quantized"]),
        codebook=report["codebook"],
        out_scales=report["out_scales"],
        size_bytes=int(report["size_bytes"]),
        source_bytes=int(report["source_bytes"]),
        tensor_count=len(tensors),
        fallbacks=_reasons(tensors, "fallback"),
        output_fallbacks=_reasons(tensors, "output_fallback"),
        copied=tuple(report["copied"].items()),
        notes=tuple(report["notes"]),
        calibration=_calibration(report["calibration"]),
        tuning=_tuning(report.get("tuning")),
        tap_shift=int(report["tap_shift"]),
        probe=_probe(report.get("probe")),
        measurement=_measurement(report["fidelity"]),
        seed=int(report["seed"]),
        versions=tuple(report["versions"].items()),
        fingerprint=fingerprint,
    )


def _reasons(tensors: list[Mapping[str, Any]], key: str) -> tuple[tuple[str, str], ...]:
    return tuple((tensor["name"], tensor[key]) for tensor in tensors if tensor.get(key))


def _calibration(said: Mapping[str, Any]) -> Calibration:
    if said["mode"] not in ("target", "none"):
        raise ValueError(f"calibration mode {said['mode']!r}")
    data = said["source"] or ""
    return Calibration(
        mode=said["mode"],
        method=said.get("method"),
        data=data if data in KNOWN_CALIBRATION_DATA else PurePath(data).name,  # a path is nobody's business
        rows=int(said["rows"]),
        cols=int(said["cols"]),
        tokens=int(said["tokens"]),
        anchors=int(said["anchors"]),
        dropped_rows=int(said["dropped_rows"]),
        thinking=said.get("thinking", "default"),
    )


def _tuning(said: Mapping[str, Any] | None) -> Tuning:
    if said is None:
        return Tuning(asked=False, kept=False, reason="", rows=0, parameters=0)
    return Tuning(True, bool(said["kept"]), said["reason"], int(said["rows"]), int(said["parameters"]))


def _probe(probe: Mapping[str, Any] | None) -> tuple[tuple[str, float, str], ...]:
    settings = [] if probe is None else probe["settings"]
    return tuple((chosen["setting"], float(chosen["choice"]), chosen["reason"]) for chosen in settings)


def _measurement(fidelity: Mapping[str, Any] | None) -> Measurement | None:
    if fidelity is None:
        return None
    unquantized, quantized = (_accuracy(drafter) for drafter in fidelity["drafters"])
    return Measurement(
        unquantized=unquantized,
        quantized=quantized,
        anchors=int(fidelity["anchors"]),
        rows=int(fidelity["rows"]),
        dropped_rows=int(fidelity["dropped_rows"]),
        block_size=int(fidelity["block_size"]),
    )


def _accuracy(drafter: Mapping[str, Any]) -> Accuracy:
    low, high = drafter["ci95"]
    kept_low, kept_high = drafter["retention_ci95"]
    return Accuracy(
        accept_length=float(drafter["accept_length"]),
        accept_length_interval=(float(low), float(high)),
        retention=float(drafter["retention"]),
        retention_interval=(float(kept_low), float(kept_high)),
        top1_agreement=float(drafter["top1_agreement"]),
        kl=float(drafter["kl"]),
    )
