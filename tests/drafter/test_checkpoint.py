"""Every tensor of a drafter is accounted for, in every layout; whatever does not fit is named in one error."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.errors import Exl3DflashError
from quantize.hadamard import padded_features
from quantize.hessian import HessianAccumulator
from quantize.linear import QuantizedLinear, QuantSettings, decode_linear, quantize_linear
from tests.tiny_models import make_tiny_drafter, tiny_config, tiny_tensors, write_drafter

DOWN = "layers.1.mlp.down_proj"


def draft(checkpoint: DrafterCheckpoint) -> torch.Tensor:
    """A hidden state that depends on every weight."""
    model = DrafterModel.from_checkpoint(checkpoint)
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(6, len(checkpoint.config.target_layer_ids) * checkpoint.target_hidden_size, generator=generator)
    blocks = torch.randn(1, 4, checkpoint.config.hidden_size, generator=generator)
    return model.forward_anchors(taps, blocks, torch.tensor([6]))


def refused(path: Path) -> str:
    with pytest.raises(Exl3DflashError) as caught:
        DrafterCheckpoint.open(path)
    return str(caught.value)


def test_facts_of_a_plain_checkpoint(tmp_path: Path) -> None:
    checkpoint = DrafterCheckpoint.open(make_tiny_drafter(tmp_path))
    assert not any((checkpoint.is_exl3, checkpoint.has_head, checkpoint.has_embedding, checkpoint.has_mask_embedding))
    assert checkpoint.target_hidden_size == 32
    assert set(checkpoint.tensor_names()) == set(tiny_tensors(tiny_config()))
    assert sum(map(checkpoint.nbytes, checkpoint.tensor_names())) == checkpoint.directory.nbytes()
    assert checkpoint.sha256 == hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    groups = {spec.name: (spec.in_features, spec.out_features, spec.group) for spec in checkpoint.linears}
    assert groups["fc"] == (96, 32, "fc")
    assert groups["layers.0.self_attn.q_proj"] == (32, 32, "layers.0.q")
    assert groups["layers.0.self_attn.k_proj"] == groups["layers.0.self_attn.v_proj"] == (32, 16, "layers.0.kv")
    assert groups["layers.1.self_attn.o_proj"] == (32, 32, "layers.1.o")
    assert groups["layers.1.mlp.gate_proj"] == groups["layers.1.mlp.up_proj"] == (32, 48, "layers.1.gate_up")
    assert groups["layers.1.mlp.down_proj"] == (48, 32, "layers.1.down")
    assert len(groups) == 15


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_stored_types(dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint = DrafterCheckpoint.open(make_tiny_drafter(tmp_path, dtype=dtype))
    expected = tiny_tensors(tiny_config(), dtype=dtype)
    for name in checkpoint.tensor_names():
        assert torch.equal(checkpoint.load(name), expected[name])


def test_prefix_and_shards(tmp_path: Path) -> None:
    config, tensors = tiny_config(), tiny_tensors(tiny_config())
    plain = DrafterCheckpoint.open(write_drafter(tmp_path / "plain", config, tensors))
    prefixed = write_drafter(tmp_path / "prefixed", config, {f"model.{n}": t for n, t in tensors.items()})
    assert torch.equal(draft(DrafterCheckpoint.open(prefixed)), draft(plain))
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    (sharded / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    files = {name: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, sharded / file)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    assert torch.equal(draft(DrafterCheckpoint.open(sharded)), draft(plain))


@pytest.mark.parametrize("name", sorted(tiny_tensors(tiny_config(num_hidden_layers=1))))
def test_each_missing_or_renamed_tensor_is_named(name: str, tmp_path: Path) -> None:
    config = tiny_config(num_hidden_layers=1)
    tensors = tiny_tensors(config)
    tensor = tensors.pop(name)
    assert f"missing {name}" in refused(write_drafter(tmp_path, config, tensors))
    message = refused(write_drafter(tmp_path, config, {**tensors, f"{name}_renamed": tensor}))
    assert f"missing {name};" in message
    assert f"unexpected {name}_renamed" in message


def test_all_problems_are_in_one_error(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config())
    del tensors["norm.weight"], tensors["layers.1.self_attn.q_norm.weight"]
    tensors["fc.weight"] = tensors["fc.weight"][:, :95].contiguous()
    tensors[f"{DOWN}.weight"] = tensors[f"{DOWN}.weight"].to(torch.float8_e4m3fn)
    tensors["layers.2.input_layernorm.weight"] = torch.ones(32)
    message = refused(write_drafter(tmp_path, tiny_config(), tensors))
    for part in (
        "missing norm.weight",
        "missing layers.1.self_attn.q_norm.weight",
        "fc.weight has shape [32, 95], expected [32, 96]",
        f"{DOWN}.weight is torch.float8_e4m3fn, expected BF16, FP16 or FP32",
        "unexpected layers.2.input_layernorm.weight",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("name", "feature"),
    [
        ("layers.0.self_attn.sinks", "attention sinks"),
        ("layers.0.attention_conv.base_kernel", "DFlash 2"),
        ("layers.0.mlp_conv.kernel_projection.weight", "DFlash 2"),
        ("candidate_selector.predecessor_codebook", "DFlash 2"),
        ("d2t", "missing lm_head.weight (the drafter has a vocabulary of its own)"),
        ("t2d", "t2d is there without d2t"),
        ("layers.0.self_attn.qkv_proj.weight", "fused q, k and v of other sizes"),
        ("layers.0.self_attn.g_proj.weight", "Laguna"),
        ("aux_hidden_norms.0.weight", "norm per tap"),
        ("encoder.fc.weight", "Muse-Glimmer"),
        ("markov_head.markov_w1.weight", "DSpark"),
        ("layers.0.self_attn.q_proj.bias", "attention_bias is False"),
        ("rotary_emb.inv_freq", "unexpected rotary_emb.inv_freq"),
    ],
)
def test_tensors_of_other_variants_are_named_with_their_feature(name: str, feature: str, tmp_path: Path) -> None:
    tensors = {**tiny_tensors(tiny_config()), name: torch.ones(4)}
    message = refused(write_drafter(tmp_path, tiny_config(), tensors))
    assert name in message
    assert feature in message


def test_biases_are_all_expected(tmp_path: Path) -> None:
    config = tiny_config(attention_bias=True)
    tensors = tiny_tensors(config)
    checkpoint = DrafterCheckpoint.open(write_drafter(tmp_path / "all", config, tensors))
    assert sum(spec.bias for spec in checkpoint.linears) == 8
    del tensors["layers.1.self_attn.o_proj.bias"]
    assert "missing layers.1.self_attn.o_proj.bias" in refused(write_drafter(tmp_path / "one less", config, tensors))


@pytest.mark.parametrize("shape", [(32,), (1, 32), (1, 1, 32)])
def test_own_embedding_head_and_mask_embedding(shape: tuple[int, ...], tmp_path: Path) -> None:
    optional = ("embed_tokens.weight", "lm_head.weight", "mask_embedding")
    tensors = tiny_tensors(tiny_config(), optional=optional)
    tensors["mask_embedding"] = tensors["mask_embedding"].reshape(shape)
    checkpoint = DrafterCheckpoint.open(write_drafter(tmp_path, tiny_config(), tensors))
    assert checkpoint.has_head
    assert checkpoint.has_embedding
    assert checkpoint.has_mask_embedding
    assert checkpoint.linears[-1].name == checkpoint.linears[-1].group == "lm_head"
    assert checkpoint.load("mask_embedding").shape == (32,)
    assert set(checkpoint.tensor_names()) == set(tensors)


@pytest.mark.parametrize(
    ("key", "name"), [("has_embed_tokens", "embed_tokens.weight"), ("has_lm_head", "lm_head.weight")]
)
def test_promised_tables_must_be_there(key: str, name: str, tmp_path: Path) -> None:
    assert f"missing {name}" in refused(make_tiny_drafter(tmp_path, **{key: True}))
    DrafterCheckpoint.open(make_tiny_drafter(tmp_path / "there", optional=(name,), **{key: True}))


def test_a_mask_token_outside_the_vocabulary_needs_a_mask_embedding(tmp_path: Path) -> None:
    nested = {"mask_token_id": 288, "target_layer_ids": [0, 2, 3]}
    assert "mask_token_id 288 is not below vocab_size 288" in refused(make_tiny_drafter(tmp_path, dflash_config=nested))
    DrafterCheckpoint.open(make_tiny_drafter(tmp_path / "own", optional=("mask_embedding",), dflash_config=nested))


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    tensors = tiny_tensors(tiny_config())
    tensors["hidden_norm.weight"][3] = float("nan")
    checkpoint = DrafterCheckpoint.open(write_drafter(tmp_path, tiny_config(), tensors))
    with pytest.raises(Exl3DflashError, match=r"hidden_norm\.weight .*holds NaN or infinity"):
        DrafterModel.from_checkpoint(checkpoint)


def random_linear(rows: int, columns: int, bias: torch.Tensor | None) -> QuantizedLinear:
    """A quantized layer of the right form with random content, which is all that reading it needs."""
    generator = torch.Generator().manual_seed(rows + columns)
    tiles = padded_features(rows) // 16, padded_features(columns) // 16
    trellis = torch.randint(-(2**15), 2**15, (*tiles, 64), generator=generator).to(torch.int16)
    scales = [torch.randn(16 * count, generator=generator) for count in tiles]
    suh, svh = (scales[0] * rows**-0.5).half(), scales[1].half()
    bias = None if bias is None else functional.pad(bias.half(), (0, 16 * tiles[1] - columns))
    return QuantizedLinear(trellis, suh, svh, bias, "mul1", 4, rows, columns, 0.0, 0.0, None, 0.0)


def quantized_copy(
    source: Path, target: Path, names: set[str], extra: dict[str, Any] | None = None
) -> dict[str, QuantizedLinear]:
    """Write `source` with the linears `names` as EXL3; returns them by name."""
    checkpoint = DrafterCheckpoint.open(source)
    tensors = load_file(source / "model.safetensors")
    quantized = {}
    for spec in checkpoint.linears:
        if spec.name in names:
            del tensors[f"{spec.name}.weight"]
            bias = tensors.pop(f"{spec.name}.bias") if spec.bias else None
            quantized[spec.name] = random_linear(spec.in_features, spec.out_features, bias)
            tensors |= quantized[spec.name].tensors(spec.name)
    config = {**checkpoint.config.raw, "quantization_config": {"quant_method": "exl3"}, **(extra or {})}
    write_drafter(target, config, tensors)
    return quantized


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny_drafter(
        tmp_path / "source", num_hidden_layers=1, attention_bias=True, optional=("lm_head.weight",)
    )


@pytest.mark.parametrize("copied", [set(), {"fc", "layers.0.mlp.up_proj"}])
def test_exl3_drafters_are_decoded(copied: set[str], source: Path, tmp_path: Path) -> None:
    """Features of 32, 48, 96 and 16 are padded in the file; biases too; some layers may be left unquantized."""
    original = DrafterCheckpoint.open(source)
    names = {spec.name for spec in original.linears} - copied
    quantized = quantized_copy(source, tmp_path / "exl3", names)
    checkpoint = DrafterCheckpoint.open(tmp_path / "exl3")
    assert checkpoint.is_exl3
    assert checkpoint.linears == original.linears
    assert {spec.name for spec in checkpoint.linears if checkpoint.is_quantized(spec.name)} == names
    assert sum(map(checkpoint.nbytes, checkpoint.tensor_names())) == checkpoint.directory.nbytes()
    model = DrafterModel.from_checkpoint(original)
    for name, linear in quantized.items():
        torch.testing.assert_close(checkpoint.load(f"{name}.weight").T, decode_linear(linear))
        model.set_linear_weight(name, decode_linear(linear))
    for spec in original.linears:
        if spec.bias:
            expected = original.load(f"{spec.name}.bias").half().float()
            assert torch.equal(checkpoint.load(f"{spec.name}.bias").float(), expected)
    blocks, taps = torch.randn(1, 4, 32), torch.randn(6, 96)
    result = DrafterModel.from_checkpoint(checkpoint).forward_anchors(taps, blocks, torch.tensor([6]))
    torch.testing.assert_close(result, model.forward_anchors(taps, blocks, torch.tensor([6])), rtol=1e-3, atol=1e-3)


def test_faults_of_exl3_drafters_are_named(source: Path, tmp_path: Path) -> None:
    names = {"layers.0.mlp.down_proj"}
    quantized_copy(source, tmp_path / "wide", names, {"intermediate_size": 300})
    message = refused(tmp_path / "wide")
    assert "layers.0.mlp.down_proj.trellis holds 128 x 128 weights, expected 384 x 128" in message
    quantized_copy(source, tmp_path / "no bias", {"layers.0.self_attn.q_proj"}, {"attention_bias": False})
    assert "unexpected layers.0.self_attn.q_proj.bias" in refused(tmp_path / "no bias")
    quantized_copy(source, tmp_path / "half", names)
    tensors = load_file(tmp_path / "half" / "model.safetensors")
    del tensors["layers.0.mlp.down_proj.suh"]
    save_file(tensors, tmp_path / "half" / "model.safetensors")
    assert "down_proj" in refused(tmp_path / "half")
    assert "suh" in refused(tmp_path / "half")


def test_both_forms_of_one_weight_are_refused(source: Path, tmp_path: Path) -> None:
    name = "layers.0.mlp.down_proj"
    quantized_copy(source, tmp_path / "both", {name})
    tensors = load_file(tmp_path / "both" / "model.safetensors")
    tensors[f"{name}.weight"] = torch.zeros(32, 48)
    save_file(tensors, tmp_path / "both" / "model.safetensors")
    assert f"unexpected {name}.weight" in refused(tmp_path / "both")


def test_features_that_are_no_multiple_of_128_survive_calibrated_quantization(tmp_path: Path) -> None:
    """192 = 1.5 x 128 inside, 576 into fc: decoded weights come back in their own shape and near the original."""
    path = make_tiny_drafter(tmp_path, hidden_size=192, head_dim=48, intermediate_size=320, num_hidden_layers=1)
    checkpoint = DrafterCheckpoint.open(path)
    model = DrafterModel.from_checkpoint(checkpoint)
    hessian = HessianAccumulator(576)
    taps = torch.randn(700, 576)
    with model.observe(lambda name, stream, x: hessian.add(x) if name == "fc" else None):
        model.forward_anchors(taps, torch.randn(1, 4, 192), torch.tensor([700]))
    weight = checkpoint.load("fc.weight").float().T
    linear = quantize_linear(weight, hessian.finish(), QuantSettings(bits=6))
    decoded = decode_linear(linear)
    assert decoded.shape == (576, 192)
    assert linear.fallback is None
    assert (decoded - weight).norm() / weight.norm() < 0.05
