"""Small stand-ins for a target and a drafter that make statistical and property tests of the engine fast and exact.

`TableTarget` looks its logits up by the last two tokens, so the distribution of every continuation is known. Its taps
are the pair (position, token): `NoisyDrafter` can check that its context is exactly the committed prefix of the
sequence.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from exl3_dflash.drafter.selector import Proposal
from exl3_dflash.target.base import TapRows, TargetFacts

FIRST_CHARACTER = ord("a")


class LetterTokenizer:
    """Token i is the i-th letter from "a"; the chat template joins contents with a separating token 0."""

    eos_token_ids = (1,)
    has_chat_template = True
    supports_thinking = True

    def __init__(self, size: int) -> None:
        self.size = size
        self.thinking: bool | None = None

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        return [ord(character) - FIRST_CHARACTER for character in text]

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        return "".join(chr(FIRST_CHARACTER + token) for token in ids)

    def apply_chat_template(
        self, messages: Sequence[Any], thinking: bool | None = None, add_generation_prompt: bool = True
    ) -> list[int]:
        self.thinking = thinking
        ids: list[int] = []
        for message in messages:
            ids += [0, *(token % self.size for token in self.encode(message["content"]))]
        return [*ids, 0]


class TableSession:
    """A session over a table; counts its forwards and the tokens they ran."""

    def __init__(self, target: TableTarget) -> None:
        self._target = target
        self._ids: list[int] = []
        self.forwards: list[int] = []
        self.tap_requests: list[bool] = []

    @property
    def length(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        return list(self._ids)

    def tail(self, count: int) -> list[int]:
        """The last `count` committed tokens."""
        return self._ids[-count:]

    def forward(
        self, ids: torch.Tensor, tap_ids: Sequence[int] | None = None, logit_rows: int | None = None
    ) -> TapRows:
        self._target.before_forward()
        rows, taps = [], []
        for token in ids.tolist():
            self._ids.append(token)
            rows.append(self._target.logits_after(self._ids))
            taps.append([float(self.length - 1), float(token)])
        self.forwards.append(len(rows))
        self.tap_requests.append(tap_ids is not None)
        wanted = rows[len(rows) - (len(rows) if logit_rows is None else logit_rows) :]
        logits = torch.stack(wanted) if wanted else None
        return TapRows(torch.tensor(taps) if tap_ids is not None else torch.zeros(len(rows), 0), logits)

    def rollback(self, length: int) -> None:
        assert 0 <= length <= self.length
        del self._ids[length:]


class TableTarget:
    """Random logits (V, V, V) by the last two tokens; `sharpness` scales them."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(self, size: int, seed: int = 0, sharpness: float = 1.5, context: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(size, size, size, generator=generator) * sharpness
        self.tokenizer = LetterTokenizer(size)
        self.sessions: list[TableSession] = []
        self.before_forward = lambda: None
        self.facts = TargetFacts(
            name="table",
            architecture="Table",
            hidden_size=size,
            num_layers=4,
            vocab_size=size,
            head_size=size,
            tokenizer_size=size,
            embedding_scale=1.0,
            final_logit_softcap=None,
            recurrent=False,
            quantized="none",
            sha256=None,
            max_position_embeddings=context,
            eos_token_ids=(1,),
        )

    def logits_after(self, ids: Sequence[int]) -> torch.Tensor:
        return self.table[ids[-2] if len(ids) > 1 else 0, ids[-1]]

    def greedy(self, ids: Sequence[int], count: int) -> list[int]:
        """The plain greedy continuation, without any engine."""
        sequence = list(ids)
        for _ in range(count):
            sequence.append(int(self.logits_after(sequence).argmax()))
        return sequence[len(ids) :]

    def new_session(self) -> TableSession:
        self.sessions.append(TableSession(self))
        return self.sessions[-1]

    @property
    def session(self) -> TableSession:
        return self.sessions[-1]


class ContextCache:
    """The tap rows a drafter was given."""

    def __init__(self) -> None:
        self.rows: list[list[float]] = []

    @property
    def length(self) -> int:
        return len(self.rows)

    def crop(self, length: int) -> None:
        assert 0 <= length <= self.length
        del self.rows[length:]


class NoisyDrafter:
    """Proposes the target's greedy tokens, each wrong with probability `noise`; checks its context on every call."""

    checked_rows = 200  # of the end of the context; bounds the work of long runs

    def __init__(self, target: TableTarget, block_size: int = 5, noise: float = 0.3, causal: bool = False) -> None:
        self._target = target
        self._noise = noise
        self._random = random.Random(0)
        self._anchor_token = 0
        self.block_rows: list[int] = []
        self.calls = 0
        self.config = SimpleNamespace(
            block_size=block_size,
            num_layers=1,
            num_target_layers=4,
            target_layer_ids=(0, 2),
            tap_shift=None,
            layer_is_causal=lambda _layer: causal,
        )

    def new_cache(self) -> ContextCache:
        self.calls += 1
        return ContextCache()

    def extend_context(self, cache: ContextCache, taps: torch.Tensor) -> None:
        self.calls += 1
        cache.rows += taps.tolist()

    def block_embeddings(self, _target: TableTarget, anchors: torch.Tensor, rows: int | None = None) -> torch.Tensor:
        self._anchor_token = int(anchors[0])
        return torch.zeros(1, rows or self.config.block_size, 1)

    def draft(self, cache: ContextCache, embeddings: torch.Tensor, start: int) -> torch.Tensor:
        self.calls += 1
        session = self._target.session
        assert start == cache.length == session.length
        tail = session.tail(self.checked_rows)
        assert cache.rows[-len(tail) :] == [
            [float(at), float(token)] for at, token in enumerate(tail, start - len(tail))
        ]
        self.block_rows.append(len(embeddings))
        sequence = [*tail, self._anchor_token]
        tokens = [self._anchor_token, *self._target.greedy(sequence, len(embeddings) - 1)]
        size = self._target.facts.vocab_size
        noisy = [self._random.randrange(size) if self._random.random() < self._noise else token for token in tokens]
        return torch.nn.functional.one_hot(torch.tensor(noisy), size).float()

    def propose(self, _target: TableTarget, _anchors: torch.Tensor, hidden: torch.Tensor) -> Proposal:
        return Proposal(hidden.argmax(-1), hidden)
