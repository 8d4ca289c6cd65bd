"""An EXL3 drafter back to plain weights, for engines that do not read EXL3 (`exl3-dflash dequantize`).

Every quantized linear is decoded in float32 and rounded once to the asked type; other tensors are converted likewise.
What quantization lost stays lost. The config loses `quantization_config` and gains, under `exl3_dflash`, what it was
decoded from. The written directory is opened again: every tensor must be consumed by the drafter that the config
describes, and equal what was decoded.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from exl3_dflash.conversion.output import carried_files
from exl3_dflash.conversion.report import package_versions
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.export import folded_config
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub.resolve import resolve
from exl3_dflash.progress import Reporter
from quantize.checkpoint import CheckpointWriter

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
QUANTIZED_KEYS = ("quantization_config", "torch_dtype")
DROPPED_FILES = ("README.md",)  # the card of the quantized drafter


@dataclass(frozen=True)
class DequantizeReport:
    """What was written, and what it was decoded from."""

    out_dir: str
    source: str
    source_revision: str | None
    source_sha256: str
    dtype: str
    decoded: list[str]
    tensors: int
    size_bytes: int
    source_bytes: int
    versions: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return asdict(self)

    def summary(self) -> str:
        """One line for a person."""
        return (
            f"wrote {self.out_dir}: {self.tensors} tensors in {self.dtype}, {len(self.decoded)} of them decoded from "
            f"EXL3, {self.size_bytes / 2**20:.2f} MiB (EXL3 {self.source_bytes / 2**20:.2f} MiB)"
        )


def dequantize_drafter(
    source: str, out_dir: Path, *, dtype: str = "bfloat16", force: bool = False, reporter: Reporter | None = None
) -> DequantizeReport:
    """Decode an EXL3 drafter into a plain one.

    Args:
        source: a directory or Hugging Face id.
        out_dir: the directory to create.
        dtype: stored type: bfloat16, float16 or float32.
        force: replace an existing `out_dir`.
        reporter: where to tell.

    Raises:
        Exl3DflashError: not an EXL3 drafter, an unusable `out_dir`, or a weight that `dtype` cannot hold.
    """
    reporter = reporter or Reporter(quiet=True)
    if dtype not in DTYPES:
        raise Exl3DflashError(f"--dtype {dtype!r}", f"one of {', '.join(DTYPES)}", "use bfloat16")
    model = resolve(source, "drafter")
    checkpoint = DrafterCheckpoint.open(model.path)
    if not checkpoint.is_exl3:
        raise Exl3DflashError(f"{model.name} has no quantized tensor", "an EXL3 drafter", "use it as it is")
    names = checkpoint.tensor_names()
    decoded = [spec.name for spec in checkpoint.linears if checkpoint.is_quantized(spec.name)]
    expected = sum(_elements(checkpoint, name) for name in names) * DTYPES[dtype].itemsize
    provenance = _provenance(checkpoint, model.name, model.revision, dtype)
    with CheckpointWriter(out_dir, force=force, expected_bytes=expected) as writer:
        with reporter.bar("decode", len(names), "tensor") as advance:
            for name in names:
                writer.add(checkpoint.output_name(name), _converted(checkpoint, name, DTYPES[dtype]))
                advance(1)
        for path in carried_files(model.path):
            if path.name not in DROPPED_FILES:
                writer.add_file(path.name, path.read_bytes())
        # The writer makes config.json itself, for quantized directories only: this one gets its name in `_finish`.
        writer.add_file("config.json.partial", _config_text(checkpoint, dtype, provenance))
        size = writer.tensor_bytes
        writer.finish(check=lambda path: _finish(path, checkpoint, DTYPES[dtype]))
    return DequantizeReport(
        out_dir=str(out_dir),
        source=model.name,
        source_revision=model.revision,
        source_sha256=checkpoint.sha256,
        dtype=dtype,
        decoded=decoded,
        tensors=len(names),
        size_bytes=size,
        source_bytes=checkpoint.directory.nbytes(),
        versions=package_versions(),
    )


def _elements(checkpoint: DrafterCheckpoint, name: str) -> int:
    """An upper bound of a tensor's elements: stored bytes, or the weights of a linear."""
    for spec in checkpoint.linears:
        if name == f"{spec.name}.weight":
            return spec.in_features * spec.out_features
    return checkpoint.nbytes(name)


def _converted(checkpoint: DrafterCheckpoint, name: str, dtype: torch.dtype) -> torch.Tensor:
    """One tensor in the file's orientation, rounded once to `dtype`; whole numbers (vocabulary maps) as they are."""
    tensor = checkpoint.load(name).contiguous()
    tensor = tensor.to(dtype) if tensor.is_floating_point() else tensor
    if not torch.isfinite(tensor).all():
        raise Exl3DflashError(
            f"tensor {name} does not fit into {dtype}", "values below 65,504 in float16", "use --dtype bfloat16"
        )
    return tensor


def _provenance(checkpoint: DrafterCheckpoint, name: str, revision: str | None, dtype: str) -> dict[str, Any]:
    before = checkpoint.config.raw.get("exl3_dflash")
    quantization = checkpoint.config.raw.get("quantization_config")
    return {
        **(before if isinstance(before, dict) else {}),
        "dequantized_from": name,
        "dequantized_from_revision": revision,
        "dequantized_from_sha256": checkpoint.sha256,
        "dequantized_from_bits": quantization.get("bits") if isinstance(quantization, dict) else None,
        "dequantized_to": dtype,
    }


def _config_text(checkpoint: DrafterCheckpoint, dtype: str, provenance: dict[str, Any]) -> str:
    config = {key: value for key, value in folded_config(checkpoint.config).items() if key not in QUANTIZED_KEYS}
    return json.dumps({**config, "dtype": dtype, "exl3_dflash": provenance}, indent=4)


def _finish(path: Path, checkpoint: DrafterCheckpoint, dtype: torch.dtype) -> None:
    """Give the config its name and hold the written directory against the source, tensor by tensor."""
    (path / "config.json.partial").replace(path / "config.json")
    written = DrafterCheckpoint.open(path)
    assert not written.is_exl3, "a quantized tensor in a plain drafter"
    for name in checkpoint.tensor_names():
        if not torch.equal(written.load(name), _converted(checkpoint, name, dtype)):
            raise Exl3DflashError(f"tensor {name} was not read back as it was written", fix="check the disk")
