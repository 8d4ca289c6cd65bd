"""How the trainers of DFlash drafters write config.json, and what of it this version can run.

The same fact has several names and two places: the `dflash_config` object (first release) and the top level (later
ones). `ConfigReader` looks in both, for every name of a fact, treats null as absent, and refuses two different answers,
because engines disagree about which of them wins. The tables below list the settings and tensors of the wider DFlash
family whose meaning this version does not compute; each is refused by name, since running a drafter without one of them
costs acceptance silently (the target still verifies every token).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from exl3_dflash.errors import Exl3DflashError

SUPPORTED_ARCHITECTURE = "DFlashDraftModel"
NESTED_KEY = "dflash_config"

OTHER_ARCHITECTURES: Mapping[str, str] = {
    "DFlash2DraftModel": "DFlash 2: dynamic convolutions and a candidate selector",
    "DFlashLagunaForCausalLM": "Laguna: fused qkv, head gates and a norm per tap",
    "MuseGlimmerAssistantModel": "Muse-Glimmer: its own tensor and key names",
}

_ARCHITECTURE_FAMILIES = (
    (re.compile(r"dspark", re.I), "DSpark: Markov and confidence heads"),
    (re.compile(r"domino", re.I), "Domino: a recurrent correction of the logits"),
    (re.compile(r"dflash-?2|dflash_v2", re.I), "DFlash 2: dynamic convolutions and a candidate selector"),
    (re.compile(r"laguna", re.I), "Laguna: fused qkv, head gates and a norm per tap"),
    (re.compile(r"glimmer", re.I), "Muse-Glimmer: its own tensor and key names"),
    (re.compile(r"speculator", re.I), "the speculators format: its own layer config, head and reduced vocabulary"),
)


@dataclass(frozen=True)
class UnsupportedKey:
    """A setting that changes the forward pass; `neutral` values, like null and absence, leave it unchanged."""

    name: str
    neutral: tuple[Any, ...]
    feature: str


UNSUPPORTED_KEYS = (
    UnsupportedKey("attention_sink_bias", (False,), "attention sinks"),
    UnsupportedKey("add_swa_attention_sink_bias", (False,), "attention sinks"),
    UnsupportedKey("attention_value_scale", (1,), "a scale on V"),
    UnsupportedKey("input_embedding_scale", (1,), "an embedding scale of its own"),
    UnsupportedKey("output_multiplier", (1,), "a multiplier on its output"),
    UnsupportedKey("attn_logit_softcapping", (), "a softcap on attention scores"),
    UnsupportedKey("gating", (False, "none"), "gates on attention heads"),
    UnsupportedKey("norm_before_fc", (False,), "norms on the taps before fc"),
    UnsupportedKey("causal_head", (False,), "a causal head"),
    UnsupportedKey("sample_from_anchor", (False,), "sampling from the anchor's row (DSpark, Domino)"),
    UnsupportedKey("markov_rank", (0,), "a Markov head (DSpark)"),
    UnsupportedKey("markov_head_type", ("none",), "a Markov head (DSpark)"),
    UnsupportedKey("dspark_markov_rank", (0,), "a Markov head (DSpark)"),
    UnsupportedKey("dspark_fixup_head_type", ("none",), "a correction head (DSpark)"),
    UnsupportedKey("enable_confidence_head", (False,), "a confidence head (DSpark)"),
    UnsupportedKey("selector_rank", (0,), "a candidate selector (DFlash 2)"),
    UnsupportedKey("conv_kernel_size", (0,), "dynamic convolutions (DFlash 2)"),
    UnsupportedKey("hidden_act", ("silu", "swish"), "an activation other than SiLU"),
    UnsupportedKey("mlp_bias", (False,), "biases in the MLP"),
    UnsupportedKey("is_neox_style", (True,), "interleaved RoPE"),
)

# Tensors of the family that a v1 drafter does not have: pattern on the canonical name -> what it is for.
UNSUPPORTED_TENSORS = tuple(
    (re.compile(pattern), feature)
    for pattern, feature in (
        (r"\battention_sink_bias$|\bsinks$", "attention sinks"),
        (r"\b(attention_conv|mlp_conv)\.", "dynamic convolutions (DFlash 2)"),
        (r"\bcandidate_selector\.", "a candidate selector (DFlash 2)"),
        (r"^(d2t|t2d)$", "a reduced draft vocabulary"),
        (r"\bqkv_proj\.", "fused qkv projections (Laguna)"),
        (r"\bg_proj\.", "gates on attention heads (Laguna)"),
        (r"^aux_hidden_norms?\.|^(aux|tap)_norms?\.", "a norm per tap (Laguna)"),
        (r"^encoder\.", "the Muse-Glimmer encoder"),
        (r"markov", "a Markov head (DSpark)"),
        (r"confidence", "a confidence head (DSpark)"),
        (r"domino|correction_head|\bgru\b", "a correction of the logits (Domino)"),
    )
)


class ConfigReader:
    """Typed access to a drafter's config.json through both places and all names of a fact.

    Raises:
        Exl3DflashError: from every method, naming the key: two places that disagree, a wrong type, a value out of
            range, or (without a `default`) a key that is nowhere.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        nested = raw.get(NESTED_KEY)
        if nested is not None and not isinstance(nested, Mapping):
            raise Exl3DflashError(f"{NESTED_KEY} in config.json is {nested!r}", expected="an object")
        self._places: tuple[tuple[str, Mapping[str, Any]], ...] = ((f"{NESTED_KEY}.", nested or {}), ("", raw))

    def entries(self, *names: str) -> list[tuple[str, Any]]:
        """Every (path, value) under which the fact is given, in the order of preference; nulls are left out."""
        return [(p + n, place[n]) for p, place in self._places for n in names if place.get(n) is not None]

    def value(self, *names: str) -> Any:
        """The fact's value, or None; names are synonyms."""
        found = self.entries(*names)
        for path, other in found[1:]:
            if other != found[0][1]:
                raise Exl3DflashError(
                    f"config.json says {found[0][0]} = {found[0][1]!r} but {path} = {other!r}",
                    expected="one value",
                    fix="remove the wrong one",
                )
        return found[0][1] if found else None

    def integer(self, *names: str, default: Any = ..., minimum: int = 1) -> Any:
        """A whole number of at least `minimum`."""
        value = self._present(names, default)
        if value is None:
            return None
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not numeric or value != int(value) or value < minimum:
            raise self._wrong(names, value, f"a whole number of at least {minimum}")
        return int(value)

    def number(self, *names: str, default: Any = ...) -> Any:
        """A positive finite number."""
        value = self._present(names, default)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self._wrong(names, value, "a number above 0")
        return float(value)

    def boolean(self, *names: str, default: Any = ...) -> Any:
        """true or false."""
        value = self._present(names, default)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(names, value, "true, false or null")
        return value

    def integers(self, *names: str, default: Any = ...) -> Any:
        """A list of whole numbers, as a tuple."""
        value = self._present(names, default)
        if value is None:
            return None
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise self._wrong(names, value, "a list of whole numbers")
        return tuple(value)

    def _present(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.value(*names)
        if value is None and default is ...:
            raise Exl3DflashError(
                f"config.json has no {names[0]!r}, neither in {NESTED_KEY} nor at the top level",
                expected="a value: no default is right for every drafter",
                fix=f"add {names[0]} as the drafter was trained with it",
            )
        return default if value is None else value

    def _wrong(self, names: tuple[str, ...], value: Any, expected: str) -> Exl3DflashError:
        path = self.entries(*names)[0][0]
        return Exl3DflashError(f"{path} in config.json is {value!r}", expected=expected)


def check_architecture(raw: Mapping[str, Any]) -> None:
    """Accept `DFlashDraftModel`; refuse everything else by name.

    Raises:
        Exl3DflashError: another or no architecture, or the speculators format.
    """
    if raw.get("speculators_model_type") is not None or raw.get("transformer_layer_config") is not None:
        kind = raw.get("speculators_model_type", "unnamed")
        raise _unsupported(f"a {kind!r} drafter in the speculators format (own head, reduced vocabulary)")
    architectures = raw.get("architectures")
    if architectures == [SUPPORTED_ARCHITECTURE]:
        return
    if not isinstance(architectures, list) or len(architectures) != 1 or not isinstance(architectures[0], str):
        raise Exl3DflashError(
            f"'architectures' in config.json is {architectures!r}",
            expected=f'["{SUPPORTED_ARCHITECTURE}"]',
            fix="give the directory of a DFlash drafter",
        )
    name = architectures[0]
    feature = OTHER_ARCHITECTURES.get(name)
    if feature is None:
        feature = next((text for pattern, text in _ARCHITECTURE_FAMILIES if pattern.search(name)), None)
    if feature is not None:
        raise _unsupported(f"architecture {name} ({feature})")
    raise Exl3DflashError(
        f"architecture {name} is not a DFlash drafter",
        expected=SUPPORTED_ARCHITECTURE,
        fix="give the drafter's directory, not the target's",
    )


def check_features(reader: ConfigReader, vocab_size: int) -> None:
    """Refuse settings whose meaning this version does not compute, all in one error.

    Raises:
        Exl3DflashError: naming every such key, its value and the feature.
    """
    problems = []
    for key in UNSUPPORTED_KEYS:
        for path, value in reader.entries(key.name):
            if value not in key.neutral:
                problems.append(f"{path} = {value!r} ({key.feature})")
    for path, value in reader.entries("draft_vocab_size"):
        if value != vocab_size:
            problems.append(f"{path} = {value!r} (a reduced draft vocabulary of {vocab_size})")
    for path, value in reader.entries("quantization_config"):
        method = value.get("quant_method") if isinstance(value, Mapping) else value
        if method != "exl3":
            problems.append(f"{path} of type {method!r} (weights are read as BF16, FP16, FP32 or EXL3)")
    if problems:
        raise _unsupported("; ".join(problems))


def tensor_feature(name: str) -> str | None:
    """What an unexpected tensor is for, if the family knows it."""
    return next((feature for pattern, feature in UNSUPPORTED_TENSORS if pattern.search(name)), None)


def _unsupported(what: str) -> Exl3DflashError:
    return Exl3DflashError(
        f"this version does not support {what}",
        expected=f"a DFlash v1 drafter ({SUPPORTED_ARCHITECTURE})",
        fix="use a DFlash v1 drafter of the same target",
    )
