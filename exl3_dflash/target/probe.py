"""What only a forward can tell: checks on a few tokens, once, when a target is loaded.

1. Scale of the embedding. Some models multiply table rows inside the embedding module, some afterwards, some not at
   all. The input x of layer 0 is compared with the module's output e and with the table's rows w, by least squares:
   x = s_outer * e = s * w. Where x is not proportional (learned positions or a norm are added) the scale is 1.
2. Head. The logits of the whole model must equal those that the separated head gives for the same hidden states.
3. Recurrent layers: is a forward of several tokens on an existing state the same as one-token decoding? Some
   implementations read the state only when a single token comes and else start from zero, without an error. Outputs and
   states are compared; what rounding alone does is known from a forward of all tokens at once, which needs no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target.cache import RewindableCache
from exl3_dflash.target.messages import first_line

_HEAD_TOLERANCE = 1e-3  # relative to the largest logit; the operations are the same, so the difference is normally zero
_PROPORTIONAL = 0.02  # relative residual of x = s * w up to which x counts as scaled (BF16 rounding stays under 0.01)
_SNAP = 0.01  # a fitted scale this close to a usual one is that one
_NOISE = 1e-5
_NOISE_FACTOR = 4.0  # a state that was ignored is wrong by some 10 %, in at least one layer

RunChunk = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class ModelProbe:
    """Findings of one forward of the whole model; hidden (1, T, Ht) and logits (1, T, V) are kept for `check_head`."""

    body_output_type: type
    embedding_scale: float
    outer_embedding_scale: float
    hidden: torch.Tensor
    logits: torch.Tensor

    @property
    def hidden_size(self) -> int:
        """Ht."""
        return int(self.hidden.shape[-1])

    @property
    def head_size(self) -> int:
        """V, rows of the head."""
        return int(self.logits.shape[-1])

    def check_head(self, head: Callable[[torch.Tensor], torch.Tensor], architecture: str) -> None:
        """Compare the separated head with the whole model; raises Exl3DflashError where they differ."""
        with torch.no_grad():
            difference = (head(self.hidden) - self.logits).abs().max()
        if not difference <= _HEAD_TOLERANCE * self.logits.abs().max().clamp(min=1e-6):
            raise Exl3DflashError(
                f"the head of {architecture} cannot be separated from its decoder",
                expected="logits that depend only on the decoder's last hidden state",
                fix="choose a target of another architecture",
            )


def probe_ids(vocab_size: int, count: int = 3) -> torch.Tensor:
    """`count` different ids inside the used part of a vocabulary (no padding rows, few special tokens)."""
    return torch.tensor(
        [(vocab_size * (2 + 3 * index) // 7 + index) % (vocab_size - vocab_size // 8) for index in range(count)]
    )


@torch.no_grad()
def probe_model(model: Any, body: nn.Module, layers: nn.ModuleList, cache_options: dict[str, Any]) -> ModelProbe:
    """One forward of the whole model on three tokens, on the cache in `cache_options` (so that it is tried, too)."""
    embedding = model.get_input_embeddings()
    ids = probe_ids(embedding.weight.shape[0]).to(embedding.weight.device)
    first_inputs: list[torch.Tensor] = []
    bodies: list[Any] = []

    def keep_input(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        first_inputs.append(inputs[0] if inputs else named["hidden_states"])

    handles = [
        layers[0].register_forward_pre_hook(keep_input, with_kwargs=True),
        body.register_forward_hook(lambda module, inputs, output: bodies.append(output)),
    ]
    try:
        logits = model(input_ids=ids[None], **cache_options).logits
    except Exception as error:
        raise _cannot_run(model, f"fails on three tokens: {first_line(error)}") from error
    finally:
        for handle in handles:
            handle.remove()
    if not bodies or not first_inputs:
        raise _cannot_run(model, "does not call its decoder as a whole")
    return ModelProbe(
        body_output_type=type(bodies[0]),
        embedding_scale=_scale(first_inputs[0], embedding.weight[ids], _usual_scales(model)),
        outer_embedding_scale=_scale(first_inputs[0], embedding(ids), _usual_scales(model)),
        hidden=bodies[0].last_hidden_state,
        logits=logits,
    )


def _cannot_run(model: nn.Module, fault: str) -> Exl3DflashError:
    return Exl3DflashError(
        f"{type(model).__name__} {fault}",
        expected="a causal language model that runs on a dynamic cache",
        fix="upgrade transformers, or choose a target of another architecture",
    )


def _usual_scales(model: Any) -> tuple[float, ...]:
    config = model.config.get_text_config(decoder=True)
    named = [getattr(config, name, None) for name in ("embedding_multiplier", "scale_emb")]
    return (1.0, float(config.hidden_size) ** 0.5, *(float(value) for value in named if value))


def _scale(scaled: torch.Tensor, rows: torch.Tensor, usual: tuple[float, ...]) -> float:
    """s of scaled (1, T, Ht) = s * rows (T, Ht); 1.0 where they are not proportional."""
    if scaled.shape[-2:] != rows.shape:
        return 1.0
    x, w = scaled[0].double(), rows.double()
    scale = float((x * w).sum() / (w * w).sum().clamp(min=1e-30))
    if not (x - scale * w).norm() <= _PROPORTIONAL * x.norm():
        return 1.0
    return next((value for value in usual if abs(scale - value) <= _SNAP * value), scale)


@torch.no_grad()
def continues_in_chunks(run_chunk: RunChunk, new_cache: Callable[[], RewindableCache], vocab_size: int) -> bool:
    """Whether several tokens at once continue a recurrent state correctly (see the module's docstring, 3)."""
    ids = probe_ids(vocab_size, count=9)

    def run(lengths: Sequence[int]) -> list[torch.Tensor]:
        """Run ids in pieces of these lengths: the last four hidden states, then every recurrent state."""
        cache, start, hidden = new_cache(), 0, []
        for piece in ids.split(list(lengths)):
            hidden.append(run_chunk(piece, start, cache)[0])
            start += len(piece)
        return [torch.cat(hidden)[-4:].double(), *(tensor.double() for tensor in cache.recurrent_tensors())]

    decoded = run([1] * 9)
    noise = _relative_errors(run([9]), decoded)
    try:
        errors = _relative_errors(run([5, 4]), decoded)
    except Exception:  # some implementations fail here instead of going wrong
        return False
    return all(error <= _NOISE + _NOISE_FACTOR * floor for error, floor in zip(errors, noise, strict=True))


def _relative_errors(values: list[torch.Tensor], reference: list[torch.Tensor]) -> list[float]:
    return [
        float((value - wanted).norm() / wanted.norm().clamp(min=1e-30))
        for value, wanted in zip(values, reference, strict=True)
    ]
