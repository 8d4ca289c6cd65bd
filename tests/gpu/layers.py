"""(b) Layers and the demo drafter, quantized on the GPU and on the CPU: are the results as good?"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import torch

from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.report import QuantizeReport
from exl3_dflash.conversion.settings import JobSettings
from quantize.hessian import Hessian, HessianAccumulator
from quantize.linear import QuantizedLinear, QuantSettings, quantize_linear
from quantize.tensor_directory import TensorDirectory

from .outcome import Findings

LAYER_RATES = (2.5, 4)
WORST_LAYER = 1.02  # error on the GPU over that on the CPU; two layers of equal quality differ by about 1 %
WORST_DEMO = 1.05  # the demo's layers are small and its calibration runs in another precision
LEAST_ACCEPTANCE = 0.97  # accept length of the GPU's result over that of the CPU's


def synthetic_layer(size: int) -> tuple[torch.Tensor, Hessian, Hessian]:
    """A weight (size, size) with uneven channels, and second moments of correlated inputs and output gradients."""
    random = torch.Generator().manual_seed(size)
    weight = 0.02 * torch.randn(size, size, generator=random) * torch.rand(size, generator=random).add(0.2)
    moments = []
    for _ in range(2):
        mixing = torch.randn(size, size, generator=random) / size**0.5
        rows = torch.randn(2 * size, size, generator=random) * torch.logspace(0, -1.5, size) @ mixing
        sums = HessianAccumulator(size)
        sums.add(rows)
        moments.append(sums.finish())
    return weight, moments[0], moments[1]


def compare_layers(device: torch.device, size: int = 2048, threads: int = 0) -> Findings:
    """One synthetic layer at several rates, one-sided and two-sided, on both."""
    weight, inputs, outputs = synthetic_layer(size)
    figures: dict[str, Any] = {"size": size}
    passed = True
    for bits in LAYER_RATES:
        for name, output_hessian in (("one-sided", None), ("two-sided", outputs)):
            settings = QuantSettings(bits=bits, encoder="exact", threads=threads)
            cpu = quantize_linear(weight, inputs, settings, output_hessian=output_hessian)
            gpu = quantize_linear(weight.to(device), inputs, settings, output_hessian=output_hessian)
            ratio = gpu.proxy_error / cpu.proxy_error
            passed &= ratio <= WORST_LAYER and _forms(gpu) == _forms(cpu)
            seconds = {"cpu": round(cpu.seconds, 2), "gpu": round(gpu.seconds, 2)}
            figures[f"{bits:g} bits {name}"] = {"error_ratio": ratio, "error": gpu.proxy_error, "seconds": seconds}
    return passed, figures


def _forms(linear: QuantizedLinear) -> dict[str, tuple[Any, ...]]:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in linear.tensors("x").items()}


def compare_demo(device: torch.device, out: Path, **settings: Any) -> Findings:
    """The embedded drafter, calibrated and quantized by the whole job on both; the results stay in `out`."""
    cpu, gpu = (_quantize_demo(out / name, place, **settings) for name, place in (("cpu", "cpu"), ("gpu", str(device))))
    same_form = _stored_forms(out / "cpu") == _stored_forms(out / "gpu")
    pairs = list(zip(gpu.tensors, cpu.tensors, strict=True))
    ratio = statistics.geometric_mean(mine.proxy_error / other.proxy_error for mine, other in pairs)
    assert gpu.accept_length is not None
    assert cpu.accept_length is not None
    accepted = [gpu.accept_length["quantized"], cpu.accept_length["quantized"]]
    kept = accepted[0] / accepted[1]
    figures = {
        "tensors": len(pairs),
        "same_names_shapes_types": same_form,
        "error_ratio": ratio,
        "accept_length": {"gpu": accepted[0], "cpu": accepted[1]},
        "seconds": {"gpu": gpu.seconds, "cpu": cpu.seconds},
    }
    return same_form and ratio <= WORST_DEMO and kept >= LEAST_ACCEPTANCE, figures


def _stored_forms(directory: Path) -> dict[str, tuple[Any, ...]]:
    with TensorDirectory.open(directory) as stored:
        return {name: (stored.shape(name), stored.dtype(name)) for name in stored}


def _quantize_demo(out: Path, device: str, **settings: Any) -> QuantizeReport:
    chosen: dict[str, Any] = {"bits": 4.0, "cal_rows": 48, "cal_cols": 256, "eval_rows": 16, "encoder": "exact"}
    job = JobSettings(source="demo", target="demo", out_dir=out, device=device, force=True, **(chosen | settings))
    return quantize_drafter(job)
