"""The embedded pair: complete, small, loadable by everybody, drafted well, and in step with the script that made it."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from exl3_dflash.calibration.rows import TokenRow
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.drafter.taps import tap_layer_indices
from exl3_dflash.measure.fidelity import measure_fidelity
from exl3_dflash.measure.generation import run_request
from exl3_dflash.pairing import check_pairing
from exl3_dflash.runtime.engine import SamplingSettings, StopSettings
from exl3_dflash.runtime.reference import ReferenceEngine
from exl3_dflash.target.base import Target
from exl3_dflash.target.load import load_target

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "exl3_dflash" / "demo"
MAX_BYTES = 3_000_000
MODULES = ("demo_world", "demo_turns", "demo_tasks", "demo_grammar", "demo_network", "demo_training", "demo_files")


@pytest.fixture(scope="module")
def tools() -> Iterator[dict[str, ModuleType]]:
    """The training modules; they lie in tools/ and import each other by their plain names."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield {name: __import__(name) for name in MODULES}
    finally:
        sys.path.remove(str(ROOT / "tools"))


@pytest.fixture(scope="module")
def target() -> Target:
    return load_target(DEMO / "target", device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def drafter() -> DrafterModel:
    return DrafterModel.from_checkpoint(DrafterCheckpoint.open(DEMO / "drafter"))


def prompts(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (DEMO / name).read_text("utf-8").splitlines()]


def test_everything_is_there_and_small() -> None:
    names = {path.relative_to(DEMO).as_posix() for path in DEMO.rglob("*") if path.is_file()}
    target_files: tuple[str, ...] = (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    )
    target_files += ("chat_template.jinja", "model.safetensors", "exl3_dflash_prompts.jsonl")
    expected = {f"target/{name}" for name in target_files}
    expected |= {f"drafter/{name}" for name in ("config.json", "model.safetensors", "README.md")}
    assert names == expected | {"heldout_prompts.jsonl", "README.md"}
    assert sum(path.stat().st_size for path in DEMO.rglob("*") if path.is_file()) <= MAX_BYTES


def test_transformers_loads_the_target() -> None:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        str(DEMO / "target"), dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.max_position_embeddings >= 512
    assert 700_000 < sum(parameter.numel() for parameter in model.parameters()) < 1_000_000


@given(st.text().filter(lambda text: "<|" not in text))  # special tokens are recognised in text, as everywhere
@settings(max_examples=60, deadline=None)
def test_any_text_makes_a_round_trip(text: str) -> None:
    tokenizer = load_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def load_tokenizer(cache: list[Any] = []) -> Any:  # noqa: B006 (one tokenizer for all of hypothesis' examples)
    from transformers import AutoTokenizer

    if not cache:
        cache.append(AutoTokenizer.from_pretrained(str(DEMO / "target")))
    return cache[0]


def test_chat_template_is_the_one_that_was_trained(tools: dict[str, ModuleType]) -> None:
    chat = tools["demo_grammar"].sample_chat(random.Random(1), 3, held_out=False)
    ids, _ = tools["demo_training"].encode_chat(chat)
    tokenizer = load_tokenizer()
    assert tokenizer.apply_chat_template(list(chat.messages), return_dict=False) == ids
    prompt = tokenizer.apply_chat_template(chat.prompt(), add_generation_prompt=True, return_dict=False)
    assert prompt == ids[: len(prompt)]
    assert tokenizer.convert_ids_to_tokens(prompt[-1]) == "<|assistant|>"


def test_drafter_holds_exactly_the_tensors_of_the_format() -> None:
    hidden, width, intermediate = 128, 256, 256
    linears = {
        "q_proj": (width, hidden),
        "k_proj": (width, hidden),
        "v_proj": (width, hidden),
        "o_proj": (hidden, width),
    }
    expected: dict[str, tuple[int, ...]] = {
        f"layers.0.self_attn.{name}.weight": shape for name, shape in linears.items()
    }
    expected |= {f"layers.0.self_attn.{name}.weight": (32,) for name in ("q_norm", "k_norm")}
    expected |= {f"layers.0.mlp.{name}.weight": (intermediate, hidden) for name in ("gate_proj", "up_proj")}
    expected |= {"layers.0.mlp.down_proj.weight": (hidden, intermediate), "fc.weight": (hidden, 3 * hidden)}
    norms = ("norm", "hidden_norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm")
    expected |= {f"{name}.weight": (hidden,) for name in norms}
    stored = load_file(str(DEMO / "drafter" / "model.safetensors"))
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == expected
    assert {tensor.dtype for tensor in stored.values()} == {torch.bfloat16}
    assert all(tensor.isfinite().all() for tensor in stored.values())


def test_prompts_are_many_mixed_and_disjoint(tools: dict[str, ModuleType]) -> None:
    heldout, calibration = prompts("heldout_prompts.jsonl"), prompts("target/exl3_dflash_prompts.jsonl")
    assert len(heldout) >= 150
    assert len(calibration) >= 400
    for side in (heldout, calibration):
        assert all(prompt["messages"][-1]["role"] == "user" for prompt in side)
        assert len({json.dumps(prompt["messages"]) for prompt in side}) == len(side)
        assert len(set(Counter(prompt["kind"] for prompt in side).values())) == 1
        assert any(len(prompt["messages"]) >= 5 for prompt in side)
    grammar = tools["demo_grammar"]
    for side, held_out in ((heldout, True), (calibration, False)):
        for prompt in side:
            question = next(m["content"] for m in reversed(prompt["messages"]) if m["role"] == "user")
            assert prompt["kind"] == "memory" or grammar.is_held_out(question) == held_out


def test_shipped_files_are_what_the_script_writes(tools: dict[str, ModuleType], tmp_path: Path) -> None:
    files = tools["demo_files"]
    files.write_target(tmp_path / "target", {"x": torch.zeros(1)})
    files.write_drafter(tmp_path / "drafter", {"x": torch.zeros(1)})
    for side, prefix, name in (
        ("heldout", "heldout", "heldout_prompts.jsonl"),
        ("calibration", "calibration", "target/exl3_dflash_prompts.jsonl"),
    ):
        files.write_prompts(tmp_path / name, files.sample_prompts(0, side), prefix)
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.suffix != ".safetensors"]
    assert len(written) == 8
    for path in written:
        assert path.read_bytes() == (DEMO / path.relative_to(tmp_path)).read_bytes(), path.name


def test_training_forward_is_the_products_forward(
    tools: dict[str, ModuleType], target: Target, drafter: DrafterModel
) -> None:
    network = tools["demo_network"]
    trainable_target = network.TargetNetwork(dtype=torch.float32)
    trainable = network.DrafterNetwork(dtype=torch.float32)
    network.load_tensors(trainable_target, load_file(str(DEMO / "target" / "model.safetensors")))
    network.load_tensors(trainable, load_file(str(DEMO / "drafter" / "model.safetensors")))
    ids = torch.tensor(target.tokenizer.apply_chat_template(prompts("heldout_prompts.jsonl")[0]["messages"]))
    anchors = torch.tensor([1, 7, 8, len(ids) - 1])
    expected = target.tap_rows(ids, tap_layer_indices(drafter.config), want_logits=True)
    blocks = drafter.block_embeddings(target, ids[anchors])
    with torch.no_grad():
        logits, outputs = trainable_target(ids[None])
        taps = torch.cat([outputs[layer] for layer in network.TAP_LAYERS], -1)
        hidden = trainable(taps, anchors[None], blocks[None])[0]
    assert expected.logits is not None
    torch.testing.assert_close(logits[0], expected.logits, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(taps[0], expected.taps, atol=1e-3, rtol=1e-4)
    reference = drafter.forward_anchors(expected.taps, blocks, anchors)
    torch.testing.assert_close(hidden, reference, atol=1e-3, rtol=1e-4)


def test_drafts_are_accepted_on_held_out_prompts(target: Target, drafter: DrafterModel) -> None:
    stops = StopSettings(max_new_tokens=300, token_ids=frozenset(target.tokenizer.eos_token_ids))
    engine = ReferenceEngine(target, drafter)
    rows: list[TokenRow] = []
    lengths: list[float] = []
    for prompt in prompts("heldout_prompts.jsonl")[4::16]:
        ids = target.tokenizer.apply_chat_template(prompt["messages"])
        output, stats = run_request(engine, ids, SamplingSettings(), stops)
        rows.append(TokenRow(torch.tensor(ids + output), len(ids), prompt["kind"]))
        assert stats.accept_length is not None
        lengths.append(stats.accept_length)
    figures = measure_fidelity(target, {"unquantized": drafter}, rows).drafters[0]
    assert figures.accept_length > 4.0
    assert figures.accept_length < 7.0, "a saturated pair cannot show what quantization costs"
    assert sum(lengths) / len(lengths) > 4.0


def test_training_repeats_itself(tools: dict[str, ModuleType]) -> None:
    training = tools["demo_training"]
    stages = ((training.Phase(3, 2, 96, 1),), (training.Phase(1, 1, 128, 2),))

    def train() -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        target = training.train_target(5, stages, lambda line: None).requires_grad_(False)
        return target.tensors(), training.train_drafter(target, 5, stages, lambda line: None).tensors()

    for first, second in zip(train(), train(), strict=True):
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_drafter_is_trained_for_the_same_target(tmp_path: Path) -> None:
    """The way from the command to a drafter that pairs, of the fewest steps; AdamW gives other weights than Muon."""
    script = "import sys; sys.argv[1:1] = ['--another-drafter', sys.argv.pop()]; import demo_training as training; "
    script += "training.DRAFTER_STAGES = ((training.Phase(2, 2, 96, 1),),); import train_demo_pair as t; t.main()"
    for name, options in (("muon", []), ("adamw", ["--adamw", "--times", "2"])):
        command = [sys.executable, "-c", script, *options, str(tmp_path / name)]
        subprocess.run(command, check=True, cwd=ROOT / "tools", capture_output=True)
        checkpoint = DrafterCheckpoint.open(tmp_path / name)
        check_pairing(checkpoint, load_target(DEMO / "target", device="cpu", dtype=torch.float32).facts)
    muon, adamw = (load_file(tmp_path / name / "model.safetensors") for name in ("muon", "adamw"))
    assert not torch.equal(muon["fc.weight"], adamw["fc.weight"])
