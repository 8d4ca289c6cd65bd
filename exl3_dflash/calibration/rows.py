"""Token rows for calibration and measurement, from three kinds of sources.

    default    the corpora of the installed exllamav3, mixed with prompts under the target's chat template; the held-out
               rows are the target's own answers to other prompts
    chat       the target's own answers to prompts: what a drafter really meets (on-policy rows)
    PATH       .txt, .jsonl (`text` or `messages`) or .safetensors (token rows) of the user's

Prompts are the project's own, or those of `exl3_dflash_prompts.jsonl` in the target's directory where it has that file.

Calibration and held-out rows are disjoint by what they are made of: a document (`default`, text), a prompt with all its
answers (`chat`, `messages`, token rows with prompt lengths) or a token row is on one side only, and repeated documents,
prompts and rows are left out. (Two different prompts of the kind long_context may quote a document in common.)
Held-out rows are dealt first, so they stay the same when more calibration rows are asked for (as long as there is
enough for both). Everything is seeded: the same request gives the same rows.

Where there is less than asked, fewer rows come back and `RowSet.notes` says so.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from calibration_data.files import check_file
from calibration_data.prompts import Prompt, load_prompts, target_prompts
from exl3_dflash.calibration.answers import AnswerStore
from exl3_dflash.calibration.candidates import Candidate, rows_of_candidates
from exl3_dflash.calibration.conversations import interleaved, prompt_candidates, require_template
from exl3_dflash.calibration.default_rows import default_rows
from exl3_dflash.calibration.file_rows import file_rows
from exl3_dflash.calibration.rowset import ANSWER_TOKENS, MIN_ROW_TOKENS, RowPools, RowRequest, RowSet, TokenRow
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.progress import Reporter
from exl3_dflash.target.base import Target

__all__ = ["CHAT", "DEFAULT", "RowSet", "TokenRow", "check_source", "load_rows"]

DEFAULT, CHAT = "default", "chat"


def check_source(source: str) -> None:
    """Refuse a source that cannot be read, before a model is loaded for it.

    Raises:
        Exl3DflashError: neither `default` nor `chat` nor a file with a known suffix that is not empty.
    """
    if source not in (DEFAULT, CHAT):
        check_file(Path(source).expanduser())


def load_rows(
    source: str,
    target: Target,
    *,
    rows: int,
    cols: int,
    seed: int = 0,
    held_out: int = 0,
    progress: Reporter | None = None,
    thinking: bool | tuple[bool | None, ...] | None = None,
    answer_tokens: int = ANSWER_TOKENS,
    target_directory: Path | None = None,
    answers: AnswerStore | None = None,
) -> RowSet:
    """Make the token rows that a drafter of `target` is calibrated and measured on.

    Args:
        source: `default`, `chat` or a path.
        target: whose tokenizer, template and answers are used.
        rows, held_out: wanted calibration and held-out rows; either may be 0.
        cols: most tokens per row; clamped, with a note, to the target's positions.
        seed: of every choice.
        progress: shows how far the target's answers are; silent where None.
        thinking: the chat template's thinking switch; None leaves its default. Of several, each conversation gets one.
        answer_tokens: most tokens the target writes per prompt.
        target_directory: where `exl3_dflash_prompts.jsonl` may be.
        answers: where the target's answers are kept while they are written; None keeps nothing.

    Returns:
        At most `rows` and `held_out` rows of at most `cols` tokens; every id is within the target's vocabulary.

    Raises:
        Exl3DflashError: the source cannot be read or used with this target, or it gives no row at all.
    """
    request = RowRequest(
        rows=rows,
        cols=cols,
        held_out=held_out,
        seed=seed,
        thinking=thinking if isinstance(thinking, tuple) else (thinking,),
        answer_tokens=answer_tokens,
        reporter=progress or Reporter(quiet=True),
        answers=answers,
    )
    notes: list[str] = []
    limit = target.facts.max_position_embeddings
    if limit is not None and cols > limit:
        request = replace(request, cols=limit)
        notes.append(f"rows have {limit} tokens instead of {cols}: {target.facts.name} has no more positions")
    pools = _make_pools(source, target, request, target_directory)
    _check(pools, source, target, request)
    for side, wanted, got in (("calibration", rows, pools.rows), ("held-out", held_out, pools.held_out)):
        if len(got) < wanted:
            notes.append(f"{len(got)} {side} rows instead of {wanted}: {source} has no more")
    return RowSet(tuple(pools.rows), source, tuple(pools.held_out), (*notes, *pools.notes))


def _make_pools(source: str, target: Target, request: RowRequest, directory: Path | None) -> RowPools:
    if source == DEFAULT:
        return _default_pools(target, interleaved(_prompts(directory), request.seed), request)
    if source == CHAT:
        require_template(target.tokenizer, source)
        notes: list[str] = []
        prompts = interleaved(_prompts(directory), request.seed)
        candidates = prompt_candidates(target.tokenizer, prompts, request, notes)
        pools = rows_of_candidates(target, candidates, request)
        pools.notes[:0] = notes
        return pools
    path = Path(source).expanduser()
    check_file(path)
    return file_rows(target, path, request)


def _default_pools(target: Target, prompts: list[Prompt], request: RowRequest) -> RowPools:
    """The mix for calibration; measured on the target's answers to prompts that are kept out of the mix.

    Only rows that the target wrote say how a drafter fares in generation. Without a chat template the target cannot be
    asked, and text of the mix is measured on instead.
    """
    if not target.tokenizer.has_chat_template:
        pools = default_rows(target, prompts, request)
        if request.held_out:
            pools.notes.append("the held-out rows are text that the target did not write")
        return pools
    kept_out: list[Prompt] = []
    asked: list[Candidate] = []
    for prompt in prompts[: len(prompts) // 2]:
        if len(asked) < request.held_out:
            asked += prompt_candidates(target.tokenizer, [prompt], request, [])
            kept_out.append(prompt)
    answered = rows_of_candidates(target, asked, replace(request, rows=0)) if asked else RowPools()
    pools = default_rows(target, [p for p in prompts if p not in kept_out], replace(request, held_out=0))
    return RowPools(pools.rows, answered.held_out, [*answered.notes, *pools.notes])


def _prompts(directory: Path | None) -> list[Prompt]:
    return target_prompts(directory) or load_prompts()


def _check(pools: RowPools, source: str, target: Target, request: RowRequest) -> None:
    """Refuse an empty result, and ids that the target cannot embed."""
    if (request.rows and not pools.rows) or (request.held_out and not request.rows and not pools.held_out):
        raise Exl3DflashError(
            f"calibration data {source} gives no usable row" + "".join(f" ({note})" for note in pools.notes),
            f"at least one row of {MIN_ROW_TOKENS} tokens",
            "give more or longer text, or allow more tokens per row",
        )
    for row in (*pools.rows, *pools.held_out):
        if int(row.ids.max()) >= target.facts.vocab_size:
            raise Exl3DflashError(
                f"the target's tokenizer gives the id {int(row.ids.max())}",
                f"ids below {target.facts.vocab_size}, the rows of its embedding",
                "check that tokenizer and weights of the target belong together",
            )
