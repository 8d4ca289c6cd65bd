"""What a model directory holds: config, tensors, bits, sizes, and what is quantized (`exl3-dflash inspect`).

Works on EXL3 directories of any origin and model, and on unquantized DFlash drafters. Nothing is decoded; sizes are
stored bytes. Definitions: `bpw` is all bits of the quantized linears without the head, scales and biases included, over
their weights (unpadded where the drafter's config tells the size, else as stored); everything else counts as copied.

A directory whose files are damaged is an error. One that is readable but does not hold the drafter that its config
describes is shown, with `problems`.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.config import SLIDING, DrafterConfig
from exl3_dflash.drafter.config_reader import NESTED_KEY
from exl3_dflash.drafter.layout import HEAD
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub.resolve import ResolvedModel
from quantize.checkpoint import StoredLinear, TensorDirectory, layer_tensors, linear_names

REPORT_NAME = "quantize_report.json"
_FAMILY = re.compile(r"dflash|dspark|domino|glimmer", re.IGNORECASE)


@dataclass(frozen=True)
class InspectedTensor:
    """A quantized linear (shape in x out, all its tensors together) or another tensor (shape as stored)."""

    name: str
    quantized: bool
    shape: list[int]
    type: str
    bits: float | None
    nbytes: int


@dataclass(frozen=True)
class Inspection:
    """Everything that is shown; the keys of `--json`.

    Attributes:
        kind: what it is, in words.
        drafter: facts of a DFlash config; None for other models.
        quantization: what `config.json` states, None where it states nothing.
        calibration: `stated` by config.json, and `run` as a report of exl3-dflash says; each None where absent.
        bpw: see the module; None where nothing is quantized.
        head: what the head is and whether `head_bits` means anything.
        sha256: of the weight files; None where it was not computed.
        problems: why it is not the drafter that its config describes.
    """

    name: str
    path: str
    revision: str | None
    kind: str
    architecture: str | None
    drafter: dict[str, Any] | None
    quantization: dict[str, Any] | None
    calibration: dict[str, Any]
    provenance: dict[str, Any] | None
    bpw: float | None
    head: str
    quantized_bytes: int
    copied_bytes: int
    size_bytes: int
    files: dict[str, int]
    sha256: str | None
    tensors: list[InspectedTensor]
    problems: list[str]
    notes: list[str]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def inspect_model(model: ResolvedModel, *, sha256: bool = True) -> Inspection:
    """Look into a model directory.

    Args:
        model: from `hub.resolve.resolve`.
        sha256: also read all weights for their digest.

    Raises:
        Exl3DflashError: config.json or the weight files are damaged or absent.
    """
    raw = _read_json(model.path / "config.json")
    with TensorDirectory.open(model.path) as directory:
        linears = linear_names(directory)
        config, checkpoint, problems = _as_drafter(model.path, raw)
        tensors = _tensors(directory, linears, checkpoint)
        body = [tensor for tensor in tensors if tensor.quantized and not _is_head(tensor.name)]
        weights = sum(tensor.shape[0] * tensor.shape[1] for tensor in body)
        quantized = sum(tensor.nbytes for tensor in tensors if tensor.quantized)
        quantization = raw.get("quantization_config") if isinstance(raw.get("quantization_config"), dict) else None
        report = _report(model.path)
        return Inspection(
            name=model.name,
            path=str(model.path),
            revision=model.revision,
            kind=_kind(config, bool(linears), raw),
            architecture=(raw.get("architectures") or [None])[0],
            drafter=_drafter_facts(config, checkpoint) if config else None,
            quantization=quantization,
            calibration={"stated": (quantization or {}).get("calibration"), "run": (report or {}).get("calibration")},
            provenance=raw.get("exl3_dflash") if isinstance(raw.get("exl3_dflash"), dict) else None,
            bpw=round(8 * sum(tensor.nbytes for tensor in body) / weights, 4) if weights else None,
            head=_head(tensors, config),
            quantized_bytes=quantized,
            copied_bytes=directory.nbytes() - quantized,
            size_bytes=directory.nbytes(),
            files={file.name: file.stat().st_size for file in directory.files},
            sha256=directory.sha256() if sha256 else None,
            tensors=tensors,
            problems=problems,
            notes=_notes(config, quantization, report, bool(linears)),
        )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Exl3DflashError(f"{file} cannot be read: {error}", "a JSON object", "download it again") from error
    if not isinstance(content, dict):
        raise Exl3DflashError(f"{file} holds a {type(content).__name__}", "a JSON object")
    return content


def _report(path: Path) -> dict[str, Any] | None:
    return _read_json(path / REPORT_NAME) if (path / REPORT_NAME).is_file() else None


def _as_drafter(path: Path, raw: dict[str, Any]) -> tuple[DrafterConfig | None, DrafterCheckpoint | None, list[str]]:
    """The DFlash config and checkpoint, as far as the directory has them, and what is wrong with them."""
    claims = NESTED_KEY in raw or _FAMILY.search(str(raw.get("architectures", ""))) is not None
    try:
        config = DrafterConfig.from_dict(raw)
    except Exl3DflashError as error:
        return None, None, [str(error)] if claims else []
    try:
        return config, DrafterCheckpoint.open(path), []
    except Exl3DflashError as error:
        return config, None, [str(error)]


def _tensors(
    directory: TensorDirectory, linears: dict[str, StoredLinear], checkpoint: DrafterCheckpoint | None
) -> list[InspectedTensor]:
    """Quantized linears in order of name, then the rest."""
    features = {}
    if checkpoint is not None:
        for spec in checkpoint.linears:
            features[checkpoint.output_name(spec.name)] = (spec.in_features, spec.out_features)
    owned: set[str] = set()
    found = []
    for name, stored in linears.items():
        parts = layer_tensors(directory, name)
        owned.update(parts)
        shape = features.get(name.removeprefix("model."), (stored.in_features, stored.out_features))
        nbytes = sum(directory.nbytes(part) for part in parts)
        found.append(InspectedTensor(name, True, list(shape), stored.codebook, stored.bits, nbytes))
    for name in directory:
        if name not in owned:
            dtype = str(directory.dtype(name)).removeprefix("torch.")
            found.append(InspectedTensor(name, False, list(directory.shape(name)), dtype, None, directory.nbytes(name)))
    return found


def _is_head(name: str) -> bool:
    return name.rpartition(".")[2] == HEAD


def _kind(config: DrafterConfig | None, quantized: bool, raw: dict[str, Any]) -> str:
    if config is not None:
        return "DFlash drafter, EXL3" if quantized else "DFlash drafter, not quantized"
    if quantized:
        return "EXL3 model"
    method = (
        raw["quantization_config"].get("quant_method") if isinstance(raw.get("quantization_config"), dict) else None
    )
    return f"model, quantized with {method}" if method else "model, not quantized"


def _head(tensors: list[InspectedTensor], config: DrafterConfig | None) -> str:
    for tensor in tensors:
        name = tensor.name.removesuffix(".weight")
        if _is_head(name):
            return f"its own, {tensor.bits:g} bits" if tensor.bits is not None else f"its own, {tensor.type}"
    if config is not None:
        return "none of its own, it uses the target's: head_bits means nothing"
    return "no tensor of its own"


def _drafter_facts(config: DrafterConfig, checkpoint: DrafterCheckpoint | None) -> dict[str, Any]:
    return {
        "member": config.dialect.title,
        "config_keys": f"{NESTED_KEY} object" if NESTED_KEY in config.raw else "top level",
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.stated_block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "tap_shift": config.tap_shift,
        "num_target_layers": config.num_target_layers,
        "target_hidden_size": checkpoint.target_hidden_size if checkpoint else config.target_hidden_size,
        "sliding_layers": config.layer_types.count(SLIDING),
        "sliding_window": config.sliding_window,
        "is_causal": config.is_causal,
        "rope": asdict(config.rope),
    }


def _notes(
    config: DrafterConfig | None, quantization: dict[str, Any] | None, report: dict[str, Any] | None, quantized: bool
) -> list[str]:
    notes = []
    calibration = (quantization or {}).get("calibration")
    rows = calibration.get("rows") if isinstance(calibration, dict) else None
    if config is not None and quantized and report is None and rows:
        notes.append(
            f"config.json states a calibration of {rows} rows and no report proves it: ExLlamaV3's converter writes "
            "that for DFlash drafters, whose target it does not run"
        )
    if quantization is not None and quantization.get("quant_method") == "exl3" and not quantized:
        notes.append("config.json says exl3, and no tensor is quantized")
    if quantized and quantization is None:
        notes.append("tensors are quantized, and config.json has no quantization_config")
    return notes
