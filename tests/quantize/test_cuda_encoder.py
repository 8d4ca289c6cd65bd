"""The encoder bridge: what ExLlamaV3's kernels are given, and that what they return arrives unchanged."""

from __future__ import annotations

import pytest
import torch

from quantize import cuda_encoder
from quantize.coder import TileCoder
from quantize.cuda_encoder import encode_tiles_on_gpu, make_scratch
from quantize.cuda_plan import scratch_bytes
from quantize.encoder import encode_tiles
from quantize.errors import Exl3DflashError
from quantize.trellis import SUPPORTED_BITS, tiles_to_weight, unpack_states

from .gpu_stand_in import GPU, EncoderStub, fake_gpu, to_gpu

RATES = [(bits, "mul1") for bits in SUPPORTED_BITS] + [(4, "mcg"), (4, "3inst")]
EXTENSIONS = {"1.6.5": {}, "1.6.5, dense kernels": {"dense": True}, "1.4.2": {"legacy": True}}


def gaussian_tiles(count: int = 5, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 256, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("extension", EXTENSIONS)
@pytest.mark.parametrize(("bits", "codebook"), RATES)
def test_values_and_states_are_those_of_the_kernel(bits: float, codebook: str, extension: str) -> None:
    tiles = gaussian_tiles(2)
    values, states = encode_tiles(tiles, bits, codebook)
    with fake_gpu(EncoderStub(**EXTENSIONS[extension])) as kernels:
        if bits != int(bits) and extension == "1.4.2":
            with pytest.raises(Exl3DflashError, match=f"cannot encode {bits} bits.*pip install --upgrade exllamav3"):
                encode_tiles_on_gpu(to_gpu(tiles), bits, codebook)
            return
        found, found_states = encode_tiles_on_gpu(to_gpu(tiles), bits, codebook)
        assert found.device == found_states.device == GPU
        assert found_states.dtype == torch.int16
        assert torch.equal(found.cpu(), values)
        assert torch.equal(found_states.cpu().int() & 0xFFFF, states)
        assert kernels.calls == [(2, bits, codebook)]


def test_rows_are_packed_from_the_kernels_states() -> None:
    rows = tiles_to_weight(gaussian_tiles(6).view(2, 3, 256))
    for bits in (2.5, 8):
        coder = TileCoder(bits, "mul1")
        values, packed = coder.rows(rows)
        with fake_gpu(EncoderStub()):
            on_gpu = coder.rows(to_gpu(rows))
            assert all(tensor.device == GPU for tensor in on_gpu)
            assert torch.equal(on_gpu[0].cpu(), values)
            assert torch.equal(on_gpu[1].cpu(), packed)
            assert torch.equal(coder.values(to_gpu(gaussian_tiles())).cpu(), coder.values(gaussian_tiles()))
        states = unpack_states(packed.view(6, -1), bits)
        assert (states > 0x7FFF).any(), "states that are negative as int16 are among those tested"


def test_tiles_that_fp16_costs_cannot_hold_are_coded_exactly_on_the_cpu() -> None:
    tiles = gaussian_tiles(8)
    tiles[2, 17] = 40.0
    tiles[5] *= 200.0
    tiles[7, 0] = 10.0  # 6.7 past the codebook's end: fp16 holds it
    values, states = encode_tiles(tiles, 4, "mul1")
    with fake_gpu(EncoderStub()) as kernels:
        given = to_gpu(tiles)
        found, found_states = encode_tiles_on_gpu(given, 4, "mul1")
        assert torch.equal(given.cpu(), tiles)
        assert torch.equal(found.cpu(), values)
        assert torch.equal(found_states.cpu().int() & 0xFFFF, states)
        assert kernels.calls == [(8, 4, "mul1")]  # the stand-in refuses what would overflow


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_weights_that_no_encoder_takes_are_refused_as_on_the_cpu(bad: float) -> None:
    tiles = gaussian_tiles()
    tiles[3, 100] = bad
    with pytest.raises(Exl3DflashError) as on_cpu:
        encode_tiles(tiles[3:4], 4, "mul1")
    with fake_gpu(EncoderStub()) as kernels:
        with pytest.raises(Exl3DflashError) as on_gpu:
            encode_tiles_on_gpu(to_gpu(tiles), 4, "mul1")
        assert kernels.calls == []
    assert str(on_gpu.value) == str(on_cpu.value)


def test_unsupported_rates_are_refused() -> None:
    with fake_gpu(EncoderStub()):
        with pytest.raises(Exl3DflashError, match="half rates with mul1 only"):
            encode_tiles_on_gpu(to_gpu(gaussian_tiles()), 2.5, "mcg")
        with pytest.raises(Exl3DflashError, match="unsupported bits per weight 9"):
            encode_tiles_on_gpu(to_gpu(gaussian_tiles()), 9, "mul1")


def test_large_calls_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_encoder, "MAX_TILES", 4)
    tiles = gaussian_tiles(10)
    with fake_gpu(EncoderStub()) as kernels:
        found, _ = encode_tiles_on_gpu(to_gpu(tiles), 6, "mul1")
        assert [count for count, *_ in kernels.calls] == [4, 4, 2]
        assert torch.equal(found.cpu(), encode_tiles(tiles, 6, "mul1")[0])


def test_strided_and_empty_tiles() -> None:
    wide = torch.randn(4, 512, generator=torch.Generator().manual_seed(1))
    with fake_gpu(EncoderStub()) as kernels:
        found, _ = encode_tiles_on_gpu(to_gpu(wide)[:, ::2], 6, "mul1")
        assert torch.equal(found.cpu(), encode_tiles(wide[:, ::2].contiguous(), 6, "mul1")[0])
        kernels.calls.clear()
        values, states = encode_tiles_on_gpu(to_gpu(wide[:0, :256]), 6, "mul1")
        assert values.shape == states.shape == (0, 256)
        assert kernels.calls == []


@pytest.mark.parametrize("memory", [12 << 30, 1 << 30, 64 << 20])
@pytest.mark.parametrize(
    ("bits", "extension"), [(bits, name) for bits in (1, 2, 4, 8) for name in EXTENSIONS] + [(1.5, "1.6.5")]
)
def test_scratch_is_what_was_promised_and_within_its_share(bits: float, memory: int, extension: str) -> None:
    kernels = EncoderStub(**EXTENSIONS[extension], wave=56)
    with fake_gpu(kernels, memory=memory):
        costs, history = make_scratch(kernels, GPU, bits, "mul1")
    dense = kernels.dense and bits == int(bits)
    size = sum(tensor.numel() * tensor.element_size() for tensor in (costs, history))
    assert 1 <= len(history) <= 56
    assert size == scratch_bytes(bits, len(history), dense)
    share = memory // cuda_encoder.SCRATCH_SHARE
    assert size <= share or len(history) == 1
    assert len(history) == 56 or scratch_bytes(bits, len(history) + 1, dense) > share


def test_history_of_an_old_version_stays_within_32_bits() -> None:
    with fake_gpu(EncoderStub(legacy=True), memory=141 << 30, multiprocessors=132) as kernels:
        _, history = make_scratch(kernels, GPU, 1, "mul1")
    assert history.numel() - history[0].numel() < 1 << 31
