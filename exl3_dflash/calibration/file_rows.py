"""Rows from a file of the user's: text, JSON lines or token rows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from calibration_data.files import read_json_lines, read_text, read_token_rows
from calibration_data.splitting import SEGMENT_CHARACTERS, split_segments
from exl3_dflash.calibration.candidates import Candidate, rows_of_candidates
from exl3_dflash.calibration.conversations import conversation_candidates, require_template
from exl3_dflash.calibration.packing import DocumentSource, pack_documents, special_prefix
from exl3_dflash.calibration.rowset import RowPools, RowRequest
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target.base import Target

_PIECES_PER_ROW = 4
_SHORTEST_PIECE = 256  # characters


def file_rows(target: Target, path: Path, request: RowRequest) -> RowPools:
    """Rows of `path`, whose suffix gives its format (see `calibration_data.files`)."""
    if path.suffix == ".txt":
        text = read_text(path)
        wanted = _PIECES_PER_ROW * max(1, request.rows + request.held_out)
        limit = min(SEGMENT_CHARACTERS, max(_SHORTEST_PIECE, len(text) // wanted))
        return _text_rows(target, split_segments(text, limit), request)
    if path.suffix == ".jsonl":
        content = read_json_lines(path)
        if not content.conversations:
            return _text_rows(target, content.documents, request)
        require_template(target.tokenizer, str(path))
        notes: list[str] = []
        candidates = conversation_candidates(target.tokenizer, content.conversations, request, notes)
        return _shuffled_candidates(target, candidates, request, notes)
    return _token_rows(target, path, request)


def _text_rows(target: Target, texts: Sequence[str], request: RowRequest) -> RowPools:
    tokenizer = target.tokenizer
    packed = pack_documents(
        DocumentSource.of_texts("text", texts, tokenizer),
        held_out=request.held_out,
        rows=request.rows,
        cols=request.cols,
        prefix=special_prefix(tokenizer),
        seed=request.seed,
    )
    return RowPools(packed.rows, packed.held_out)


def _token_rows(target: Target, path: Path, request: RowRequest) -> RowPools:
    rows = read_token_rows(path)
    largest = max(int(row.ids.max()) for row in rows)
    smallest = min(int(row.ids.min()) for row in rows)
    if smallest < 0 or largest >= target.facts.vocab_size:
        raise Exl3DflashError(
            f"{path} has the token id {smallest if smallest < 0 else largest}",
            f"0 to {target.facts.vocab_size - 1}, the vocabulary of {target.facts.name}",
            "make the rows with the target's own tokenizer",
        )
    candidates = []
    cut = 0
    for row in rows:
        ids = tuple(row.ids[: request.cols].tolist())
        cut += len(ids) < len(row.ids)
        length = min(row.prompt_length, len(ids))
        candidates.append(Candidate(ids[:length], ids[length:], "rows"))
    notes = [f"{cut} of {len(rows)} rows were cut to {request.cols} tokens"] if cut else []
    return _shuffled_candidates(target, candidates, request, notes)


def _shuffled_candidates(
    target: Target, candidates: list[Candidate], request: RowRequest, notes: list[str]
) -> RowPools:
    random.Random(request.seed).shuffle(candidates)
    pools = rows_of_candidates(target, candidates, request)
    pools.notes[:0] = notes
    return pools
