"""Loading: device and dtype, and one clear error for every directory that is not a usable target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target.load import load_target, sketch_target
from exl3_dflash.target.placement import choose_device, choose_dtype, parse_dtype
from quantize import cuda_requirements
from tests.tiny_targets import (
    TINY_LINEAR_ATTENTION,
    edit_config,
    make_tiny_family,
    make_tiny_llama,
    small_dimensions,
    write_tiny_tokenizer,
)


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_tiny_llama(tmp_path / "tiny-llama", num_hidden_layers=2)


def change_weights(path: Path, drop: str | None = None, **added: torch.Tensor) -> None:
    tensors = load_file(path / "model.safetensors")
    if drop is not None:
        del tensors[drop]
    save_file(tensors | added, path / "model.safetensors")


def test_name_and_dtype_can_be_given(llama: Path) -> None:
    target = load_target(llama, device="cpu", dtype="bfloat16", name="org/tiny")
    assert (target.facts.name, target.dtype, target.device.type) == ("org/tiny", torch.bfloat16, "cpu")
    rows = target.tap_rows(torch.tensor([1, 2, 3]), [0, 1], want_logits=True)
    assert rows.taps.dtype == torch.bfloat16
    assert rows.logits is not None
    assert rows.logits.dtype == torch.float32


def test_bf16_sessions_follow_one_token_decoding(llama: Path) -> None:
    target = load_target(llama, device="cpu", dtype=torch.bfloat16)
    ids = torch.arange(12)
    session, reference = target.new_session(), target.new_session()
    session.forward(ids)
    session.rollback(5)
    taps = session.forward(ids[5:], [1]).taps.float()
    wanted = torch.cat([reference.forward(token[None], [1]).taps for token in ids])[5:].float()
    assert (taps - wanted).norm() <= 0.03 * wanted.norm()


def test_recurrent_targets_load_in_bf16_with_continuation(tmp_path: Path) -> None:
    path = make_tiny_family(tmp_path / "a", "qwen3_5_text")
    assert load_target(path, device="cpu", dtype=torch.bfloat16).new_session()._parts.continues_in_chunks


def test_a_missing_weight_is_named(llama: Path) -> None:
    change_weights(llama, drop="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(Exl3DflashError, match=r"tiny-llama lacks the weight: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_target(llama, device="cpu")


def test_a_weight_that_the_architecture_lacks_is_named(llama: Path) -> None:
    change_weights(llama, **{"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)})
    with pytest.raises(Exl3DflashError, match=r"has an unknown weight: model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_target(llama, device="cpu")


def test_parts_that_text_does_not_need_are_left_alone(llama: Path) -> None:
    change_weights(llama, **{"mtp.layers.0.weight": torch.zeros(3), "model.visual.patch.weight": torch.zeros(3)})
    assert load_target(llama, device="cpu").facts.num_layers == 2


def test_a_weight_of_another_shape_is_named(llama: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_config(llama, intermediate_size=72)
    capsys.readouterr()
    with pytest.raises(Exl3DflashError, match=r"down_proj\.weight \[32, 64\] instead of \[32, 72\] and 5 more"):
        load_target(llama, device="cpu")
    assert capsys.readouterr().err == ""


def test_a_shard_that_did_not_arrive(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "model-00001-of-00002.safetensors")
    names = load_file(llama / "model-00001-of-00002.safetensors")
    weight_map = dict.fromkeys(names, "model-00001-of-00002.safetensors")
    weight_map["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(Exl3DflashError, match="model-00002-of-00002"):
        load_target(llama, device="cpu")


def test_no_weights_no_config_no_directory(llama: Path, tmp_path: Path) -> None:
    (llama / "model.safetensors").unlink()
    with pytest.raises(Exl3DflashError, match="no safetensors"):
        load_target(llama, device="cpu")
    with pytest.raises(Exl3DflashError, match=r"has no config\.json"):
        load_target(tmp_path / "nowhere", device="cpu")


@pytest.mark.parametrize("content", ["{", '{"model_type": "no-such-model"}', '{"hidden_size": 8}'])
def test_an_unusable_config(llama: Path, content: str) -> None:
    (llama / "config.json").write_text(content)
    with pytest.raises(Exl3DflashError, match=r"config\.json cannot be used") as raised:
        load_target(llama, device="cpu")
    assert "\n" not in str(raised.value)


def test_a_drafter_given_as_target(llama: Path) -> None:
    edit_config(llama, architectures=["DFlashDraftModel"], dflash_config={"mask_token_id": 3})
    with pytest.raises(Exl3DflashError, match=r"is a DFlash drafter.*--target"):
        load_target(llama, device="cpu")


def test_another_quantization(llama: Path) -> None:
    edit_config(llama, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(Exl3DflashError, match="is quantized with awq; expected plain safetensors weights or EXL3"):
        load_target(llama, device="cpu")


def test_no_tokenizer(llama: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (llama / name).unlink()
    with pytest.raises(Exl3DflashError, match="no usable tokenizer"):
        load_target(llama, device="cpu")


def test_a_model_that_is_no_language_model(llama: Path) -> None:
    (llama / "config.json").write_text(json.dumps({"model_type": "vit", "hidden_size": 32}))
    with pytest.raises(Exl3DflashError, match="transformers cannot build the target"):
        load_target(llama, device="cpu")


def test_the_text_model_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, Qwen3_5Config

    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3_5Config(text_config=small_dimensions() | TINY_LINEAR_ATTENTION, vision_config=vision)
    whole = AutoModelForImageTextToText.from_config(config).float()
    whole.save_pretrained(tmp_path)
    write_tiny_tokenizer(tmp_path)
    target = load_target(tmp_path, device="cpu")
    ids = torch.tensor([5, 6, 7, 8])
    with torch.no_grad():
        wanted = whole(input_ids=ids[None]).logits[0]
    assert target.facts.recurrent
    torch.testing.assert_close(target.tap_rows(ids, [0], want_logits=True).logits, wanted, rtol=1e-3, atol=1e-4)


def test_a_model_that_only_exists_with_its_vision_tower(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, Mistral3Config

    tower = {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    tower |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    text = small_dimensions() | {"model_type": "mistral", "head_dim": 8}
    whole = AutoModelForImageTextToText.from_config(Mistral3Config(text_config=text, vision_config=tower)).float()
    whole.save_pretrained(tmp_path)
    write_tiny_tokenizer(tmp_path)
    target = load_target(tmp_path, device="cpu")
    session = target.new_session()
    session.forward(torch.tensor([5, 6, 7]))
    with torch.no_grad():
        wanted = whole(input_ids=torch.tensor([[5, 6, 7, 8]])).logits[0, -1:]
    torch.testing.assert_close(session.forward(torch.tensor([8])).logits, wanted, rtol=1e-3, atol=1e-4)


def test_a_sketch_agrees_with_the_loaded_target(llama: Path) -> None:
    facts, sketch = load_target(llama, device="cpu").facts, sketch_target(llama)
    (llama / "model.safetensors").unlink()
    assert sketch_target(llama) == sketch
    for name in ("name", "hidden_size", "num_layers", "vocab_size", "tokenizer_size"):
        assert getattr(sketch, name) == getattr(facts, name)


def test_device_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(Exl3DflashError, match="device 'gpu' is unknown; expected auto, cpu, cuda or cuda:N"):
        choose_device("gpu")
    monkeypatch.setattr(cuda_requirements, "gpu_problem", lambda index: Exl3DflashError("no driver"))
    with pytest.raises(Exl3DflashError, match="no driver"):
        choose_device("cuda")
    monkeypatch.setattr(cuda_requirements, "gpu_problem", lambda index: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(Exl3DflashError, match="cuda:2 is not there"):
        choose_device("cuda:2")


@pytest.mark.parametrize(
    ("stored", "billions", "device", "wanted"),
    [
        (torch.bfloat16, 0.135, "cpu", torch.float32),
        (torch.bfloat16, 1.0, "cpu", torch.float32),
        (torch.bfloat16, 1.2, "cpu", torch.bfloat16),
        (torch.float16, 8, "cpu", torch.bfloat16),
        (torch.bfloat16, 8, "cuda", torch.bfloat16),
        (torch.float16, 8, "cuda", torch.bfloat16),
        (torch.float32, 8, "cuda", torch.float32),
        (None, 8, "cuda", torch.bfloat16),
    ],
)
def test_dtype_choice(stored: torch.dtype | None, billions: float, device: str, wanted: torch.dtype) -> None:
    assert choose_dtype(stored, int(billions * 1e9), torch.device(device)) == wanted


def test_dtype_names() -> None:
    assert parse_dtype("float32") is torch.float32
    assert parse_dtype(torch.bfloat16) is torch.bfloat16
    assert parse_dtype(None) is None
    with pytest.raises(Exl3DflashError, match="dtype 'int8' is unknown"):
        parse_dtype("int8")
