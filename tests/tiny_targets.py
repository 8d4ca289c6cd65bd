"""Tiny random targets as real Hugging Face directories, seeded, made in-process in a fraction of a second.

All share one byte-level tokenizer: ids 0..255 are the bytes (in the order of ByteLevel's alphabet) and the special
tokens follow, so any text round-trips. The chat template is ChatML with a thinking switch. Weights are drawn wider
than usual (standard deviation about H**-0.5): logits depend visibly on the whole context and no cache fault can hide.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
VOCAB_SIZE = 288  # 256 bytes, 5 special tokens, padding rows
END_ID, IM_START_ID, IM_END_ID, MASK_ID = 257, 258, 259, 260

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def write_tiny_tokenizer(directory: Path, chat_template: str | None = CHAT_TEMPLATE) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template (none where None) to `directory`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = chat_template
    fast.save_pretrained(directory)


def write_tiny_target(
    directory: Path, config: Any, *, seed: int = 0, chat_template: str | None = CHAT_TEMPLATE, scale: float = 1.0
) -> Path:
    """Write a random model of `config` with the tiny tokenizer; returns `directory`.

    Matrices get standard deviation scale * columns**-0.5, embeddings 1, norms and other vectors a little noise.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        embedding = model.get_input_embeddings().weight
        for parameter in model.parameters():
            if parameter is embedding:
                parameter.normal_()
            elif parameter.dim() >= 2:
                parameter.normal_(std=scale * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.generation_config = GenerationConfig(eos_token_id=[IM_END_ID, END_ID], pad_token_id=256)
    model.save_pretrained(directory)
    write_tiny_tokenizer(directory, chat_template)
    return directory


def make_tiny_llama(
    directory: Path, *, seed: int = 0, chat_template: str | None = CHAT_TEMPLATE, **config: Any
) -> Path:
    """A 4-layer Llama of hidden size 32 (grouped heads); `config` overrides LlamaConfig keys."""
    from transformers import LlamaConfig

    settings = {**small_dimensions(), "head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    return write_tiny_target(directory, LlamaConfig(**{**settings, **config}), seed=seed, chat_template=chat_template)


def make_tiny_qwen3_next(
    directory: Path, *, seed: int = 0, chat_template: str | None = CHAT_TEMPLATE, **config: Any
) -> Path:
    """A 4-layer Qwen3-Next of hidden size 32: three gated delta layers and one attention layer, dense MLPs."""
    from transformers import Qwen3NextConfig

    settings = {
        **small_dimensions(),
        **TINY_LINEAR_ATTENTION,
        "mlp_only_layers": [0, 1, 2, 3],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    }
    return write_tiny_target(
        directory, Qwen3NextConfig(**{**settings, **config}), seed=seed, chat_template=chat_template
    )


def make_constant_target(directory: Path, *, num_layers: int = 4) -> Path:
    """A Llama whose layer i emits the constant i in every feature, for any tokens.

    The embedding is -1 everywhere; attention and gated MLP write nothing, and the bias of down_proj adds 1 per layer.
    """
    make_tiny_llama(directory, num_hidden_layers=num_layers, mlp_bias=True)
    model = AutoModelForCausalLM.from_pretrained(directory)
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(-1.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            layer.mlp.down_proj.bias.fill_(1.0)
    model.save_pretrained(directory)
    return directory


TINY_LINEAR_ATTENTION = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

# model_type -> keys that a tiny configuration needs beside `small_dimensions`
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mistral": {"head_dim": 8, "sliding_window": 7},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 7, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 7, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    "granite": {"logits_scaling": 4.0, "embedding_multiplier": 3.0},
    "cohere": {"logit_scale": 0.25},
    "gpt_oss": {"head_dim": 8, "sliding_window": 7, "num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "mamba": {"state_size": 8},
    "qwen3_5_text": TINY_LINEAR_ATTENTION,
    "falcon_h1": {
        "head_dim": 8,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 2.0,
    },
}


def make_tiny_family(directory: Path, model_type: str, *, seed: int = 0, **config: Any) -> Path:
    """A tiny target of a family in FAMILIES; `config` overrides its keys."""
    from transformers import AutoConfig

    settings = {**small_dimensions(), **FAMILIES[model_type], **config}
    return write_tiny_target(directory, AutoConfig.for_model(model_type, **settings), seed=seed)


def small_dimensions() -> dict[str, Any]:
    """The configuration keys that every tiny target shares."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": IM_END_ID,
        "pad_token_id": 256,
    }


def edit_config(directory: Path, **changes: Any) -> None:
    """Overwrite keys of config.json in `directory`; a value of None removes the key."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    config.update(changes)
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
