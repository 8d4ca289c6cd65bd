"""The small parts of a drafter: a norm that cannot overflow and a linear whose inputs can be watched.

Linears compute in the model's type (FP32 or BF16). Norms, rotation and the residual stream stay in FP32 at least: real
features reach 10^5 and their squares would leave FP16's range at once, BF16's precision soon.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

CONTEXT, BLOCK = "context", "block"

# callback(outputs (..., out_features))
OutputCallback = Callable[[torch.Tensor], None]
# callback(linear name, CONTEXT or BLOCK, inputs (..., in_features)); it may return a callback for the outputs
InputCallback = Callable[[str, str, torch.Tensor], OutputCallback | None]


class Observer:
    """Holds the callback that sees every linear's input, if any."""

    def __init__(self) -> None:
        self.callback: InputCallback | None = None


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, in float32 or wider."""

    weight: torch.Tensor

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., F) to (..., F) in the weight's type, which is float32 or float64."""
        x = x.to(self.weight.dtype)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class TracedLinear(nn.Module):
    """x @ W.T + bias in the weight's type; shows its input, and its outputs if wanted, to the observer.

    Args:
        name: canonical name of the linear.
        observer: shared by all linears of a model.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, name: str, observer: Observer) -> None:
        super().__init__()
        self.name = name
        self._observer = observer
        self.register_buffer("weight", torch.empty(0, 0))
        self.register_buffer("bias", None)

    def forward(self, x: torch.Tensor, stream: str) -> torch.Tensor:
        """x (..., in) to (..., out); `stream` says whether the rows are context or block."""
        x = x.to(self.weight.dtype)
        callback = self._observer.callback
        see_outputs = None if callback is None else callback(self.name, stream, x)
        outputs = functional.linear(x, self.weight, self.bias)
        if see_outputs is not None:
            see_outputs(outputs)
        return outputs
