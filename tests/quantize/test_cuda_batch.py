"""The meeting of threads that encode together: everybody gets their own tiles back, and nobody waits for the gone."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from quantize.cuda_batch import TileBatch, WorkStoppedError, encode_in_batch, member_of, run_together

TIMEOUT = 20.0


class Doubler:
    """An encoder whose values are twice the tiles; it notes how many came in each call."""

    def __init__(self, fails: bool = False) -> None:
        self.calls: list[tuple[int, float, str]] = []
        self.fails = fails

    def __call__(self, tiles: torch.Tensor, bits: float, codebook: str) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.append((len(tiles), bits, codebook))
        if self.fails:
            raise ValueError("out of memory")
        return 2 * tiles, tiles.to(torch.int16)


def run_members(batch: TileBatch, steps: list[list[int]], rates: list[float] | None = None) -> list[list[bool]]:
    """Members that encode `steps[m]` tiles one call after the other; whether each call's result was theirs."""

    def member(index: int) -> list[bool]:
        right = []
        with member_of(batch):
            for step, count in enumerate(steps[index]):
                tiles = torch.full((count, 256), 100.0 * index + step)
                values, states = encode_in_batch(tiles, rates[index] if rates else 4, "mul1")
                right.append(torch.equal(values, 2 * tiles) and torch.equal(states, tiles.to(torch.int16)))
        return right

    with ThreadPoolExecutor(len(steps)) as pool:
        return [future.result(TIMEOUT) for future in [pool.submit(member, index) for index in range(len(steps))]]


def test_every_step_is_one_call_and_who_is_done_is_not_waited_for() -> None:
    encode = Doubler()
    right = run_members(TileBatch(3, encode), [[1, 2, 3], [10, 20], [100]])
    assert right == [[True] * 3, [True] * 2, [True]]
    assert encode.calls == [(111, 4, "mul1"), (22, 4, "mul1"), (3, 4, "mul1")]


def test_rates_do_not_mix() -> None:
    encode = Doubler()
    assert run_members(TileBatch(3, encode), [[1], [2], [4]], rates=[4, 6, 4]) == [[True]] * 3
    assert sorted(encode.calls) == [(2, 6, "mul1"), (5, 4, "mul1")]


def test_an_error_reaches_every_member() -> None:
    batch = TileBatch(2, Doubler(fails=True))

    def member() -> None:
        with member_of(batch):
            encode_in_batch(torch.zeros(1, 256), 4, "mul1")

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(member), pool.submit(member)]:
            with pytest.raises(ValueError, match="out of memory"):
                future.result(TIMEOUT)


def test_a_member_that_fails_is_not_waited_for() -> None:
    batch = TileBatch(2, Doubler())

    def failing() -> None:
        with member_of(batch):
            raise KeyError

    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(lambda: run_one(batch))
        bad = pool.submit(failing)
        assert good.result(TIMEOUT)
        with pytest.raises(KeyError):
            bad.result(TIMEOUT)


def test_work_that_is_called_off_ends_at_its_next_step() -> None:
    stop = threading.Event()

    def work() -> None:
        encode_in_batch(torch.ones(1, 256), 4, "mul1")
        stop.set()
        encode_in_batch(torch.ones(1, 256), 4, "mul1")

    encode = Doubler()
    with pytest.raises(WorkStoppedError):
        run_together([work], encode, stop)
    assert len(encode.calls) == 1


def run_one(batch: TileBatch) -> bool:
    with member_of(batch):
        return encode_in_batch(torch.ones(3, 256), 4, "mul1")[0].eq(2.0).all().item()
