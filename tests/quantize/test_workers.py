"""Column-blocked matrix work: the same bytes for any number of threads, and torch's own setting left as it was."""

from __future__ import annotations

import threading

import pytest
import torch

from quantize.workers import BLOCK_COLUMNS, Workers


def test_products_do_not_depend_on_the_threads() -> None:
    random = torch.Generator().manual_seed(0)
    left, right = torch.randn(70, 300, generator=random), torch.randn(300, 3 * BLOCK_COLUMNS + 40, generator=random)
    products = []
    for threads in (1, 2, 5):
        with Workers(threads) as workers:
            products.append(workers.matmul(left, right))
    assert torch.equal(products[0], products[1])
    assert torch.equal(products[0], products[2])
    assert torch.allclose(products[0].double(), left.double() @ right.double(), atol=1e-4)


def test_symmetric_products_are_the_plain_ones() -> None:
    left = torch.randn(2 * BLOCK_COLUMNS + 40, 90, generator=torch.Generator().manual_seed(0))
    right = left.T * torch.rand(90, 1, generator=torch.Generator().manual_seed(1))
    products = []
    for threads in (1, 3):
        with Workers(threads) as workers:
            products.append(workers.symmetric_matmul(left, right))
    assert torch.equal(products[0], products[1])
    assert torch.allclose(products[0].double(), left.double() @ right.double(), atol=1e-4)


def test_every_block_is_visited_once() -> None:
    visits = torch.zeros(2 * BLOCK_COLUMNS + 3)
    with Workers(3) as workers:
        workers.each_block(len(visits), lambda block: visits[block].add_(1))
    assert visits.eq(1).all()


def test_an_error_in_a_block_reaches_the_caller() -> None:
    def fail(block: slice) -> None:
        raise ValueError(block)

    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="slice"), Workers(2) as workers:
        workers.each_block(2000, fail)
    assert torch.get_num_threads() == before


def test_torch_threads_are_one_inside_and_restored_outside() -> None:
    before = torch.get_num_threads()
    seen: list[int] = []
    try:
        torch.set_num_threads(3)
        with Workers(2) as outer:
            with Workers(2) as inner:
                inner.each_block(2000, lambda block: seen.append(torch.get_num_threads()))
            outer.each_block(2000, lambda block: seen.append(torch.get_num_threads()))
            seen.append(torch.get_num_threads())
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert set(seen) == {1}


def test_two_callers_at_once() -> None:
    before = torch.get_num_threads()
    inside, leave = threading.Event(), threading.Event()
    seen: list[int] = []

    def other() -> None:
        with Workers(1):
            inside.set()
            leave.wait(10)
            seen.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    with Workers(1):
        seen.append(torch.get_num_threads())
    leave.set()
    thread.join()
    assert seen == [1, 1]
    assert torch.get_num_threads() == before
