"""The demo pair as Hugging Face directories: configs, tokenizer, chat template, weights in BF16, prompts.

    demo/target/    Llama: config.json, generation_config.json, tokenizer.json, tokenizer_config.json,
                    chat_template.jinja, model.safetensors, and exl3_dflash_prompts.jsonl (prompts of the training
                    side, for on-policy calibration)
    demo/drafter/   DFlash v1: config.json, model.safetensors (tokenizer, embedding and head are the target's)
    demo/heldout_prompts.jsonl   prompts whose messages no training chat contains

The tokenizer is a byte-level BPE without merges: token id = byte value, special tokens after them, so any UTF-8 text
makes a round trip. The vocabulary of the model is padded beyond the tokenizer's, as real models' are.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from demo_grammar import Chat, sample_chat
from demo_network import (
    BLOCK_SIZE,
    DRAFTER_SHAPE,
    END,
    END_OF_TEXT,
    MASK,
    NORM_EPSILON,
    POSITIONS,
    ROPE_THETA,
    TAP_LAYERS,
    TARGET_SHAPE,
    VOCABULARY,
    NetworkShape,
)
from demo_tasks import KINDS
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

SPECIAL_TOKENS = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|mask|>")
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message['role'] not in ['system', 'user', 'assistant'] -%}
        {{- raise_exception('The demo target knows the roles system, user and assistant only.') -}}
    {%- endif -%}
    {{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""
PROMPTS_PER_KIND = {"calibration": 30, "heldout": 12}
TURNS = (1, 1, 1, 2, 3)  # of a prompt, drawn evenly


def byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE (the table of GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte if byte in printable else 256 + others.index(byte)) for byte in range(256)]


def make_tokenizer() -> Tokenizer:
    """Ids 0..255 are the bytes, then the special tokens."""
    vocabulary = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return tokenizer


def shared_config(shape: NetworkShape) -> dict[str, Any]:
    """What both config.json files say."""
    return {
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPSILON,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": POSITIONS,
        "vocab_size": VOCABULARY,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": END_OF_TEXT,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "dtype": "bfloat16",
    }


def target_config() -> dict[str, Any]:
    """config.json of the target."""
    head = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA}, "mlp_bias": False}
    return head | shared_config(TARGET_SHAPE) | rope


def drafter_config() -> dict[str, Any]:
    """config.json of the drafter, in the keys of the first DFlash release."""
    head = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}
    own = {
        "rope_theta": ROPE_THETA,
        "rope_scaling": None,
        "layer_types": ["full_attention"] * DRAFTER_SHAPE.layers,
        "sliding_window": None,
        "use_sliding_window": False,
        "num_target_layers": TARGET_SHAPE.layers,
        "block_size": BLOCK_SIZE,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(TAP_LAYERS)},
    }
    return head | shared_config(DRAFTER_SHAPE) | own | {"tie_word_embeddings": False}


def write_weights(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file in BF16."""
    stored = {name: tensor.to(torch.bfloat16).contiguous().clone() for name, tensor in tensors.items()}
    save_file(stored, str(path), metadata={"format": "pt"})


def write_target(directory: Path, tensors: dict[str, Tensor]) -> None:
    """The target's directory, without prompts and card."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", target_config())
    write_json(directory / "generation_config.json", {"eos_token_id": END, "pad_token_id": END_OF_TEXT})
    make_tokenizer().save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[END - END_OF_TEXT],
        "pad_token": SPECIAL_TOKENS[0],
        "model_max_length": POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    write_json(directory / "tokenizer_config.json", tokenizer_config)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")
    write_weights(directory / "model.safetensors", tensors)


def write_drafter(directory: Path, tensors: dict[str, Tensor]) -> None:
    """The drafter's directory, without card."""
    directory.mkdir(parents=True, exist_ok=True)
    write_json(directory / "config.json", drafter_config())
    write_weights(directory / "model.safetensors", tensors)


def sample_prompts(seed: int, side: str) -> list[Chat]:
    """Distinct chats, the same number of every kind, from the calibration (training) or the held-out side."""
    rng = random.Random(f"{side} prompts {seed}")
    chosen: dict[str, Chat] = {}
    for kind in (*KINDS, "memory"):
        wanted = len(chosen) + PROMPTS_PER_KIND[side]
        while len(chosen) < wanted:
            turns = rng.choice(TURNS) if kind != "memory" else rng.choice((2, 3))
            chat = sample_chat(rng, turns, side == "heldout", kind)
            chosen.setdefault(json.dumps(chat.prompt()), chat)
    return list(chosen.values())


def write_prompts(path: Path, chats: list[Chat], prefix: str) -> None:
    """JSON lines with id, kind and messages; the last message is the user's."""
    lines = [
        json.dumps({"id": f"{prefix}-{number:03d}", "kind": chat.kind, "messages": chat.prompt()}, ensure_ascii=False)
        for number, chat in enumerate(chats)
    ]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Indented JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", "utf-8")
