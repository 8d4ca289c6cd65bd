"""Chats about the village of Larkford: the narrow grammar that the demo pair is trained on.

What it makes: chats of user and assistant turns in readable English. Every turn has a kind (see `demo_tasks.KINDS`, and
memory of an earlier greeting). The facts are fixed (`demo_world`); `demo_turns` and `demo_tasks` make one question and
its answer.

Why so: the answers must hold real information (facts to look up, text to copy from the question, small sums) and real
choice, so that a drafter accepts some tokens of a block and not all of them. A grammar without choice would be accepted
whole at any precision and could not show what quantization costs.

Held-out messages are separated by their text, not by a seed: `is_held_out` hashes what the user writes, training takes
only one side and the held-out prompts only the other, so no message of a held-out prompt stands in any training chat
(except the two questions of the memory kind, which ask about an earlier, held-out message).

Left out: anything outside Larkford. The pair answers other prompts with junk, by design.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, replace

from demo_tasks import KINDS
from demo_turns import Turn, memory_turn
from demo_world import PREFIXES, SYSTEM_PROMPTS

HELD_OUT_SHARE = 0.15
SYSTEM_SHARE = 0.15
GREETING_SHARE = 0.25


@dataclass(frozen=True)
class Chat:
    """A chat with its answers; `kind` is that of the last turn, each message has `role` and `content`."""

    kind: str
    messages: tuple[dict[str, str], ...]

    def prompt(self) -> list[dict[str, str]]:
        """The messages without the last answer."""
        return list(self.messages[:-1])


def is_held_out(message: str) -> bool:
    """Whether a user's message belongs to the held-out side (a fixed share of all texts, by hash)."""
    digest = hashlib.sha256(message.encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def sample_turn(rng: random.Random, kind: str, held_out: bool) -> Turn:
    """A turn of one kind from one side of the split; its question may begin with a polite phrase."""
    while True:
        turn = KINDS[kind](rng)
        turn = replace(turn, question=rng.choice(PREFIXES) + turn.question)
        if is_held_out(turn.question) == held_out:
            return turn


def sample_chat(rng: random.Random, turns: int, held_out: bool, last_kind: str | None = None) -> Chat:
    """A chat of `turns` question and answer pairs, all from one side of the split.

    `last_kind` fixes the kind of the last turn; "memory" needs at least two turns, because it asks about the first.
    """
    memory = last_kind == "memory" or (last_kind is None and turns > 1 and rng.random() < GREETING_SHARE)
    kinds = rng.choices(list(KINDS), k=turns)
    if last_kind is not None and not memory:
        kinds[-1] = last_kind
    if memory:
        kinds[0] = "greetings"
    chosen = [sample_turn(rng, kind, held_out) for kind in kinds[: turns - memory]]
    if memory:
        chosen.append(memory_turn(rng, chosen[0].question))
    messages = []
    if rng.random() < SYSTEM_SHARE:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_PROMPTS)})
    for turn in chosen:
        messages.append({"role": "user", "content": turn.question})
        messages.append({"role": "assistant", "content": turn.answer})
    return Chat(chosen[-1].kind, tuple(messages))
