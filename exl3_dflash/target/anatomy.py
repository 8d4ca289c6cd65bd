"""The parts of a transformers causal LM that a drafter touches, found without knowing the architecture.

    decoder    the text stack: token ids in, hidden states after the final norm out
    layers     its list of decoder layers; layer j's output is tap j
    head       everything the model does after its decoder: the output matrix, logit scales, softcap

The head is not rebuilt from config keys (architectures spell their logit scales in many ways). `HeadOnly` is the model
itself with its body replaced by a module that hands over given hidden states, so the model's own code computes the
logits. What cannot be separated like this is refused when the model is loaded (`probe.py` compares on a few tokens).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from exl3_dflash.errors import Exl3DflashError

CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")  # the older names are those of transformers before 5.2x
LAYER_LIST_NAMES = ("layers", "h", "blocks", "block")


def text_config(model: Any) -> Any:
    """The configuration of the text model inside a possibly multimodal model."""
    return model.config.get_text_config(decoder=True)


def find_decoder(model: Any) -> nn.Module:
    """The text stack. Raises Exl3DflashError where the model is not a decoder with an embedding and a separate head."""
    decoder: nn.Module = model.get_decoder()
    if decoder is model:  # transformers names the body by a prefix that some classes do not follow
        num_layers = int(text_config(model).num_hidden_layers)
        bodies = [child for child in model.children() if _layer_lists(child, num_layers)]
        decoder = bodies[0] if bodies else model
    if decoder is model or model.get_input_embeddings() is None:
        raise Exl3DflashError(
            f"{type(model).__name__} has no text decoder apart from its head",
            expected="a causal language model (decoder layers, embedding, head)",
            fix="choose a target that transformers loads as a causal language model",
        )
    return decoder


def find_body_name(model: nn.Module, decoder: nn.Module) -> str:
    """Name of the child of `model` that is its decoder or holds it (with the towers of a multimodal model)."""
    return next(name for name, child in model.named_children() if any(part is decoder for part in child.modules()))


def _layer_lists(decoder: nn.Module, num_layers: int) -> dict[str, nn.ModuleList]:
    lists = {name: child for name, child in decoder.named_children() if isinstance(child, nn.ModuleList)}
    return {name: child for name, child in lists.items() if len(child) == num_layers}


def find_layers(decoder: nn.Module, num_layers: int) -> nn.ModuleList:
    """The list of `num_layers` decoder layers, by its usual names, else by its length."""
    fitting = _layer_lists(decoder, num_layers)
    for name in (*LAYER_LIST_NAMES, *fitting):
        if name in fitting:
            return fitting[name]
    raise Exl3DflashError(
        f"{type(decoder).__name__} has no list of {num_layers} layers",
        expected="a decoder whose layers are in one list",
        fix="choose a target of another architecture",
    )


def cache_argument(decoder: nn.Module) -> str:
    """Name of the argument that takes the cache."""
    parameters = inspect.signature(decoder.forward).parameters
    for name in CACHE_ARGUMENTS:
        if name in parameters:
            return name
    raise Exl3DflashError(
        f"{type(decoder).__name__} takes no cache",
        expected=f"a forward with one of the arguments {', '.join(CACHE_ARGUMENTS)}",
        fix="choose a target of another architecture",
    )


def residual_of(output: Any) -> torch.Tensor:
    """The hidden states of a layer's output, which is a tensor or a tuple that starts with it."""
    return output[0] if isinstance(output, (tuple, list)) else output


@contextmanager
def collect_outputs(layers: nn.ModuleList, tap_ids: Sequence[int]) -> Iterator[dict[int, torch.Tensor]]:
    """While active, a forward of layer j in `tap_ids` puts its output (1, T, Ht) under j into the yielded dict."""
    outputs: dict[int, torch.Tensor] = {}

    def keep(layer_id: int, output: Any) -> None:
        if layer_id in outputs:
            raise Exl3DflashError(
                f"layer {layer_id} of the target runs more than once in a forward",
                expected="layers that run once, so that a tap is one state",
                fix="choose a target of another architecture",
            )
        outputs[layer_id] = residual_of(output)

    def hook_for(layer_id: int) -> Any:
        return lambda module, inputs, output: keep(layer_id, output)

    handles = [layers[layer_id].register_forward_hook(hook_for(layer_id)) for layer_id in set(tap_ids)]
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


class _GivenHidden(nn.Module):
    """Stands in for a model's body: returns `inputs_embeds` as its last hidden state; attributes are the body's."""

    def __init__(self, body: nn.Module, output_type: type) -> None:
        super().__init__()
        object.__setattr__(self, "_body", body)
        self._output_type = output_type

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(object.__getattribute__(self, "_body"), name)

    def forward(self, *inputs: Any, inputs_embeds: torch.Tensor, **others: Any) -> Any:
        return self._output_type(last_hidden_state=inputs_embeds)


class HeadOnly:
    """The logits that a model computes from given final hidden states, by its own forward."""

    def __init__(self, model: Any, body_name: str, output_type: type) -> None:
        """body_name: see `find_body_name`; output_type: class of the body's output (known from a watched forward)."""
        self._model = copy.copy(model)
        self._model._modules = dict(model._modules)
        self._model._modules[body_name] = _GivenHidden(getattr(model, body_name), output_type)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden (1, T, Ht) in the model's dtype to logits (1, T, V)."""
        logits: torch.Tensor = self._model(inputs_embeds=hidden, use_cache=False).logits
        return logits
