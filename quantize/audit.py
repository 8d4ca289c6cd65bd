"""The audit of a written EXL3 checkpoint: open it again as a stranger would, and account for every tensor.

A conversion can fail without anybody noticing: a tensor that never reached the file, one that no layer asks for, a
scale that overflowed, a marker that names the wrong codebook. The target verifies every draft, so the text stays right
and only the speed is gone. The audit therefore reopens the finished directory and checks that

- every expected tensor is there and every tensor there is expected;
- each quantized layer's shapes, types and marker fit together (`quantize.exl3_tensors`);
- what `quantization_config.json` says about the storage is what is stored;
- everything decodes to finite numbers, and each layer is as close to the original weight as its quantization reported.

All problems are collected and raised as one error. Left out: whether the drafter still drafts well, which is measured
by running it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantize.errors import Exl3DflashError
from quantize.exl3_tensors import StoredLinear, layer_tensors, linear_names, read_linear
from quantize.hadamard import padded_features
from quantize.linear import decode_linear
from quantize.quantization_config import CONFIG_NAME, QUANTIZATION_NAME, tensor_storage
from quantize.tensor_directory import TensorDirectory

ERROR_TOLERANCE = 1e-3  # relative: two float32 computations of the same error
_SHOWN = 8  # problems spelled out in the error


@dataclass(frozen=True)
class AuditedLinear:
    """One quantized layer: as stored, and its relative squared error |W - Wq|^2 / |W|^2 where a reference was given."""

    name: str
    stored: StoredLinear
    weight_error: float | None


@dataclass(frozen=True)
class AuditReport:
    """What was found in a checkpoint that passed.

    Attributes:
        path: the directory.
        linears: its quantized layers, in order of name.
        copied: names of its other tensors, in order.
        nbytes: bytes of all tensors.
        sha256: of the weight files, see `TensorDirectory.sha256`.
    """

    path: Path
    linears: tuple[AuditedLinear, ...]
    copied: tuple[str, ...]
    nbytes: int
    sha256: str


def audit_directory(
    path: str | Path,
    expected: Iterable[str] | None = None,
    reference: Callable[[str], torch.Tensor] | None = None,
    recorded_errors: Mapping[str, float] | None = None,
) -> AuditReport:
    """Reopen an EXL3 checkpoint and account for everything in it.

    Args:
        path: the directory.
        expected: names of the source's tensors (`norm.weight`, `layers.0.mlp.up_proj.weight`, a bias); a quantized
            layer stands for its weight, and for its bias. None: whatever is there is expected.
        reference: the original weight (in, out) of a layer, by the layer's name (without `.weight`).
        recorded_errors: the weight errors that quantization reported, by layer; needs `reference`. Each must be found
            again, and every quantized layer must be among them.

    Raises:
        Exl3DflashError: the directory is damaged, or with every problem that was found.
    """
    assert recorded_errors is None or reference is not None, "recorded errors without the weights they refer to"
    with TensorDirectory.open(path) as directory:
        linears = linear_names(directory)
        owned = {tensor for name in linears for tensor in layer_tensors(directory, name)}
        copied = tuple(name for name in directory if name not in owned)
        problems = _missing_and_unexpected(directory, linears, copied, expected)
        problems += _storage_problems(directory)
        problems += [f"{name} is not finite" for name in copied if not _finite(directory.get(name))]
        audited = []
        for name, stored in linears.items():
            weight_error, problem = _audit_linear(directory, name, stored, reference)
            audited.append(AuditedLinear(name, stored, weight_error))
            problems += [problem] if problem else []
        problems += _error_problems(audited, recorded_errors)
        if problems:
            more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
            raise Exl3DflashError(
                f"{directory.path} failed its audit: {'; '.join(problems[:_SHOWN])}{more}", fix="write it again"
            )
        return AuditReport(directory.path, tuple(audited), copied, directory.nbytes(), directory.sha256())


def _missing_and_unexpected(
    directory: TensorDirectory, linears: Iterable[str], copied: Iterable[str], expected: Iterable[str] | None
) -> list[str]:
    if expected is None:
        return []
    present = set(copied)
    for name in linears:
        present.add(f"{name}.weight")
        if f"{name}.bias" in directory:
            present.add(f"{name}.bias")
    wanted = set(expected)
    missing = [f"{name} is missing" for name in sorted(wanted - present)]
    return missing + [f"{name} belongs to nothing" for name in sorted(present - wanted)]


def _storage_problems(directory: TensorDirectory) -> list[str]:
    """Differences between the stored tensors and what the two configuration files, where present, say of them."""
    if not (directory.path / QUANTIZATION_NAME).is_file():
        return []
    stated = _read_json(directory.path / QUANTIZATION_NAME)
    actual = tensor_storage({name: (directory.shape(name), directory.dtype(name)) for name in directory})
    storage = stated.pop("tensor_storage", None)
    storage = storage if isinstance(storage, dict) else {}
    modules = storage.keys() | actual.keys()
    wrong = sorted(module for module in modules if storage.get(module) != actual.get(module))
    problems = [f"{QUANTIZATION_NAME} does not describe {module}" for module in wrong]
    config = directory.path / CONFIG_NAME
    if config.is_file() and _read_json(config).get("quantization_config") != stated:
        problems.append(f"{CONFIG_NAME} and {QUANTIZATION_NAME} disagree")
    return problems


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise Exl3DflashError(f"{file} cannot be read: {error}", "JSON") from error
    if not isinstance(content, dict):
        raise Exl3DflashError(f"{file} is not a JSON object", "an object")
    return content


def _audit_linear(
    directory: TensorDirectory, name: str, stored: StoredLinear, reference: Callable[[str], torch.Tensor] | None
) -> tuple[float | None, str | None]:
    """Decode one layer; its error against the reference, and what is wrong with it, if anything."""
    original = None if reference is None else reference(name)
    features = (stored.in_features, stored.out_features) if original is None else tuple(original.shape)
    if tuple(padded_features(size) for size in features) != (stored.in_features, stored.out_features):
        shape = f"{stored.in_features} x {stored.out_features}"
        return None, f"{name} is stored as {shape}, the original is {features[0]} x {features[1]}"
    decoded = decode_linear(read_linear(directory, name, *features))
    if not _finite(decoded):
        return None, f"{name} decodes to values that are not finite"
    if original is None:
        return None, None
    exact = original.detach().to("cpu", torch.float32)
    power = exact.double().square().sum().item()
    difference = (exact - decoded).double().square().sum().item()
    return (difference / power if power else float(difference > 0)), None


def _error_problems(audited: Iterable[AuditedLinear], recorded: Mapping[str, float] | None) -> list[str]:
    """Layers whose recomputed error is not the recorded one."""
    if recorded is None:
        return []
    problems = []
    for linear in audited:
        if linear.weight_error is None:
            continue  # already a problem of its own
        if linear.name not in recorded:
            problems.append(f"{linear.name} has no recorded error")
        elif not math.isclose(linear.weight_error, recorded[linear.name], rel_tol=ERROR_TOLERANCE, abs_tol=1e-9):
            problems.append(
                f"{linear.name} has the error {linear.weight_error:.6g}, not {recorded[linear.name]:.6g} as recorded"
            )
    return problems + [f"{name} is missing" for name in sorted(recorded.keys() - {linear.name for linear in audited})]


def _finite(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())
