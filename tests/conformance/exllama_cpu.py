"""ExLlamaV3's own Python code, running on a CPU for as long as a test needs it.

ExLlamaV3 imports a compiled CUDA extension. Here a stand-in (`extension_stub`) takes its place before the import, and
the few calls of `torch.cuda` that its quantizer makes become no-ops. All of it is undone at the end of the `with`
block: the modules leave `sys.modules`, so that other tests see ExLlamaV3 exactly as it is installed. A second `with`
block brings the same modules back without importing them again.

Four things differ between its CPU and GPU behaviour and are levelled here: the file loader (its default reads through
the extension), `block_ldl` (overwrites the Hessian it is given when that is on the CPU), the Hessian accumulation (a
Triton kernel) and the choice of attention function (all but one need a GPU).
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from .extension_stub import ExtensionStub

PACKAGE = "exllamav3"
_modules: dict[str, types.ModuleType] = {}


def why_not() -> str | None:
    """Why ExLlamaV3 cannot run here, or None."""
    missing = [name for name in (PACKAGE, "triton", "marisa_trie") if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed" if missing else None


@contextlib.contextmanager
def exllama_on_cpu() -> Iterator[types.ModuleType]:
    """Make `exllamav3` importable on a CPU; yields the package."""
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if _is_ours(name)}
    try:
        sys.modules.update(_modules or _stand_ins())
        with _quiet_cuda():
            package = importlib.import_module(PACKAGE)
            with _levelled():
                yield package
    finally:
        _modules.update({name: sys.modules.pop(name) for name in list(sys.modules) if _is_ours(name)})
        sys.modules.update(before)


def _is_ours(name: str) -> bool:
    return name.split(".")[0] in (PACKAGE, "exllamav3_ext")


def _stand_ins() -> dict[str, types.ModuleType]:
    module = types.ModuleType(f"{PACKAGE}.ext")
    module.exllamav3_ext = ExtensionStub()  # type: ignore[attr-defined]
    return {module.__name__: module}


@contextlib.contextmanager
def _quiet_cuda() -> Iterator[None]:
    """The `torch.cuda` calls of the quantizer, as no-ops."""
    with contextlib.ExitStack() as stack:
        for name in ("synchronize", "empty_cache", "Stream"):
            stack.enter_context(mock.patch.object(torch.cuda, name))
        stack.enter_context(mock.patch.object(torch.cuda, "stream", return_value=contextlib.nullcontext()))
        stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=0))
        yield


@contextlib.contextmanager
def _levelled() -> Iterator[None]:
    """What would differ from a GPU run, made alike; see the module's list."""
    quantizer = importlib.import_module(f"{PACKAGE}.modules.quant.exl3_lib.quantize")
    linear = importlib.import_module(f"{PACKAGE}.modules.linear")
    loader = importlib.import_module(f"{PACKAGE}.loader.safetensors").SafetensorsCollection
    dispatch = importlib.import_module(f"{PACKAGE}.modules.attention_fn.dispatch")
    real_init, real_ldl = loader.__init__, quantizer.block_ldl

    def init(self: Any, directory: str, load_method: str | None = None, *args: Any, **kwargs: Any) -> None:
        real_init(self, directory, "python", *args, **kwargs)

    def block_ldl(hessian: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        factor, _ = real_ldl(hessian.clone(), *args, **kwargs)
        return factor, hessian

    with (
        mock.patch.object(loader, "__init__", init),
        mock.patch.object(quantizer, "block_ldl", block_ldl),
        mock.patch.object(linear, "accumulate_", accumulate_packed),
        mock.patch.object(dispatch, "attn_fns", [dispatch.fn_torch_sdpa_fallback_nocache]),
    ):
        yield


def accumulate_packed(packed: torch.Tensor, rows: torch.Tensor) -> None:
    """H += X^T X into ExLlamaV3's packed upper triangle: blocks of 64 x 64, row after row of blocks."""
    count = -(-rows.shape[1] // 64)
    padded = torch.nn.functional.pad(rows.float(), (0, count * 64 - rows.shape[1]))
    blocks = (padded.T @ padded).view(count, 64, count, 64).permute(0, 2, 1, 3)
    above, right = torch.triu_indices(count, count)
    packed += blocks[above, right].reshape(-1)
