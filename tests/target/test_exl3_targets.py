"""EXL3 targets give what the same target with decoded weights gives; damaged ones give one error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target.load import load_target
from tests.target.exl3_directories import write_exl3_pair
from tests.tiny_targets import make_tiny_family, make_tiny_llama

IDS = torch.tensor([7, 65, 66, 67, 200, 3, 65, 66, 9])


def linear_layers(name: str) -> bool:
    return name.endswith(("_proj.weight", "lm_head.weight"))


@pytest.fixture
def exl3_llama(tmp_path: Path) -> Path:
    """A two-layer EXL3 Llama whose widths (48, 80) need padding."""
    make_tiny_llama(tmp_path / "source", num_hidden_layers=2, hidden_size=48, intermediate_size=80)
    write_exl3_pair(tmp_path / "source", tmp_path / "plain", tmp_path / "exl3", linear_layers)
    return tmp_path / "exl3"


def assert_same_target(plain: Path, exl3: Path, bits: int = 4) -> None:
    wanted, target = load_target(plain, device="cpu"), load_target(exl3, device="cpu")
    assert target.facts.quantized == f"exl3 {bits}.00bpw"
    assert wanted.facts.quantized == "none"
    last = [target.facts.num_layers - 1, 0]
    expected, seen = (model.tap_rows(IDS, last, want_logits=True) for model in (wanted, target))
    torch.testing.assert_close(seen.taps, expected.taps, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(seen.logits, expected.logits, rtol=1e-4, atol=1e-4)


def test_padded_llama(exl3_llama: Path) -> None:
    assert_same_target(exl3_llama.parent / "plain", exl3_llama)


@pytest.mark.parametrize(
    ("family", "bits", "codebook"), [("qwen2", 3, "3inst"), ("qwen3", 6, "mcg"), ("gemma2", 2, "mul1")]
)
def test_other_families_bits_and_codebooks(tmp_path: Path, family: str, bits: int, codebook: str) -> None:
    make_tiny_family(tmp_path / "source", family, num_hidden_layers=2)
    write_exl3_pair(tmp_path / "source", tmp_path / "plain", tmp_path / "exl3", linear_layers, bits, codebook)
    assert_same_target(tmp_path / "plain", tmp_path / "exl3", bits)


def test_experts_that_transformers_fuses(tmp_path: Path) -> None:
    settings = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128, "hidden_size": 128}
    make_tiny_family(tmp_path / "source", "qwen3_moe", num_hidden_layers=1, **settings)
    assert any(".experts.1.gate_proj" in name for name in load_file(tmp_path / "source" / "model.safetensors"))
    write_exl3_pair(tmp_path / "source", tmp_path / "plain", tmp_path / "exl3", linear_layers)
    assert_same_target(tmp_path / "plain", tmp_path / "exl3")


def test_a_tied_model_uses_the_head_that_was_quantized_for_it(tmp_path: Path) -> None:
    """ExLlamaV3 stores a quantized head beside the embedding; config.json still says that they are tied."""
    make_tiny_family(tmp_path / "source", "qwen3", num_hidden_layers=1, tie_word_embeddings=True)
    write_exl3_pair(tmp_path / "source", tmp_path / "plain", tmp_path / "exl3", linear_layers)
    target = load_target(tmp_path / "exl3", device="cpu")
    head, table = target.model.get_output_embeddings().weight, target.model.get_input_embeddings().weight
    assert torch.equal(head, load_file(tmp_path / "plain" / "model.safetensors")["lm_head.weight"])
    assert not torch.equal(head, table)


def test_a_tied_head_that_is_not_stored_stays_tied(tmp_path: Path) -> None:
    make_tiny_family(tmp_path / "source", "qwen3", num_hidden_layers=1, tie_word_embeddings=True)
    write_exl3_pair(
        tmp_path / "source", tmp_path / "plain", tmp_path / "exl3", lambda name: name.endswith("_proj.weight")
    )
    assert_same_target(tmp_path / "plain", tmp_path / "exl3")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("model.layers.1.mlp.down_proj.svh", "svh"),
        ("model.layers.1.mlp.down_proj.trellis", "no trellis"),
        ("model.norm.weight", r"lacks the weight: model\.norm\.weight"),
    ],
)
def test_a_missing_tensor_is_named(exl3_llama: Path, tensor: str, message: str) -> None:
    tensors = load_file(exl3_llama / "model.safetensors")
    del tensors[tensor]
    save_file(tensors, exl3_llama / "model.safetensors")
    with pytest.raises(Exl3DflashError, match=message):
        load_target(exl3_llama, device="cpu")


def test_a_whole_missing_layer_is_named(exl3_llama: Path) -> None:
    tensors = load_file(exl3_llama / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layers.1.mlp.up_proj." not in name}
    save_file(kept, exl3_llama / "model.safetensors")
    with pytest.raises(Exl3DflashError, match=r"lacks the weight: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_target(exl3_llama, device="cpu")


def test_a_layer_of_another_size_is_refused(exl3_llama: Path) -> None:
    config = json.loads((exl3_llama / "config.json").read_text())
    (exl3_llama / "config.json").write_text(json.dumps(config | {"intermediate_size": 160}))
    with pytest.raises(Exl3DflashError, match="down_proj is stored as 128 x 128; expected 256 x 128"):
        load_target(exl3_llama, device="cpu")


def test_plain_weights_that_claim_to_be_exl3(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path / "a", num_hidden_layers=1)
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "exl3"}
    (tmp_path / "a" / "config.json").write_text(json.dumps(config))
    with pytest.raises(Exl3DflashError, match="says quant_method exl3, but has no quantized layer"):
        load_target(tmp_path / "a", device="cpu")
