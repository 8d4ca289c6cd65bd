"""Taps, embedding and head against the model's own forward and against an independent loop over its layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target.base import Target, TargetSession, TargetTokenizer
from exl3_dflash.target.transformers_target import TransformersTarget
from tests.target.families import MakeTarget
from tests.tiny_targets import FAMILIES

IDS = torch.tensor([7, 65, 66, 67, 200, 3, 65, 66, 9, 10, 11, 12, 258])


def close(values: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-5) -> bool:
    return bool((values - wanted).abs().max() <= tolerance * wanted.abs().max())


@torch.no_grad()
def llama_layer_outputs(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Every layer's output (T, H) of a Llama-like model, written out from the layers' parts."""
    body = model.model
    hidden = body.embed_tokens(ids)  # (T, H)
    positions = torch.arange(len(ids), dtype=torch.float32)
    outputs = []
    for layer in body.layers:
        attention = layer.self_attn
        normed = layer.input_layernorm(hidden)
        dim = attention.head_dim
        split = [
            part(normed).view(len(ids), -1, dim).transpose(0, 1)
            for part in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]  # (heads, T, dim)
        angles = positions[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)  # (T, dim/2)
        rotation = torch.polar(torch.ones_like(angles), angles)
        query, key = (rotate(part, rotation) for part in split[:2])
        groups = query.shape[0] // key.shape[0]
        scores = query @ key.repeat_interleave(groups, 0).transpose(1, 2) * dim**-0.5
        scores += torch.full((len(ids), len(ids)), float("-inf")).triu(1)
        mixed = scores.softmax(-1) @ split[2].repeat_interleave(groups, 0)  # (heads, T, dim)
        hidden = hidden + attention.o_proj(mixed.transpose(0, 1).reshape(len(ids), -1))
        normed = layer.post_attention_layernorm(hidden)
        gate = torch.nn.functional.silu(layer.mlp.gate_proj(normed))
        hidden = hidden + layer.mlp.down_proj(gate * layer.mlp.up_proj(normed))
        outputs.append(hidden)
    return outputs


def rotate(values: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """NEOX rotation of (heads, T, dim): the pairs are (i, i + dim/2)."""
    half = values.shape[-1] // 2
    turned = torch.complex(values[..., :half], values[..., half:]) * rotation
    return torch.cat([turned.real, turned.imag], dim=-1)


def test_taps_equal_an_independent_loop_over_the_layers(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    wanted = llama_layer_outputs(target.model, IDS)
    taps = target.tap_rows(IDS, [0, 1, 2, 3]).taps
    assert taps.shape == (len(IDS), 4 * 32)
    assert close(taps, torch.cat(wanted, dim=-1))


def test_taps_keep_the_listed_order(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    by_layer = target.tap_rows(IDS, [0, 1, 2, 3]).taps.split(32, dim=-1)
    assert torch.equal(target.tap_rows(IDS, [3, 0, 2]).taps, torch.cat([by_layer[3], by_layer[0], by_layer[2]], dim=-1))
    session = target.new_session()
    assert close(session.forward(IDS, [2, 1]).taps, torch.cat([by_layer[2], by_layer[1]], dim=-1))


def test_tap_j_is_the_raw_output_of_layer_j_also_for_the_last(tiny_target: MakeTarget) -> None:
    target = tiny_target("constant")
    row = target.tap_rows(IDS, [3, 0, 2, 1]).taps
    assert torch.equal(row, torch.tensor([3.0, 0, 2, 1]).repeat_interleave(32).expand(len(IDS), -1))
    step = target.new_session().forward(IDS[:2], [3, 1])
    assert torch.equal(step.taps, torch.tensor([3.0, 1]).repeat_interleave(32).expand(2, -1))


@pytest.mark.parametrize("tap_ids", [[4], [-1], [0, 17]])
def test_a_tap_outside_the_layers_is_refused(tiny_target: MakeTarget, tap_ids: list[int]) -> None:
    with pytest.raises(Exl3DflashError, match=r"is no layer of llama.*expected layers 0 to 3"):
        tiny_target("llama").tap_rows(IDS, tap_ids)


@pytest.mark.parametrize("family", [*FAMILIES, "qwen3_next"])
def test_head_of_the_normed_last_tap_is_the_models_own_logits(tiny_target: MakeTarget, family: str) -> None:
    """Also: the taps before it are what transformers itself reports as hidden states."""
    target = tiny_target(family)
    last = target.facts.num_layers - 1
    result = target.tap_rows(IDS, range(last + 1), want_logits=True)
    with torch.no_grad():
        own = target.model(IDS[None], use_cache=False, output_hidden_states=True)
    assert result.logits is not None
    assert result.logits.dtype == torch.float32
    assert torch.equal(result.logits, own.logits[0])
    assert close(target.head(final_norm(target)(result.taps.split(32, dim=-1)[last])), own.logits[0])
    if family != "mamba":  # whose list of hidden states starts after the first layer
        assert close(result.taps[:, : 32 * last], torch.cat(own.hidden_states[1 : last + 1], dim=-1)[0])


def final_norm(target: TransformersTarget) -> Any:
    decoder = target.model.get_decoder()
    names = ("norm", "final_layernorm", "norm_f", "embedding_norm")
    return next(getattr(decoder, name) for name in names if hasattr(decoder, name))


@pytest.mark.parametrize(
    ("family", "scale"),
    [("llama", 1.0), ("gemma", 32**0.5), ("gemma3_text", 32**0.5), ("granite", 3.0), ("falcon_h1", 2.0)],
)
def test_embed_is_the_input_of_the_first_layer(tiny_target: MakeTarget, family: str, scale: float) -> None:
    target = tiny_target(family)
    seen: list[torch.Tensor] = []
    first = target.model.get_decoder().layers[0]
    handle = first.register_forward_pre_hook(lambda module, inputs, named: seen.append(inputs[0]), with_kwargs=True)
    target.tap_rows(IDS, [])
    handle.remove()
    assert torch.equal(target.embed(IDS), seen[0][0])
    assert target.facts.embedding_scale == scale
    table = target.model.get_input_embeddings().weight
    assert close(target.embed(IDS.view(1, -1, 1)), table[IDS].view(1, -1, 1, 32) * scale, 1e-6)


def test_head_keeps_leading_dimensions_and_applies_the_softcap(tiny_target: MakeTarget) -> None:
    target = tiny_target("gemma2")
    hidden = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0)) * 20
    plain = hidden @ target.model.get_output_embeddings().weight.T
    assert target.facts.final_logit_softcap == 30.0
    assert target.head(hidden).shape == (2, 3, 288)
    assert close(target.head(hidden), 30 * torch.tanh(plain / 30))


def test_facts(tiny_target: MakeTarget) -> None:
    facts = tiny_target("llama").facts
    assert (facts.architecture, facts.hidden_size, facts.num_layers) == ("LlamaForCausalLM", 32, 4)
    assert (facts.vocab_size, facts.head_size, facts.tokenizer_size) == (288, 288, 261)
    assert facts.eos_token_ids == (257, 259)
    assert (facts.recurrent, facts.quantized, facts.max_position_embeddings) == (False, "none", 1024)
    assert facts.sha256 is not None
    assert len(facts.sha256) == 64
    assert tiny_target("qwen3_next").facts.recurrent


def test_it_is_what_the_protocols_promise(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    assert isinstance(target, Target)
    assert isinstance(target.new_session(), TargetSession)
    assert isinstance(target.tokenizer, TargetTokenizer)
