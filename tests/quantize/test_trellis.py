"""The bit stream against a slow decoder that follows the format's text bit by bit, and round-trip properties."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantize import trellis
from quantize.codebook import CODEBOOKS, codebook_values
from quantize.errors import Exl3DflashError
from quantize.trellis import (
    SUPPORTED_BITS,
    decode_trellis,
    pack_states,
    position_bits,
    tile_permutation,
    tiles_to_weight,
    trellis_words,
    unpack_states,
    weight_to_tiles,
)

RATES = [pytest.param(bits, id=str(bits)) for bits in SUPPORTED_BITS]
rates = st.sampled_from(SUPPORTED_BITS)
seeds = st.integers(0, 2**32 - 1)


def random_words(seed: int, tiles: int, bits: float) -> torch.Tensor:
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.integers(-(2**15), 2**15, (tiles, int(16 * bits)), dtype=np.int16))


def slow_states(words: torch.Tensor, bits: float) -> list[int]:
    """The states of one tile, from the text: 32-bit little-endian words, read from the most significant bit."""
    words32 = np.frombuffer(words.numpy().astype("<i2").tobytes(), dtype="<u4")
    stream = "".join(f"{int(word):032b}" for word in words32)
    states, end = [], 0
    for position in range(256):
        end += int(bits) if position % 2 == 0 else int(np.ceil(bits))
        states.append(
            int(
                (stream + stream)[end - 16 + len(stream) : end + len(stream)] if end < 16 else stream[end - 16 : end], 2
            )
        )
    assert end == len(stream)
    return states


@pytest.mark.parametrize("bits", RATES)
def test_states_match_the_slow_decoder(bits: float) -> None:
    words = random_words(int(bits * 10), 3, bits)
    assert unpack_states(words, bits).tolist() == [slow_states(tile, bits) for tile in words]


@settings(max_examples=60, deadline=None)
@given(rates, seeds, st.integers(0, 5))
def test_any_stored_words_survive_a_round_trip(bits: float, seed: int, tiles: int) -> None:
    words = random_words(seed, tiles, bits)
    states = unpack_states(words, bits)
    assert states.dtype == torch.int32
    assert states.shape == (tiles, 256)
    assert torch.equal(pack_states(states, bits), words)


@settings(max_examples=60, deadline=None)
@given(rates, st.lists(st.booleans(), min_size=16, max_size=64), seeds)
def test_any_ring_of_states_survives_a_round_trip(bits: float, start: list[bool], seed: int) -> None:
    """Rings built as windows of a circular bit string, with a chosen beginning and a random rest."""
    even, odd = position_bits(bits)
    length = 128 * (even + odd)
    rest = np.random.default_rng(seed).integers(0, 2, length - len(start))
    stream = [int(bit) for bit in start] + rest.tolist()
    ends = np.cumsum([even, odd] * 128)
    ring = [sum(stream[(end - 1 - i) % length] << i for i in range(16)) for end in ends]
    for dtype in (torch.int32, torch.int64, torch.uint16):
        states = torch.tensor([ring], dtype=torch.int64).to(dtype)
        assert unpack_states(pack_states(states, bits), bits).tolist() == [ring]


@settings(max_examples=30, deadline=None)
@given(rates, seeds, st.sampled_from(CODEBOOKS))
def test_decoding_looks_the_states_up(bits: float, seed: int, codebook: str) -> None:
    codebook = codebook if bits == int(bits) else "mul1"
    words = random_words(seed, 6, bits)
    weight = decode_trellis(words.view(2, 3, -1), bits, codebook)
    assert weight.shape == (32, 48)
    assert weight.dtype == torch.float32
    values = codebook_values(codebook)[unpack_states(words, bits).long()]
    assert torch.equal(weight_to_tiles(weight).view(6, 256), values)


@pytest.mark.parametrize(("bits", "codebook"), [(1, "3inst"), (3, "mcg"), (6, "mul1"), (2.5, "mul1")])
def test_a_layer_matches_the_slow_decoder(bits: float, codebook: str) -> None:
    words = random_words(5, 4, bits)
    values = codebook_values(codebook)
    expected = torch.empty(32, 32)
    for index, tile in enumerate(words):
        for position, state in enumerate(slow_states(tile, bits)):
            t, q = divmod(position, 8)
            row = 2 * (t % 4) + (q & 1) + 8 * ((q >> 1) & 1)
            column = t // 4 + 8 * (q >> 2)
            expected[16 * (index // 2) + row, 16 * (index % 2) + column] = values[state]
    assert torch.equal(decode_trellis(words.view(2, 2, -1), bits, codebook), expected)


def test_tile_permutation_is_the_formats() -> None:
    rows, columns = tile_permutation()
    for position in range(256):
        t, q = divmod(position, 8)
        assert rows[position] == 2 * (t % 4) + (q & 1) + 8 * ((q >> 1) & 1)
        assert columns[position] == t // 4 + 8 * (q >> 2)
    assert len(set(zip(rows.tolist(), columns.tolist(), strict=True))) == 256


@given(st.integers(1, 4), st.integers(1, 4))
@settings(deadline=None)
def test_matrices_and_tiles_convert_both_ways(tile_rows: int, tile_columns: int) -> None:
    weight = torch.arange(256 * tile_rows * tile_columns).view(16 * tile_rows, 16 * tile_columns)
    tiles = weight_to_tiles(weight)
    assert tiles.shape == (tile_rows, tile_columns, 256)
    assert tiles.is_contiguous()
    rows, columns = tile_permutation()
    assert torch.equal(tiles[-1, -1], weight[-16:, -16:][rows, columns])
    assert torch.equal(tiles_to_weight(tiles), weight)
    assert torch.equal(weight_to_tiles(weight.T), weight_to_tiles(weight.T.contiguous()))


def test_chunking_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    words = random_words(9, 11, 3)
    states = unpack_states(words, 3)
    monkeypatch.setattr(trellis, "_CHUNK_TILES", 4)
    assert torch.equal(unpack_states(words, 3), states)
    assert torch.equal(pack_states(states, 3), words)


def test_words_per_tile() -> None:
    assert [trellis_words(bits) for bits in SUPPORTED_BITS] == [16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128]


@pytest.mark.parametrize("bits", [0, 9, 4.5, 1.25, True, "4", None])
def test_unsupported_rates(bits: object) -> None:
    with pytest.raises(Exl3DflashError, match="unsupported bits per weight"):
        trellis_words(bits)  # type: ignore[arg-type]


def test_half_rates_exist_for_mul1_only() -> None:
    for codebook in ("mcg", "3inst"):
        with pytest.raises(Exl3DflashError, match="half rates with mul1 only"):
            decode_trellis(torch.zeros(1, 1, 40, dtype=torch.int16), 2.5, codebook)


def test_wrong_shapes_and_dtypes_are_named() -> None:
    words = torch.zeros(1, 1, 48, dtype=torch.int16)
    with pytest.raises(Exl3DflashError, match="unknown codebook"):
        decode_trellis(words, 3, "mul2")
    with pytest.raises(Exl3DflashError, match=r"expected int16 \(tiles, 64\) at 4 bits"):
        decode_trellis(words, 4, "mul1")
    with pytest.raises(Exl3DflashError, match=r"torch\.int32"):
        decode_trellis(words.int(), 3, "mul1")
    with pytest.raises(Exl3DflashError, match="three axes"):
        decode_trellis(words[0], 3, "mul1")
    with pytest.raises(Exl3DflashError, match=r"\(2, 255\)"):
        pack_states(torch.zeros(2, 255, dtype=torch.int32), 3)
    with pytest.raises(Exl3DflashError, match="multiples of 16"):
        weight_to_tiles(torch.zeros(16, 24))
