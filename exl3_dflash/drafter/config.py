"""One `DrafterConfig` out of every config.json dialect of the DFlash family.

Facts without a right default (RoPE theta, taps, mask token) must be there; facts given twice must agree. Some published
configs lack `block_size` (engines that take the number of mask rows from their command line never read it). How many
rows a drafter was trained with cannot be seen in its tensors: such a config can be looked at, and running it is refused
until the user has said it (`DrafterConfig.with_block_size`).

Tensors are not looked at here (`drafter.checkpoint`), and the target neither (`exl3_dflash.pairing`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from exl3_dflash.drafter.config_facts import (
    FULL,
    SLIDING,
    ConvolutionSettings,
    read_causality,
    read_convolutions,
    read_draft_vocabulary,
    read_heads,
    read_layers,
    read_sinks,
    read_taps,
)
from exl3_dflash.drafter.config_reader import ConfigReader
from exl3_dflash.drafter.dialects import Dialect, check_features, find_dialect
from exl3_dflash.drafter.rope import RopeSettings, read_rope
from exl3_dflash.errors import Exl3DflashError

__all__ = ["FULL", "SLIDING", "ConvolutionSettings", "DrafterConfig"]


@dataclass(frozen=True)
class DrafterConfig:
    """Everything that decides what a drafter computes.

    Attributes:
        dialect: which member of the family it is.
        target_layer_ids: as listed, which is the order of concatenation (`drafter.taps` maps them to target layers).
        num_target_layers, target_hidden_size: None where the config does not say.
        layer_types: per layer, "full_attention" or "sliding_attention".
        sliding_window: keys a sliding layer sees, itself included; None without sliding layers.
        is_causal: None where it follows the layer type.
        attention_sinks: layers with a learned sink per head; None where the tensors decide.
        attention_value_scale: factor on V, folded into o_proj when a checkpoint is read.
        input_embedding_scale: factor on the embedded rows of a block, beside the target's own scale.
        output_multiplier, final_logit_softcap: of the logits, before proposals are chosen; see `DrafterModel.logits`.
        vocab_size: None where the config does not say, which only a dialect without own tables may do.
        draft_vocab_size: rows of the drafter's own head; vocab_size unless `d2t` maps them to target ids.
        convolutions: DFlash 2 only.
        stated_block_size: rows of a block, the anchor included; None where the config does not say (see `block_size`).
        tap_shift: exllamav3's offset on target_layer_ids where the checkpoint pins it, else None.
        raw: the config.json it was read from.
    """

    dialect: Dialect
    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    vocab_size: int | None
    draft_vocab_size: int | None
    stated_block_size: int | None
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None
    target_hidden_size: int | None
    layer_types: tuple[str, ...]
    sliding_window: int | None
    is_causal: bool | None
    attention_bias: bool
    attention_sinks: tuple[bool, ...] | None
    attention_value_scale: float
    rope: RopeSettings
    tap_shift: int | None
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcap: float | None
    convolutions: ConvolutionSettings | None
    raw: dict[str, Any]

    @property
    def block_size(self) -> int:
        """Rows B of a block, the anchor included.

        Raises:
            Exl3DflashError: the config does not say.
        """
        if self.stated_block_size is None:
            raise Exl3DflashError(
                "config.json of the drafter has no 'block_size'",
                expected="the block size that the drafter was trained with: its tensors do not show it",
                fix="give --block-size N (its card, or the command line of the engine it was made for, says it)",
            )
        return self.stated_block_size

    def with_block_size(self, rows: int) -> DrafterConfig:
        """This config with blocks of `rows` rows, for one that does not say.

        Raises:
            Exl3DflashError: it says another number, or `rows` is below 2.
        """
        if self.stated_block_size not in (None, rows):
            raise Exl3DflashError(
                f"--block-size {rows}, but config.json of the drafter says {self.stated_block_size}",
                expected="a block size only where config.json has none",
                fix="leave it out; --draft-tokens drafts fewer tokens",
            )
        return self.from_dict({**self.raw, "block_size": rows})

    def layer_is_causal(self, index: int) -> bool:
        """Whether block rows of layer `index` see only themselves and earlier block rows."""
        return self.layer_types[index] == SLIDING if self.is_causal is None else self.is_causal

    def layer_window(self, index: int) -> int | None:
        """Window of layer `index`, or None for full attention."""
        return self.sliding_window if self.layer_types[index] == SLIDING else None

    @classmethod
    def from_directory(cls, path: str | Path) -> DrafterConfig:
        """Read `path/config.json`.

        Raises:
            Exl3DflashError: no such file, no JSON object, or what `from_dict` refuses.
        """
        file = Path(path).expanduser() / "config.json"
        if not file.is_file():
            raise Exl3DflashError(f"{file} does not exist", "a drafter's Hugging Face directory", "check the path")
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise Exl3DflashError(f"{file} cannot be read: {error}", "a JSON object", "download it again") from error
        if not isinstance(raw, dict):
            raise Exl3DflashError(f"{file} holds a {type(raw).__name__}", expected="a JSON object")
        try:
            return cls.from_dict(raw)
        except Exl3DflashError as error:
            raise Exl3DflashError(f"{file}: {error.what}", error.expected, error.fix) from None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> DrafterConfig:
        """Read the contents of a config.json.

        Raises:
            Exl3DflashError: another architecture, an unsupported feature, a missing, malformed or contradictory key.
        """
        dialect = find_dialect(raw)
        reader = ConfigReader(raw)
        check_features(reader, dialect)
        vocab_size = reader.integer("vocab_size", default=... if dialect.names_vocabulary else None)
        block_size = reader.integer("block_size", default=None, minimum=2)
        hidden_size, num_layers = reader.integer("hidden_size"), reader.integer("num_hidden_layers")
        heads = read_heads(reader, hidden_size)
        layer_types, window = read_layers(reader, num_layers)
        return cls(
            dialect=dialect,
            architecture=dialect.name,
            hidden_size=hidden_size,
            num_layers=num_layers,
            **heads,
            intermediate_size=reader.integer("intermediate_size"),
            rms_norm_eps=reader.number("rms_norm_eps"),
            vocab_size=vocab_size,
            draft_vocab_size=read_draft_vocabulary(reader, vocab_size),
            stated_block_size=block_size,
            mask_token_id=reader.integer("mask_token_id", minimum=0),
            target_layer_ids=read_taps(reader),
            num_target_layers=reader.integer("num_target_layers", default=None),
            target_hidden_size=reader.integer("target_hidden_size", default=None),
            layer_types=layer_types,
            sliding_window=window,
            is_causal=read_causality(reader, dialect),
            attention_bias=reader.boolean("attention_bias", default=False),
            attention_sinks=read_sinks(reader, layer_types),
            attention_value_scale=reader.number("attention_value_scale", default=1.0),
            rope=read_rope(reader, heads["head_dim"]),
            tap_shift=reader.integer("tap_shift", default=None, minimum=-1),
            input_embedding_scale=reader.number("input_embedding_scale", default=1.0),
            output_multiplier=reader.number("output_multiplier", default=1.0),
            final_logit_softcap=reader.number("final_logit_softcapping", default=None, zero_is_none=True),
            convolutions=read_convolutions(reader, hidden_size, vocab_size, block_size)
            if dialect.convolutions
            else None,
            raw=dict(raw),
        )
