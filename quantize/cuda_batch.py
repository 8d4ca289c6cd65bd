"""Tiles of several layers in one call of the GPU's encoder, so that small layers fill a large GPU.

Why: error feedback codes a layer in steps that depend on each other, and a step of a 2048-wide layer has 128 tiles or
less, fewer than a large GPU codes at once. Layers do not depend on each other. So each layer of a batch is quantized by
a thread of its own; at every step the threads wait for one another, and the last to arrive has the tiles of all coded
by one call. Tiles are independent, hence a layer's result is the same in any company.

All threads of a batch enqueue on the same CUDA stream (torch's default), so the order in which they arrive here is the
order on the GPU. Layers of unlike shapes have unlike numbers of steps: who is done leaves, the rest go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from quantize.cuda_encoder import encode_tiles_on_gpu

Encode = Callable[[Tensor, float, str], tuple[Tensor, Tensor]]
Result = TypeVar("Result")
_this_thread = threading.local()


@dataclass(eq=False)
class _Request:
    """Tiles of one member, and what became of them."""

    tiles: Tensor
    rate: tuple[float, str]  # bits and codebook
    result: tuple[Tensor, Tensor] | None = None
    error: BaseException | None = None


class WorkStoppedError(Exception):
    """The work was called off."""


class TileBatch:
    """A meeting point of threads that encode tiles on one device.

    Args:
        members: how many threads take part; each must `leave` once, whatever happens to it.
        encode: codes the tiles of all, see `encode_tiles_on_gpu`.
        stop: once it is set, who comes to encode is sent away with `WorkStoppedError`.
    """

    def __init__(self, members: int, encode: Encode = encode_tiles_on_gpu, stop: threading.Event | None = None) -> None:
        self._members = members
        self._encode = encode
        self._stop = stop or threading.Event()
        self._waiting: list[_Request] = []
        self._changed = threading.Condition()

    def encode(self, tiles: Tensor, bits: float, codebook: str) -> tuple[Tensor, Tensor]:
        """As `encode_tiles_on_gpu`, together with the tiles of all other members; returns when these are there."""
        if self._stop.is_set():
            raise WorkStoppedError
        request = _Request(tiles, (bits, codebook))
        with self._changed:
            self._waiting.append(request)
            self._encode_if_complete()
            self._changed.wait_for(lambda: request.result is not None or request.error is not None)
        if request.error is not None:
            raise request.error
        assert request.result is not None
        return request.result

    def leave(self) -> None:
        """One member will not encode any more."""
        with self._changed:
            self._members -= 1
            self._encode_if_complete()

    def _encode_if_complete(self) -> None:
        if not self._waiting or len(self._waiting) < self._members:
            return
        requests, self._waiting = self._waiting, []
        for rate in dict.fromkeys(request.rate for request in requests):
            self._encode_together([request for request in requests if request.rate == rate], rate)
        self._changed.notify_all()

    def _encode_together(self, requests: list[_Request], rate: tuple[float, str]) -> None:
        sizes = [len(request.tiles) for request in requests]
        try:
            values, states = self._encode(torch.cat([request.tiles for request in requests]), *rate)
        except BaseException as error:  # for every member to raise in its own thread
            for request in requests:
                request.error = error
            return
        for request, *result in zip(requests, values.split(sizes), states.split(sizes), strict=True):
            request.result = (result[0], result[1])


def run_together(
    works: Sequence[Callable[[], Result]],
    encode: Encode = encode_tiles_on_gpu,
    stop: threading.Event | None = None,
) -> list[Result]:
    """Run functions that quantize layers on one device side by side, each in a thread of its own.

    Args:
        works: each calls `quantize_linear` with a weight on the device; their results are as if each ran alone.
        encode: codes the tiles of all, see `encode_tiles_on_gpu`.
        stop: set it, from another thread, to call the work off at its next step (`WorkStoppedError`).

    Raises:
        Whatever the first of them that fails raises; the others are finished before.
    """
    batch = TileBatch(len(works), encode, stop)

    def run(work: Callable[[], Result]) -> Result:
        with member_of(batch):
            return work()

    with ThreadPoolExecutor(len(works), "layer") as pool:
        return [future.result() for future in [pool.submit(run, work) for work in works]]


@contextmanager
def member_of(batch: TileBatch) -> Iterator[None]:
    """The calling thread is a member of the batch inside the block."""
    _this_thread.batch = batch
    try:
        yield
    finally:
        _this_thread.batch = None
        batch.leave()


def encode_in_batch(tiles: Tensor, bits: float, codebook: str) -> tuple[Tensor, Tensor]:
    """As `encode_tiles_on_gpu`; with the batch that the calling thread is a member of, if it is."""
    batch: TileBatch | None = getattr(_this_thread, "batch", None)
    return encode_tiles_on_gpu(tiles, bits, codebook) if batch is None else batch.encode(tiles, bits, codebook)
