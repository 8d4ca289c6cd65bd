"""A GPU for tests: tensors that say they are on cuda:0, live on the CPU, and mix with CPU tensors as real ones do: not.

`fake_gpu()` makes torch hand out such tensors wherever code asks for device "cuda". Each wraps a CPU tensor that holds
its values; every operation runs on those, after a check that torch itself makes on a real GPU: operands are on one
device, but for CPU scalars. Copies between devices work, `numpy()` and C++ functions do not. So code that forgets a
tensor on the CPU fails here as it would there, and the values are those of the CPU, bit for bit.

`ENCODER` has the names, arguments and checks of ExLlamaV3's encoder kernels (`quantize.cu`, `frac.cu`); the search is
the project's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from quantize import cuda_encoder
from quantize.cuda_batch import run_together
from quantize.encoder import encode_tiles
from quantize.hadamard import hadamard_matrix

GPU = torch.device("cuda:0")
_real_tensor = torch.tensor
CPU = torch.device("cpu")
_COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default, torch.ops.aten._copy_from.default)


class GpuTensor(Tensor):
    """A tensor on the pretended GPU; `held` is the CPU tensor with its values.

    To torch's C++ code it is on the device "meta", which every build has; to Python code it is on the GPU.
    """

    held: Tensor
    device = GPU  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> GpuTensor:
        return Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device="meta"
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})


class _FakeGpu(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(function, args, kwargs or {})


def run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation, on the CPU tensors behind its operands."""
    tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
    ours = [value for value in tensors if isinstance(value, GpuTensor)]
    asked = kwargs.get("device")
    if ours and function not in _COPIES:
        foreign = [value for value in tensors if not isinstance(value, GpuTensor) and value.ndim > 0]
        if foreign and not _is_index(function, args, foreign):
            raise RuntimeError(f"{function}: expected all tensors to be on the same device, found cuda:0 and cpu")
    on_gpu = bool(ours) if asked is None else torch.device(asked).type == "cuda"
    if function is torch.ops.aten.copy_.default:
        on_gpu = isinstance(args[0], GpuTensor)
    if asked is not None:
        kwargs = kwargs | {"device": CPU}
    result = function(*tree_map(_held, args), **tree_map(_held, kwargs))
    given = {id(value.held): value for value in ours}
    return tree_map(lambda value: _wrap(value, on_gpu, given), result)


def _is_index(function: Any, args: Any, foreign: list[Tensor]) -> bool:
    """Indexing a GPU tensor by CPU indices is allowed."""
    indexing = ("aten::index", "aten::index_put", "aten::index_put_")
    return function._schema.name in indexing and all(any(value is i for i in args[1]) for value in foreign)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, GpuTensor) else value


def _wrap(value: Any, on_gpu: bool, given: dict[int, GpuTensor]) -> Any:
    if not isinstance(value, Tensor) or not on_gpu:
        return value
    return given[id(value)] if id(value) in given else GpuTensor(value)


def to_gpu(tensor: Tensor) -> GpuTensor:
    """A copy on the pretended GPU."""
    return GpuTensor(tensor.clone())


def check(condition: bool, message: str) -> None:
    """What TORCH_CHECK does."""
    if not condition:
        raise RuntimeError(message)


class EncoderStub(ModuleType):
    """ExLlamaV3's encoder kernels by the project's exact search, with the checks of version 1.6.5 or 1.4.2.

    Args:
        legacy: as in 1.4.2: no half rates, no `quantize_tiles_scratch`.
        dense: what `quantize_tiles_scratch` answers.
        wave: tiles at once, what it answers too.
        encoder: the project's search that stands for the kernel's.
    """

    def __init__(self, legacy: bool = False, dense: bool = False, wave: int = 3, encoder: str = "exact") -> None:
        super().__init__("exllamav3_ext")
        self.calls: list[tuple[int, float, str]] = []  # tiles, bits and codebook of every call
        self.dense, self.wave, self.encoder = dense and not legacy, wave, encoder
        self.quantize_tiles = self._quantize_tiles
        if not legacy:
            self.quantize_tiles_frac = self._quantize_tiles_frac
            self.quantize_tiles_scratch = self._quantize_tiles_scratch

    def _quantize_tiles_scratch(self, device: int, bits: int, mcg: bool, mul1: bool, length: int) -> tuple[bool, int]:
        check(type(device) is type(bits) is int and type(mcg) is type(mul1) is bool, "incompatible function arguments")
        check(1 <= bits <= 8 and length == 256, "quantize_tiles_scratch: K must be 1..8")
        return self.dense, self.wave

    def _quantize_tiles(self, *arguments: Any) -> None:
        *tensors, bits, mcg, mul1 = arguments
        check(type(bits) is int and type(mcg) is type(mul1) is bool, "incompatible function arguments")
        check(not (mcg and mul1), "two codebooks")
        check(1 <= bits <= 8, "quantize_tiles K must be in range 1..8")
        self._check_tensors(*tensors)
        if self.dense:
            self._check_dense_scratch(*tensors[3:], bits)
        else:
            self._check_scratch(*tensors[3:], 65536 >> bits)
        self._search(*tensors[:3], bits, "mul1" if mul1 else "mcg" if mcg else "3inst")

    def _quantize_tiles_frac(self, *arguments: Any) -> None:
        *tensors, narrow, mask = arguments
        check(type(narrow) is type(mask) is int, "incompatible function arguments")
        check(narrow in (1, 2, 3) and mask == 0xAAAA, "quantize_tiles_frac: no instance")
        self._check_tensors(*tensors)
        self._check_scratch(*tensors[3:], 65536 >> narrow)
        self._search(*tensors[:3], narrow + 0.5, "mul1")

    @staticmethod
    def _check_tensors(tiles: Tensor, values: Tensor, states: Tensor, costs: Tensor, history: Tensor) -> None:
        check(tiles.shape == values.shape == states.shape and tiles.shape[1:] == (256,), "incompatible shapes")
        check(tiles.dtype == values.dtype == torch.float32, "tiles and values must be kFloat")
        check(states.dtype == torch.int16 and costs.dtype == torch.float16, "indices kShort, costs kHalf")
        everything = (tiles, values, states, costs, history)
        check(all(tensor.is_contiguous() for tensor in everything), "tensors must be contiguous")
        check(len({tensor.device for tensor in everything}) == 1, "tensors must share a device")

    @staticmethod
    def _check_scratch(costs: Tensor, history: Tensor, nodes: int) -> None:
        check(costs.ndim == 3 and costs.shape[1:] == (2, nodes), "temp_costs is (wave, 2, nodes)")
        check(history.ndim == 3 and history.shape[1:] == (256, nodes), "temp_edges is (wave, 256, nodes)")
        check(history.dtype == torch.int16 and len(costs) > 0 and len(history) > 0, "temp_edges is kShort")

    @staticmethod
    def _check_dense_scratch(costs: Tensor, history: Tensor, bits: int) -> None:
        check(costs.numel() > 0, "quantize_tiles requires nonempty cost scratch")
        check(history.dtype in (torch.uint8, torch.int16), "history must be byte or short storage")
        tile_bytes = 256 * (65536 >> bits) // (8 if bits == 1 else 1)
        check(history.numel() * history.element_size() >= tile_bytes, "scratch must hold at least one tile")

    def _search(self, tiles: Tensor, values: Tensor, states: Tensor, bits: float, codebook: str) -> None:
        check(bool((_held(tiles).abs() < 256).all()), "fp16 costs overflow")
        found, found_states = encode_tiles(_held(tiles), bits, codebook, encoder=self.encoder)
        _held(values).copy_(found)
        _held(states).copy_(found_states.to(torch.int16))
        self.calls.append((len(tiles), bits, codebook))


def _tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """torch.tensor, which no mode sees: a CPU tensor, moved."""
    made = _real_tensor(*args, **kwargs)
    return made if device is None else made.to(device)


@contextmanager
def fake_gpu(extension: EncoderStub, memory: int = 12 << 30, multiprocessors: int = 28) -> Iterator[EncoderStub]:
    """A machine with GPUs (RTX 3060 by default) whose kernels are those of `extension`."""
    properties = SimpleNamespace(multi_processor_count=multiprocessors, total_memory=memory)
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (torch, "tensor", _tensor),
            (torch.cuda, "_lazy_init", lambda: None),
            (torch.cuda, "empty_cache", lambda: None),
            (torch.cuda, "get_device_properties", lambda device: properties),
            (torch.cuda, "mem_get_info", lambda device: (memory, memory)),
            (cuda_encoder, "_extension", lambda device: extension),
        ):
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        hadamard_matrix.cache_clear()  # it keeps tensors per device
        stack.callback(hadamard_matrix.cache_clear)
        stack.enter_context(_FakeGpu())
        yield extension


def run_on_fake_gpu(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """`cuda_batch.run_together` with the pretended GPU in each of its threads (a mode of torch is its thread's own)."""

    def in_mode(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            with _FakeGpu():
                return function(*args)

        return wrapped

    return run_together([in_mode(work) for work in works], in_mode(cuda_encoder.encode_tiles_on_gpu))
