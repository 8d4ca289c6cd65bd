"""How many bytes of tensors are alive at once while code runs: what a GPU would have to hold."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class MemoryMeter(TorchDispatchMode):
    """Counts the storages that operations make inside the `with` block, until they are freed.

    Attributes:
        peak: bytes, the most that was alive at once. Storages from outside the block and temporaries inside one
            operation are not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._alive = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outside = {value.untyped_storage()._cdata for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)}
        result = function(*args, **(kwargs or {}))
        for value in tree_iter(result):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in outside | self._known:
                self._count(value)
        return result

    def _count(self, value: Tensor) -> None:
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self._alive += size
        self.peak = max(self.peak, self._alive)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._alive -= size
