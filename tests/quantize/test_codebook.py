"""The codebooks against a second computation in Python integers and numpy float16, for every state."""

import numpy as np
import pytest
import torch

from quantize.codebook import CODEBOOKS, STATES, codebook_marker, codebook_values
from quantize.errors import Exl3DflashError


def fp16(bits: int) -> float:
    return float(np.uint16(bits).view(np.float16))


def expected_value(name: str, state: int) -> float:
    """One value from the format's text: Python integers wrapped by hand, one rounding by numpy."""
    if name == "mul1":
        product = state * 0x83DCD12D % 2**32
        # The float64 product and sum are exact, so float16 rounds once, as a fused multiply-add does.
        return float(np.float16((1024 + sum(product.to_bytes(4, "little"))) * fp16(0x1EEE) + fp16(0xC931)))
    product = (state * 0xCBAC1FED if name == "mcg" else state * 89226354 + 64248484) % 2**32
    halves = (product & 0x8FFF8FFF) ^ 0x3B603B60
    return float(np.float16(fp16(halves & 0xFFFF)) + np.float16(fp16(halves >> 16)))


@pytest.mark.parametrize("name", CODEBOOKS)
def test_every_value(name: str) -> None:
    values = codebook_values(name)
    assert values.dtype == torch.float32
    assert values.tolist() == [expected_value(name, state) for state in range(STATES)]


def test_known_statistics() -> None:
    mul1 = codebook_values("mul1")
    assert mul1.unique().numel() == 913
    assert (mul1.min().item(), mul1.max().item()) == (-3.453125, 3.34765625)
    assert mul1.std().item() == pytest.approx(1.0, abs=0.001)
    for name in ("mcg", "3inst"):
        assert codebook_values(name).std().item() == pytest.approx(1.244, abs=0.001)


def test_markers() -> None:
    for name, bits in (("mul1", 0x83DCD12D), ("mcg", 0xCBAC1FED)):
        marker = codebook_marker(name)
        assert marker is not None
        assert marker.shape == ()
        assert marker.dtype == torch.int32
        assert marker.item() % 2**32 == bits
    assert codebook_marker("3inst") is None


def test_the_result_belongs_to_the_caller() -> None:
    codebook_values("mcg").zero_()
    assert codebook_values("mcg").abs().sum() > 0


def test_unknown_name() -> None:
    for function in (codebook_values, codebook_marker):
        with pytest.raises(Exl3DflashError, match=r"'mul2'.*mul1, mcg, 3inst"):
            function("mul2")
