"""Which target layers a drafter reads: the listed ids and the one-layer shift that some checkpoints need.

A tap index here always means "the residual output of layer i" (0-based, before any final norm). The ids of a checkpoint
mean the same in every engine but one: exllamav3 exports the output of layer `id + tap_shift`, with tap_shift 1 for the
class `DFlashDraftModel` unless config.json pins another value, because some checkpoints accept well only one layer
deeper than their ids say. So, with the id j of a config:

    tap_shift 0 or not pinned   output of layer j      (HF hidden_states[j + 1]; vLLM, SGLang and GGUF agree)
    tap_shift 1                 output of layer j + 1

A quantized config must always pin the value it was measured with: without it exllamav3 would read one layer deeper.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from exl3_dflash.errors import Exl3DflashError

if TYPE_CHECKING:
    from exl3_dflash.drafter.config import DrafterConfig

DEFAULT_TAP_SHIFT = 0


def tap_layer_indices(config: DrafterConfig, tap_shift: int | None = None) -> tuple[int, ...]:
    """Target layers whose residual outputs feed `fc`, in the listed order (which is the order of the concatenation).

    Args:
        config: target_layer_ids, tap_shift (None where the checkpoint pins none) and num_target_layers are read.
        tap_shift: tries another shift than the config's (the probe), with exllamav3's meaning.

    Raises:
        Exl3DflashError: a shifted id lies outside the target's layers.
    """
    if tap_shift is None:
        tap_shift = DEFAULT_TAP_SHIFT if config.tap_shift is None else config.tap_shift
    layers = tuple(layer_id + tap_shift for layer_id in config.target_layer_ids)
    limit = config.num_target_layers
    outside = [layer for layer in layers if layer < 0 or (limit is not None and layer >= limit)]
    if outside:
        raise Exl3DflashError(
            f"target_layer_ids {list(config.target_layer_ids)} with tap_shift {tap_shift} read layer {outside[0]}",
            expected="layers of the target" if limit is None else f"layers 0 to {limit - 1} of the target",
            fix="correct tap_shift or target_layer_ids in the drafter's config.json",
        )
    return layers
