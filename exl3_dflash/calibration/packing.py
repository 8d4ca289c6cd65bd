"""Documents to full token rows, so that no document is on both sides.

Documents are dealt in a seeded order: first to the held-out side until it has enough tokens, then to the calibration
side. On each side they are joined in file order and cut into rows of `cols` tokens, each of which starts with the
tokenizer's own prefix (<s> for many models) as a request does:

    documents  d7 d2 | d9 d4 d1 ...        row   [prefix] d2 d7(begin)
               held   calibration                [prefix] d7(rest) ...

A document longer than a row continues in the next row of its own side. Where the text does not suffice, the held-out
side gets its share of it and the last row of each side may be shorter. Tokenizing is lazy: a document that is not
needed is never encoded.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from exl3_dflash.calibration.rowset import MIN_ROW_TOKENS, TokenRow
from exl3_dflash.target.base import TargetTokenizer

Encoded = tuple[int, list[int]]  # index of the document in its source, token ids


class DocumentSource:
    """Documents of one kind with their tokenization, which is kept.

    Args:
        name: the kind of the rows.
        size: number of documents.
        encode: index of a document to its token ids, without the tokenizer's prefix.
    """

    def __init__(self, name: str, size: int, encode: Callable[[int], list[int]]) -> None:
        self.name = name
        self.size = size
        self._encode = encode
        self._encoded: dict[int, list[int]] = {}

    @classmethod
    def of_texts(cls, name: str, texts: Sequence[str], tokenizer: TargetTokenizer) -> DocumentSource:
        """Plain texts."""
        return cls(name, len(texts), lambda index: tokenizer.encode(texts[index], add_special=False))

    def tokens(self, index: int) -> list[int]:
        """Token ids of one document."""
        if index not in self._encoded:
            self._encoded[index] = self._encode(index)
        return self._encoded[index]


@dataclass(frozen=True)
class PackedRows:
    """Rows of both sides, as many as the documents gave."""

    held_out: list[TokenRow]
    rows: list[TokenRow]


def special_prefix(tokenizer: TargetTokenizer) -> list[int]:
    """The ids that the tokenizer puts before a text."""
    plain = tokenizer.encode("a", add_special=False)
    special = tokenizer.encode("a", add_special=True)
    starts = range(len(special) - len(plain) + 1)
    return next((special[:start] for start in starts if special[start : start + len(plain)] == plain), [])


def pack_documents(
    source: DocumentSource, *, held_out: int, rows: int, cols: int, prefix: list[int], seed: int
) -> PackedRows:
    """Deal the documents of `source` to `held_out` and `rows` rows of at most `cols` tokens, as the module says."""
    if not held_out + rows:
        return PackedRows([], [])
    body = cols - len(prefix)
    order = list(range(source.size))
    random.Random(f"{seed} {source.name}").shuffle(order)
    stream = iter(order)
    dealt = _gather(source, stream, (held_out + rows) * body)
    available = sum(len(ids) for _, ids in dealt)
    held_share = min(held_out * body, available * held_out // (held_out + rows))
    held, rest = _split_at(dealt, held_share)
    missing = rows * body - sum(len(ids) for _, ids in rest)
    rest += _gather(source, stream, missing)
    if rows and not rest:  # a single document cannot serve both sides
        held, rest = [], held
    return PackedRows(_fill(held, held_out, body, prefix, source.name), _fill(rest, rows, body, prefix, source.name))


def _gather(source: DocumentSource, stream: Iterator[int], tokens: int) -> list[Encoded]:
    """Take documents from `stream` until they have at least `tokens` tokens."""
    gathered: list[Encoded] = []
    while tokens > 0 and (index := next(stream, None)) is not None:
        gathered.append((index, source.tokens(index)))
        tokens -= len(gathered[-1][1])
    return gathered


def _split_at(documents: list[Encoded], tokens: int) -> tuple[list[Encoded], list[Encoded]]:
    """The first documents that have at least `tokens` tokens together, and the others."""
    count = 0
    while tokens > 0 and count < len(documents):
        tokens -= len(documents[count][1])
        count += 1
    return documents[:count], documents[count:]


def _fill(documents: list[Encoded], count: int, body: int, prefix: list[int], kind: str) -> list[TokenRow]:
    """At most `count` rows of `body` tokens after the prefix, from documents joined in file order."""
    rows: list[list[int]] = []
    waiting: list[int] = []
    for _, ids in sorted(documents, key=lambda document: document[0]):
        waiting += ids
        while len(waiting) >= body and len(rows) < count:
            rows.append(waiting[:body])
            waiting = waiting[body:]
    if len(rows) < count and len(waiting) >= MIN_ROW_TOKENS:
        rows.append(waiting)
    return [TokenRow(torch.tensor([*prefix, *row], dtype=torch.int64), 0, kind) for row in rows]
