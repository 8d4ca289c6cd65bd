"""The native search against a float64 brute force, across threads and instruction sets, and on awkward inputs."""

import threading
import time

import numpy as np
import pytest
import torch

from quantize import encoder
from quantize.codebook import CODEBOOKS, codebook_values
from quantize.encoder import clock_hertz, default_threads, encode_tiles, encoder_paths
from quantize.errors import Exl3DflashError
from quantize.trellis import SUPPORTED_BITS, decode_trellis, pack_states, position_bits, unpack_states, weight_to_tiles

SETTINGS = [(bits, name) for bits in SUPPORTED_BITS for name in CODEBOOKS if bits == int(bits) or name == "mul1"]


def gaussian_tiles(count: int, seed: int, spread: float = 0.9) -> torch.Tensor:
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(seed)) * spread


def brute_force_pass(values: np.ndarray, weights: np.ndarray, bits: float, start: int | None) -> list[int]:
    """Best states of one pass in float64. All costs are kept; ties go to the lowest state, and the lowest end node."""
    shift = position_bits(bits)
    cost = np.zeros(65536 >> shift[0]) if start is None else np.full(65536 >> shift[0], np.inf)
    if start is not None:
        cost[start] = 0
    rows = []
    for position in range(256):
        shift_in, shift_out = shift[position % 2], shift[(position + 1) % 2]
        rows.append(cost)
        candidates = values - weights[position]
        candidates *= candidates
        by_incoming_node = candidates.reshape(-1, 1 << shift_in)
        by_incoming_node += cost[:, None]
        cost = candidates.reshape(1 << shift_out, -1).min(axis=0)
    node = int(cost.argmin()) if start is None else start
    states = [0] * 256
    for position in reversed(range(256)):
        shift_in, shift_out = shift[position % 2], shift[(position + 1) % 2]
        candidates = (np.arange(1 << shift_out) << (16 - shift_out)) | node
        cost = rows[position][candidates >> shift_in] + (values[candidates] - weights[position]) ** 2
        states[position] = int(candidates[cost.argmin()])
        node = states[position] >> shift_in
    return states


def brute_force(tile: torch.Tensor, bits: float, codebook: str) -> list[int]:
    values, weights = codebook_values(codebook).double().numpy(), tile.double().numpy()
    rolled = brute_force_pass(values, np.roll(weights, -128), bits, None)
    return brute_force_pass(values, weights, bits, rolled[128] >> position_bits(bits)[0])


def is_ring(states: torch.Tensor, bits: float) -> bool:
    return torch.equal(unpack_states(pack_states(states, bits), bits), states)


@pytest.mark.parametrize(("bits", "codebook"), SETTINGS)
def test_states_equal_the_float64_brute_force(bits: float, codebook: str) -> None:
    """27 settings of 4 tiles: 108 tiles, every one of 27,648 states."""
    tiles = gaussian_tiles(4, seed=int(bits * 2) + 100 * CODEBOOKS.index(codebook))
    _, states = encode_tiles(tiles, bits, codebook)
    assert states.tolist() == [brute_force(tile, bits, codebook) for tile in tiles]


def squared_error(states: list[int], tile: torch.Tensor, codebook: str = "mul1") -> float:
    return (codebook_values(codebook).double()[states] - tile.double()).square().sum().item()


@pytest.mark.parametrize("bits", [2, 3.5, 6])
def test_outliers_cost_no_more_than_float32_resolves(bits: float) -> None:
    """Beyond the codebook's range the sum is large, and paths closer than its resolution cannot be told apart."""
    tiles = gaussian_tiles(2, seed=3)
    tiles[0, ::37] *= 4
    tiles[1, 5] = -60.0
    _, states = encode_tiles(tiles, bits, "mul1")
    assert is_ring(states, bits)
    for found, tile in zip(states.tolist(), tiles, strict=True):
        best = squared_error(brute_force(tile, bits, "mul1"), tile)
        assert squared_error(found, tile) <= best * (1 + 256 * 2**-24)


@pytest.mark.parametrize(("bits", "codebook"), SETTINGS)
def test_values_are_what_the_stored_stream_decodes_to(bits: float, codebook: str) -> None:
    values, states = encode_tiles(gaussian_tiles(6, seed=1), bits, codebook)
    assert values.dtype == torch.float32
    assert states.dtype == torch.int32
    assert is_ring(states, bits)
    decoded = decode_trellis(pack_states(states, bits).view(2, 3, -1), bits, codebook)
    assert torch.equal(weight_to_tiles(decoded).view(6, 256), values)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
@pytest.mark.parametrize("path", ["avx512", "avx2", "portable"])
def test_every_path_gives_the_same_states(bits: float, path: str) -> None:
    """Three tiles, so that both the pairwise and the single kernel run; zeros and repeats make ties."""
    if path not in encoder_paths():
        pytest.skip(f"this processor has no {path}")
    tiles = gaussian_tiles(3, seed=11)
    tiles[1, 64:192] = 0.0
    tiles[2] = 0.25
    _, expected = encode_tiles(tiles, bits, "mul1")
    _, states = encode_tiles(tiles, bits, "mul1", path=path)
    assert torch.equal(states, expected)


@pytest.mark.parametrize("bits", [1, 2.5, 6])
def test_any_number_of_threads_gives_the_same_states(bits: float) -> None:
    tiles = gaussian_tiles(13, seed=5)
    values, states = encode_tiles(tiles, bits, "mul1", threads=1)
    for threads in (2, 3, 40):
        other_values, other_states = encode_tiles(tiles, bits, "mul1", threads=threads)
        assert torch.equal(other_states, states)
        assert torch.equal(other_values, values)


def test_a_tile_does_not_depend_on_its_neighbours() -> None:
    tiles = gaussian_tiles(5, seed=6)
    _, together = encode_tiles(tiles, 3, "mcg")
    alone = [encode_tiles(tile[None], 3, "mcg")[1] for tile in tiles]
    assert torch.equal(torch.cat(alone), together)


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_zeros_cost_what_brute_force_finds(bits: float) -> None:
    """Rounding decides between equal paths here, so costs are compared and not states."""
    zeros = torch.zeros(1, 256)
    _, states = encode_tiles(zeros, bits, "mul1")
    assert is_ring(states, bits)
    best = squared_error(brute_force(zeros[0], bits, "mul1"), zeros[0])
    assert squared_error(states[0].tolist(), zeros[0]) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("bits", SUPPORTED_BITS)
def test_enormous_weights_still_give_a_ring(bits: float) -> None:
    tiles = gaussian_tiles(2, seed=8, spread=1e8)
    values, states = encode_tiles(tiles, bits, "mul1")
    assert is_ring(states, bits)
    assert values.isfinite().all()


def test_more_bits_mean_less_error() -> None:
    tiles = gaussian_tiles(8, seed=9)
    errors = [(encode_tiles(tiles, bits, "mul1")[0] - tiles).square().mean().item() for bits in SUPPORTED_BITS]
    assert errors == sorted(errors, reverse=True)


def test_no_tiles() -> None:
    values, states = encode_tiles(torch.empty(0, 256), 4, "mul1")
    assert values.shape == states.shape == (0, 256)
    assert (values.dtype, states.dtype) == (torch.float32, torch.int32)


def test_strided_input_and_gradients_are_accepted() -> None:
    tiles = gaussian_tiles(4, seed=2)
    _, expected = encode_tiles(tiles, 5, "mul1")
    strided = tiles.T.contiguous().T.requires_grad_()
    assert torch.equal(encode_tiles(strided, 5, "mul1")[1], expected)


def test_other_python_threads_run_meanwhile() -> None:
    worker = threading.Thread(target=encode_tiles, args=(gaussian_tiles(300, seed=4), 6, "mul1", 1))
    worker.start()
    ticks = 0
    while worker.is_alive():
        time.sleep(0.001)
        ticks += 1
    assert ticks > 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e10])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    tiles = gaussian_tiles(3, seed=2)
    tiles[1, 17] = bad
    with pytest.raises(Exl3DflashError, match=r"largest magnitude .*expected finite weights"):
        encode_tiles(tiles, 4, "mul1")


def test_wrong_arguments_are_named() -> None:
    tiles = gaussian_tiles(2, seed=2)
    with pytest.raises(Exl3DflashError, match=r"tiles of shape \(512,\)"):
        encode_tiles(tiles.flatten(), 4, "mul1")
    with pytest.raises(Exl3DflashError, match=r"tiles of shape \(2, 128\)"):
        encode_tiles(tiles[:, :128], 4, "mul1")
    with pytest.raises(Exl3DflashError, match=r"torch\.float64.*expected float32 on the CPU"):
        encode_tiles(tiles.double(), 4, "mul1")
    with pytest.raises(Exl3DflashError, match="on meta"):
        encode_tiles(tiles.to("meta"), 4, "mul1")
    with pytest.raises(Exl3DflashError, match="unsupported bits"):
        encode_tiles(tiles, 4.5, "mul1")
    with pytest.raises(Exl3DflashError, match="half rates with mul1 only"):
        encode_tiles(tiles, 2.5, "mcg")
    with pytest.raises(Exl3DflashError, match="unknown codebook"):
        encode_tiles(tiles, 4, "mul2")
    with pytest.raises(Exl3DflashError, match="threads -1"):
        encode_tiles(tiles, 4, "mul1", threads=-1)
    with pytest.raises(Exl3DflashError, match=r"encoder path 'sse'.*portable"):
        encode_tiles(tiles, 4, "mul1", path="sse")


def test_a_missing_native_module_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(encoder, "import_module", unavailable)
    with pytest.raises(Exl3DflashError, match=r"quantize\._native.*pip install"):
        encode_tiles(gaussian_tiles(1, seed=1), 4, "mul1")


def test_threads_default_to_the_cores_of_this_process() -> None:
    assert 1 <= default_threads() <= 4096
    assert "portable" in encoder_paths()


def test_the_clock_is_that_of_a_processor() -> None:
    assert clock_hertz() == 0.0 or 2e8 < clock_hertz() < 2e10
