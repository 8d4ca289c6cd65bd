"""Two names to a target and its drafter, checked against each other and ready to run.

Cheap checks come first: both names are resolved, the drafter's files are opened and the pair is compared before any
weight is read. Then one of two engines: ExLlamaV3's generator and kernels on CUDA, our own loop everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from exl3_dflash.doctor.papers import require_papers
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub.resolve import ResolvedModel, resolve
from exl3_dflash.runtime.engine import Engine
from exl3_dflash.runtime.exllama import ExllamaEngine
from exl3_dflash.runtime.exllama_library import check_exllamav3, require_exllamav3
from exl3_dflash.runtime.exllama_model import ExllamaDrafter, ExllamaSettings, load_models
from exl3_dflash.runtime.reference import ReferenceEngine
from exl3_dflash.runtime.request import check_draft_tokens
from exl3_dflash.target.base import Target
from exl3_dflash.target.exllama import ExllamaTarget
from exl3_dflash.target.load import load_target, sketch_target
from exl3_dflash.target.placement import choose_device, parse_dtype
from quantize.encoder import default_threads

AUTO, EXLLAMAV3, REFERENCE = ENGINES = ("auto", "exllamav3", "reference")


@dataclass(frozen=True)
class EngineChoice:
    """Which engine generates, and what only ExLlamaV3's can be told.

    Args:
        name: "exllamav3", "reference", or "auto": exllamav3 on CUDA, else reference.
        exllama: how ExLlamaV3 places the pair and how much it remembers; None is its defaults.
        dynamic_draft: see `ExllamaEngine`.

    Raises:
        Exl3DflashError: another name.
    """

    name: str = AUTO
    exllama: ExllamaSettings | None = None
    dynamic_draft: bool = False

    def __post_init__(self) -> None:
        if self.name not in ENGINES:
            raise Exl3DflashError(f"engine {self.name!r} is unknown", f"one of {', '.join(ENGINES)}")

    def resolve(self, device: torch.device) -> str:
        """The engine for `device`.

        Raises:
            Exl3DflashError: settings of ExLlamaV3 for the reference engine, or a split that contradicts the device.
        """
        name = self.name if self.name != AUTO else EXLLAMAV3 if device.type == "cuda" else REFERENCE
        if name == REFERENCE and (self.exllama is not None or self.dynamic_draft):
            raise Exl3DflashError(
                f"the reference engine, which runs on {device}, has no cache options, GPU split or dynamic draft",
                expected="these options with the engine exllamav3 alone",
                fix="leave them out, or run on CUDA",
            )
        if self.exllama is not None and self.exllama.gpu_split is not None:
            _check_split(self.exllama.gpu_split, device)
        return name


def _check_split(split: tuple[float, ...], device: torch.device) -> None:
    gpus = torch.cuda.device_count()
    if device.index is not None:
        raise Exl3DflashError(f"a GPU split, and the one device {device}", "one of both", "use --device cuda")
    if len(split) > gpus:
        raise Exl3DflashError(
            f"a GPU split over {len(split)} GPUs", f"at most {gpus}, which torch sees", "see nvidia-smi"
        )


@dataclass(frozen=True)
class LoadedPair:
    """A target, its drafter (None where none was asked for), where they came from and what was noticed on the way."""

    target: Target
    drafter: DrafterModel | None
    target_source: ResolvedModel
    drafter_source: ResolvedModel | None
    drafter_sha256: str | None
    notes: tuple[str, ...]
    exllama_drafter: ExllamaDrafter | None = None
    dynamic_draft: bool = False

    def engine(self, draft_tokens: int | None = None) -> Engine:
        """An engine over this pair: `ExllamaEngine` where ExLlamaV3 loaded it, else `ReferenceEngine`."""
        if isinstance(self.target, ExllamaTarget):
            return ExllamaEngine(self.target, self.exllama_drafter, draft_tokens, self.dynamic_draft)
        return ReferenceEngine(self.target, self.drafter, draft_tokens)

    def describe(self) -> dict[str, object]:
        """Names, revisions, hashes and how it runs, for reports and `--json`."""
        facts, exllama = self.target.facts, isinstance(self.target, ExllamaTarget)
        return {
            "target": self.target_source.name,
            "target_revision": self.target_source.revision,
            "target_sha256": facts.sha256,
            "target_quantized": facts.quantized,
            "drafter": self.drafter_source.name if self.drafter_source else None,
            "drafter_revision": self.drafter_source.revision if self.drafter_source else None,
            "drafter_sha256": self.drafter_sha256,
            "engine": EXLLAMAV3 if exllama else REFERENCE,
            "device": str(self.target.device),
            "dtype": "float16" if exllama else str(self.target.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }


def choose_torch_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """The torch type of a `--dtype` name; None (also for "auto") leaves the choice to the target's loader."""
    return parse_dtype(None if name == "auto" else name)


def load_pair(
    target: str,
    drafter: str | None,
    *,
    device: str = "auto",
    dtype: str | torch.dtype | None = None,
    threads: int = 0,
    draft_tokens: int | None = None,
    block_size: int | None = None,
    engine: EngineChoice | None = None,
) -> LoadedPair:
    """Load a target and its drafter.

    Args:
        target: a directory, a Hugging Face id or "demo".
        drafter: the same for the drafter; None loads no drafter.
        device: "auto", "cpu", "cuda" or "cuda:N"; both run there.
        dtype: "auto" or None, "float32", "bfloat16" or a torch type; both compute in it. ExLlamaV3 has its own.
        threads: CPU threads of torch; 0 means the physical cores.
        draft_tokens: what `LoadedPair.engine` will be asked for, to be refused early where it is out of range.
        block_size: of a drafter whose config does not say it.
        engine: which engine generates; None is "auto".

    Raises:
        Exl3DflashError: a name, a file or the pairing is wrong.
    """
    wanted = choose_torch_dtype(dtype)
    engine = engine or EngineChoice()
    where = choose_device(device)
    kind = engine.resolve(where)
    if engine.dynamic_draft and (drafter is None or draft_tokens == 0):
        raise Exl3DflashError(
            "a dynamic draft without drafting", "a drafter that is run", "leave the dynamic draft out"
        )
    if kind == EXLLAMAV3:
        check_exllamav3(where)
        if wanted is not None:
            fix = "leave --dtype out, or use --engine reference"
            raise Exl3DflashError(f"dtype {dtype} with the engine exllamav3", "its own types (FP16)", fix)
    torch.set_num_threads(threads or default_threads())
    target_source = resolve(target, "target")
    drafter_source = resolve(drafter, "drafter") if drafter is not None else None
    checkpoint = DrafterCheckpoint.open(drafter_source.path, block_size) if drafter_source else None
    notes: tuple[str, ...] = ()
    if checkpoint is not None:
        notes = require_papers(checkpoint, sketch_target(target_source.path, target_source.name))
    if draft_tokens is not None:
        check_draft_tokens(draft_tokens, checkpoint.config.block_size - 1 if checkpoint else 0)
    pair = _Sources(target_source, drafter_source, checkpoint, notes)
    if kind == EXLLAMAV3:
        return _load_with_exllama(pair, where, engine)
    model = load_target(target_source.path, device=device, dtype=wanted, name=target_source.name)
    loaded = DrafterModel.from_checkpoint(checkpoint, dtype=model.dtype, device=model.device) if checkpoint else None
    return pair.loaded(model, loaded)


@dataclass(frozen=True)
class _Sources:
    """A pair before its weights are read."""

    target: ResolvedModel
    drafter: ResolvedModel | None
    checkpoint: DrafterCheckpoint | None
    notes: tuple[str, ...]

    def loaded(self, target: Target, drafter: DrafterModel | None, **more: Any) -> LoadedPair:
        sha256 = self.checkpoint.sha256 if self.checkpoint else None
        return LoadedPair(target, drafter, self.target, self.drafter, sha256, self.notes, **more)


def _load_with_exllama(pair: _Sources, device: torch.device, engine: EngineChoice) -> LoadedPair:
    library = require_exllamav3(device)
    settings = engine.exllama or ExllamaSettings()
    model, drafter = load_models(library, pair.target.path, pair.checkpoint, device, settings)
    target = ExllamaTarget(model, pair.target.path, pair.target.name)
    return pair.loaded(target, None, exllama_drafter=drafter, dynamic_draft=engine.dynamic_draft)
