"""A quantized drafter whose scales and norms can be trained, its trellises fixed.

What. A quantized linear computes `y = ((x * su) C) * sv + bias` with C its coded weight rotated back (`H trellis H`),
decoded once and never changed. Trained are one factor per scale and per norm weight, all 1 at the start:

    su = su_0 * (1 + a)    sv = sv_0 * (1 + b)    norm weight = w_0 * (1 + c)

so that one learning rate fits all of them, signs stay where they were in any sane range, and scales of padding stay 0.
a, b and c are FP32 vectors over what the layer has without padding; the stored types (FP16 scales, norms in the type of
the source) are made once, at the end, by `rounded`.

Why not the weight `su C sv` as a matrix: its gradient would be as large as the layer. This way the memory is that of
the drafter in FP32 plus a few vectors.

Left out: biases, sinks, convolution kernels, and the selector of DFlash 2, which its logits do not depend on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.layout import SELECTOR
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.drafter.modules import RMSNorm, TracedLinear
from quantize.hadamard import rotate_both_sides_
from quantize.linear import QuantizedLinear
from quantize.trellis import decode_trellis

State = dict[str, torch.Tensor]  # factors minus 1, by the name of what they scale


def coded_weight(linear: QuantizedLinear) -> torch.Tensor:
    """The trellis of a linear decoded and rotated back, without scales: float32 (in, out)."""
    coded = decode_trellis(linear.trellis, linear.trellis.shape[2] / 16, linear.codebook)
    return rotate_both_sides_(coded)[: linear.in_features, : linear.out_features]


class ScaledLinear(TracedLinear):
    """A quantized linear with its scales apart from its coded weight.

    Attributes:
        weight: (out, in), the coded weight; fixed.
        input_scales, output_scales: (in,), (out,), as they stand; they may require gradients.
    """

    input_scales: torch.Tensor
    output_scales: torch.Tensor

    def __init__(self, replaced: TracedLinear, linear: QuantizedLinear) -> None:
        super().__init__(replaced.name, replaced._observer)
        device = replaced.weight.device
        self.weight = coded_weight(linear).T.contiguous().to(device)
        self.bias = replaced.bias
        self.register_buffer("input_scales", linear.suh[: linear.in_features].float().to(device))
        self.register_buffer("output_scales", linear.svh[: linear.out_features].float().to(device))

    def forward(self, x: torch.Tensor, stream: str) -> torch.Tensor:
        """x (..., in) to (..., out)."""
        x = x.to(self.weight.dtype) * self.input_scales
        outputs = functional.linear(x, self.weight) * self.output_scales
        return outputs if self.bias is None else outputs + self.bias


@dataclass(frozen=True)
class TunedTensors:
    """What tuning changes, as it is stored: FP16 `suh` and `svh` (padded) by linear, norm weights by tensor name."""

    suh: State
    svh: State
    norms: State


class TunableDrafter:
    """A quantized drafter in FP32 (or FP64) with trainable scales and norms.

    Args:
        checkpoint: the unquantized drafter.
        quantized: its quantized linears by name.
        device: where it runs.
        dtype: float32, or float64 for exact comparisons.

    Attributes:
        model: the drafter; call `apply` before what is to be differentiated, and `collect` after it.
        factors: the trained vectors by name.
    """

    def __init__(
        self,
        checkpoint: DrafterCheckpoint,
        quantized: Mapping[str, QuantizedLinear],
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = DrafterModel.from_checkpoint(checkpoint, dtype=dtype, device=device)
        self._quantized = {name: linear for name, linear in quantized.items() if not name.startswith(SELECTOR)}
        self._norm_dtypes: dict[str, torch.dtype] = {}
        self._start: State = {}
        self._owners: dict[str, tuple[nn.Module, str]] = {}
        for name, linear in self._quantized.items():
            scaled = self._replace(name, linear).to(dtype)
            self._register(f"{name}.suh", scaled, "input_scales")
            self._register(f"{name}.svh", scaled, "output_scales")
        for name, module in self.model.named_modules():
            if isinstance(module, RMSNorm):
                self._norm_dtypes[f"{name}.weight"] = checkpoint.load(f"{name}.weight").dtype
                self._register(f"{name}.weight", module, "weight")
        self.factors: State = {name: torch.zeros_like(start) for name, start in self._start.items()}

    def _replace(self, name: str, linear: QuantizedLinear) -> ScaledLinear:
        path, _, attribute = name.rpartition(".")
        parent = self.model.get_submodule(path)
        scaled = ScaledLinear(getattr(parent, attribute), linear)
        setattr(parent, attribute, scaled)
        return scaled

    def _register(self, name: str, owner: nn.Module, attribute: str) -> None:
        self._owners[name] = (owner, attribute)
        self._start[name] = getattr(owner, attribute).detach().clone()

    def apply(self) -> None:
        """Give the model the scales and norms that the factors stand for, as leaves that gather gradients."""
        for name, (owner, attribute) in self._owners.items():
            setattr(owner, attribute, self._value(name).requires_grad_())

    def collect(self) -> None:
        """Make what the leaves have gathered since `apply` the gradients of the factors."""
        for name, (owner, attribute) in self._owners.items():
            gathered = getattr(owner, attribute).grad
            self.factors[name].grad = None if gathered is None else self._start[name] * gathered

    def _value(self, name: str) -> torch.Tensor:
        return self._start[name] * (1.0 + self.factors[name])

    def state(self) -> State:
        """A copy of the factors."""
        return {name: factor.detach().clone() for name, factor in self.factors.items()}

    @torch.no_grad()
    def restore(self, state: State) -> None:
        """Set the factors."""
        for name, factor in self.factors.items():
            factor.copy_(state[name])

    @torch.no_grad()
    def rounded(self) -> TunedTensors:
        """Scales and norms as they are stored. The model is given these very values, so that it can be measured."""
        suh: State = {}
        svh: State = {}
        norms: State = {}
        for name, (owner, attribute) in self._owners.items():
            dtype = self._norm_dtypes.get(name, torch.float16)
            value = self._value(name)
            limit = torch.finfo(dtype).max
            stored = value.clamp(-limit, limit).to(dtype)
            setattr(owner, attribute, stored.to(value.dtype))
            if name in self._norm_dtypes:
                norms[name] = stored.cpu()
            else:
                linear, _, side = name.rpartition(".")
                old = getattr(self._quantized[linear], side)
                padded = old.clone()
                padded[: len(stored)] = stored.cpu()
                (suh if side == "suh" else svh)[linear] = padded
        return TunedTensors(suh, svh, norms)
