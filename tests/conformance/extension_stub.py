"""CPU implementations of the functions of ExLlamaV3's compiled extension that its Python code calls here.

Each keeps the name, the argument order and the shape checks of the CUDA function it stands for, so that a tensor layout
that the real extension would refuse is refused here as well. Bit streams are packed and decoded by `format_decode`,
which shares no code with the project; the tile search is the project's own, so that both quantizers search alike.
Anything that is not needed raises, naming itself.
"""

from __future__ import annotations

import types
from typing import Any, NoReturn

import numpy as np
import torch

from . import format_decode

HADAMARD = torch.from_numpy(format_decode.hadamard_matrix()).float()


def check(condition: bool, message: str) -> None:
    """What TORCH_CHECK does: RuntimeError with the message."""
    if not condition:
        raise RuntimeError(message)


def codebook_name(mcg: bool, mul1: bool) -> str:
    check(not (mcg and mul1), "Specified both mcg and mul1")
    return "mul1" if mul1 else "mcg" if mcg else "3inst"


def had_r_128(x: torch.Tensor, y: torch.Tensor, pre: Any, post: Any, scale: float) -> None:
    check(x.shape == y.shape and x.dim() == 2, "input and output have incompatible shapes")
    check(x.shape[1] % 128 == 0, "input dimension 1 must be divisible by 128")
    rows = x.float() * (pre.float() if pre is not None else 1.0)
    rotated = (rows.reshape(-1, 128) @ HADAMARD).reshape(x.shape)
    y.copy_(rotated * scale * (post.float() if post is not None else 1.0))


def reconstruct(w: torch.Tensor, trellis: torch.Tensor, bits: float, mcg: bool, mul1: bool) -> None:
    check(w.shape[0] == trellis.shape[0] * 16, "unpacked and packed have incompatible shapes")
    check(w.shape[1] == trellis.shape[1] * 16, "unpacked and packed have incompatible shapes")
    check(trellis.shape[2] == 16 * bits, "packed dimension 2 is incorrect size")
    w.copy_(torch.from_numpy(format_decode.decode_rotated(trellis.numpy(), bits, codebook_name(mcg, mul1))))


def hgemm(x: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> None:
    check(x.shape[-1] == w.shape[0] and y.shape[-1] == w.shape[1], "a, b and c have incompatible shapes")
    y.copy_(x.float() @ w.float())


class LinearFP16:
    """BC_LinearFP16: an unquantized linear layer."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias


class LinearEXL3:
    """BC_LinearEXL3: a quantized linear layer. `xh` is scratch space that is not needed here."""

    def __init__(self, trellis: Any, suh: Any, svh: Any, bits: Any, bias: Any, mcg: bool, mul1: bool, xh: Any) -> None:
        self.trellis, self.suh, self.svh, self.bits, self.bias = trellis, suh, svh, bits, bias
        self.mcg, self.mul1 = mcg, mul1

    def run_alloc(self, x: torch.Tensor, out_features: int, output_fp32: bool) -> torch.Tensor:
        check(x.shape[-1] == self.trellis.shape[0] * 16, "A and B have incompatible shapes")
        check(out_features == self.trellis.shape[1] * 16, "C and B have incompatible shapes")
        check(x.dtype == torch.half, "A is incorrect datatype, must be kHalf")
        rows = x.reshape(-1, x.shape[-1])
        rotated, weight = torch.empty_like(rows), torch.empty(rows.shape[1], out_features, dtype=torch.half)
        had_r_128(rows, rotated, self.suh, None, 1.0)
        reconstruct(weight, self.trellis, self.bits, self.mcg, self.mul1)
        y = torch.empty(rows.shape[0], out_features, dtype=torch.float if output_fp32 else torch.half)
        had_r_128(rotated.float() @ weight.float(), y, None, self.svh, 1.0)
        if self.bias is not None:
            y += self.bias
        return y.view(*x.shape[:-1], out_features)


class GatedMLP:
    """BC_GatedMLP: the fused path for few rows, kept only for its checks (quantized gate and up, no fused pair)."""

    def __init__(self, *arguments: Any) -> None:
        self.gate, self.up, self.down = arguments[-4:-1]

    def run_bszN(self, x: torch.Tensor, d: torch.Tensor) -> None:  # noqa: N802 (the extension's name)
        gate = self.gate.run_alloc(x, self.gate.trellis.shape[1] * 16, False)
        up = self.up.run_alloc(x, self.up.trellis.shape[1] * 16, False)
        both = torch.empty_like(up)
        silu_mul(gate, up, both, 0.0)
        d.copy_(self.down.run_alloc(both, d.shape[-1], d.dtype == torch.float))


def silu_mul(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor, act_limit: float) -> None:
    assert act_limit == 0.0
    out.copy_(torch.nn.functional.silu(gate.float()) * up.float())


def rms_norm(x: Any, w: Any, y: Any, eps: float, constant_bias: float, constant_scale: float, *rest: Any) -> None:
    assert (constant_bias, constant_scale) == (0.0, 1.0)
    y.copy_(x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps) * w.float())


def rms_norm_res_in(x: Any, w: Any, y: Any, residual: torch.Tensor, *rest: Any) -> None:
    residual += x.to(residual.dtype)
    rms_norm(residual, w, y, *rest)


def rope(q: Any, out_q: Any, k: Any, out_k: Any, inv_freq: torch.Tensor, position: int, *rest: Any) -> None:
    """Rotary embedding of half-split heads (NEOX) after the per-head norms; consecutive positions in each sequence.

    Features past the width of the frequencies pass (partial rotation)."""
    positions, _, _, attn_factor, q_norm, k_norm, eps = rest[:7]
    starts = torch.tensor([position]) if positions is None else positions.view(-1)  # of each sequence
    for source, target, norm in ((q, out_q, q_norm), (k, out_k, k_norm)):
        if source is None:
            continue
        x = source.float()
        if norm is not None:
            x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm.float()
        angle = (starts[:, None] + torch.arange(x.shape[1])).float()[..., None] * inv_freq.float()
        cos, sin = angle.cos()[:, :, None, :] * attn_factor, angle.sin()[:, :, None, :] * attn_factor
        half = len(inv_freq)
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        target.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1))


def mul_softplus_broadcast_(x: torch.Tensor, gates: torch.Tensor) -> None:
    """x (..., heads, head_dim) times softplus of gates (..., heads)."""
    x *= torch.nn.functional.softplus(gates.float()).to(x.dtype).unsqueeze(-1)


def count_inf_nan(x: torch.Tensor, counts: torch.Tensor) -> None:
    counts += torch.stack((torch.isinf(x).sum(), torch.isnan(x).sum()))


def quantize_tiles(
    tiles: Any, values: Any, states: Any, costs: Any, edges: Any, bits: float, mcg: Any, mul1: Any
) -> None:
    from quantize.encoder import encode_tiles

    found, found_states = encode_tiles(tiles, bits, codebook_name(mcg, mul1))
    values.copy_(found)
    states.copy_(found_states.to(torch.int32).to(torch.int16))


def quantize_tiles_frac(tiles: Any, values: Any, states: Any, costs: Any, edges: Any, whole: int, mask: int) -> None:
    assert mask == 0xAAAA
    quantize_tiles(tiles, values, states, costs, edges, whole + 0.5, False, True)


def quantize_tiles_scratch(device: int, bits: int, mcg: bool, mul1: bool, length: int) -> tuple[bool, int]:
    return True, 1


def pack_trellis(packed: torch.Tensor, states: torch.Tensor, bits: float) -> None:
    check(packed.shape[2] == 16 * bits and states.shape[2] == 256, "packed dimension 2 is incorrect size")
    flat = states.numpy().view(np.uint16).reshape(-1, 256)
    packed.copy_(torch.from_numpy(format_decode.pack_states(flat, bits)).view(packed.shape))


def pack_trellis_frac(packed: torch.Tensor, states: torch.Tensor, whole: int, mask: int) -> None:
    assert mask == 0xAAAA
    pack_trellis(packed, states, whole + 0.5)


class ExtensionStub(types.ModuleType):
    """Stands for the compiled module `exllamav3_ext`."""

    def __init__(self) -> None:
        super().__init__("exllamav3_ext")
        functions = (had_r_128, reconstruct, hgemm, silu_mul, rms_norm, rms_norm_res_in, rope, count_inf_nan)
        functions += (mul_softplus_broadcast_,)
        encoder = (quantize_tiles, quantize_tiles_frac, quantize_tiles_scratch, pack_trellis, pack_trellis_frac)
        for function in functions + encoder:
            setattr(self, function.__name__, function)
        self.hgemm_recon = hgemm
        self.BC_LinearFP16, self.BC_LinearEXL3, self.BC_GatedMLP = LinearFP16, LinearEXL3, GatedMLP

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def unavailable(*arguments: Any, **options: Any) -> NoReturn:
            raise NotImplementedError(f"exllamav3_ext.{name} has no CPU stand-in")

        return unavailable
