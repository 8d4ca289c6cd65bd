"""Models and caches of ExLlamaV3, loaded: a target and the drafter that will draft for it.

Order matters there. A cache is made before its model is loaded, because loading allocates it on the layers' devices;
the drafter is loaded before the target, so that an automatic split knows what is left; both caches have the same number
of pages, because they share one page table.

The drafter is loaded from a view of its directory: the same weights, with a config.json in ExLlamaV3's own words
(`drafter.export`), so that it computes what our torch drafter computes also where the published config would be read
another way (tap_shift first of all).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.dialects import LAGUNA
from exl3_dflash.drafter.export import exllamav3_config
from exl3_dflash.drafter.taps import DEFAULT_TAP_SHIFT, tap_layer_indices
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.runtime.exllama_errors import guarded_load

PAGE_TOKENS = 256
DEFAULT_CACHE_TOKENS = 16384
VALUE_SCALE = "attention_value_scale"


@dataclass(frozen=True)
class ExllamaSettings:
    """How a pair is put on the GPUs and how much it remembers.

    Args:
        cache_tokens: tokens of all running requests together, prompts and answers, that the cache holds; None holds
            the target's positions, but at most DEFAULT_CACHE_TOKENS.
        cache_bits: bits per cached key and value of the target, 2 to 8; None caches in FP16.
        gpu_split: GB of each GPU that target, drafter and caches may use; None fills one GPU after the other.
        max_batch_size: requests that run at once; a hybrid target keeps one recurrent state for each.
        chunk_tokens: prompt tokens of one forward.

    Raises:
        Exl3DflashError: a value is out of its range.
    """

    cache_tokens: int | None = None
    cache_bits: int | None = None
    gpu_split: tuple[float, ...] | None = None
    max_batch_size: int = 4
    chunk_tokens: int = 2048

    def __post_init__(self) -> None:
        _check("cache tokens", self.cache_tokens, self.cache_tokens is None or self.cache_tokens >= 1, "1 or more")
        _check("cache bits", self.cache_bits, self.cache_bits is None or 2 <= self.cache_bits <= 8, "2 to 8")
        split = self.gpu_split
        valid = split is None or (len(split) > 0 and min(split) >= 0 and max(split) > 0)
        _check("GPU split", split, valid, "GB for each GPU, for example 20,24")
        _check("concurrent requests", self.max_batch_size, self.max_batch_size >= 1, "1 or more")
        pages = self.chunk_tokens > 0 and self.chunk_tokens % PAGE_TOKENS == 0
        _check("chunk tokens", self.chunk_tokens, pages, f"a multiple of {PAGE_TOKENS}")


def _check(name: str, value: object, valid: bool, expected: str) -> None:
    if not valid:
        raise Exl3DflashError(f"{name}: {value}", expected, "pass another value")


@dataclass
class CacheLease:
    """Who has a cache now, a session or a generator: one at a time, and the next one starts over.

    What the owner holds of it beside pages (recurrent states, buffers) it gives back with `leave`, when it has to go.
    """

    owner: object = None
    leave: Callable[[], None] | None = None

    def take(self, owner: object, leave: Callable[[], None] | None) -> None:
        """The cache is `owner`'s from now on."""
        self.end()
        self.owner, self.leave = owner, leave

    def end(self) -> None:
        """The cache is nobody's."""
        leave, self.owner, self.leave = self.leave, None, None
        if leave is not None:
            leave()


@dataclass(frozen=True)
class ExllamaModel:
    """A loaded model with its cache. `device` is where its last layer, and so its logits, lie."""

    library: ModuleType
    config: Any
    model: Any
    cache: Any
    settings: ExllamaSettings
    device: torch.device
    lease: CacheLease = field(default_factory=CacheLease)

    @property
    def cache_tokens(self) -> int:
        """Tokens that the cache holds."""
        return int(self.cache.max_num_tokens)


@dataclass(frozen=True)
class ExllamaDrafter:
    """A loaded drafter, with the facts that its engine and its target need."""

    loaded: ExllamaModel
    block_size: int
    tap_ids: tuple[int, ...]


def load_models(
    library: ModuleType,
    target: Path,
    drafter: DrafterCheckpoint | None,
    device: torch.device,
    settings: ExllamaSettings,
) -> tuple[ExllamaModel, ExllamaDrafter | None]:
    """Load a target and its drafter with `library` (exllamav3).

    Args:
        target, drafter: an EXL3 or unquantized model directory, and an opened drafter or None.
        device: one device for everything; "cuda" without a number may use every GPU.
        settings: sizes of caches and the split.

    Raises:
        Exl3DflashError: ExLlamaV3 cannot read or hold one of them.
    """
    config = guarded_load("read", target, lambda: library.Config.from_directory(str(target)))
    tokens = _cache_tokens(settings, config, drafter)
    history = 0 if drafter is None else drafter.config.block_size - 1
    loaded_drafter = None if drafter is None else _load_drafter(library, drafter, tokens, device, settings)
    model, cache = _build(library, target, config, tokens, history, settings)
    _require_head(target, model)
    draft_model = {} if loaded_drafter is None else {"draft_model": loaded_drafter.loaded.model}
    _load(target, model, device, settings, draft_model if _takes_draft_model(model) else {})
    loaded = ExllamaModel(library, config, model, cache, settings, torch.device(model.output_device))
    return loaded, loaded_drafter


def _cache_tokens(settings: ExllamaSettings, config: Any, drafter: DrafterCheckpoint | None) -> int:
    """Whole pages for the wanted tokens, one more token, and what a verification writes past the last one."""
    wanted = settings.cache_tokens or min(int(config.max_position_embeddings), DEFAULT_CACHE_TOKENS)
    ahead = 1 if drafter is None else drafter.config.block_size
    return -(-(wanted + ahead) // PAGE_TOKENS) * PAGE_TOKENS


def _load_drafter(
    library: ModuleType, drafter: DrafterCheckpoint, tokens: int, device: torch.device, settings: ExllamaSettings
) -> ExllamaDrafter:
    path = drafter.directory.path
    with drafter_view(drafter) as view:
        config = guarded_load("read", path, lambda: library.Config.from_directory(str(view)))
        require_features(config, drafter)
        config.target_layer_ids = list(tap_layer_indices(drafter.config))  # older versions read no tap_shift
        history = drafter.config.block_size - 1  # as ExLlamaV3's own loader gives its drafters
        model, cache = _build(library, path, config, tokens, history, replace(settings, cache_bits=None))
        _load(path, model, device, settings, {})
    loaded = ExllamaModel(library, config, model, cache, settings, torch.device(model.output_device))
    return ExllamaDrafter(loaded, drafter.config.block_size, tap_layer_indices(drafter.config))


@contextmanager
def drafter_view(drafter: DrafterCheckpoint) -> Iterator[Path]:
    """A directory for ExLlamaV3 to read while the body runs: links to the weights, and our config.json."""
    source = drafter.directory.path
    written = exllamav3_config(drafter.config, drafter.config.tap_shift or DEFAULT_TAP_SHIFT)
    if drafter.config.attention_value_scale != 1:  # these weights have it not folded into o_proj
        written[VALUE_SCALE] = drafter.config.attention_value_scale
    with tempfile.TemporaryDirectory(prefix="exl3-dflash-") as name:
        view = Path(name)
        for file in source.iterdir():
            if file.name != "config.json":
                (view / file.name).symlink_to(file.resolve())
        (view / "config.json").write_text(json.dumps(written), encoding="utf-8")
        yield view


def require_features(config: Any, drafter: DrafterCheckpoint) -> None:
    """Refuse a drafter that this version of ExLlamaV3 would load and compute wrongly (docs/exllamav3.md).

    Its class for Laguna keeps sliding layers causal and joins taps in ascending order. Versions before `block_window`
    came to its class for DFlash ignore the keys below.
    """
    ours = drafter.config
    causal = [ours.layer_is_causal(index) for index in range(ours.num_layers)]
    taps = tap_layer_indices(ours)
    if ours.dialect is LAGUNA:
        unread = {
            "causal": ours.sliding_window is not None and not all(causal),
            "unsorted target_layer_ids": list(taps) != sorted(taps),
        }
    elif hasattr(config, "block_window"):
        unread = {}
    else:
        unread = {
            "is_causal": any(causal),
            "sliding_window": ours.sliding_window is not None,
            "attention sinks": any(name.endswith("attention_sink_bias") for name in drafter.tensor_names()),
            "mask_embedding": "mask_embedding" in drafter.tensor_names(),
            "unsorted target_layer_ids": list(taps) != sorted(taps),
            VALUE_SCALE: ours.attention_value_scale != 1,
        }
    wrong = [name for name, needed in unread.items() if needed]
    if wrong:
        raise Exl3DflashError(
            f"this ExLlamaV3 does not heed {', '.join(wrong)} of {drafter.directory.path}",
            expected="a version that computes what the drafter was trained with (1.6.5 was checked)",
            fix="pip install -U exllamav3, or use --engine reference",
        )


def _build(
    library: ModuleType, path: Path, config: Any, tokens: int, history: int, settings: ExllamaSettings
) -> tuple[Any, Any]:
    """A model without weights and the cache that loading it will allocate."""
    model = guarded_load("build", path, lambda: library.Model.from_config(config))
    bits = settings.cache_bits
    kind = {} if bits is None else {"layer_type": library.CacheLayer_quant, "k_bits": bits, "v_bits": bits}
    options = {"max_num_tokens": tokens, "max_batch_size": settings.max_batch_size, "max_history": history, **kind}
    return model, guarded_load("make a cache for", path, lambda: library.Cache(model, **options))


def _takes_draft_model(model: Any) -> bool:
    import inspect

    return "draft_model" in inspect.signature(model.load_gen).parameters


def _load(path: Path, model: Any, device: torch.device, settings: ExllamaSettings, more: dict[str, Any]) -> None:
    """Read the weights onto `device`, or onto every GPU where it names none and there are several."""
    several = device.type == "cuda" and device.index is None and torch.cuda.device_count() > 1
    if settings.gpu_split is not None:
        left = [max(0.0, gb - torch.cuda.memory_reserved(n) / 2**30) for n, gb in enumerate(settings.gpu_split)]
        more = {"use_per_device": left, "max_batch_size": settings.max_batch_size, **more}
    elif several:
        more = {"max_batch_size": settings.max_batch_size, **more}
    else:
        more = {"device": torch.device("cuda", 0) if device.type == "cuda" and device.index is None else device}
    guarded_load("load", path, lambda: model.load(max_chunk_size=settings.chunk_tokens, **more))


def _require_head(path: Path, model: Any) -> None:
    if model.logit_layer_idx is None or model.caps.get("dflash_draft"):
        raise Exl3DflashError(f"{path} is no target", "a complete language model", "give the drafter as --drafter")
