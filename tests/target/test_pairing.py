"""Every way a drafter can fail to fit its target, one error each, and the padded vocabularies that do fit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from exl3_dflash.drafter.config import DrafterConfig
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.pairing import check_pairing
from exl3_dflash.target.load import TargetSketch

# The published pair Qwen3-8B and its drafter.
TARGET = TargetSketch(name="Qwen3-8B", hidden_size=4096, num_layers=36, vocab_size=151936, tokenizer_size=151669)


def drafter_config(**changes: Any) -> DrafterConfig:
    raw = {
        "architectures": ["DFlashDraftModel"],
        "hidden_size": 4096,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 12288,
        "rms_norm_eps": 1e-6,
        "vocab_size": 151936,
        "block_size": 16,
        "mask_token_id": 151669,
        "target_layer_ids": [1, 9, 17, 25, 33],
        "num_target_layers": 36,
        "rope_theta": 1e6,
    }
    return DrafterConfig.from_dict({key: value for key, value in (raw | changes).items() if value is not None})


@dataclass(frozen=True)
class Drafter:
    """What pairing looks at of a checkpoint."""

    config: DrafterConfig = field(default_factory=drafter_config)
    target_hidden_size: int = 4096
    has_embedding: bool = False
    has_head: bool = False
    has_mask_embedding: bool = False


def test_the_published_pair_fits_without_a_note() -> None:
    assert check_pairing(Drafter(), TARGET) == ()


@pytest.mark.parametrize(
    ("drafter", "target", "reason"),
    [
        (Drafter(), {"hidden_size": 2560}, "fc reads 5 taps of width 4096, the target's layers have width 2560"),
        (
            Drafter(config=drafter_config(hidden_size=2048)),
            {},
            "hidden size is 2048, but it uses the target's embedding and head of width 4096",
        ),
        (
            Drafter(config=drafter_config(hidden_size=2048), has_embedding=True),
            {},
            "hidden size is 2048, but it uses the target's head of width 4096",
        ),
        (Drafter(), {"num_layers": 32}, "trained for a target of 36 layers, this one has 32"),
        (Drafter(config=drafter_config(num_target_layers=None)), {"num_layers": 28}, "taps layer 33.* layers 0 to 27"),
        (Drafter(), {"vocab_size": 248320, "tokenizer_size": 248077}, "more than a difference in padding"),
        (Drafter(), {"vocab_size": 32000, "tokenizer_size": 32000}, "has 151936 rows, the target's 32000"),
        (Drafter(), {"vocab_size": 152960}, None),
        (Drafter(), {"vocab_size": 152961}, "more than a difference in padding"),
        (Drafter(), {"vocab_size": 151950, "tokenizer_size": 151950}, "more than a difference in padding"),
        (
            Drafter(config=drafter_config(mask_token_id=151935)),
            {"vocab_size": 151680},
            "mask_token_id 151935 is no row of the target's embedding",
        ),
        (
            Drafter(config=drafter_config(vocab_size=151680, mask_token_id=151680), has_embedding=True),
            {},
            r"mask_token_id 151680 is no row of its own embedding \(151680 rows\)",
        ),
    ],
)
def test_a_pair_that_does_not_fit_is_refused(drafter: Drafter, target: dict[str, Any], reason: str | None) -> None:
    if reason is None:
        assert len(check_pairing(drafter, replace(TARGET, **target))) == 1
        return
    with pytest.raises(Exl3DflashError, match=reason) as raised:
        check_pairing(drafter, replace(TARGET, **target))
    assert str(raised.value).startswith("the drafter does not fit the target Qwen3-8B: ")


def test_one_message_names_every_reason() -> None:
    with pytest.raises(Exl3DflashError, match=r"width 2048.*36 layers.*vocabulary") as raised:
        check_pairing(Drafter(), TargetSketch("other", 2048, 28, 32000, 32000))
    assert "mask_token_id 151669 is no row" in str(raised.value)


@pytest.mark.parametrize(("drafter_rows", "target_rows"), [(152064, 151936), (151936, 152064)])
def test_vocabularies_that_differ_in_padding_fit_with_a_note(drafter_rows: int, target_rows: int) -> None:
    drafter = Drafter(config=drafter_config(vocab_size=drafter_rows))
    (note,) = check_pairing(drafter, replace(TARGET, vocab_size=target_rows))
    assert f"{drafter_rows} (drafter) and {target_rows} (target) rows differ only in padding" in note


def test_a_drafter_with_its_own_tables_or_mask_vector_needs_less_of_the_target() -> None:
    own = Drafter(config=drafter_config(hidden_size=2048), has_embedding=True, has_head=True)
    assert check_pairing(own, TARGET) == ()
    masked = Drafter(config=drafter_config(mask_token_id=151935), has_mask_embedding=True)
    assert len(check_pairing(masked, replace(TARGET, vocab_size=151680))) == 1


def test_unsorted_taps_and_the_last_layer_are_legal() -> None:
    assert check_pairing(Drafter(config=drafter_config(target_layer_ids=[35, 0, 9, 17, 25])), TARGET) == ()


def test_a_pinned_tap_shift_counts() -> None:
    drafter = Drafter(config=drafter_config(target_layer_ids=[1, 34], tap_shift=1, num_target_layers=None))
    assert check_pairing(drafter, TARGET) == ()
    with pytest.raises(Exl3DflashError, match="taps layer 35"):
        check_pairing(drafter, replace(TARGET, num_layers=35))
