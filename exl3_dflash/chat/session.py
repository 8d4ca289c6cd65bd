"""A chat session: a conversation, an engine and the settings that slash commands change.

`ChatSession.ask` is a generator of text pieces. Whatever ends it (the end of the answer, the user, an error) the
conversation stays valid: an answer that began is kept as far as it went, a question that got no token of answer is
taken back.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from exl3_dflash.chat.conversation import Conversation
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.runtime.engine import Engine, GenerationStats, SamplingSettings, StopSettings
from exl3_dflash.runtime.streaming import TextStream, answer_text

if TYPE_CHECKING:
    from exl3_dflash.target.base import ChatMessage


@dataclass(frozen=True)
class Answer:
    """One answer: its visible text, every emitted token id (a final stop token included) and its counters."""

    text: str
    token_ids: tuple[int, ...]
    stats: GenerationStats

    def to_json(self) -> dict[str, Any]:
        """The keys of `exl3-dflash chat --json`; definitions in `runtime.stats`."""
        stats = self.stats
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "accept_length": stats.accept_length,
            "accept_rate": stats.accept_rate,
            "verify_steps": stats.verify_steps,
            "tokens_per_second": stats.tokens_per_second,
            "time_to_first_token": stats.time_to_first_token,
            "stop_reason": stats.stop_reason,
            "prompt_tokens": stats.prompt_tokens,
            "new_tokens": stats.new_tokens,
            "proposed": stats.proposed,
            "accepted": stats.accepted,
            "decode_steps": stats.decode_steps,
            "prefill_seconds": stats.prefill_seconds,
            "decode_seconds": stats.decode_seconds,
            "repeated_run": stats.repeated_run,
            "looping": stats.looping,
        }


class ChatSession:
    """Turns of one user with one engine.

    Args:
        engine: generates; its caches are reused from turn to turn.
        conversation: where to begin.
        sampling: with a seed, the n-th answer of the session uses seed + n - 1, so that /retry gives another answer.
        stops: when an answer ends.
    """

    def __init__(
        self, engine: Engine, conversation: Conversation, sampling: SamplingSettings, stops: StopSettings
    ) -> None:
        self.engine = engine
        self.conversation = conversation
        self.sampling = sampling
        self.stops = stops
        self.answers: list[Answer] = []

    def ask(self, text: str) -> Generator[str]:
        """Send a user message and stream the answer's text; the finished `Answer` is `self.answers[-1]`.

        Raises:
            Exl3DflashError: the template refuses the conversation, or the context is full.
        """
        return self._ask(text, before=list(self.conversation.messages))

    def retry(self) -> Generator[str]:
        """Replace the last answer by another one to the same message, streamed as by `ask`.

        Raises:
            Exl3DflashError: there is no message yet; or as for `ask`, and the old answer stays.
        """
        before = list(self.conversation.messages)
        text = self.conversation.take_last_question()
        if text is None:
            raise Exl3DflashError("there is no message to retry", fix="write one first")
        return self._ask(text, before)

    def _ask(self, text: str, before: list[ChatMessage]) -> Generator[str]:
        """Stream an answer; without a single token of it the messages are set back to `before`."""
        self.conversation.add("user", text)
        token_ids: list[int] = []
        try:
            stream = TextStream(self.engine.tokenizer, self.stops)
            with closing(self.engine.generate(self._prompt_ids(), self._next_sampling(), self.stops)) as steps:
                for step in steps:
                    token_ids += step.token_ids
                    yield stream.push(step.token_ids)
            yield stream.finish()
        finally:
            if token_ids:
                self._record(token_ids)
            else:
                self.conversation.messages[:] = before

    def reset(self) -> None:
        """Forget the turns and the caches; system prompt and settings stay."""
        self.conversation.messages.clear()
        self.engine.reset()

    def set_thinking(self, thinking: bool | None) -> None:
        """Set the template's thinking switch; None is the template's default.

        Raises:
            Exl3DflashError: the template has no such switch.
        """
        if thinking is not None and not self.engine.tokenizer.supports_thinking:
            raise Exl3DflashError("this target's chat template has no thinking switch", fix="leave thinking as it is")
        self.conversation.thinking = thinking

    def _prompt_ids(self) -> list[int]:
        conversation = self.conversation
        return self.engine.tokenizer.apply_chat_template(conversation.for_template(), conversation.thinking)

    def _next_sampling(self) -> SamplingSettings:
        seed = self.sampling.seed
        return self.sampling if seed is None else replace(self.sampling, seed=seed + len(self.answers))

    def _record(self, token_ids: list[int]) -> None:
        text = answer_text(self.engine.tokenizer, token_ids, self.stops)
        self.conversation.add("assistant", text)
        self.answers.append(Answer(text, tuple(token_ids), replace(self.engine.stats)))
