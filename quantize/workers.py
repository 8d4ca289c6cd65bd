"""Matrix work on several cores whose result does not depend on how many there are.

What and why: quantizing is a chain of decisions, so one flipped last bit in a Cholesky factor or a sum changes the
trellis. Multi-threaded linear algebra splits sums by the number of threads and does flip such bits. Here torch runs
every operation on one thread, and the parallelism comes from cutting the columns of a product into blocks of a fixed
width: a block is the same single-threaded call whoever computes it.

Left out: anything that is not independent by column (factorizations run on one core).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock, local
from typing import TypeVar

import torch
from torch import Tensor

BLOCK_COLUMNS = 512
Job = TypeVar("Job")

_lock = Lock()
_inside = 0
_threads_outside = 1
_this_thread = local()


def _one_torch_thread() -> None:
    torch.set_num_threads(1)


@contextmanager
def single_threaded_torch() -> Iterator[None]:
    """Let torch use one thread per operation in the calling thread; what was set outside returns afterwards.

    The setting is per thread, but new threads inherit it: what counts as outside is what the first of several
    concurrent callers found.
    """
    global _inside, _threads_outside
    if getattr(_this_thread, "pinned", False):
        yield
        return
    with _lock:
        if _inside == 0:
            _threads_outside = torch.get_num_threads()
        _inside += 1
        _one_torch_thread()
    _this_thread.pinned = True
    try:
        yield
    finally:
        _this_thread.pinned = False
        with _lock:
            _inside -= 1
            torch.set_num_threads(_threads_outside)


class Workers:
    """A pool of threads over blocks of columns, and single-threaded torch while it is open.

    Args:
        threads: how many blocks run at once. Results are the same bytes for any number.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def __enter__(self) -> Workers:
        self._pinned = single_threaded_torch()
        self._pinned.__enter__()
        self._pool = ThreadPoolExecutor(self.threads, "quantize", _one_torch_thread) if self.threads > 1 else None
        return self

    def __exit__(self, *exception: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._pinned.__exit__(None, None, None)

    def each_block(self, columns: int, work: Callable[[slice], None]) -> None:
        """Run `work` on every block of columns; the blocks write to places of their own."""
        self.each(
            [slice(start, min(start + BLOCK_COLUMNS, columns)) for start in range(0, columns, BLOCK_COLUMNS)], work
        )

    def each(self, jobs: Iterable[Job], work: Callable[[Job], None]) -> None:
        """Run `work` on every job; jobs write to places of their own."""
        done: Iterable[None] = map(work, jobs) if self._pool is None else self._pool.map(work, jobs)
        for _ in done:
            pass

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """left (rows, inner) @ right (inner, columns), a new tensor."""
        product = torch.empty(left.shape[0], right.shape[1], dtype=left.dtype, device=left.device)

        def multiply(block: slice) -> None:
            product[:, block] = left @ right[:, block]

        self.each_block(right.shape[1], multiply)
        return product

    def symmetric_matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """left (n, inner) @ right (inner, n) where the product is known to be symmetric, at half the work."""
        size = left.shape[0]
        product = torch.empty(size, size, dtype=left.dtype, device=left.device)

        def multiply(block: slice) -> None:
            product[: block.stop, block] = left[: block.stop] @ right[:, block]
            product[block, : block.start] = product[: block.start, block].T

        self.each_block(size, multiply)
        return product
