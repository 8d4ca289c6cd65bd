"""A growing token sequence on a transformers target, with exact rollback.

The session owns the list of tokens and a cache that has seen the first `cached` of them. Attention layers are cut on
rollback. Recurrent layers are set back to a copy of their state taken before an earlier forward, and the tokens
between that copy and the wanted length are run again (by the next forward, so a rollback that nothing follows costs
nothing). A cache that can do neither starts over. An interrupted forward leaves layers with different lengths, so its
cache is thrown away and rebuilt by the next forward: the committed tokens are the truth, the cache is only a means.

Long inputs are run in chunks of CHUNK_TOKENS, which bounds attention masks and activations. Recurrent layers of some
architectures ignore their state when more than one token comes (`continues_in_chunks` False): these get their first
tokens in one forward and every later token alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target.base import TapRows
from exl3_dflash.target.cache import RecurrentState, RewindableCache
from exl3_dflash.target.snapshots import SnapshotShelf

CHUNK_TOKENS = 512

# (ids (T,), start position, cache, tap ids) -> (final hidden (T, Ht), taps (T, K*Ht))
RunChunk = Callable[[torch.Tensor, int, RewindableCache, Sequence[int]], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class SessionParts:
    """What a session needs from its target."""

    run_chunk: RunChunk
    head: Callable[[torch.Tensor], torch.Tensor]
    new_cache: Callable[[], RewindableCache]
    continues_in_chunks: bool


class TransformersSession:
    """`base.TargetSession` on a transformers model."""

    def __init__(self, parts: SessionParts) -> None:
        self._parts = parts
        self._ids: list[int] = []
        self._cached = 0
        self._start_over()

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        """The committed tokens, as a new list."""
        return list(self._ids)

    def forward(
        self, ids: torch.Tensor, tap_ids: Sequence[int] | None = None, logit_rows: int | None = None
    ) -> TapRows:
        """Append ids (T,); see `base.TargetSession.forward`."""
        new_ids = [int(token) for token in ids]
        assert new_ids, "a forward needs at least one token"
        self._catch_up()
        hidden, taps = self._advance(new_ids, tap_ids or ())
        self._ids.extend(new_ids)
        rows = len(new_ids) if logit_rows is None else min(logit_rows, len(new_ids))
        logits = self._parts.head(hidden[len(new_ids) - rows :]) if rows else None
        return TapRows(taps=taps, logits=logits)

    def rollback(self, length: int) -> None:
        """Forget every token from `length` on; see `base.TargetSession.rollback`."""
        if not 0 <= length <= self.length:
            raise Exl3DflashError(f"rollback to {length} tokens", f"0 to {self.length}, the tokens of the session")
        self._ids = self._ids[:length]
        if self._cached > length:
            self._rewind_cache(length)

    def _rewind_cache(self, length: int) -> None:
        """Set the cache back to at most `length` tokens, as near to it as possible."""
        if length == 0 or not self._cache.rewindable:
            self._start_over()
        elif not self._cache.recurrent:
            self._cache.drop_last(self._cached - length)
            self._cached = length
        else:
            self._restore_snapshot(length)

    def _restore_snapshot(self, length: int) -> None:
        self._snapshots.drop_after(length)
        found = self._snapshots.latest(length)
        if found is None:
            self._start_over()
            return
        kept, state = found
        self._cache.drop_last(self._cached - kept)
        self._cache.restore(state)
        self._cached = kept

    def _start_over(self) -> None:
        self._cache = self._parts.new_cache()
        self._cached = 0
        self._snapshots: SnapshotShelf[RecurrentState] = SnapshotShelf()

    def _catch_up(self) -> None:
        """Run the committed tokens that the cache has not seen."""
        if self._cached < self.length:
            self._advance(self._ids[self._cached :], ())

    def _advance(self, ids: Sequence[int], tap_ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ids through the cache: final hidden states (T, Ht) and taps (T, K*Ht)."""
        hidden: list[torch.Tensor] = []
        taps: list[torch.Tensor] = []
        try:
            for chunk in self._chunks(ids):
                if len(chunk) > 1 or not hidden:
                    self._take_snapshot()
                chunk_hidden, chunk_taps = self._parts.run_chunk(
                    torch.tensor(chunk), self._cached, self._cache, tap_ids
                )
                self._cached += len(chunk)
                hidden.append(chunk_hidden)
                taps.append(chunk_taps)
        except BaseException:
            self._start_over()
            raise
        return torch.cat(hidden), torch.cat(taps)

    def _take_snapshot(self) -> None:
        if self._cache.recurrent and self._cached > 0 and self._cached not in self._snapshots.lengths:
            self._snapshots.add(self._cached, self._cache.recurrent_state())

    def _chunks(self, ids: Sequence[int]) -> Iterator[Sequence[int]]:
        """The pieces that one forward may take."""
        if self._parts.continues_in_chunks:
            yield from (ids[start : start + CHUNK_TOKENS] for start in range(0, len(ids), CHUNK_TOKENS))
            return
        if self._cached == 0:
            yield ids
        else:
            yield from ([token] for token in ids)
