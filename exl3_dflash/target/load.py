"""A model directory to a ready target: by ExLlamaV3 for EXL3 weights on CUDA, else by transformers.

ExLlamaV3 keeps EXL3 weights as small as they are. transformers gets them decoded, which every device and architecture
can do, as long as there is memory for the unquantized model. It fills missing weights with noise and only warns, so
what it reports is checked here: a tensor that is missing, left over or of another shape is an error that names it.
Device and dtype are chosen in `placement.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target import exl3_weights
from exl3_dflash.target.base import Target
from exl3_dflash.target.messages import first_line
from exl3_dflash.target.placement import choose_device, choose_dtype, parse_dtype
from exl3_dflash.target.tokenizer import TransformersTokenizer, eos_ids_of
from exl3_dflash.target.transformers_target import TransformersTarget
from quantize.checkpoint import TensorDirectory

HASHED_BYTES = 4 << 30  # weights up to this size are identified by SHA-256; larger ones by their hub revision alone

# Parts of a checkpoint that text generation does not use (towers, projectors, multi-token-prediction layers, buffers).
_UNUSED_TENSORS = re.compile(
    r"(^|\.)(mtp|visual|vision\w*|audio\w*|image\w*|video\w*|multi_modal\w*|embed_(vision|audio)|connector)\.|inv_freq$"
)


@dataclass(frozen=True)
class TargetSketch:
    """What a target's files tell without its weights; the first five fields mean what they do in `base.TargetFacts`.

    rope_theta and sliding_window are None where the config has none, or has several. special_tokens are the added
    tokens of the tokenizer by id.
    """

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    tokenizer_size: int
    rope_theta: float | None = None
    sliding_window: int | None = None
    has_chat_template: bool = True
    supports_thinking: bool = False
    special_tokens: Mapping[int, str] = field(default_factory=dict)


def sketch_target(path: str | Path, name: str | None = None) -> TargetSketch:
    """Dimensions of the target in `path` from its config and tokenizer, in about a second for any size.

    Raises:
        Exl3DflashError: the config or the tokenizer cannot be used.
    """
    path = Path(path)
    config = read_config(path)
    text = config.get_text_config(decoder=True)
    tokenizer = TransformersTokenizer.load(path)
    rope = getattr(text, "rope_parameters", None) or {}
    return TargetSketch(
        name=name or path.resolve().name,
        hidden_size=int(text.hidden_size),
        num_layers=int(text.num_hidden_layers),
        vocab_size=int(text.vocab_size),
        tokenizer_size=tokenizer.size,
        rope_theta=_number(rope.get("rope_theta", getattr(text, "rope_theta", None))),
        sliding_window=_number(getattr(text, "sliding_window", None)),
        has_chat_template=tokenizer.has_chat_template,
        supports_thinking=tokenizer.supports_thinking,
        special_tokens=tokenizer.special_tokens,
    )


def _number(value: Any) -> Any:
    """The value if it is a number."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def load_target(
    path: str | Path, *, device: str = "auto", dtype: torch.dtype | str | None = None, name: str | None = None
) -> Target:
    """Load the target in the directory `path` (safetensors; plain or EXL3).

    Args:
        path: a Hugging Face model directory (see `hub.resolve` for names).
        device: "auto", "cpu", "cuda" or "cuda:N".
        dtype: a torch dtype or its name ("float32", "bfloat16", "float16"); None lets `placement.choose_dtype` choose.
            Of a target on ExLlamaV3 it is the type of embeddings and taps; BF16 where None.
        name: for reports and messages; the directory's name where None.

    Raises:
        Exl3DflashError: anything about the directory, its config, weights or tokenizer that cannot be used, named.
    """
    path = Path(path)
    config = read_config(path)
    chosen = choose_device(device)
    method = _quantization_method(path, config)
    if method == "exl3" and chosen.type == "cuda":
        from exl3_dflash.target.exllama import load_exllama_target

        return load_exllama_target(path, chosen, parse_dtype(dtype), name)
    return _load_transformers_target(path, config, method, chosen, parse_dtype(dtype), name)


def _load_transformers_target(
    path: Path, config: Any, method: str | None, device: torch.device, dtype: torch.dtype | None, name: str | None
) -> TransformersTarget:
    with TensorDirectory.open(path) as directory:
        sha256 = directory.sha256() if directory.nbytes() <= HASHED_BYTES else None
        if method == "exl3":
            config = exl3_weights.untied_config(directory, config)
        skeleton = _empty_model(config)
        stored_dtype = config.get_text_config(decoder=True).dtype
        chosen_dtype = dtype or choose_dtype(stored_dtype, skeleton.num_parameters(), device)
        state = None
        if method == "exl3":
            shapes = {key: tuple(tensor.shape) for key, tensor in skeleton.state_dict().items()}
            state = exl3_weights.decode_state_dict(directory, shapes, chosen_dtype, device)
        quantized = exl3_weights.describe(directory) if method == "exl3" else "none"
    model = _load_weights(path, skeleton, chosen_dtype, state)
    eos = eos_ids_of(model.generation_config, config, config.get_text_config(decoder=True))
    tokenizer = TransformersTokenizer.load(path, eos)
    return TransformersTarget(
        model.to(device), tokenizer, name=name or path.resolve().name, quantized=quantized, sha256=sha256
    )


def read_config(path: Path) -> Any:
    """The transformers configuration of a model directory."""
    from transformers import AutoConfig

    file = path / "config.json"
    if not file.is_file():
        raise Exl3DflashError(f"{path} has no config.json", "a Hugging Face model directory", "check the path")
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        _refuse_drafter(path, raw)
        return AutoConfig.from_pretrained(str(path), local_files_only=True)
    except Exl3DflashError:
        raise
    except Exception as error:  # broken JSON, an unknown model_type, values the configuration class refuses
        raise Exl3DflashError(
            f"{file} cannot be used: {first_line(error)}",
            expected="the config.json of an architecture that the installed transformers knows",
            fix="upgrade transformers, or choose another target",
        ) from error


def check_loading(path: Path, info: dict[str, Any]) -> None:
    """Raise where transformers' loading report names weights that are missing, left over or of another shape."""
    faults = {
        "lacks the weight": sorted(info["missing_keys"]),
        "has an unknown weight": sorted(key for key in info["unexpected_keys"] if not _UNUSED_TENSORS.search(key)),
        "has a weight of another shape than its config says": sorted(map(_shapes_text, info["mismatched_keys"])),
        "has a weight that cannot be converted": sorted(map(str, info.get("error_msgs") or [])),
    }
    for fault, names in faults.items():
        if names:
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise Exl3DflashError(
                f"{path} {fault}: {names[0]}{others}",
                expected="exactly the tensors of the architecture in config.json",
                fix="download the checkpoint again, or check config.json",
            )


def _shapes_text(mismatch: tuple[str, torch.Size, torch.Size]) -> str:
    name, stored, wanted = mismatch
    return f"{name} {list(stored)} instead of {list(wanted)}"


def _refuse_drafter(path: Path, raw: dict[str, Any]) -> None:
    architectures = [str(name) for name in raw.get("architectures") or []]
    if "dflash_config" in raw or any("DFlash" in name for name in architectures):
        raise Exl3DflashError(
            f"{path} is a DFlash drafter ({', '.join(architectures) or 'dflash_config'})",
            expected="its target, a complete language model",
            fix="give the drafter as SOURCE or --drafter and the target as --target",
        )


def _quantization_method(path: Path, config: Any) -> str | None:
    """quant_method of the config: "exl3" or None; anything else is refused."""
    method = (getattr(config, "quantization_config", None) or {}).get("quant_method")
    if method in (None, "exl3"):
        return method
    raise Exl3DflashError(
        f"{path} is quantized with {method}",
        expected="plain safetensors weights or EXL3",
        fix="use the unquantized or the EXL3 version of the target",
    )


def _model_class(config: Any) -> Any:
    """The auto class for `config`; multimodal models that have no text-only class are loaded whole."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    known = type(config) in AutoModelForCausalLM._model_mapping
    multimodal = type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if multimodal and not known else AutoModelForCausalLM


def _empty_model(config: Any) -> Any:
    """The model of `config` without memory for its parameters."""
    with torch.device("meta"):
        return _call_transformers(_model_class(config).from_config, config)


def _load_weights(path: Path, skeleton: Any, dtype: torch.dtype, state: dict[str, torch.Tensor] | None) -> Any:
    """A model like `skeleton` on the CPU with the weights of `state`, or of the files in `path` where it is None."""
    model, info = _call_transformers(
        type(skeleton).from_pretrained,
        str(path) if state is None else None,
        config=skeleton.config,
        state_dict=state,
        dtype=dtype,
        local_files_only=True,
        ignore_mismatched_sizes=True,  # reported, and refused with the rest below
        output_loading_info=True,
    )
    check_loading(path, info)
    return model


def _call_transformers(function: Any, *inputs: Any, **options: Any) -> Any:
    """Call a transformers constructor; its many exception types become one error."""
    try:
        with _quiet_transformers():
            return function(*inputs, **options)
    except Exception as error:
        raise Exl3DflashError(
            f"transformers cannot build the target: {first_line(error)}",
            expected="a causal language model that the installed transformers knows",
            fix="upgrade transformers, or choose another target",
        ) from error


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and no loading report: what the report says is checked here."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
