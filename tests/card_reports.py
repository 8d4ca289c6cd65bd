"""Reports and cards as large drafters have them, written by hand: no weights are needed to make a card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMIT = "89abcdef0123456789abcdef0123456789abcdef"

UPSTREAM_CARD = """---
license: apache-2.0
language:
- en
- zh
library_name: transformers
pipeline_tag: text-generation
base_model: Qwen/Qwen3.6-35B-A3B
tags:
- dflash
- speculative-decoding
extra_gated_prompt: "Tell us who you are"
---

# Qwen3.6-35B-A3B-DFlash

[**Paper**](https://arxiv.org/abs/2602.06036) | [**Training code**](training/README.md) | [Results](#results)

<p align="center"><img src="assets/overview.png" alt="overview" width="80%"></p>

[![chart](./assets/chart.svg)](docs/chart.md)

A block-diffusion drafter for `Qwen3.6-35B-A3B`: 8 layers, blocks of 16 tokens.

## Results

| Task | Thinking | Accept length | Speedup |
|:-----|:--------:|--------------:|--------:|
| GSM8K | off | 6.41 | 4.1x |
| HumanEval | on | 5.87 | 3.6x |
| MT-Bench | off | 4.02 | 2.5x |

```python
# a relative path in code stays as it is: [not a link](train.py)
model = AutoModel.from_pretrained("./Qwen3.6-35B-A3B-DFlash", trust_remote_code=True)
```

> Measured at temperature 0 with {{ n_prompts }} prompts; 100 % of `{% raw %}` stays text.
"""

CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "block_size": 16,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 10, 19, 28, 37]},
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "num_target_layers": 40,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000000,
    "vocab_size": 248320,
    "tap_shift": 1,
}


def make_report(**changes: Any) -> dict[str, Any]:
    """A report of a calibrated 4-bit job, with keys replaced."""
    unquantized = {
        "name": "unquantized",
        "accept_length": 5.43217,
        "ci95": [5.21934, 5.65781],
        "retention": 1.0,
        "retention_ci95": [1.0, 1.0],
        "position_acceptance": [0.91, 0.88],
        "top1_agreement": 1.0,
        "top1_agreement_ci95": [1.0, 1.0],
        "kl": 0.0,
    }
    quantized = unquantized | {
        "name": "quantized",
        "accept_length": 5.40873,
        "ci95": [5.19562, 5.63219],
        "retention": 0.995686,
        "retention_ci95": [0.993127, 0.998341],
        "top1_agreement": 0.973412,
        "kl": 0.0041873,
    }
    tensor = {"shape": [2048, 2048], "bits": 4.0, "proxy_error": 1e-4, "weight_error": 0.008, "seconds": 1.0}
    names = ["fc", *(f"layers.{i}.mlp.up_proj" for i in range(8))]
    report: dict[str, Any] = {
        "out_dir": "/home/somebody/private/out",
        "source": "z-lab/Qwen3.6-35B-A3B-DFlash",
        "source_revision": COMMIT,
        "source_sha256": "ab" * 32,
        "target": "Qwen/Qwen3.6-35B-A3B",
        "bits": 4.0,
        "bpw": 4.0317,
        "head_bits": 8.0,
        "head_quantized": False,
        "codebook": "mul1",
        "out_scales": "auto",
        "size_bytes": 241172480,
        "source_bytes": 947912704,
        "tensors": [{"name": name, "fallback": None, **tensor} for name in names],
        "copied": {},
        "notes": [],
        "calibration": {
            "mode": "target",
            "source": "chat",
            "rows": 247,
            "cols": 2048,
            "tokens": 402817,
            "anchors": 96411,
            "dropped_rows": 3,
            "dropped_inputs": 0,
            "method": "two-sided",
            "notes": [],
        },
        "tap_shift": 1,
        "probe": {
            "settings": [{"setting": "tap_shift", "choice": 1, "default": 0, "outcome": "changed", "reason": "better"}],
            "anchors": 3456,
            "rows": 8,
        },
        "accept_length": {"unquantized": 5.43217, "quantized": 5.40873},
        "fidelity": {
            "drafters": [unquantized, quantized],
            "anchors": 51234,
            "rows": 31,
            "dropped_rows": 1,
            "block_size": 16,
        },
        "seed": 17,
        "versions": {"exl3-dflash": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "exllamav3": "1.6.5"},
        "seconds": 1234.5,
    }
    return report | changes


def write_directory(directory: Path, report: dict[str, Any], card: str | None = UPSTREAM_CARD) -> Path:
    """A drafter's directory as far as a card needs it: config, report, and the source's card."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "quantize_report.json").write_text(json.dumps(report))
    if card is not None:
        (directory / "README.md").write_text(card)
    return directory
