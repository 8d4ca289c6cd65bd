"""The encoder bridge against ExLlamaV3: the kernels exist, are called as its own code calls them, and answer alike."""

from __future__ import annotations

import importlib
import importlib.util
import json
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from quantize.cuda_encoder import encode_tiles_on_gpu
from quantize.trellis import SUPPORTED_BITS
from tests.quantize.gpu_stand_in import EncoderStub, fake_gpu, to_gpu

from .encoder_kernels import KERNELS, RECORD, read_prototypes

pytestmark = pytest.mark.conformance

VERSIONS = json.loads(RECORD.read_text())
PYTHON_TYPES = {"at::Tensor": torch.Tensor, "int": int, "int64_t": int, "bool": bool}
RATES = [(bits, "mul1") for bits in SUPPORTED_BITS] + [(4, "mcg"), (4, "3inst")]
Call = tuple[str, tuple[Any, ...]]


class Recording(EncoderStub):
    """Kernels that keep what they are called with."""

    def __init__(self, **kind: Any) -> None:
        super().__init__(**kind)
        self.seen: list[Call] = []
        for name in KERNELS:
            if hasattr(self, name):
                setattr(self, name, self._kept(name, getattr(self, name)))

    def _kept(self, name: str, kernel: Any) -> Any:
        def call(*arguments: Any) -> Any:
            self.seen.append((name, arguments))
            return kernel(*arguments)

        return call


def tiles() -> torch.Tensor:
    return torch.randn(2, 256, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("bits", "codebook"), RATES)
def test_our_calls_fit_the_prototypes_of(version: str, bits: float, codebook: str) -> None:
    prototypes = VERSIONS[version]
    legacy = "quantize_tiles_scratch" not in prototypes
    if legacy and bits != int(bits):
        assert "quantize_tiles_frac" not in prototypes  # refused, see test_cuda_encoder
        return
    with fake_gpu(Recording(legacy=legacy)) as kernels:
        encode_tiles_on_gpu(to_gpu(tiles()), bits, codebook)
    assert kernels.seen
    for name, arguments in kernels.seen:
        wanted = [PYTHON_TYPES[kind] for kind, _ in prototypes[name]]
        assert [type(a) if not isinstance(a, torch.Tensor) else torch.Tensor for a in arguments] == wanted, name


def test_the_record_is_that_of_the_installed_version() -> None:
    spec = importlib.util.find_spec("exllamav3")
    if spec is None or spec.origin is None:
        pytest.skip("exllamav3 is not installed")
    package = Path(spec.origin).parent
    found = read_prototypes(package)
    scope: dict[str, str] = {}
    exec((package / "version.py").read_text(encoding="utf-8"), scope)
    assert found == VERSIONS.get(scope["__version__"], VERSIONS["1.6.5"])


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(("bits", "codebook"), RATES)
def test_kernels_get_what_exllamav3_gives_them(
    exllama: types.ModuleType, bits: float, codebook: str, dense: bool
) -> None:
    theirs, ours = Recording(dense=dense), Recording(dense=dense)
    quantizer = importlib.import_module("exllamav3.modules.quant.exl3_lib.quantize")
    properties = types.SimpleNamespace(multi_processor_count=2)
    settings = {"K": bits, **({} if codebook == "3inst" else {codebook: True})}
    quantizer.get_temp_buffers.cache_clear()
    quantizer.get_temp_buffers_frac.cache_clear()
    with (
        mock.patch.object(quantizer, "ext", theirs),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=properties),
        mock.patch.object(torch, "zeros", torch.empty),  # their scratch is GBs of zeros, and is not read
    ):
        wanted = quantizer.quantize_tiles(tiles(), settings)
    quantizer.get_temp_buffers.cache_clear()
    quantizer.get_temp_buffers_frac.cache_clear()
    with fake_gpu(ours):
        found = [tensor.cpu() for tensor in encode_tiles_on_gpu(to_gpu(tiles()), bits, codebook)]
        assert [described(call) for call in ours.seen] == [described(call) for call in theirs.seen]
    assert all(map(torch.equal, found, wanted))


def described(call: Call) -> tuple[str, list[Any]]:
    """A call without values: of a tensor dtype and shape, of scratch without the size of a wave."""
    name, arguments = call
    scratch = {3, 4} if name != "quantize_tiles_scratch" else set()

    def form(index: int, argument: Any) -> Any:
        if not isinstance(argument, torch.Tensor):
            return argument
        return argument.dtype, tuple(argument.shape)[1 if index in scratch else 0 :]

    return name, [form(index, argument) for index, argument in enumerate(arguments)]
