"""A target of bytes for row tests: ids are bytes plus a few special tokens, answers follow a fixed rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target.base import ChatMessage, TapRows, TargetFacts

BEGIN, END, USER, ASSISTANT = 256, 257, 258, 259
VOCAB_SIZE = 264


class ByteTokenizer:
    """UTF-8 bytes; `encode` with special tokens puts BEGIN first, the template marks turns."""

    eos_token_ids = (END,)
    supports_thinking = True
    size = 260

    def __init__(self, has_chat_template: bool = True, allows_system: bool = True) -> None:
        self.has_chat_template = has_chat_template
        self.allows_system = allows_system
        self.thinking: list[bool | None] = []
        self.encoded_characters = 0

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        self.encoded_characters += len(text)
        return [BEGIN] * add_special + list(text.encode())

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="replace")

    def apply_chat_template(
        self, messages: Sequence[ChatMessage], thinking: bool | None = None, add_generation_prompt: bool = True
    ) -> list[int]:
        self.thinking.append(thinking)
        ids = [BEGIN]
        for message in messages:
            if message["role"] == "system" and not self.allows_system:
                raise Exl3DflashError("the template refuses a system turn")
            mark = ASSISTANT if message["role"] == "assistant" else USER
            ids += [mark, *message["content"].encode(), END, 10]
        return [*ids, ASSISTANT] if add_generation_prompt else ids


class CountingSession:
    """Writes letters that depend on everything before, and END as token number `answer_length` of the answer."""

    def __init__(self, answer_length: int) -> None:
        self._answer_length = answer_length
        self._ids: list[int] = []

    @property
    def length(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        return list(self._ids)

    def forward(
        self, ids: torch.Tensor, tap_ids: Sequence[int] | None = None, logit_rows: int | None = None
    ) -> TapRows:
        self._ids += ids.tolist()
        answered = len(self._ids) - 1 - max(i for i, t in enumerate(self._ids) if t == ASSISTANT)
        logits = torch.zeros(1, VOCAB_SIZE)
        mixture = sum((place * place + 1) * token for place, token in enumerate(self._ids))
        best = END if answered + 1 >= self._answer_length else 97 + mixture % 26
        logits[0, best] = 50.0  # sampling gives the same as greedy decoding
        return TapRows(torch.zeros(len(ids), 0), logits.expand(len(ids), -1))

    def rollback(self, length: int) -> None:
        del self._ids[length:]


class ByteTarget:
    """`Target` as far as rows need it; answers have `answer_length` tokens with the END token."""

    device = torch.device("cpu")
    dtype = torch.float32

    def __init__(
        self, *, positions: int | None = None, answer_length: int = 40, vocab_size: int = VOCAB_SIZE, **tokenizer: Any
    ) -> None:
        self.tokenizer = ByteTokenizer(**tokenizer)
        self._answer_length = answer_length
        self.sessions = 0
        self.facts = TargetFacts(
            name="bytes",
            architecture="Bytes",
            hidden_size=8,
            num_layers=2,
            vocab_size=vocab_size,
            head_size=VOCAB_SIZE,
            tokenizer_size=260,
            embedding_scale=1.0,
            final_logit_softcap=None,
            recurrent=False,
            quantized="none",
            sha256=None,
            max_position_embeddings=positions,
            eos_token_ids=(END,),
        )

    def new_session(self) -> CountingSession:
        self.sessions += 1
        return CountingSession(self._answer_length)
