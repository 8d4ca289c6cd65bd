"""The members of the DFlash family: what distinguishes each, and what of the family cannot be run.

A `Dialect` is one way in which trainers write a drafter: its class name, the names of its tensors, and the few switches
of its forward pass. Everything else is a setting that any dialect may have (window, causality, biases, sinks, V scale,
RoPE, own embedding or head). The second half lists settings, classes and tensors whose meaning is not computed here;
each is refused by name, since running a drafter without one of them costs acceptance silently (the target still
verifies every token).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exl3_dflash.drafter.config_reader import LAYER_CONFIG_KEY, ConfigReader
from exl3_dflash.errors import Exl3DflashError

SPECULATORS_KEY = "speculators_model_type"


@dataclass(frozen=True)
class Dialect:
    """One member of the family.

    Attributes:
        name: the class in `architectures`.
        title: for messages.
        in_exllamav3: whether ExLlamaV3 has a class that loads it.
        stored_prefixes: (prefix in the files, canonical prefix) of tensors that are named otherwise.
        names_vocabulary: whether config.json must have a vocab_size.
        causal: block causality of all layers where the config does not say; None follows the layer type.
        norm_per_tap: each tap has a norm of its own before `fc` (`aux_hidden_norms.i`).
        context_is_normed: context rows get each layer's input_layernorm before its K and V.
        head_gates: attention output is multiplied by softplus(g_proj x), one gate per head.
        convolutions: dynamic convolutions around each sublayer, and a candidate selector (DFlash 2).
    """

    name: str
    title: str
    in_exllamav3: bool = True
    stored_prefixes: tuple[tuple[str, str], ...] = ()
    names_vocabulary: bool = True
    causal: bool | None = None
    norm_per_tap: bool = False
    context_is_normed: bool = False
    head_gates: bool = False
    convolutions: bool = False


DFLASH = Dialect("DFlashDraftModel", "DFlash")
DFLASH2 = Dialect("DFlash2DraftModel", "DFlash 2", convolutions=True)
LAGUNA = Dialect(
    "DFlashLagunaForCausalLM",
    "DFlash for Laguna",
    causal=True,
    norm_per_tap=True,
    context_is_normed=True,
    head_gates=True,
)
MUSE_GLIMMER = Dialect(
    "MuseGlimmerAssistantModel",
    "Muse-Glimmer assistant",
    stored_prefixes=(("encoder.fc", "fc"), ("encoder.output_norm_enc", "hidden_norm")),
    names_vocabulary=False,
    causal=False,
)
SPECULATORS = Dialect("DFlashSpeculator", "DFlash in the speculators format", in_exllamav3=False)
SPECULATORS_DFLASH2 = Dialect(
    "DFlash2Speculator", "DFlash 2 in the speculators format", in_exllamav3=False, convolutions=True
)

DIALECTS: Mapping[str, Dialect] = {d.name: d for d in (DFLASH, DFLASH2, LAGUNA, MUSE_GLIMMER)}
SPECULATORS_KINDS: Mapping[str, Dialect] = {"dflash": SPECULATORS, "dflash2": SPECULATORS_DFLASH2}
_KNOWN = f"{', '.join(DIALECTS)}, or {SPECULATORS_KEY} {' or '.join(SPECULATORS_KINDS)}"

_DOMINO = "Domino: a recurrent head corrects the logits token by token, which neither ExLlamaV3 nor this engine runs"
_DSPARK = "DSpark: Markov and confidence heads sample from the anchor's row on, which this engine does not run"
_REFUSED_FAMILIES = (
    (re.compile(r"dspark", re.I), _DSPARK),
    (re.compile(r"domino", re.I), _DOMINO),
)


@dataclass(frozen=True)
class UnsupportedKey:
    """A setting that changes the forward pass; `neutral` values, like null and absence, leave it unchanged."""

    name: str
    neutral: tuple[Any, ...]
    feature: str


UNSUPPORTED_KEYS = (
    UnsupportedKey("attn_logit_softcapping", (), "a softcap on attention scores"),
    UnsupportedKey("norm_before_fc", (False,), "norms on the taps before fc"),
    UnsupportedKey("projector_type", ("dflash",), "a head that corrects the logits (Domino, DSpark)"),
    UnsupportedKey("shift_label", (False,), "labels one position earlier (Domino, DSpark)"),
    UnsupportedKey("sample_from_anchor", (False,), "sampling from the anchor's row (DSpark, Domino)"),
    UnsupportedKey("markov_rank", (0,), "a Markov head (DSpark)"),
    UnsupportedKey("markov_head_type", ("none",), "a Markov head (DSpark)"),
    UnsupportedKey("dspark_markov_rank", (0,), "a Markov head (DSpark)"),
    UnsupportedKey("dspark_bonus_anchor", (False,), "sampling from the anchor's row (DSpark)"),
    UnsupportedKey("dspark_fixup_head_type", ("none",), "a correction head (DSpark)"),
    UnsupportedKey("enable_confidence_head", (False,), "a confidence head (DSpark)"),
    UnsupportedKey("use_confidence_head", (False,), "a confidence head (DSpark)"),
    UnsupportedKey("linear_context", (), "a recurrent memory of the context"),
    UnsupportedKey("use_aux_hidden_state", (True,), "a drafter without the target's features"),
    UnsupportedKey("hidden_act", ("silu", "swish"), "an activation other than SiLU"),
    UnsupportedKey("hidden_activation", ("silu", "swish"), "an activation other than SiLU"),
    UnsupportedKey("mlp_bias", (False,), "biases in the MLP"),
    UnsupportedKey("is_neox_style", (True,), "interleaved RoPE"),
)
# Settings that only one dialect gives a meaning: refused elsewhere, where its tensors would be missing anyway.
_GATES = UnsupportedKey("gating", (False, "none"), "gates on attention heads (Laguna)")
_CONVOLUTIONS = (
    UnsupportedKey("selector_rank", (0,), "a candidate selector (DFlash 2)"),
    UnsupportedKey("conv_kernel_size", (0,), "dynamic convolutions (DFlash 2)"),
)

# Tensors of the family that the drafter at hand has no place for: pattern on the canonical name -> what it is for.
UNSUPPORTED_TENSORS = tuple(
    (re.compile(pattern), feature)
    for pattern, feature in (
        (r"\battention_sink_bias$|\bsinks$", "attention sinks, which its config.json does not announce"),
        (r"\b(attention_conv|mlp_conv)\.", "dynamic convolutions (DFlash 2)"),
        (r"\bcandidate_selector\.", "a candidate selector (DFlash 2)"),
        (r"\bqkv_proj\.", "fused q, k and v of other sizes than config.json says"),
        (r"\bg_proj\.", "gates on attention heads (Laguna)"),
        (r"^aux_hidden_norms?\.|^(aux|tap)_norms?\.", "a norm per tap (Laguna)"),
        (r"^encoder\.", "the Muse-Glimmer encoder"),
        (r"markov", "a Markov head (DSpark)"),
        (r"confidence", "a confidence head (DSpark)"),
        (r"domino|correction_head|\b(prefix_)?gru\b|\bembed_proj\b", "a correction of the logits (Domino)"),
    )
)


def find_dialect(raw: Mapping[str, Any]) -> Dialect:
    """The dialect of a config.json.

    Raises:
        Exl3DflashError: no drafter, or a member of the family that cannot be run, named with the reason.
    """
    architectures = raw.get("architectures")
    if raw.get(SPECULATORS_KEY) is not None or raw.get(LAYER_CONFIG_KEY) is not None:
        kind = str(raw.get(SPECULATORS_KEY))
        if kind not in SPECULATORS_KINDS:
            raise _unsupported(f"a speculators drafter of type {kind!r}{_reason(kind)}")
        return SPECULATORS_KINDS[kind]
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise Exl3DflashError(
            f"'architectures' in config.json is {architectures!r}",
            expected=f"one of {_KNOWN}",
            fix="give the directory of a DFlash drafter",
        )
    name = architectures[0]
    if name in DIALECTS:
        return DIALECTS[name]
    if _reason(name):
        raise _unsupported(f"architecture {name}{_reason(name)}")
    raise Exl3DflashError(
        f"architecture {name} is not a DFlash drafter",
        expected=f"one of {_KNOWN}",
        fix="give the drafter's directory, not the target's",
    )


def check_features(reader: ConfigReader, dialect: Dialect) -> None:
    """Refuse settings whose meaning is not computed, all in one error.

    Raises:
        Exl3DflashError: naming every such key, its value and the feature.
    """
    keys = [*UNSUPPORTED_KEYS]
    keys += () if dialect.head_gates else (_GATES,)
    keys += () if dialect.convolutions else _CONVOLUTIONS
    problems = []
    for key in keys:
        for path, value in reader.entries(key.name):
            if value not in key.neutral:
                problems.append(f"{path} = {value!r}{_reason(str(value)) or f' ({key.feature})'}")
    for path, value in reader.entries("gating") if dialect.head_gates else ():
        if value != "per-head":
            problems.append(f"{path} = {value!r} (gates other than one per head)")
    for path, value in reader.entries("quantization_config"):
        method = value.get("quant_method") if isinstance(value, Mapping) else value
        if method != "exl3":
            problems.append(f"{path} of type {method!r} (weights are read as BF16, FP16, FP32 or EXL3)")
    if problems:
        raise _unsupported("; ".join(problems))


def tensor_feature(name: str) -> str | None:
    """What an unexpected tensor is for, if the family knows it."""
    return next((feature for pattern, feature in UNSUPPORTED_TENSORS if pattern.search(name)), None)


def _reason(name: str) -> str:
    """Why a member of the family by that name is refused, in brackets; empty if it is none."""
    return next((f" ({text})" for pattern, text in _REFUSED_FAMILIES if pattern.search(name)), "")


def _unsupported(what: str) -> Exl3DflashError:
    return Exl3DflashError(
        f"this version does not support {what}",
        expected=f"a drafter of one of the classes {_KNOWN}",
        fix="use a DFlash drafter of the same target",
    )
