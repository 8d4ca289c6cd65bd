"""A model directory to a ready target: device and dtype chosen, weights loaded strictly, EXL3 decoded on the way.

Device: `auto` is CUDA where there is a GPU, else the CPU.
Dtype, where none is given:
- CUDA: the checkpoint's own, but BF16 for FP16 checkpoints: residuals of real models pass FP16's 65,504, and taps are
  residuals.
- CPU: FP32 where the weights take at most FP32_CPU_BYTES in FP32 (exact, and fast on every CPU), else BF16.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target.messages import first_line
from exl3_dflash.target.tokenizer import TransformersTokenizer, eos_ids_of
from exl3_dflash.target.transformers_target import TransformersTarget
from quantize.tensor_directory import TensorDirectory

FP32_CPU_BYTES = 4 << 30
HASHED_BYTES = 4 << 30  # weights up to this size are identified by SHA-256; larger ones by their hub revision alone

# Parts of a checkpoint that text generation does not use (towers, projectors, multi-token-prediction layers, buffers).
_UNUSED_TENSORS = re.compile(
    r"(^|\.)(mtp|visual|vision\w*|audio\w*|image\w*|video\w*|multi_modal\w*|embed_(vision|audio)|connector)\.|inv_freq$"
)


def load_target(
    path: str | Path, *, device: str = "auto", dtype: torch.dtype | None = None, name: str | None = None
) -> TransformersTarget:
    """Load the target in the directory `path` (safetensors; plain or EXL3).

    Args:
        device: "auto", "cpu", "cuda" or "cuda:N".
        dtype: None chooses (see above); otherwise torch.float32 or torch.bfloat16 (float16 where you must).
        name: for reports and messages; the directory's name where None.

    Raises:
        Exl3DflashError: anything about the directory, its config, weights or tokenizer that cannot be used, named.
    """
    path = Path(path)
    config = read_config(path)
    with TensorDirectory.open(path) as directory:
        chosen = choose_device(device)
        chosen_dtype = dtype or choose_dtype(config, chosen)
        sha256 = directory.sha256() if directory.nbytes() <= HASHED_BYTES else None
        model, quantized = _load_model(path, config, directory, chosen_dtype)
    eos = eos_ids_of(model.generation_config, config, config.get_text_config(decoder=True))
    tokenizer = TransformersTokenizer.load(path, eos)
    return TransformersTarget(
        model.to(chosen), tokenizer, name=name or path.resolve().name, quantized=quantized, sha256=sha256
    )


def read_config(path: Path) -> Any:
    """The transformers configuration of a model directory."""
    from transformers import AutoConfig

    file = path / "config.json"
    if not file.is_file():
        raise Exl3DflashError(f"{path} has no config.json", "a Hugging Face model directory", "check the path")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        config = AutoConfig.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # broken JSON, an unknown model_type, values the configuration class refuses
        raise Exl3DflashError(
            f"{file} cannot be used: {first_line(error)}",
            expected="the config.json of an architecture that the installed transformers knows",
            fix="upgrade transformers, or choose another target",
        ) from error
    _refuse_drafter(path, raw)
    return config


def _refuse_drafter(path: Path, raw: dict[str, Any]) -> None:
    architectures = [str(name) for name in raw.get("architectures") or []]
    if "dflash_config" in raw or any("DFlash" in name for name in architectures):
        raise Exl3DflashError(
            f"{path} is a DFlash drafter ({', '.join(architectures) or 'dflash_config'})",
            expected="its target, a complete language model",
            fix="give the drafter as SOURCE or --drafter and the target as --target",
        )


def choose_device(device: str) -> torch.device:
    """ "auto", "cpu", "cuda" or "cuda:N" to a device that exists."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise Exl3DflashError(f"device {device!r} is unknown", "auto, cpu, cuda or cuda:N")
    chosen = torch.device(device)
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise Exl3DflashError(
            f"device {device} is not there",
            expected=f"one of {torch.cuda.device_count()} CUDA devices",
            fix="use --device cpu, or install a CUDA build of torch",
        )
    return chosen


def choose_dtype(config: Any, device: torch.device) -> torch.dtype:
    """The dtype that targets run in where the user gives none (see the module's docstring)."""
    stored = getattr(config.get_text_config(decoder=True), "dtype", None) or getattr(config, "dtype", None)
    if device.type == "cuda":
        return stored if isinstance(stored, torch.dtype) and stored != torch.float16 else torch.bfloat16
    return torch.float32 if 4 * _parameter_count(config) <= FP32_CPU_BYTES else torch.bfloat16


def _parameter_count(config: Any) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = _call_transformers(AutoModelForCausalLM.from_config, config)
    return sum(parameter.numel() for parameter in model.parameters())


def _load_model(path: Path, config: Any, directory: TensorDirectory, dtype: torch.dtype) -> tuple[Any, str]:
    """The model on the CPU, with what it is quantized as."""
    from transformers import AutoModelForCausalLM

    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method == "exl3":
        from exl3_dflash.target.exl3_weights import decode_state_dict, describe

        state_dict, config = decode_state_dict(directory, config, dtype)
        load, quantized = (
            {"pretrained_model_name_or_path": None, "config": config, "state_dict": state_dict},
            describe(directory),
        )
    elif method is not None:
        raise Exl3DflashError(
            f"{path} is quantized with {method}",
            expected="plain safetensors weights or EXL3",
            fix="use the unquantized or the EXL3 version of the target",
        )
    else:
        load, quantized = (
            {"pretrained_model_name_or_path": str(path), "config": config, "local_files_only": True},
            "none",
        )
    model, info = _call_transformers(
        AutoModelForCausalLM.from_pretrained, dtype=dtype, output_loading_info=True, **load
    )
    check_loading(path, info)
    return model, quantized


def check_loading(path: Path, info: dict[str, Any]) -> None:
    """Raise where weights were missing, left over or of another shape (transformers only warns and fills in noise)."""
    unexpected = sorted(key for key in info["unexpected_keys"] if not _UNUSED_TENSORS.search(key))
    faults = {
        "lacks": sorted(info["missing_keys"]),
        "has unknown": unexpected,
        "has wrongly shaped": sorted(str(key) for key in info["mismatched_keys"]),
    }
    for fault, names in faults.items():
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise Exl3DflashError(
                f"{path} {fault} weights: {names[0]}{others}",
                expected="exactly the tensors of the architecture in config.json",
                fix="download the checkpoint again, or check config.json",
            )


def _call_transformers(function: Any, *inputs: Any, **options: Any) -> Any:
    """Call a transformers constructor, quietly; its many exception types become one error."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        return function(*inputs, **options)
    except Exl3DflashError:
        raise
    except Exception as error:
        raise Exl3DflashError(
            f"transformers cannot build the target: {first_line(error)}",
            expected="a causal language model that the installed transformers knows",
            fix="upgrade transformers, or choose another target",
        ) from error
