"""K/V of the context rows a drafter attends to, per layer, with amortised growth.

Layout: one key and one value buffer (nkv, capacity, hd) per layer; row t belongs to position t, keys are normed and
rotated. Buffers double when full. Rows past `length` are free space: a block forward puts its own transient K/V there,
next to the context it attends to, so that neither is copied; the next rows of the context overwrite it.

Sliding layers keep all rows too and read only the window: rolling back stays exact for any length, at the price of
memory that a ring would save.
"""

from __future__ import annotations

import torch

_FIRST_CAPACITY = 256


class DrafterCache:
    """Context K/V of one sequence. Made by `DrafterModel.new_cache`."""

    def __init__(
        self, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.length = 0
        empty = torch.empty(num_kv_heads, 0, head_dim, dtype=dtype, device=device)
        self._keys = [empty for _ in range(num_layers)]
        self._values = [empty for _ in range(num_layers)]

    @property
    def capacity(self) -> int:
        """Rows that fit without growing."""
        return self._keys[0].shape[1]

    def reserve(self, rows: int) -> None:
        """Make room for `rows` rows in all; the context is kept."""
        if rows <= self.capacity:
            return
        capacity = max(rows, 2 * self.capacity, _FIRST_CAPACITY)
        for buffers in (self._keys, self._values):
            for index, old in enumerate(buffers):
                grown = old.new_empty(old.shape[0], capacity, old.shape[2])
                grown[:, : self.length] = old[:, : self.length]
                buffers[index] = grown

    def write(self, layer: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put rows `keys, values (nkv, T, hd)` of one layer at `start`; `length` is the caller's to set."""
        stop = start + keys.shape[1]
        assert stop <= self.capacity, "reserve first"
        self._keys[layer][:, start:stop] = keys
        self._values[layer][:, start:stop] = values

    def rows(self, layer: int, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Views (nkv, stop - start, hd) of one layer's keys and values."""
        return self._keys[layer][:, start:stop], self._values[layer][:, start:stop]

    def crop(self, length: int) -> None:
        """Forget every row from `length` on, 0 <= length <= self.length."""
        assert 0 <= length <= self.length, f"cannot crop {self.length} rows to {length}"
        self.length = length

    def reset(self) -> None:
        """Forget every row; the memory is kept."""
        self.length = 0
