"""What a job will do to each tensor, and how large the result will be (how long it takes: `conversion.estimate`).

Sizes follow the format: a quantized linear stores `bits` per padded weight, two FP16 scale vectors and a marker; copied
tensors keep their source type.

Bits come from a uniform rate, from a recipe, or, for a mixed plan, from what calibration saw (`conversion.deciding`):
until then a mixed plan is undecided, and its bits are the upper bounds that sizes and time are reckoned with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from exl3_dflash.conversion.allocation import plan_rates
from exl3_dflash.conversion.recipe import UNQUANTIZED_BITS, RecipeTensor, resolve_recipe
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint, LinearSpec
from exl3_dflash.drafter.dialects import LAGUNA
from exl3_dflash.drafter.layout import HEAD
from exl3_dflash.errors import Exl3DflashError

TILE_WEIGHTS = 256
PAD_TO = 128
QKV = ("q_proj", "k_proj", "v_proj")


@dataclass(frozen=True)
class TensorPlan:
    """One linear of the drafter.

    Attributes:
        linear: the layer.
        bits: bits per weight, or None if its weight is copied.
        reason: why it is copied; empty otherwise.
        stored_bytes: of all its tensors in the output.
    """

    linear: LinearSpec
    bits: float | None
    reason: str
    stored_bytes: int

    @property
    def weights(self) -> int:
        """Weights of the layer, without padding."""
        return self.linear.in_features * self.linear.out_features

    @property
    def stored_weights(self) -> int:
        """Weights of the layer, padding included: what ExLlamaV3 averages bits over."""
        return padded(self.linear.in_features) * padded(self.linear.out_features)

    @property
    def tiles(self) -> int:
        """16 x 16 tiles, padding included."""
        return self.stored_weights // TILE_WEIGHTS


@dataclass(frozen=True)
class QuantizationPlan:
    """A whole job.

    Attributes:
        tensors: its linears.
        copied_bytes: everything that is not a linear.
        source_bytes: of all tensors of the source.
        has_head: whether the drafter has a head of its own.
        loader_note: what ExLlamaV3 does differently; may be empty.
        decided: false while the bits of a mixed plan are upper bounds.
        predicted_retention: share of the accept length that is expected to remain; None where it is not predicted.
    """

    tensors: tuple[TensorPlan, ...]
    copied_bytes: int
    source_bytes: int
    has_head: bool
    loader_note: str
    decided: bool = True
    predicted_retention: float | None = None

    @property
    def quantized(self) -> tuple[TensorPlan, ...]:
        """The tensors that will be quantized."""
        return tuple(tensor for tensor in self.tensors if tensor.bits is not None)

    @property
    def body(self) -> tuple[TensorPlan, ...]:
        """The quantized tensors without the head, over which bits per weight are counted."""
        return tuple(tensor for tensor in self.quantized if tensor.linear.name != HEAD)

    @property
    def mean_bits(self) -> float:
        """Mean bits of the body's codes, scales apart: what `--bits` budgets and ExLlamaV3 calls `bits`."""
        weights = sum(tensor.stored_weights for tensor in self.body)
        return sum(tensor.stored_weights * (tensor.bits or 0) for tensor in self.body) / weights if weights else 0.0

    @property
    def bpw(self) -> float:
        """Stored bits of the quantized linears, scales included, per weight; head and copied tensors apart."""
        weights = sum(tensor.weights for tensor in self.body)
        return 8 * sum(tensor.stored_bytes for tensor in self.body) / weights if weights else 0.0

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors of the output."""
        return self.copied_bytes + sum(tensor.stored_bytes for tensor in self.tensors)


def padded(features: int) -> int:
    """`features` rounded up to the 128 of the Hadamard blocks."""
    return -(-features // PAD_TO) * PAD_TO


def make_plan(
    checkpoint: DrafterCheckpoint, settings: JobSettings, bits: Mapping[str, float] | None = None
) -> QuantizationPlan:
    """Decide bits and storage of every tensor of the drafter.

    Args:
        checkpoint: the drafter.
        settings: of the job.
        bits: by linear, for a mixed plan that is decided; other linears get the settings' bits.

    Raises:
        Exl3DflashError: the recipe does not fit the drafter, or quantizes nothing of it.
    """
    recipe = _recipe_bits(checkpoint, settings)
    chosen = recipe if bits is None else bits
    upper = min((rate for rate in plan_rates(settings.codebook) if rate >= settings.bits), default=settings.bits)
    uniform = upper if settings.mixes_bits else settings.bits
    tensors = tuple(_plan_linear(checkpoint, linear, settings, chosen, uniform) for linear in checkpoint.linears)
    covered = {f"{t.linear.name}.weight" for t in tensors} | {f"{t.linear.name}.bias" for t in tensors}
    copied = sum(checkpoint.nbytes(name) for name in checkpoint.tensor_names() if name not in covered)
    return QuantizationPlan(
        tensors=tensors,
        copied_bytes=copied,
        source_bytes=checkpoint.directory.nbytes(),
        has_head=checkpoint.has_head,
        loader_note="; ".join(loader_notes(checkpoint)),
        decided=not settings.mixes_bits or bits is not None,
    )


def _recipe_bits(checkpoint: DrafterCheckpoint, settings: JobSettings) -> dict[str, float]:
    """Bits by linear as the recipe says; empty without one."""
    if settings.recipe is None:
        return {}
    body = [linear for linear in checkpoint.linears if linear.name != HEAD]
    tensors = [
        RecipeTensor(checkpoint.output_name(linear.name), copy_reason(linear, checkpoint.config.hidden_size))
        for linear in body
    ]
    bits = resolve_recipe(settings.recipe, tensors, settings.codebook)
    if set(bits.values()) == {UNQUANTIZED_BITS}:
        raise Exl3DflashError(
            "the recipe leaves every linear unquantized", "bits for one at least", "correct the recipe"
        )
    return {linear.name: bits[checkpoint.output_name(linear.name)] for linear in body}


def copy_reason(linear: LinearSpec, hidden_size: int) -> str:
    """Why ExLlamaV3 needs this linear unquantized; empty if it can be quantized.

    ExLlamaV3 1.6.5 pads the layers of a drafter to multiples of 128, with three exceptions (found by loading and
    running its own code, see `tests/conformance`): `fc` and head gates are built without padding, and its fused q/k/v
    kernels write outputs of the unpadded width. Head gates have a few outputs only, so they are always copied.
    """
    kind = linear.name.rpartition(".")[2]
    if kind == "g_proj":
        return "ExLlamaV3 pads no head gates"
    if kind == "fc" and (linear.in_features % PAD_TO or linear.out_features % PAD_TO):
        return f"{linear.in_features} x {linear.out_features} is not a multiple of {PAD_TO} and ExLlamaV3 pads no fc"
    if kind in QKV and linear.out_features % PAD_TO and hidden_size % PAD_TO == 0:
        return f"its {linear.out_features} outputs are no multiple of {PAD_TO}, which ExLlamaV3's fused kernels need"
    return ""


def loader_notes(checkpoint: DrafterCheckpoint) -> tuple[str, ...]:
    """What ExLlamaV3 cannot do with this drafter, or does differently; exl3-dflash's own engine runs all of it."""
    config, notes = checkpoint.config, []
    if not config.dialect.in_exllamav3:
        notes.append(f"ExLlamaV3 1.6.5 has no class for {config.dialect.title}; exl3-dflash's own engine runs it")
        return tuple(notes)
    if config.hidden_size % PAD_TO:
        notes.append(
            f"hidden size {config.hidden_size} is not a multiple of {PAD_TO}: ExLlamaV3 1.6.5 loads such a DFlash "
            "drafter but cannot run it, quantized or not (its MLP output is not trimmed); exl3-dflash's own engine "
            "runs it"
        )
    own = [name for name, there in (("embedding", checkpoint.has_embedding), ("head", checkpoint.has_head)) if there]
    if own:
        notes.append(f"ExLlamaV3 1.6.5 uses the target's {' and '.join(own)}, not the drafter's own")
    if config.dialect is LAGUNA and list(config.target_layer_ids) != sorted(config.target_layer_ids):
        notes.append("ExLlamaV3 1.6.5 gives a Laguna drafter its taps in ascending order, not in the listed one")
    if config.input_embedding_scale != 1.0 and config.convolutions is None:
        notes.append("ExLlamaV3 1.6.5 reads input_embedding_scale of DFlash 2 drafters only")
    return tuple(notes)


def _plan_linear(
    checkpoint: DrafterCheckpoint,
    linear: LinearSpec,
    settings: JobSettings,
    chosen: Mapping[str, float],
    uniform: float,
) -> TensorPlan:
    reason = copy_reason(linear, checkpoint.config.hidden_size)
    bits = chosen.get(linear.name, settings.head_bits if linear.name == HEAD else uniform)
    if not reason and bits == UNQUANTIZED_BITS:
        reason = "the recipe leaves it unquantized"
    bias_bytes = 2 * padded(linear.out_features) if linear.bias else 0
    if reason:
        stored = checkpoint.nbytes(f"{linear.name}.weight") + bias_bytes
        return TensorPlan(linear, None, reason, stored)
    rows, columns = padded(linear.in_features), padded(linear.out_features)
    marker_bytes = 0 if settings.codebook == "3inst" else 4
    stored = int(rows * columns * bits) // 8 + 2 * (rows + columns) + marker_bytes + bias_bytes
    return TensorPlan(linear, bits, "", stored)


def describe(plan: QuantizationPlan, settings: JobSettings, seconds: float) -> str:
    """The plan as a table for the person who waits; `seconds` of encoding."""
    lines = [f"{'tensor':<34} {'in x out':>15} {'bits':>5} {'KiB':>9}"]
    for tensor in plan.tensors:
        shape = f"{tensor.linear.in_features} x {tensor.linear.out_features}"
        bits = "copy" if tensor.bits is None else f"{tensor.bits:g}"
        if not plan.decided and tensor in plan.body:
            bits = "?"
        lines.append(f"{tensor.linear.name:<34} {shape:>15} {bits:>5} {tensor.stored_bytes / 1024:>9,.0f}")
    lines += [f"  {tensor.linear.name} is copied: {tensor.reason}" for tensor in plan.tensors if tensor.reason]
    most = "" if plan.decided else "at most "
    lines.append(
        f"{plan.source_bytes / 2**20:,.1f} MiB -> {most}{plan.total_bytes / 2**20:,.1f} MiB, {plan.bpw:.2f} bpw, "
        f"codebook {settings.codebook}; encoding takes about {format_seconds(seconds)} on a CPU"
    )
    if not plan.decided:
        lines.append(f"a mixed plan of {settings.bits:g} bits on average is made after calibration")
    if plan.predicted_retention is not None:
        lines.append(
            f"{plan.mean_bits:.3f} bits on average; predicted to retain {100 * plan.predicted_retention:.1f} % of the "
            "accept length"
        )
    if plan.loader_note:
        lines.append(f"note: {plan.loader_note}")
    if not plan.has_head:
        lines.append("this drafter has no head of its own (it uses the target's): --head-bits is inert")
    return "\n".join(lines)


def format_seconds(seconds: float) -> str:
    """Seconds as a person reads them."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
