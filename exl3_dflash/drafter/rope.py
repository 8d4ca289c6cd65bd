"""Rotary position embeddings of drafters: settings from every config layout, frequencies, and their application.

NEOX layout: with rotary width R = head_dim * partial_rotary_factor, feature i of the first R is paired with i + R/2 and
turned by position * frequency[i]; features from R on pass unchanged.

    frequency[i] = theta^(-2i/R)                 default
    linear, llama3, yarn                         rescale the frequencies for contexts longer than the trained one
    yarn                                         also multiplies cos and sin by its attention factor

Angles are computed in float64 (position * frequency loses digits in float32 from about 10^4 on). Types that look at the
current length (dynamic, longrope) are left out: no drafter uses them, and K/V could not be cached under them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from exl3_dflash.drafter.config_reader import ConfigReader
from exl3_dflash.errors import Exl3DflashError

ROPE_TYPES = ("default", "linear", "llama3", "yarn")

_KNOWN_KEYS = {
    *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"),
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate"),
    *("low_freq_factor", "high_freq_factor"),
    *("mrope_section", "mrope_interleaved"),  # text positions are equal in all sections: plain RoPE
}
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class RopeSettings:
    """RoPE as a drafter's config states it.

    Attributes:
        theta: base of the frequencies.
        type: one of ROPE_TYPES.
        partial_rotary_factor: share of head_dim that is rotated.
        factor, original_max_position_embeddings: context extension (linear, llama3, yarn); 1.0 and None otherwise.
        beta_fast, beta_slow, truncate, attention_factor, mscale, mscale_all_dim: yarn.
        low_freq_factor, high_freq_factor: llama3.
    """

    theta: float
    type: str = "default"
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def rotary_width(self, head_dim: int) -> int:
        """Number of rotated features R of a head."""
        return int(head_dim * self.partial_rotary_factor)

    def scale(self) -> float:
        """What cos and sin are multiplied by: 1 except for yarn."""
        if self.type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _yarn_magnitude(self.factor, self.mscale) / _yarn_magnitude(self.factor, self.mscale_all_dim)
        return _yarn_magnitude(self.factor, 1.0)

    def frequencies(self, head_dim: int) -> torch.Tensor:
        """Angle per position of each pair, float64 `(R/2,)`."""
        width = self.rotary_width(head_dim)
        plain = self.theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        if self.type == "linear":
            return plain / self.factor
        if self.type == "llama3":
            return self._llama3(plain)
        if self.type == "yarn":
            return self._yarn(plain, width)
        return plain

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        """Slow pairs are divided by factor, fast ones kept, those between blended by turns in the trained context."""
        assert self.original_max_position_embeddings is not None
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        keep = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = keep.clamp(0, 1)
        return plain * (keep + (1 - keep) / self.factor)

    def _yarn(self, plain: torch.Tensor, width: int) -> torch.Tensor:
        """As llama3, with a ramp over the pair index between the pairs that make beta_fast and beta_slow turns."""
        assert self.original_max_position_embeddings is not None
        context = self.original_max_position_embeddings

        def pair_of(turns: float) -> float:
            return width * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = pair_of(self.beta_fast), pair_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        if low == high:
            high += 0.001
        interpolate = ((torch.arange(width // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
        return plain * (1 - interpolate) + plain / self.factor * interpolate


def _yarn_magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def read_rope(reader: ConfigReader, head_dim: int) -> RopeSettings:
    """RoPE settings from `rope_theta` and `rope_scaling`, from `rope_parameters`, or from a mixture that agrees.

    Raises:
        Exl3DflashError: no theta anywhere, an unknown type or key, a missing or malformed value, two answers.
    """
    merged = ConfigReader(_merged(reader))
    kind = merged.value("rope_type", "type")
    if kind is None:
        kind = "default"
        if merged.value("factor") is not None:
            raise Exl3DflashError("rope_scaling in config.json has a factor but no rope_type", " or ".join(ROPE_TYPES))
    if kind not in ROPE_TYPES:
        raise Exl3DflashError(f"rope_type {kind!r} in config.json is not supported", " or ".join(ROPE_TYPES))
    partial = merged.number("partial_rotary_factor", default=1.0)
    width = int(head_dim * partial)
    if partial > 1 or width % 2 or width == 0:
        raise Exl3DflashError(f"partial_rotary_factor {partial} of head_dim {head_dim}", "an even rotated width")
    if reader.integer("rotary_dim", default=width) != width:
        raise Exl3DflashError(f"rotary_dim {reader.value('rotary_dim')} in config.json", f"{width}, as head_dim says")
    theta = merged.number("rope_theta", default=None)
    if theta is None:
        raise Exl3DflashError(
            "config.json has no 'rope_theta', neither at the top level nor in rope_parameters or rope_scaling",
            expected="the base that the drafter was trained with: no default is right for every drafter",
            fix="add rope_theta (usually the target's)",
        )
    if theta <= 1:
        raise Exl3DflashError(f"rope_theta in config.json is {theta}", expected="a number above 1")
    if kind == "default":
        return RopeSettings(theta=theta, partial_rotary_factor=partial)
    return _scaled(merged, kind, theta, partial)


def _scaled(merged: ConfigReader, kind: str, theta: float, partial: float) -> RopeSettings:
    original = None if kind == "linear" else merged.integer("original_max_position_embeddings")
    low, high = merged.number("low_freq_factor", default=1.0), merged.number("high_freq_factor", default=4.0)
    if low >= high:
        raise Exl3DflashError(f"low_freq_factor {low} is not below high_freq_factor {high} in config.json")
    return RopeSettings(
        theta=theta,
        type=kind,
        partial_rotary_factor=partial,
        factor=merged.number("factor"),
        original_max_position_embeddings=original,
        beta_fast=merged.number("beta_fast", default=32.0),
        beta_slow=merged.number("beta_slow", default=1.0),
        truncate=merged.boolean("truncate", default=True),
        attention_factor=merged.number("attention_factor", default=None),
        mscale=merged.number("mscale", default=None),
        mscale_all_dim=merged.number("mscale_all_dim", default=None),
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _merged(reader: ConfigReader) -> dict[str, Any]:
    """One flat mapping of everything the config says about RoPE; an error where two places disagree."""
    sources: list[tuple[str, Any]] = []
    for path, table in reader.entries("rope_parameters", "rope_scaling"):
        if not isinstance(table, dict):
            raise Exl3DflashError(f"{path} in config.json is {table!r}", expected="an object or null")
        if any(key in table for key in _LAYER_TYPES):
            raise Exl3DflashError(f"{path} in config.json has a RoPE per layer type", expected="one for all layers")
        unknown = sorted(key for key, value in table.items() if key not in _KNOWN_KEYS and value is not None)
        if unknown:
            raise Exl3DflashError(f"{path} in config.json has unknown keys {unknown}", f"any of {sorted(_KNOWN_KEYS)}")
        sources += [(f"{path}.{key}", value) for key, value in table.items()]
    for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        sources += reader.entries(key)
    merged: dict[str, tuple[str, Any]] = {}
    for path, value in sources:
        if value is None:
            continue
        key = path.rpartition(".")[2].replace("rope_type", "type")
        if key in merged and merged[key][1] != value:
            raise Exl3DflashError(
                f"config.json says {merged[key][0]} = {merged[key][1]!r} but {path} = {value!r}",
                expected="one value",
                fix="remove the wrong one",
            )
        merged.setdefault(key, (path, value))
    return {key: value for key, (_, value) in merged.items()}


class RotaryTable:
    """cos and sin by position, grown on demand.

    Args:
        settings: the drafter's RoPE.
        head_dim: features of a head.
        dtype: float32, or float64 for exact comparisons.
    """

    def __init__(self, settings: RopeSettings, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = settings.frequencies(head_dim)
        self._scale = settings.scale()
        self._dtype = dtype
        self._device = device
        self._cos = self._sin = torch.empty(0, len(self._frequencies), dtype=dtype, device=device)

    def at(self, positions: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin `(T, R/2)` of int64 `positions (T,)`, all below `length`."""
        if length > len(self._cos):
            rows = max(length, 2 * len(self._cos), 1024)
            angles = torch.arange(rows, dtype=torch.float64)[:, None] * self._frequencies
            self._cos = (angles.cos() * self._scale).to(self._device, self._dtype)
            self._sin = (angles.sin() * self._scale).to(self._device, self._dtype)
        return self._cos[positions], self._sin[positions]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn heads `x (T, heads, head_dim)` by `cos, sin (T, R/2)`; features from R on pass unchanged."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)
