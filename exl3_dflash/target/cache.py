"""A transformers cache that can be rolled back exactly.

Three kinds of layer state, three ways back:

    attention          keys and values per token: cut to the length. Sliding-window layers normally keep only their
                       window and could not be cut; here they keep every token (the mask alone applies the window),
                       which costs memory and gives the same result.
    recurrent          gated delta, Mamba, short convolutions: one state for all tokens. It cannot be cut, so copies are
                       taken (`recurrent_state`) and put back (`restore`); the session re-runs the tokens in between.
    anything else      compressed or model-specific layers: not rewindable; the session starts over.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, cache_utils

_KEYS_AND_VALUES = ("keys", "values")
_CROPPED_LAYERS = ("DynamicLayer", "DynamicIndexedLayer")
_RECURRENT_LAYERS = ("LinearAttentionLayer", "LinearAttentionAndFullAttentionLayer")
_STATELESS_LAYERS = ("DummyLayer",)

RecurrentState = tuple[dict[str, Any], ...]


class RewindableCache:
    """One cache for one sequence, with what it needs to be set back."""

    def __init__(self, config: Any) -> None:
        """An empty cache for the decoder that `config` (its text configuration) describes."""
        self.transformers_cache = _full_length_cache(config)
        kinds = [type(layer).__name__ for layer in self.transformers_cache.layers]
        known = {*_CROPPED_LAYERS, *_RECURRENT_LAYERS, *_STATELESS_LAYERS}
        self.rewindable = set(kinds) <= known
        self._recurrent = [
            layer for layer, kind in zip(self.transformers_cache.layers, kinds, strict=True) if _is_recurrent(kind)
        ]

    @property
    def recurrent(self) -> bool:
        """Whether any layer keeps one state for all tokens."""
        return bool(self._recurrent)

    def drop_last(self, count: int) -> None:
        """Remove the last `count` tokens from every layer that keeps them per token."""
        if count == 0:
            return
        for layer in self.transformers_cache.layers:
            if type(layer).__name__ in _CROPPED_LAYERS:
                layer.crop(-count)
            elif type(layer).__name__ == "LinearAttentionAndFullAttentionLayer" and layer.keys is not None:
                layer.keys = layer.keys[..., :-count, :]
                layer.values = layer.values[..., :-count, :]

    def recurrent_state(self) -> RecurrentState:
        """A copy of the state of every recurrent layer (keys and values are not part of it)."""
        return tuple(
            {name: _copy(value) for name, value in vars(layer).items() if name not in _KEYS_AND_VALUES}
            for layer in self._recurrent
        )

    def recurrent_tensors(self) -> list[torch.Tensor]:
        """Every tensor of every recurrent layer's state, in a fixed order (not copied)."""
        fields = [value for layer in self._recurrent for name, value in sorted(vars(layer).items())]
        items = [item for field in fields if isinstance(field, dict) for item in field.values()]
        return [item for item in items if isinstance(item, torch.Tensor)]

    def restore(self, state: RecurrentState) -> None:
        """Put a copied state back; the copy stays usable."""
        for layer, saved in zip(self._recurrent, state, strict=True):
            for name, value in saved.items():
                setattr(layer, name, _copy(value))


def _full_length_cache(config: Any) -> DynamicCache:
    """A dynamic cache for `config` whose sliding layers keep every token."""
    cache = DynamicCache(config=config)
    for index, layer in enumerate(cache.layers):
        kind = type(layer).__name__
        if kind == "DynamicSlidingWindowLayer":
            cache.layers[index] = cache_utils.DynamicLayer()
        elif kind == "LinearAttentionAndSlidingWindowAttentionLayer":
            states = layer.number_of_states
            cache.layers[index] = cache_utils.LinearAttentionAndFullAttentionLayer(number_of_states=states)
    return cache


def _is_recurrent(kind: str) -> bool:
    return kind in _RECURRENT_LAYERS


def _copy(value: Any) -> Any:
    """A copy that shares no tensor memory with `value` (tensors, and dictionaries and lists of them)."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value
