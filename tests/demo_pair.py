"""The embedded pair for tests of acceptance: everything that needs a drafter which knows its target."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub.resolve import resolve


def demo_directories() -> tuple[Path, Path]:
    """Target and drafter of the embedded pair; skips the test where the installation lacks it."""
    try:
        return resolve("demo", "target").path, resolve("demo", "drafter").path
    except Exl3DflashError as error:
        pytest.skip(str(error))


def with_identity_layer(target: Path, out: Path) -> Path:
    """A copy of a Llama target with a first layer that does nothing, so that layer j + 1 emits what layer j did."""
    shutil.copytree(target, out)
    config = json.loads((out / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (out / "config.json").write_text(json.dumps(config))
    tensors = {}
    for name, tensor in load_file(target / "model.safetensors").items():
        prefix, _, rest = name.partition("layers.")
        if rest:
            index, _, tail = rest.partition(".")
            tensors[f"{prefix}layers.{int(index) + 1}.{tail}"] = tensor.clone()
            if index == "0":
                silent = tail.startswith(("self_attn.o_proj", "mlp.down_proj"))
                tensors[f"{prefix}layers.0.{tail}"] = torch.zeros_like(tensor) if silent else tensor.clone()
        else:
            tensors[name] = tensor.clone()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def edited_drafter(drafter: Path, out: Path, **changes: object) -> Path:
    """A copy of a drafter with top-level keys of its config changed; None removes one."""
    shutil.copytree(drafter, out)
    config = json.loads((out / "config.json").read_text())
    config.update(changes)
    (out / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return out
