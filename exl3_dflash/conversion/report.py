"""The result of a quantization job, as JSON and as a summary for people.

The JSON keys are a contract (see the README); the same object is printed by `--json` and written as
`quantize_report.json` into the output directory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

VERSIONED_PACKAGES = ("exl3-dflash", "torch", "transformers", "safetensors", "exllamav3")


@dataclass(frozen=True)
class TensorReport:
    """One quantized linear: `proxy_error` is relative output error on calibration inputs, `weight_error` relative
    squared error of the stored weight; `method` says along which sides errors were fed back (`two-sided`, `one-sided`,
    `none`), `fallback` why not along the inputs and `output_fallback` why not along the outputs, or null. For two-sided
    tensors `proxy_error` weighs outputs too."""

    name: str
    shape: list[int]
    bits: float
    proxy_error: float
    weight_error: float
    fallback: str | None
    seconds: float
    method: str = "none"
    output_fallback: str | None = None


@dataclass(frozen=True)
class CalibrationReport:
    """What calibration was really run; all zero with mode "none"."""

    mode: str
    source: str | None = None
    rows: int = 0
    cols: int = 0
    tokens: int = 0
    anchors: int = 0
    dropped_rows: int = 0
    dropped_inputs: int = 0
    dropped_gradients: int = 0
    method: str | None = None
    thinking: str = "default"
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class QuantizeReport:
    """The whole job; `bits` is what was asked for, `plan` where the bits of each tensor come from (`uniform`,
    `mixed`, `recipe`), `mean_bits` what the codes of the body have on average
    (equal unless bits are mixed), `bpw` what is stored per weight, scales included, `predicted_retention` the share of
    the accept length that was expected to remain before anything was encoded, `probe` how settings were chosen
    that the checkpoint leaves open (`measure.probe`), `accept_length` is teacher-forced on held-out rows; both null
    where nothing was measured."""

    out_dir: str
    source: str
    source_revision: str | None
    source_sha256: str
    target: str | None
    bits: float
    plan: str
    mean_bits: float
    bpw: float
    head_bits: float
    head_quantized: bool
    codebook: str
    encoder: str
    out_scales: str
    size_bytes: int
    source_bytes: int
    tensors: list[TensorReport]
    copied: dict[str, str]
    notes: list[str]
    calibration: CalibrationReport
    tap_shift: int
    probe: dict[str, Any] | None
    accept_length: dict[str, float] | None
    predicted_retention: float | None
    fidelity: dict[str, Any] | None
    seed: int
    versions: dict[str, str]
    seconds: float
    tuning: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> QuantizeReport:
        """The inverse of `to_json`."""
        tensors = [TensorReport(**tensor) for tensor in data["tensors"]]
        return cls(**{**data, "tensors": tensors, "calibration": CalibrationReport(**data["calibration"])})

    def to_json_text(self) -> str:
        """The object as indented JSON."""
        return json.dumps(self.to_json(), indent=2, allow_nan=False)

    def summary(self) -> str:
        """A few lines for a person."""
        fallbacks = [tensor.name for tensor in self.tensors if tensor.fallback]
        lines = [
            f"wrote {self.out_dir}: {self.bpw:.2f} bpw, {self.size_bytes / 2**20:.2f} MiB "
            f"(source {self.source_bytes / 2**20:.2f} MiB), {self.seconds:.0f} s",
            f"calibration: {self._calibration_line()}",
        ]
        if fallbacks and self.calibration.mode != "none":
            lines.append(f"without a usable Hessian: {', '.join(fallbacks)}")
        one_sided = [tensor.name for tensor in self.tensors if tensor.output_fallback]
        if one_sided:
            lines.append(f"without a usable output-side Hessian: {', '.join(one_sided)}")
        if self.tuning is not None:
            lines.append(self._tuning_line(self.tuning))
        if self.fidelity is not None:
            before, after = self.fidelity["drafters"]
            low, high = after["retention_ci95"]
            lines.append(
                f"held out, {self.fidelity['anchors']} anchors: accept length {before['accept_length']:.3f} -> "
                f"{after['accept_length']:.3f}, retained {100 * after['retention']:.2f} % "
                f"(95 % interval {100 * low:.2f} to {100 * high:.2f})"
            )
        return "\n".join(lines)

    @staticmethod
    def _tuning_line(tuning: Mapping[str, Any]) -> str:
        if not tuning["kept"]:
            return f"not tuned: {tuning['reason']}"
        measured = tuning.get("held_out")
        gain = ""
        if measured:
            low, high = measured["ratio_ci95"]
            change = f"{100 * measured['ratio'] - 100:+.2f} % ({100 * low - 100:+.2f} to {100 * high - 100:+.2f})"
            before, after = measured["accept_length_untuned"], measured["accept_length_tuned"]
            gain = f": held out, accept length {before:.3f} -> {after:.3f}, {change}"
        return f"tuned {tuning['parameters']} scales and norm weights on {tuning['rows']} rows{gain}"

    def _calibration_line(self) -> str:
        calibration = self.calibration
        if calibration.mode == "none":
            return "none was run"
        dropped = f", {calibration.dropped_rows} rows dropped" if calibration.dropped_rows else ""
        return (
            f"{calibration.rows} rows from {calibration.source}, {calibration.tokens} tokens, "
            f"{calibration.anchors} anchors{dropped}"
        )


def package_versions() -> dict[str, str]:
    """Installed versions of what shaped the result."""
    versions = {}
    for package in VERSIONED_PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
