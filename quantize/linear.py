"""Quantize one linear layer to EXL3, and decode one: the entry point of everything in this package below files.

What it computes. `quantize_linear` pads the weight to multiples of 128, regularizes it (`regularize`), finds the global
scale (`scale_search`), codes it with error feedback in the metric of the measured inputs and, where it is known, of
what errors in the outputs cost (`coding`), and fits the stored scales to what was coded (`refit`). It is pure: the same
weight, Hessians and settings give the same bytes, on any number of threads, and torch's global generator is neither
read nor moved. Torch runs single-threaded inside (`workers`).

Layout: weights are (in, out), the transpose of `nn.Linear.weight`. Stored tensors are as in ExLlamaV3: `trellis` int16
(in/16, out/16, 16 * bits), `suh` fp16 (in,), `svh` fp16 (out,), all padded, `bias` fp16 (out,), and the codebook's
marker. Padded rows and columns have scale 0 and decode to exactly 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quantize.codebook import CODEBOOKS, codebook_marker
from quantize.coder import TileCoder
from quantize.coding import Side, code_weight, make_side
from quantize.encoder import check_encoder, default_threads
from quantize.errors import Exl3DflashError
from quantize.hadamard import padded_features, rotate_both_sides_
from quantize.hessian import Hessian
from quantize.refit import ScaleFit
from quantize.regularize import Regularized, regularize
from quantize.scale_search import search_scale
from quantize.trellis import check_bits, decode_trellis
from quantize.workers import Workers

OUT_SCALES = ("auto", "always", "never")
FP16_MAX = 65504.0


@dataclass(frozen=True)
class QuantSettings:
    """How a linear layer is quantized.

    Attributes:
        bits: bits per weight, one of `trellis.SUPPORTED_BITS`.
        codebook: `mul1`, `mcg` or `3inst`.
        out_scales: output channel scales: `always`, `never`, or `auto`, which is the same as `always` (with feedback in
            both directions the column's RMS is the best scale whatever the outputs' sensitivity).
        scaled_hessian: feed errors back in the metric that includes the layer's own input scales.
        refit: fit the scales to the coded weight afterwards.
        sigma_reg: damping of the Hessian, as a share of its mean diagonal.
        output_reg: the same for the output-side Hessian; larger values blend towards one-sided feedback.
        seed: of the random signs.
        threads: encoder threads, 0 for one per core; never changes the result.
        encoder: the tile search, `fast` or `exact` (see `encoder`).
    """

    bits: float = 6
    codebook: str = "mul1"
    out_scales: str = "auto"
    scaled_hessian: bool = True
    refit: bool = True
    sigma_reg: float = 0.025
    output_reg: float = 0.2
    seed: int = 0
    threads: int = 0
    encoder: str = "fast"

    def __post_init__(self) -> None:
        check_bits(self.bits, self.codebook)
        check_encoder(self.encoder)
        if self.out_scales not in OUT_SCALES:
            raise Exl3DflashError(f"out_scales {self.out_scales!r}", "one of " + ", ".join(OUT_SCALES))
        for name, share in (("sigma_reg", self.sigma_reg), ("output_reg", self.output_reg)):
            if not 0.0 < share < math.inf:
                raise Exl3DflashError(f"{name} {share}", "a finite number above 0")
        if self.threads < 0:
            raise Exl3DflashError(f"threads {self.threads}", "a number of threads, or 0 for one per core")
        if not 0 <= self.seed < 1 << 63:
            raise Exl3DflashError(f"seed {self.seed}", "a whole number from 0 to 2^63 - 1")


@dataclass(frozen=True, eq=False)
class QuantizedLinear:
    """One quantized linear layer: the tensors as stored, and what is known about them.

    Attributes:
        trellis: int16 (padded in / 16, padded out / 16, 16 * bits).
        suh, svh: fp16 (padded in,), (padded out,), input and output scales with signs.
        bias: fp16 (out_features,) or None.
        codebook, bits: how the trellis is read.
        in_features, out_features: before padding.
        proxy_error: tr(E^T H E G) / tr(W^T H W G) of the stored tensors, H and G the undamped Hessians of inputs and
            outputs; a side without a usable one has the identity, and with neither it is the weight error.
        weight_error: |E|^2 / |W|^2 of the stored tensors.
        fallback: why there was no feedback along the inputs; None when there was.
        seconds: wall time.
        damping: the share of the Hessian's mean diagonal that was added; more than `sigma_reg` when the factorization
            needed it, None without feedback or when unknown.
        output_damping: the same for the output-side Hessian; None means that the layer was quantized one-sided.
        output_fallback: why a given output-side Hessian was not used.
    """

    trellis: Tensor
    suh: Tensor
    svh: Tensor
    bias: Tensor | None
    codebook: str
    bits: float
    in_features: int
    out_features: int
    proxy_error: float
    weight_error: float
    fallback: str | None
    seconds: float
    damping: float | None = None
    output_damping: float | None = None
    output_fallback: str | None = None

    @property
    def method(self) -> str:
        """Along which sides errors were fed back: `two-sided`, `one-sided` or `none` (also if read from a file)."""
        return ("none", "one-sided", "two-sided")[sum(d is not None for d in (self.damping, self.output_damping))]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors to store for a linear layer called `name`, by their full names.

        The bias is zero-padded as the outputs are, because ExLlamaV3 adds it before it drops the padding.
        """
        stored = {"trellis": self.trellis, "suh": self.suh, "svh": self.svh}
        marker = codebook_marker(self.codebook)
        if marker is not None:
            stored[self.codebook] = marker
        if self.bias is not None:
            stored["bias"] = torch.nn.functional.pad(self.bias, (0, self.svh.numel() - self.bias.numel()))
        return {f"{name}.{suffix}": tensor for suffix, tensor in stored.items()}


def quantize_linear(
    weight: Tensor,
    hessian: Hessian | None,
    settings: QuantSettings,
    *,
    output_hessian: Hessian | None = None,
    bias: Tensor | None = None,
    name: str = "weight",
) -> QuantizedLinear:
    """Quantize a linear layer.

    Args:
        weight: (in, out), any floating dtype, any strides; left untouched. The work is done on its device.
        hessian: of the layer's inputs, or None to quantize without calibration.
        settings: see `QuantSettings`.
        output_hessian: second moments of the loss gradient at the layer's outputs, for two-sided quantization.
        bias: (out,), stored in fp16.
        name: what error messages call the weight.

    Raises:
        Exl3DflashError: wrong shapes, or values that are not finite or beyond what EXL3 can store.
    """
    started = time.perf_counter()
    stored_bias = _check_arguments(weight, hessian, output_hessian, bias, name)
    in_features, out_features = weight.shape
    threads = settings.threads or default_threads()
    coder = TileCoder(settings.bits, settings.codebook, threads, settings.encoder)
    with torch.no_grad(), Workers(threads) as workers:
        padded = padded_weight(weight)
        regular = regularize(padded, settings.out_scales != "never", settings.seed)
        regular = regular.rescaled(search_scale(regular.weight, coder))
        suh, svh = _storable_scales(regular, name)
        inputs, outputs = make_sides(regular, hessian, output_hessian, settings)
        coded, trellis = code_weight(regular, inputs, outputs, coder, workers)
        inputs, outputs = inputs.without_factor(), outputs.without_factor()
        del regular
        rows, columns = slice(in_features), slice(out_features)
        fit = ScaleFit(padded[rows, columns], coded[rows, columns], inputs.metric, workers, outputs.metric)
        if settings.refit:
            suh[rows], svh[columns] = fit.refit(suh[rows], svh[columns])
        suh, svh = suh.half(), svh.half()
        error = fit.error(suh[rows].float(), svh[columns].float())
    stored = (trellis, suh, svh, stored_bias, settings.codebook, settings.bits, in_features, out_features)
    return QuantizedLinear(
        *stored,
        proxy_error=error.output,
        weight_error=error.weight,
        fallback=inputs.unusable,
        seconds=time.perf_counter() - started,
        damping=inputs.damping,
        output_damping=outputs.damping,
        output_fallback=None if output_hessian is None else outputs.unusable,
    )


def _check_arguments(
    weight: Tensor, hessian: Hessian | None, output_hessian: Hessian | None, bias: Tensor | None, name: str
) -> Tensor | None:
    """Refuse what cannot be quantized; returns the bias in fp16."""
    if weight.ndim != 2 or not weight.is_floating_point() or 0 in weight.shape:
        raise Exl3DflashError(f"{name} has shape {tuple(weight.shape)} and dtype {weight.dtype}", "a float (in, out)")
    bad = int((~torch.isfinite(weight)).sum())
    if bad:
        raise Exl3DflashError(
            f"{name} holds {bad} values that are NaN or infinite",
            expected="finite weights",
            fix="take the weight from an intact checkpoint",
        )
    for side, given, size in (("Hessian", hessian, 0), ("output-side Hessian", output_hessian, 1)):
        if given is not None and given.features != weight.shape[size]:
            raise Exl3DflashError(f"the {side} of {name} has {given.features} features", f"{weight.shape[size]}")
    if bias is None:
        return None
    stored = bias.detach().to(torch.float16, copy=True)
    if stored.shape != weight.shape[1:] or not bool(torch.isfinite(stored).all()):
        raise Exl3DflashError(
            f"the bias of {name} has shape {tuple(bias.shape)} or values beyond fp16",
            f"({weight.shape[1]},), finite and at most 65504",
        )
    return stored


def padded_weight(weight: Tensor) -> Tensor:
    """A float32 copy, zero-padded to multiples of 128 on both sides."""
    rows, columns = weight.shape
    padded = weight.new_zeros(padded_features(rows), padded_features(columns), dtype=torch.float32)
    padded[:rows, :columns] = weight
    return padded


def make_sides(
    regular: Regularized, hessian: Hessian | None, output_hessian: Hessian | None, settings: QuantSettings
) -> tuple[Side, Side]:
    """What is known of the inputs and of the outputs of a regularized layer, factored as the settings say."""
    input_scales = regular.input_scales if settings.scaled_hessian else regular.input_scales.sign()
    inputs = make_side(hessian, input_scales, settings.sigma_reg)
    return inputs, make_side(output_hessian, regular.output_scales, settings.output_reg)


def _storable_scales(regular: Regularized, name: str) -> tuple[Tensor, Tensor]:
    """Copies of the scales within fp16's range: a power of two moves between the two sides if the weights need it."""
    inputs, outputs = regular.input_scales.clone(), regular.output_scales.clone()
    size = float(inputs.square().sum() / (inputs != 0).sum().clamp_min(1)) ** 0.5
    if size > 0.0 and not 2.0**-10 < size < 2.0**10:
        shift = round(-0.5 * math.log2(size))
        inputs, outputs = inputs * 2.0**shift, outputs * 2.0**-shift
    if max(float(inputs.abs().max()), float(outputs.abs().max())) > FP16_MAX:
        raise Exl3DflashError(f"{name} is too large for EXL3's fp16 scales", "weights of a usual size (below 1e6)")
    return inputs, outputs


def decode_linear(quantized: QuantizedLinear) -> Tensor:
    """The weight that the stored tensors stand for, float32 (in_features, out_features)."""
    stored = {"trellis": quantized.trellis, "suh": quantized.suh, "svh": quantized.svh}
    return _decode(stored, quantized.codebook)[: quantized.in_features, : quantized.out_features]


def decode_tensors(tensors: Mapping[str, Tensor], in_features: int, out_features: int) -> Tensor:
    """Decode the stored tensors of one linear layer.

    Args:
        tensors: `trellis`, `suh`, `svh` and the codebook's marker `mul1` or `mcg`, neither for 3inst.
        in_features, out_features: the size before padding.

    Returns:
        float32 (in_features, out_features).

    Raises:
        Exl3DflashError: a tensor is missing, or shapes and dtypes do not belong together.
    """
    missing = [key for key in ("trellis", "suh", "svh") if key not in tensors]
    if missing:
        raise Exl3DflashError(f"EXL3 linear layer without {', '.join(missing)}", "trellis, suh and svh")
    codebooks = [name for name in CODEBOOKS if name in tensors] or ["3inst"]
    if len(codebooks) > 1:
        raise Exl3DflashError("EXL3 linear layer with the markers of two codebooks", "one of mul1 and mcg, or neither")
    padded = (padded_features(in_features), padded_features(out_features))
    trellis = tensors["trellis"]
    shapes = (tuple(trellis.shape[:2]), tuple(tensors["suh"].shape), tuple(tensors["svh"].shape))
    expected = ((padded[0] // 16, padded[1] // 16), padded[:1], padded[1:])
    if trellis.ndim != 3 or shapes != expected:
        raise Exl3DflashError(
            f"EXL3 linear layer of {in_features} x {out_features} with trellis, suh and svh of shapes "
            f"{tuple(trellis.shape)}, {shapes[1]}, {shapes[2]}",
            f"{expected[0]} and the words of a tile, {expected[1]}, {expected[2]}",
        )
    return _decode(tensors, codebooks[0])[:in_features, :out_features]


def _decode(tensors: Mapping[str, Tensor], codebook: str) -> Tensor:
    """suh * (H trellis H) * svh, float32 (padded in, padded out)."""
    trellis = tensors["trellis"]
    coded = decode_trellis(trellis, trellis.shape[2] / 16, codebook)
    weight = rotate_both_sides_(coded)
    return weight.mul_(tensors["suh"].float()[:, None]).mul_(tensors["svh"].float())
