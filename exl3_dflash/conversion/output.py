"""The output directory's tensors and metadata, laid out as ExLlamaV3's converter writes them.

`config.json` is the source's, written so that ExLlamaV3 reads the facts that the drafter was measured with (the tap
shift above all, see `drafter.export`), with `quantization_config` and our own facts under `exl3_dflash`. `recipe.yaml`
holds the bits of every linear, for `--recipe` and for ExLlamaV3's converter. Files of the source that are neither
weights nor metadata (its card, license, code) are carried along unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from exl3_dflash.conversion.recipe import RECIPE_FILE, UNQUANTIZED_BITS, Recipe
from exl3_dflash.conversion.report import QuantizeReport
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.config import DrafterConfig
from exl3_dflash.drafter.export import exllamav3_config
from exl3_dflash.drafter.layout import HEAD
from quantize.audit import audit_directory
from quantize.checkpoint import CheckpointWriter, QuantizationConfig
from quantize.linear import QuantizedLinear

REPLACED_FILES = {
    "config.json",
    "quantization_config.json",
    "quantize_report.json",
    "model.safetensors.index.json",
    RECIPE_FILE,
}
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".ckpt", ".pth", ".pt", ".gguf"}
CARRIED_FILE_LIMIT = 16 << 20  # bytes; anything larger beside the weights is no metadata


def drafter_config(config: DrafterConfig, report: QuantizeReport) -> dict[str, Any]:
    """The source's config under the names that ExLlamaV3 reads, with our facts added."""
    written = exllamav3_config(config, report.tap_shift)
    written["exl3_dflash"] = {
        "version": report.versions.get("exl3-dflash"),
        "source": report.source,
        "source_revision": report.source_revision,
        "source_sha256": report.source_sha256,
        "target": report.target,
        "calibration": report.calibration.mode,
    }
    return written


def carried_files(directory: Path) -> list[Path]:
    """Files of the source directory that go along: no weights, no metadata that is written anew, nothing hidden."""
    return [
        path
        for path in sorted(directory.iterdir())
        if path.is_file()
        and not path.name.startswith(".")
        and path.name not in REPLACED_FILES
        and path.suffix not in WEIGHT_SUFFIXES
        and path.stat().st_size <= CARRIED_FILE_LIMIT
    ]


def write_output(
    writer: CheckpointWriter,
    checkpoint: DrafterCheckpoint,
    quantized: Mapping[str, QuantizedLinear],
    report: QuantizeReport,
    norms: Mapping[str, torch.Tensor],
) -> None:
    """Give the writer every tensor and file of the output but the report.

    Args:
        writer: of the output directory.
        checkpoint: the source; what is not in `quantized` is copied from it.
        quantized: the quantized linears by name.
        report: for the metadata.
        norms: tuned norm weights by tensor name, in place of the source's.
    """
    replaced = set(quantized)
    for name in checkpoint.tensor_names():
        linear = name.rpartition(".")[0]
        if linear not in replaced:
            writer.add(checkpoint.output_name(name), norms[name] if name in norms else checkpoint.load(name))
        elif name.endswith(".weight"):
            for stored_name, tensor in quantized[linear].tensors(checkpoint.output_name(linear)).items():
                writer.add(stored_name, tensor)
    for path in carried_files(checkpoint.directory.path):
        writer.add_file(path.name, path.read_bytes())
    writer.add_file(RECIPE_FILE, written_recipe(checkpoint, report).to_yaml())
    ran = report.calibration.mode == "target"
    quantization = QuantizationConfig(
        bits=report.mean_bits,
        head_bits=report.head_bits,
        codebook=report.codebook,
        out_scales=report.out_scales,
        calibration_rows=report.calibration.rows if ran else 0,
        calibration_cols=report.calibration.cols if ran else 0,
    )
    writer.set_config(drafter_config(checkpoint.config, report), quantization.to_dict())


def written_recipe(checkpoint: DrafterCheckpoint, report: QuantizeReport) -> Recipe:
    """The bits that every linear but the head got, by its name in the files."""
    bits = dict.fromkeys(report.copied, float(UNQUANTIZED_BITS)) | {t.name: t.bits for t in report.tensors}
    body = [linear.name for linear in checkpoint.linears if linear.name != HEAD]
    return Recipe(
        tensors={checkpoint.output_name(name): bits[name] for name in body},
        target_bpw=report.bits,
        achieved_bpw=report.mean_bits,
        head_bits=report.head_bits,
    )


def audit_output(path: Path, checkpoint: DrafterCheckpoint, quantized: Mapping[str, QuantizedLinear]) -> None:
    """Reopen a written directory as a stranger would and hold it against the source and the reported errors.

    Raises:
        Exl3DflashError: a tensor is missing, unexpected, damaged, or decodes to another error than was reported.
    """
    linears = {checkpoint.output_name(name): name for name in quantized}
    audit_directory(
        path,
        expected=map(checkpoint.output_name, checkpoint.tensor_names()),
        reference=lambda name: checkpoint.load(f"{linears[name]}.weight").float().T,
        recorded_errors={name: quantized[linear].weight_error for name, linear in linears.items()},
    )
    DrafterCheckpoint.open(path)
