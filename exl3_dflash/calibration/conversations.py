"""Conversations through the target's own chat template, as candidates for rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import takewhile, zip_longest

from calibration_data.messages import Message
from calibration_data.prompts import Prompt
from exl3_dflash.calibration.candidates import Candidate
from exl3_dflash.calibration.rowset import MIN_ROW_TOKENS, RowRequest
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target.base import ChatMessage, TargetTokenizer


def require_template(tokenizer: TargetTokenizer, source: str) -> None:
    """Raise Exl3DflashError where the target has no chat template."""
    if not tokenizer.has_chat_template:
        raise Exl3DflashError(
            f"calibration data {source} needs a chat template, and the target has none",
            "chat_template.jinja, or chat_template in tokenizer_config.json",
            "calibrate with `default`, text or token rows, or add the template to the target",
        )


def render(
    tokenizer: TargetTokenizer, messages: Sequence[Message], thinking: bool | None, add_generation_prompt: bool
) -> list[int]:
    """Ids of a conversation. Where the template refuses a system turn, its text goes before the first user turn."""
    turns = [ChatMessage(role=message["role"], content=message["content"]) for message in messages]
    try:
        return tokenizer.apply_chat_template(turns, thinking, add_generation_prompt)
    except Exl3DflashError:
        if turns[0]["role"] != "system" or len(turns) < 2:
            raise
    first = ChatMessage(role=turns[1]["role"], content=f"{turns[0]['content']}\n\n{turns[1]['content']}")
    return tokenizer.apply_chat_template([first, *turns[2:]], thinking, add_generation_prompt)


def interleaved(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """Prompts in a seeded order that goes round the kinds, so that any first few have them in equal shares."""
    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.kind, []).append(prompt)
    columns = list(kinds.values())
    for kind, column in zip(kinds, columns, strict=True):
        random.Random(f"{seed} {kind}").shuffle(column)
    return [prompt for round_ in zip_longest(*columns) for prompt in round_ if prompt is not None]


def prompt_candidates(
    tokenizer: TargetTokenizer, prompts: Sequence[Prompt], request: RowRequest, notes: list[str]
) -> list[Candidate]:
    """Open prompts in the given order; those without room for an answer in `cols` tokens are noted and left out."""
    candidates = [
        Candidate(
            tuple(render(tokenizer, prompt.messages, request.thinking_of(prompt.messages), True)), None, prompt.kind
        )
        for prompt in prompts
    ]
    fitting = [candidate for candidate in candidates if len(candidate.prompt) + MIN_ROW_TOKENS <= request.cols]
    if len(fitting) < len(candidates):
        notes.append(
            f"{len(candidates) - len(fitting)} of {len(candidates)} prompts leave no room for an answer in "
            f"{request.cols} tokens and were left out"
        )
    return fitting


def conversation_candidates(
    tokenizer: TargetTokenizer, conversations: Sequence[tuple[Message, ...]], request: RowRequest, notes: list[str]
) -> list[Candidate]:
    """Conversations of a file: those that end with the assistant are rows, the others are prompts for the target."""
    finished = [messages for messages in conversations if messages[-1]["role"] == "assistant"]
    prompts = [
        Prompt(kind="messages", messages=messages, id="")
        for messages in conversations
        if messages[-1]["role"] != "assistant"
    ]
    if prompts:
        notes.append(f"{len(prompts)} conversations without a final answer are answered by the target")
    rows = [_finished_candidate(tokenizer, messages, request) for messages in finished]
    kept = [candidate for candidate in rows if candidate is not None]
    if len(kept) < len(rows):
        notes.append(
            f"{len(rows) - len(kept)} conversations have no answer within {request.cols} tokens and were left out"
        )
    return [*kept, *prompt_candidates(tokenizer, prompts, request, notes)]


def _finished_candidate(
    tokenizer: TargetTokenizer, messages: tuple[Message, ...], request: RowRequest
) -> Candidate | None:
    """A conversation with its answer, cut after the end token and at `cols` tokens; None where no answer is left."""
    thinking = request.thinking_of(messages)
    ids = render(tokenizer, messages, thinking, False)
    opening = render(tokenizer, messages[:-1], thinking, True)
    # The answer begins where the conversation departs from its own beginning: templates may open an answer
    # differently (an empty thinking block) from how they show a finished one.
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(opening, ids, strict=False)))
    ends = [position for position in range(length, len(ids)) if ids[position] in tokenizer.eos_token_ids]
    answer = ids[length : (ends[-1] + 1) if ends else len(ids)][: max(0, request.cols - length)]
    return Candidate(tuple(ids[:length]), tuple(answer), "messages") if len(answer) >= 2 else None
