"""What a drafter needs from its target: taps, embedding, head, sessions with exact rollback, a tokenizer.

A DFlash drafter has no vocabulary of its own. It reads the residual stream of K target layers ("taps"), embeds its
block with the target's table, and scores its output with the target's head. Everything that calibrates, measures or
generates talks to the protocols below and never to a model class, so that engines are interchangeable.

Conventions
- Tap id j is the residual output of layer j (0-based), without any final norm, also for the last layer.
- Taps are concatenated in the LISTED order of the ids: (T, K*Ht), K = number of taps, Ht = target hidden size.
- Token ids are 1-d int64 tensors; one row at a time, never padded.
- A session is a growing list of tokens with its cache. `rollback` is exact: after it, the session gives what a fresh
  session fed with the same tokens would give, also for recurrent layers and for sliding windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict, runtime_checkable

import torch


class ChatMessage(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class TargetFacts:
    """What pairing, reports and cards need to know of a target.

    vocab_size is the number of rows of the embedding table and head_size that of the head (both with padding rows);
    tokenizer_size is the number of ids the tokenizer knows. embedding_scale is what the model multiplies table rows by
    before its first layer (already applied by `Target.embed`). quantized is "none" or for example "exl3 4.00bpw".
    """

    name: str
    architecture: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    head_size: int
    tokenizer_size: int
    embedding_scale: float
    final_logit_softcap: float | None
    recurrent: bool
    quantized: str
    sha256: str | None
    max_position_embeddings: int | None
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class TapRows:
    """One target forward over T tokens: taps (T, K*Ht) in the model's dtype, logits (T, V) float32 or None."""

    taps: torch.Tensor
    logits: torch.Tensor | None


@runtime_checkable
class TargetTokenizer(Protocol):
    """Text to ids and back, with the target's own chat template."""

    @property
    def size(self) -> int:
        """Number of ids the tokenizer knows (largest id + 1)."""
        ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer: generation_config, config and tokenizer together, sorted."""
        ...

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        ...

    @property
    def supports_thinking(self) -> bool:
        """Whether the chat template reads a thinking switch."""
        ...

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Ids of `text`; special tokens written in the text are recognised."""
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of `ids`, without clean-up of spaces."""
        ...

    def apply_chat_template(
        self, messages: Sequence[ChatMessage], thinking: bool | None = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation; thinking None leaves the template's default. Exl3DflashError without a template."""
        ...


@runtime_checkable
class TargetSession(Protocol):
    """One growing token sequence with its cache."""

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        ...

    @property
    def ids(self) -> list[int]:
        """The committed tokens, as a new list."""
        ...

    def forward(
        self, ids: torch.Tensor, tap_ids: Sequence[int] | None = None, logit_rows: int | None = None
    ) -> TapRows:
        """Append ids (T,), T >= 1. Returns taps (T, K*Ht), (T, 0) where tap_ids is None, and logits (T, V) float32.

        logit_rows n computes only the last n rows of logits (n, V), None where n is 0: a long prompt needs one row, and
        all of them would take T*V*4 bytes. If the forward is interrupted the session stays as it was before the call.
        """
        ...

    def rollback(self, length: int) -> None:
        """Forget every token from `length` on, 0 <= length <= self.length. Exact."""
        ...


@runtime_checkable
class Target(Protocol):
    """A causal language model seen from its drafter."""

    @property
    def facts(self) -> TargetFacts: ...

    @property
    def tokenizer(self) -> TargetTokenizer: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (...) to rows of the table (..., Ht), scaled as the model scales its first layer's input."""
        ...

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalised hidden (..., Ht) to logits (..., V) float32: with logit scale and softcap, no final norm."""
        ...

    def output_matrix(self, hidden: torch.Tensor) -> torch.Tensor:
        """As `head`, by the output matrix alone: without the model's logit scale and softcap."""
        ...

    def tap_rows(self, ids: torch.Tensor, tap_ids: Sequence[int], want_logits: bool = False) -> TapRows:
        """One row ids (S,) without a cache: taps (S, K*Ht), logits (S, V) only where wanted."""
        ...

    def new_session(self) -> TargetSession:
        """An empty session."""
        ...
