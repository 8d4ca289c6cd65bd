"""The fast search: close to the exact one, the same on every instruction set, and exact where it must be."""

from collections.abc import Callable

import pytest
import torch

from quantize.codebook import codebook_values
from quantize.encoder import encode_tiles, encoder_paths
from quantize.errors import Exl3DflashError
from quantize.linear import QuantSettings, quantize_linear
from quantize.trellis import SUPPORTED_BITS, decode_trellis, pack_states, unpack_states, weight_to_tiles
from tests.quantize.layer_samples import correlated_rows, hessian_of, uneven_weight


def gaussian_tiles(count: int, seed: int, spread: float = 0.85) -> torch.Tensor:
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(seed)) * spread


def student_tiles(count: int, seed: int) -> torch.Tensor:
    """Student's t with four degrees of freedom, scaled to the codebook."""
    random = torch.Generator().manual_seed(seed)
    normal = torch.randn(5, count, 256, generator=random)
    return normal[0] / (normal[1:].square().mean(0)).sqrt() / 2**0.5 * 0.85


def fast(tiles: torch.Tensor, bits: float, threads: int = 0, path: str | None = None) -> torch.Tensor:
    return encode_tiles(tiles, bits, "mul1", threads, encoder="fast", path=path)[1]


def is_ring(states: torch.Tensor, bits: float) -> bool:
    return torch.equal(unpack_states(pack_states(states, bits), bits), states)


def squared_errors(tiles: torch.Tensor, bits: float, encoder: str) -> torch.Tensor:
    values, states = encode_tiles(tiles, bits, "mul1", encoder=encoder)
    assert is_ring(states, bits)
    assert torch.equal(codebook_values("mul1")[states], values)
    return (values - tiles).double().square().sum(1)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("make", [gaussian_tiles, student_tiles])
def test_errors_are_those_of_the_exact_search(bits: float, make: Callable[[int, int], torch.Tensor]) -> None:
    """At 96 tiles chance still shows (a seam elsewhere, some percent of a tile either way): 0.1 % in all. The bound of
    0.02 % is for thousands of tiles, see `benchmarks/encode.py`."""
    tiles = make(96, int(10 * bits))
    exact, found = (squared_errors(tiles, bits, encoder) for encoder in ("exact", "fast"))
    assert found.sum() <= 1.001 * exact.sum()
    assert (found <= 1.15 * exact).all()


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("path", ["avx512", "avx2", "portable"])
def test_every_path_gives_the_same_states(bits: float, path: str) -> None:
    """Odd numbers of tiles for the single kernel; zeros and repeats for ties; outliers for the exact search."""
    if path not in encoder_paths():
        pytest.skip(f"this processor has no {path}")
    tiles = gaussian_tiles(7, seed=11)
    tiles[1, 64:192] = 0.0
    tiles[2] = 0.25
    tiles[3, 100] = 9.0
    tiles[4, ::16] = 2.9
    assert torch.equal(fast(tiles, bits, path=path), fast(tiles, bits))


@pytest.mark.parametrize("bits", [2, 3.5, 4, 6, 8])
def test_any_number_of_threads_gives_the_same_states(bits: float) -> None:
    tiles = gaussian_tiles(13, seed=5)
    tiles[6, 3] = 4.0
    states = fast(tiles, bits, threads=1)
    for threads in (2, 3, 40):
        assert torch.equal(fast(tiles, bits, threads=threads), states)
    alone = [fast(tile[None], bits) for tile in tiles]
    assert torch.equal(torch.cat(alone), states)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_tiles_with_outliers_are_coded_exactly(bits: float) -> None:
    tiles = gaussian_tiles(4, seed=3)
    tiles[:, 17] = torch.tensor([3.6, -3.6, 12.0, -5e5])
    assert torch.equal(fast(tiles, bits), encode_tiles(tiles, bits, "mul1")[1])


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_hard_tiles_within_range_cost_what_they_must(bits: float) -> None:
    """All weights where candidates are rare or few, and steps between: costs must not run out of integers unseen."""
    tiles = gaussian_tiles(5, seed=4, spread=0.02)
    tiles[0] += 2.95
    tiles[1] -= 2.95
    tiles[2, ::2] += 2.9
    tiles[3, 128:] -= 2.9
    tiles[4] *= 0.0
    exact, found = (squared_errors(tiles, bits, encoder) for encoder in ("exact", "fast"))
    assert (found <= 1.1 * exact + 1e-4).all(), (found / exact - 1).tolist()


@pytest.mark.parametrize("codebook", ["mcg", "3inst"])
def test_other_codebooks_are_coded_exactly(codebook: str) -> None:
    tiles = gaussian_tiles(3, seed=6)
    _, states = encode_tiles(tiles, 5, codebook, encoder="fast")
    assert torch.equal(states, encode_tiles(tiles, 5, codebook)[1])


def test_the_stored_stream_decodes_to_the_values() -> None:
    values, states = encode_tiles(gaussian_tiles(6, seed=1), 6, "mul1", encoder="fast")
    decoded = decode_trellis(pack_states(states, 6).view(2, 3, -1), 6, "mul1")
    assert torch.equal(weight_to_tiles(decoded).view(6, 256), values)


def test_no_tiles_and_unknown_encoders() -> None:
    assert fast(torch.empty(0, 256), 4).shape == (0, 256)
    with pytest.raises(Exl3DflashError, match=r"unknown encoder 'quick'.*one of fast, exact"):
        encode_tiles(gaussian_tiles(1, seed=1), 4, "mul1", encoder="quick")


@pytest.mark.parametrize("bits", [4, 6])
def test_layers_are_as_good_as_with_the_exact_search(bits: float) -> None:
    """Another tile changes all that follow by feedback: small layers differ by percents, their mean does not."""
    ratios = []
    for seed in range(16):
        weight, hessian = uneven_weight(128, 128, seed), hessian_of(correlated_rows(500, 128, seed))
        fast_error, exact_error = (
            quantize_linear(weight, hessian, QuantSettings(bits=bits, encoder=encoder)).proxy_error
            for encoder in ("fast", "exact")
        )
        ratios.append(fast_error / exact_error)
    assert sum(ratios) / len(ratios) < 1.03  # three deviations of this mean
    assert max(ratios) < 1.15
