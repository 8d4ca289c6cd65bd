"""Signatures of what we call in ExLlamaV3, read from its source without importing it.

`exllama_signatures.json` holds those of the versions that were looked at. What another one has:

    python -m tests.conformance.exllama_signatures DIRECTORY_OF_THE_PACKAGE
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from pathlib import Path
from typing import Any

RECORD = Path(__file__).with_name("exllama_signatures.json")

# Callable -> (file, class, function). A class is called through its __init__, Model.load through load_gen.
SOURCES = {
    "Config.from_directory": ("model/config.py", "Config", "from_directory"),
    "Model.from_config": ("model/model.py", "Model", "from_config"),
    "Model.load": ("model/model.py", "Model", "load_gen"),
    "Model.forward": ("model/model.py", "Model", "forward"),
    "Model.prefill": ("model/model.py", "Model", "prefill"),
    "Cache": ("cache/cache.py", "Cache", "__init__"),
    "Cache.get_new_state": ("cache/cache.py", "Cache", "get_new_state"),
    "CacheLayer_quant": ("cache/quant.py", "CacheLayer_quant", "__init__"),
    "Tokenizer.from_config": ("tokenizer/tokenizer.py", "Tokenizer", "from_config"),
    "Generator": ("generator/generator.py", "Generator", "__init__"),
    "Generator.enqueue": ("generator/generator.py", "Generator", "enqueue"),
    "Generator.cancel": ("generator/generator.py", "Generator", "cancel"),
    "Generator.num_remaining_jobs": ("generator/generator.py", "Generator", "num_remaining_jobs"),
    "Generator.iterate": ("generator/generator.py", "Generator", "iterate"),
    "Job": ("generator/job.py", "Job", "__init__"),
    "CustomSampler": ("generator/sampler/custom.py", "CustomSampler", "__init__"),
    "SS_RepP": ("generator/sampler/custom.py", "SS_RepP", "__init__"),
    "SS_Temperature": ("generator/sampler/custom.py", "SS_Temperature", "__init__"),
    "SS_TopK": ("generator/sampler/custom.py", "SS_TopK", "__init__"),
    "SS_TopP": ("generator/sampler/custom.py", "SS_TopP", "__init__"),
    "SS_MinP": ("generator/sampler/custom.py", "SS_MinP", "__init__"),
    "LinearEXL3.forward": ("modules/quant/exl3.py", "LinearEXL3", "forward"),
    "LinearEXL3.get_weight_tensor": ("modules/quant/exl3.py", "LinearEXL3", "get_weight_tensor"),
    "LinearFP16.forward": ("modules/quant/fp16.py", "LinearFP16", "forward"),
    "LinearFP16.get_weight_tensor": ("modules/quant/fp16.py", "LinearFP16", "get_weight_tensor"),
}
# Attributes that are read, by class.
ATTRIBUTES = {
    ("generator/generator.py", "Generator"): ("draft_ids_pinned",),
    ("generator/job.py", "Job"): (
        "sequences", "draft_stats", "cached_pages", "cached_tokens", "time_first_token", "accepted_draft_tokens",
        "rejected_draft_tokens", "is_finished",
    ),
    ("model/model.py", "Model"): ("caps", "draft_verifier_params", "logit_layer_idx", "modules", "output_device"),
    ("modules/linear.py", "Linear"): ("inner", "in_features", "in_features_unpadded", "softcap", "pre_scale",
                                      "post_scale"),
    ("modules/embedding.py", "Embedding"): ("vocab_size", "normalize", "multiplier"),
}  # fmt: skip

Signatures = dict[str, list[list[Any]]]


def read_signatures(package: Path) -> Signatures:
    """Per callable its parameters [name, kind, has a default] without self; a callable that is missing is left out."""
    found = {}
    for name, (file, owner, function) in SOURCES.items():
        definition = _function(package / file, owner, function)
        if definition is not None:
            found[name] = _parameters(definition)
    return found


def read_attributes(package: Path) -> dict[str, list[str]]:
    """Per class those of ATTRIBUTES that it assigns."""
    found = {}
    for (file, owner), names in ATTRIBUTES.items():
        tree = _class(package / file, owner)
        assigned = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
        found[owner] = [name for name in names if name in assigned]
    return found


def bind(parameters: list[list[Any]], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Raise TypeError where a function with these parameters cannot be called so."""
    made = [
        inspect.Parameter(name, getattr(inspect.Parameter, kind), default=None if default else inspect.Parameter.empty)
        for name, kind, default in parameters
    ]
    inspect.Signature(made).bind(*arguments, **options)


def _class(file: Path, owner: str) -> ast.AST:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return next(
        (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner), ast.Module([], [])
    )


def _function(file: Path, owner: str, function: str) -> ast.FunctionDef | None:
    body = getattr(_class(file, owner), "body", [])
    return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == function), None)


def _parameters(definition: ast.FunctionDef) -> list[list[Any]]:
    given = definition.args
    plain = [*given.posonlyargs, *given.args]
    without = len(plain) - len(given.defaults)
    found = [[a.arg, "POSITIONAL_OR_KEYWORD", k >= without] for k, a in enumerate(plain) if a.arg != "self"]
    if given.vararg:
        found.append([given.vararg.arg, "VAR_POSITIONAL", False])
    found += [[a.arg, "KEYWORD_ONLY", d is not None] for a, d in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    if given.kwarg:
        found.append([given.kwarg.arg, "VAR_KEYWORD", False])
    return found


if __name__ == "__main__":
    root = Path(sys.argv[1])
    print(json.dumps({"signatures": read_signatures(root), "attributes": read_attributes(root)}))
