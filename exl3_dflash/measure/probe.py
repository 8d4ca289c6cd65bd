"""Settings that a checkpoint leaves open, chosen by what the drafter accepts on rows that its target wrote.

    tap_shift         {0, 1}: engines disagree whether the listed ids mean a layer's output or one layer deeper
    embedding scale   {the target's, 1, sqrt(H)}: a trainer may or may not have scaled what a Gemma-like target scales

Each is probed only where the checkpoint does not fix it (a pinned `tap_shift`; an embedding table or an
`input_embedding_scale` of the drafter's own). The default stays unless another value accepts clearly more: its paired
95 % interval lies above zero and the gain is worth it. Where neither does, that is said, not guessed, and where the
best value still accepts next to nothing the probe has failed: then a wrong target or a damaged file is likelier than a
wrong setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.config import DrafterConfig
from exl3_dflash.drafter.taps import DEFAULT_TAP_SHIFT, tap_layer_indices
from exl3_dflash.measure.candidates import Candidate, CandidateFigures, CandidateProbe
from exl3_dflash.measure.fidelity import all_layers
from exl3_dflash.measure.statistics import Interval
from exl3_dflash.target.base import Target

TAP_SHIFTS = (0, 1)
PROBE_ROWS = 8
PROBE_ANCHORS_PER_ROW = 32
WORTHWHILE_GAIN = 0.02  # of the default's accept length
LOST_FIRST_ACCEPTANCE = 0.1  # acceptance of the first draft token below which no setting can be told from another
SCALE_KEY = "input_embedding_scale"


@dataclass(frozen=True)
class SettingChoice:
    """What was chosen for one setting, and why.

    Attributes:
        setting: `tap_shift` or `embedding_scale`.
        choice: the value to use.
        default: the value without a probe.
        outcome: `default` or `changed` where one value is clearly better, `tie`, `failed`, or `forced` where there is
            only one possible value.
        reason: the same in words.
        candidates: what each value accepts; the default first, names are the values.
        margin, margin_ci95: accept length of the best other value less the default's, paired; None if forced.
    """

    setting: str
    choice: float
    default: float
    outcome: str
    reason: str
    candidates: list[CandidateFigures]
    margin: float | None
    margin_ci95: Interval | None


@dataclass(frozen=True)
class ProbeResult:
    """Every probed setting; empty where the checkpoint fixes them all."""

    settings: list[SettingChoice]
    anchors: int
    rows: int

    def choice(self, setting: str) -> SettingChoice | None:
        """The choice for a setting, None where it was not probed."""
        return next((choice for choice in self.settings if choice.setting == setting), None)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def open_settings(checkpoint: DrafterCheckpoint, target: Target) -> tuple[str, ...]:
    """The settings that the checkpoint does not fix."""
    settings = []
    if checkpoint.config.tap_shift is None:
        settings.append("tap_shift")
    if not _fixes_scale(checkpoint) and len(embedding_scales(target)) > 1:
        settings.append("embedding_scale")
    return tuple(settings)


def embedding_scales(target: Target) -> tuple[float, ...]:
    """The scales worth trying, the target's own first."""
    facts = target.facts
    return tuple(dict.fromkeys((facts.embedding_scale, 1.0, facts.hidden_size**0.5)))


def shifted_layers(config: DrafterConfig, shift: int, num_layers: int) -> tuple[int, ...] | None:
    """Layers tapped under a shift, None where one lies outside the target."""
    layers = tuple(layer + shift for layer in config.target_layer_ids)
    return layers if all(0 <= layer < num_layers for layer in layers) else None


def probe_settings(
    checkpoint: DrafterCheckpoint,
    target: Target,
    rows: Sequence[TokenRow],
    *,
    anchors_per_row: int | None = PROBE_ANCHORS_PER_ROW,
    seed: int = 0,
) -> ProbeResult:
    """Choose what the checkpoint leaves open.

    Args:
        checkpoint: the unquantized drafter.
        target: its target.
        rows: a few rows that the target wrote.
        anchors_per_row, seed: of the anchors.

    Raises:
        Exl3DflashError: no row is long enough and finite.
    """
    wanted = open_settings(checkpoint, target)
    if not wanted:
        return ProbeResult([], 0, 0)
    shifts = _possible_shifts(checkpoint.config, target) if "tap_shift" in wanted else ()
    taps = [tap_layer_indices(checkpoint.config)]
    taps += [tap_layer_indices(checkpoint.config, shift) for shift in shifts]
    probe = CandidateProbe.label(checkpoint, target, rows, all_layers(taps), anchors_per_row=anchors_per_row, seed=seed)
    config, choices = checkpoint.config, []
    if "tap_shift" in wanted:
        candidates = [Candidate(f"{shift}", replace(config, tap_shift=shift)) for shift in shifts]
        choices.append(_choose(probe, "tap_shift", candidates, [float(shift) for shift in shifts]))
        config = replace(config, tap_shift=int(choices[-1].choice))
    if "embedding_scale" in wanted:
        own, *others = embedding_scales(target)
        candidates = [Candidate(f"embedding scale {own:g}", config)]
        candidates += [Candidate(f"embedding scale {scale:g}", rescaled(config, scale / own)) for scale in others]
        choices.append(_choose(probe, "embedding_scale", candidates, [own, *others]))
    return ProbeResult(choices, probe.anchors, len(probe.rows))


def rescaled(config: DrafterConfig, factor: float) -> DrafterConfig:
    """The config with a factor on the target's embeddings, also in what is written of it."""
    raw = {**config.raw, SCALE_KEY: factor}
    return replace(config, input_embedding_scale=factor, raw=raw)


def _fixes_scale(checkpoint: DrafterCheckpoint) -> bool:
    raw = checkpoint.config.raw
    places = (raw, raw.get("dflash_config") or {})
    return checkpoint.has_embedding or any(place.get(SCALE_KEY) is not None for place in places)


def _possible_shifts(config: DrafterConfig, target: Target) -> list[int]:
    layers = target.facts.num_layers
    possible = [shift for shift in TAP_SHIFTS if shifted_layers(config, shift, layers) is not None]
    return sorted(possible, key=lambda shift: shift != DEFAULT_TAP_SHIFT)


def _choose(probe: CandidateProbe, setting: str, candidates: list[Candidate], values: list[float]) -> SettingChoice:
    """The best of `candidates`, of which the first is the default."""
    figures = [probe.figures(candidate) for candidate in candidates]
    default = figures[0]
    label = setting.replace("_", " ")
    if len(candidates) == 1:
        reason = f"{values[0]:g} is the only {label} within the target's layers"
        return SettingChoice(setting, values[0], values[0], "forced", reason, figures, None, None)
    other = max(range(1, len(candidates)), key=lambda index: figures[index].accept_length)
    gain = probe.gain(candidates[other], candidates[0])
    low, high = gain.interval
    worthwhile = WORTHWHILE_GAIN * default.accept_length
    best_first = max(figure.position_acceptance[0] for figure in figures)
    evidence = (
        f"{label} {values[other]:g} accepts {figures[other].accept_length:.3f} tokens a step, {values[0]:g} "
        f"{default.accept_length:.3f} (difference {gain.value:+.3f}, 95 % interval {low:+.3f} to {high:+.3f})"
    )
    choice = values[0]
    if best_first < LOST_FIRST_ACCEPTANCE:
        outcome, reason = "failed", f"no {label} accepts anything worth it, {values[0]:g} is kept: {evidence}"
    elif low > 0 and gain.value >= worthwhile:
        outcome, reason, choice = "changed", evidence, values[other]
    elif high < 0:
        outcome, reason = "default", evidence
    else:
        outcome, reason = "tie", f"the probe cannot tell, {values[0]:g} is kept: {evidence}"
    return SettingChoice(setting, choice, values[0], outcome, reason, figures, gain.value, gain.interval)
