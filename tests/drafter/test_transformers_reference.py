"""The one drafter that transformers runs: its own files are read, and it proposes what transformers proposes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, GenerationConfig

from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.drafter.taps import tap_layer_indices
from exl3_dflash.runtime.engine import SamplingSettings, StopSettings
from exl3_dflash.runtime.load import load_pair
from exl3_dflash.runtime.reference import ReferenceEngine
from tests.tiny_targets import small_dimensions, write_tiny_tokenizer

candidates = pytest.importorskip("transformers.generation.candidate_generator")
target_module = pytest.importorskip("transformers.models.muse_glimmer.configuration_muse_glimmer")
assistant = pytest.importorskip("transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant")


def randomize(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
            else:
                parameter.add_(0.2 * torch.randn_like(parameter))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A tiny Muse-Glimmer and its assistant, as models of transformers and in one directory each.

    The window is longer than the context: transformers counts it one key wider on either side.
    """
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("glimmer")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = target_module.MuseGlimmerConfig(text_config={**small_dimensions(), "head_dim": 8}, vision_config=vision)
    target = AutoModelForImageTextToText.from_config(config).float().eval()
    drafter = assistant.MuseGlimmerAssistantModel(
        assistant.MuseGlimmerAssistantConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=8, block_size=4, mask_token_id=260, target_layer_ids=[2, 0, 1],
            layer_types=["sliding_attention", "full_attention"], sliding_window=64,
            rope_parameters={"rope_type": "default", "rope_theta": 500000.0}, attn_implementation="eager",
        )
    ).eval()  # fmt: skip
    for name, model in (("target", target), ("drafter", drafter)):
        randomize(model)
        model.save_pretrained(folder / name)
    write_tiny_tokenizer(folder / "target")
    return folder, target, drafter


def test_hidden_states_are_those_of_transformers(theirs: tuple[Path, Any, Any]) -> None:
    folder, _, model = theirs
    checkpoint = DrafterCheckpoint.open(folder / "drafter")
    assert checkpoint.config.vocab_size is None
    assert [checkpoint.config.layer_is_causal(i) for i in range(2)] == [False, False]
    taps, block = torch.randn(9, 96), torch.randn(4, 32)
    with torch.inference_mode():
        expected = model(noise_embeds=block[None], context_hidden_states=taps[None]).last_hidden_state[0]
    ours = DrafterModel.from_checkpoint(checkpoint).forward_anchors(taps, block[None], torch.tensor([9]))[0]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


def test_proposals_are_those_of_transformers(theirs: tuple[Path, Any, Any]) -> None:
    """Taps, context, block embeddings (without the target's norm on them) and head, all at once."""
    folder, target, drafter = theirs
    ids = torch.randint(0, 256, (1, 12), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        generator = candidates.DFlashTokenCandidateGenerator(
            drafter, target.get_input_embeddings(), target.get_output_embeddings(), GenerationConfig(max_length=64)
        )
        outputs = target(input_ids=ids[:, :-1], output_hidden_states=True)
        rows = {"position_ids": torch.arange(12)[None], "attention_mask": torch.ones(1, 12, dtype=torch.int64)}
        seen = SimpleNamespace(hidden_states=outputs.hidden_states)
        proposed, logits = generator.get_candidates(ids, rows, seen, False, 0)

    pair = load_pair(str(folder / "target"), str(folder / "drafter"), device="cpu", dtype="float32", threads=1)
    assert pair.drafter is not None
    anchor = ids[0, -1:]
    with torch.inference_mode():
        taps = pair.target.tap_rows(ids[0, :-1], tap_layer_indices(pair.drafter.config)).taps
        block = pair.drafter.block_embeddings(pair.target, anchor)
        hidden = pair.drafter.forward_anchors(taps, block, torch.tensor([11]))[:, 1:]
        ours = pair.drafter.propose(pair.target, anchor, hidden)
        torch.testing.assert_close(pair.target.output_matrix(hidden), logits, rtol=1e-4, atol=1e-3)
    assert torch.equal(ours.ids[0], proposed[0, 12:])
    engines = ReferenceEngine(pair.target, pair.drafter), ReferenceEngine(pair.target)
    stops = StopSettings(max_new_tokens=10, token_ids=frozenset())
    drafted, plain = ([t for step in e.generate(ids[0].tolist(), SamplingSettings(), stops) for t in step.token_ids]
                      for e in engines)  # fmt: skip
    assert drafted == plain
