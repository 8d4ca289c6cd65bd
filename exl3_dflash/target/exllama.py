"""A target on ExLlamaV3: EXL3 or unquantized weights on one or more GPUs, seen as every other target is.

Taps come by the state export that ExLlamaV3's own DFlash models are fed by: a layer whose number is in
`export_state_layers` appends its output to `export_states`, in the order of execution. What is exported is FP16 on the
layer's GPU, whatever the residual stream is held in (FP32 for most architectures), and clamped to +-65,504. A drafter
that runs there sees exactly these values, so they are the right ones to calibrate with; `clamped_values` says how many
were cut. A layer scalar (Gemma 4) is applied behind the export.

Rows of up to `chunk_tokens` run without a cache; longer ones, and sessions, run through the model's cache in chunks.
The head is ExLlamaV3's too. Where a gradient is wanted, its weight is decoded for the backward pass alone.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.runtime.exllama_library import require_exllamav3
from exl3_dflash.runtime.exllama_model import ExllamaModel, ExllamaSettings, load_models
from exl3_dflash.target import exl3_weights
from exl3_dflash.target.base import TapRows, TargetFacts
from exl3_dflash.target.exllama_session import ExllamaSession
from exl3_dflash.target.tokenizer import TransformersTokenizer, eos_ids_of
from quantize.checkpoint import TensorDirectory, linear_names

log = logging.getLogger(__name__)

FP16_MAX = 65504.0
HASHED_BYTES = 4 << 30
MEASURING_CACHE_TOKENS = 8192  # on-policy rows are written in it, as many at once as fit, but at most
MEASURING_REQUESTS = 16


class ExllamaTarget:
    """`base.Target` on a model that ExLlamaV3 loaded.

    Args:
        loaded: the model with its cache, which the newest session and an `ExllamaEngine` share: one at a time.
        path: its directory, for the tokenizer and the facts.
        name: for reports and messages.
        dtype: of `embed` and of taps; the drafter's torch model computes in it.
    """

    def __init__(
        self, loaded: ExllamaModel, path: Path, name: str | None = None, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.loaded = loaded
        self.dtype = dtype
        self.device = loaded.device
        self.tokenizer = TransformersTokenizer.load(path, _eos_ids(path))
        self.facts = _facts(loaded, path, name or path.resolve().name, self.tokenizer)
        self.clamped_values = 0
        self._modules = loaded.model.modules
        self._head = self._modules[loaded.model.logit_layer_idx]

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (...) to the rows (..., Ht) that ExLlamaV3 embeds a drafter's block with."""
        rows: torch.Tensor = self._modules[0].forward(ids.reshape(1, -1).cpu(), {})
        return rows.reshape(*ids.shape, -1).to(self.device, self.dtype)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalised hidden (..., Ht) to logits (..., V) float32, with the model's logit scale and softcap.

        Differentiable in `hidden`.
        """
        logits = self.output_matrix(hidden) * self._head.pre_scale
        cap = self._head.softcap
        return (cap * torch.tanh(logits / cap) if cap else logits) * self._head.post_scale

    def output_matrix(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalised hidden (..., Ht) to logits (..., V) float32, without logit scale and softcap. Differentiable."""
        rows = hidden.reshape(-1, hidden.shape[-1]).to(self._head.device)
        logits: torch.Tensor = _HeadProduct.apply(rows, self._head)
        return logits[:, : self.facts.head_size].reshape(*hidden.shape[:-1], -1).to(self.device)

    @torch.no_grad()
    def tap_rows(self, ids: torch.Tensor, tap_ids: Sequence[int], want_logits: bool = False) -> TapRows:
        """One row ids (S,): taps (S, K*Ht) on the GPU, logits (S, V) only where wanted."""
        if len(ids) > self.loaded.settings.chunk_tokens:
            return self.new_session().forward(ids, tap_ids, None if want_logits else 0)
        self.check_tap_ids(tap_ids)
        parameters: dict[str, Any] = {"attn_mode": "flash_attn_nc", "export_state_layers": set(tap_ids)}
        run = self.loaded.model.forward if want_logits else self.loaded.model.prefill
        output = run(ids.reshape(1, -1).cpu(), parameters)
        taps = self.exported(parameters, tap_ids, len(ids))
        return TapRows(taps, self.cropped(output) if want_logits else None)

    def new_session(self) -> ExllamaSession:
        """An empty session; it takes the cache over from the one before."""
        return ExllamaSession(self)

    def cropped(self, logits: torch.Tensor) -> torch.Tensor:
        """ExLlamaV3's logits (1, T, padded V) as (T, V) float32."""
        return logits[0, :, : self.facts.head_size].float().to(self.device)

    def exported(self, parameters: dict[str, Any], tap_ids: Sequence[int], count: int) -> torch.Tensor:
        """The exported states of a forward over `count` tokens as taps (T, K*Ht), in the listed order."""
        if not tap_ids:
            return torch.empty(count, 0, dtype=self.dtype, device=self.device)
        layers = sorted(set(tap_ids))
        states = parameters.get("export_states") or []
        if len(states) != len(layers):
            raise Exl3DflashError(
                f"ExLlamaV3 exports no state of some layers of {self.facts.architecture}",
                expected=f"layers {', '.join(map(str, layers))}",
                fix="choose a target of another architecture",
            )
        clamped = sum(int((state.abs() >= FP16_MAX).sum()) for state in states)
        if clamped and not self.clamped_values:
            log.info("features of %s beyond 65,504 are clamped, as for a drafter in ExLlamaV3", self.facts.name)
        self.clamped_values += clamped
        by_layer = dict(zip(layers, states, strict=True))
        return torch.cat([by_layer[layer][0].to(self.device, self.dtype) for layer in tap_ids], dim=-1)

    def check_tap_ids(self, tap_ids: Sequence[int]) -> None:
        """Raise Exl3DflashError for a tap that is no layer of this target."""
        outside = [layer for layer in tap_ids if not 0 <= layer < self.facts.num_layers]
        if outside:
            raise Exl3DflashError(
                f"tap {outside[0]} is no layer of {self.facts.name}",
                expected=f"layers 0 to {self.facts.num_layers - 1}",
                fix="pair the drafter with the target that it was trained for",
            )


def load_exllama_target(
    path: Path, device: torch.device, dtype: torch.dtype | None = None, name: str | None = None
) -> ExllamaTarget:
    """Load a target for calibration or measurement.

    Args:
        path: an EXL3 or unquantized model directory.
        device: a CUDA device; "cuda" without a number uses all GPUs where there are several.
        dtype: of embeddings and taps; None is BF16.
        name: for reports and messages.

    Raises:
        Exl3DflashError: CUDA or ExLlamaV3 is not usable; the model cannot be read or does not fit.
    """
    library = require_exllamav3(device)
    settings = ExllamaSettings(cache_tokens=MEASURING_CACHE_TOKENS, max_batch_size=MEASURING_REQUESTS)
    loaded, _ = load_models(library, path, None, device, settings)
    return ExllamaTarget(loaded, path, name, dtype or torch.bfloat16)


class _HeadProduct(torch.autograd.Function):
    """rows (N, Ht) times the head's matrix, by its kernel; backward with the weight decoded for that one product."""

    @staticmethod
    def forward(context: Any, rows: torch.Tensor, head: Any) -> torch.Tensor:
        context.head = head
        context.dtype = rows.dtype
        padded = functional.pad(rows.half(), (0, head.in_features - rows.shape[-1]))
        product: torch.Tensor = head.inner.forward(padded[None].contiguous(), {}, torch.float)
        return product[0]

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        weight = context.head.inner.get_weight_tensor()  # (padded Ht, padded V) half
        width = context.head.in_features_unpadded
        columns = weight.shape[1]
        gradient = functional.pad(gradients[0], (0, columns - gradients[0].shape[-1]))
        return (gradient.float() @ weight[:width].float().T).to(context.dtype), None


def _eos_ids(path: Path) -> tuple[int, ...]:
    """Every eos_token_id of the directory's configuration files."""
    sources: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        file = path / name
        if file.is_file():
            raw = json.loads(file.read_text(encoding="utf-8"))
            sources += [part for part in (raw, raw.get("text_config")) if isinstance(part, dict)]
    return eos_ids_of(*(_Attributes(source) for source in sources))


class _Attributes:
    """A JSON object whose keys are attributes."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


def _facts(loaded: ExllamaModel, path: Path, name: str, tokenizer: TransformersTokenizer) -> TargetFacts:
    config, embedding = loaded.config, loaded.model.modules[0]
    head = loaded.model.modules[loaded.model.logit_layer_idx]
    with TensorDirectory.open(path) as directory:
        quantized = exl3_weights.describe(directory) if linear_names(directory) else "none"
        sha256 = directory.sha256() if directory.nbytes() <= HASHED_BYTES else None
    scale = getattr(embedding, "multiplier", 1.0) * (config.hidden_size**0.5 if embedding.normalize else 1.0)
    return TargetFacts(
        name=name,
        architecture=str(config.architecture),
        hidden_size=int(config.hidden_size),
        num_layers=int(config.num_hidden_layers),
        vocab_size=int(embedding.vocab_size),
        head_size=int(config.vocab_size),
        tokenizer_size=tokenizer.size,
        embedding_scale=float(scale),
        final_logit_softcap=float(head.softcap) or None,
        recurrent=bool(loaded.model.caps.get("recurrent_states")),
        quantized=quantized,
        sha256=sha256,
        max_position_embeddings=int(config.max_position_embeddings),
        eos_token_ids=tokenizer.eos_token_ids,
    )
