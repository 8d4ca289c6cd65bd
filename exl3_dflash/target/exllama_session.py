"""A growing token sequence in ExLlamaV3's paged cache, with exact rollback.

One sequence takes the pages 0, 1, 2, ... in order. A rollback needs nothing but another length: rows behind it are
written over. A recurrent state cannot be set back, so it starts over, and the kept tokens run again with the next
forward; so does a session whose cache another one has used in between. The committed tokens are the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.runtime.exllama_model import PAGE_TOKENS
from exl3_dflash.target.base import TapRows

if TYPE_CHECKING:
    from exl3_dflash.target.exllama import ExllamaTarget


class ExllamaSession:
    """`base.TargetSession` on an `ExllamaTarget`."""

    def __init__(self, target: ExllamaTarget) -> None:
        self._target = target
        self._loaded = target.loaded
        self._ids: list[int] = []
        self._cached = 0
        self._state: Any = None

    @property
    def length(self) -> int:
        """Number of committed tokens."""
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        """The committed tokens, as a new list."""
        return list(self._ids)

    @torch.no_grad()
    def forward(
        self, ids: torch.Tensor, tap_ids: Sequence[int] | None = None, logit_rows: int | None = None
    ) -> TapRows:
        """Append ids (T,); see `base.TargetSession.forward`.

        Raises:
            Exl3DflashError: the tokens do not fit into the cache.
        """
        new_ids = [int(token) for token in ids]
        assert new_ids, "a forward needs at least one token"
        taps = tuple(tap_ids or ())
        self._target.check_tap_ids(taps)
        self._check_room(len(new_ids))
        self._take_over()
        rows = len(new_ids) if logit_rows is None else min(logit_rows, len(new_ids))
        try:
            if self._cached < self.length:
                self._advance(self._ids[self._cached :], (), 0)
            result = self._advance(new_ids, taps, rows)
        except BaseException:  # also Ctrl-C: nothing is known of the cache
            self._start_over()
            raise
        self._ids.extend(new_ids)
        return result

    def rollback(self, length: int) -> None:
        """Forget every token from `length` on; see `base.TargetSession.rollback`."""
        if not 0 <= length <= self.length:
            raise Exl3DflashError(f"rollback to {length} tokens", f"0 to {self.length}, the tokens of the session")
        self._ids = self._ids[:length]
        if self._cached > length:
            if self._state is not None:
                self._start_over()
            self._cached = min(self._cached, length)

    def _check_room(self, count: int) -> None:
        if self.length + count > self._loaded.cache_tokens:
            raise Exl3DflashError(
                f"{self.length + count} tokens do not fit into the target's cache",
                expected=f"at most {self._loaded.cache_tokens}",
                fix="shorter rows; in `chat`, a larger --cache-tokens",
            )

    def _take_over(self) -> None:
        if self._loaded.lease.owner is not self:
            self._loaded.lease.take(self, self._start_over)

    def _start_over(self) -> None:
        self._cached = 0
        if self._state is not None:
            self._state.free()
        self._state = None

    def _advance(self, ids: Sequence[int], tap_ids: Sequence[int], logit_rows: int) -> TapRows:
        """Run ids through the cache in chunks; logits of the last `logit_rows`."""
        taps: list[torch.Tensor] = []
        logits: list[torch.Tensor] = []
        chunk = self._loaded.settings.chunk_tokens
        for start in range(0, len(ids), chunk):
            piece = ids[start : start + chunk]
            wanted = min(len(piece), max(0, start + len(piece) - (len(ids) - logit_rows)))
            parameters = self._parameters(tap_ids, wanted)
            run = self._loaded.model.forward if wanted else self._loaded.model.prefill
            output = run(torch.tensor([piece], dtype=torch.int64), parameters)
            self._cached += len(piece)
            taps.append(self._target.exported(parameters, tap_ids, len(piece)))
            if wanted:
                logits.append(self._target.cropped(output))
        return TapRows(torch.cat(taps), torch.cat(logits) if logits else None)

    def _parameters(self, tap_ids: Sequence[int], logit_rows: int) -> dict[str, Any]:
        cache = self._loaded.cache
        pages = torch.arange(self._loaded.cache_tokens // PAGE_TOKENS, dtype=torch.int32)[None]  # (1, pages)
        parameters: dict[str, Any] = {
            "attn_mode": "flash_attn",
            "block_table": pages,
            "cache": cache,
            "cache_seqlens": torch.tensor([self._cached], dtype=torch.int32),
            "export_state_layers": set(tap_ids),
        }
        if logit_rows:
            parameters["last_tokens_only"] = logit_rows
        if self._target.facts.recurrent:
            if self._state is None:
                self._state = cache.get_new_state()
            parameters["recurrent_states"] = [self._state]
        return parameters
