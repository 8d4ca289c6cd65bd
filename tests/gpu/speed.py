"""(e) Time: encoding a 0.5 B drafter against ExLlamaV3's converter, and our engine against a bare generator loop."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.runtime.engine import SamplingSettings, StopSettings
from exl3_dflash.runtime.exllama import ExllamaEngine
from exl3_dflash.runtime.exllama_sampling import make_sampler
from tests.tiny_models import make_tiny_drafter

from .generation import prompts_of
from .outcome import Findings

BITS = 4
# The sizes of DFlash for Qwen3-4B: 0.54 B weights in linear layers.
HALF_BILLION = {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8,
                "head_dim": 128, "num_hidden_layers": 5, "num_target_layers": 36, "vocab_size": 151936,
                "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}}  # fmt: skip
SLOWEST_ENCODING = 1.25  # of ExLlamaV3's time
SLOWEST_ENGINE = 0.9  # of the bare loop's tokens per second
CONVERTER = """
import sys
from exllamav3.conversion.convert_model import main, parser, prepare
settings, state, ready, problem = prepare(parser.parse_args(sys.argv[1:]))
assert ready, problem
main(settings, state)
"""


def compare_encoding(device: torch.device, scratch: Path, sizes: dict[str, Any] = HALF_BILLION) -> Findings:
    """The same random drafter, uncalibrated, by both converters; each reads from and writes to the disk."""
    source = make_tiny_drafter(scratch / "source", **sizes)
    began = time.perf_counter()
    job = JobSettings(
        str(source), None, scratch / "ours", bits=BITS, calibration="none", device=str(device), force=True
    )
    report = quantize_drafter(job)
    ours = time.perf_counter() - began
    theirs = their_seconds(source, scratch, device)
    weights = sum(tensor.shape[0] * tensor.shape[1] for tensor in report.tensors)
    figures = {"weights": weights, "bits": BITS, "seconds": {"ours": ours, "exllamav3": theirs}, "ratio": ours / theirs}
    return ours <= SLOWEST_ENCODING * theirs, figures


def their_seconds(source: Path, scratch: Path, device: torch.device) -> float:
    """Wall time of ExLlamaV3's converter, less the start of a process that imports it."""
    paths = ["-i", source, "-o", scratch / "theirs", "-w", scratch / "work", "-b", BITS, "-d", device.index or 0]
    started = _timed([sys.executable, "-c", "import exllamav3.conversion.convert_model"])
    return _timed([sys.executable, "-c", CONVERTER, *map(str, paths)]) - started


def _timed(command: Sequence[str]) -> float:
    began = time.perf_counter()
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"ExLlamaV3's converter failed: {(run.stderr or run.stdout).strip().splitlines()[-1]}")
    return time.perf_counter() - began


def compare_engines(engine: ExllamaEngine, new_tokens: int = 256, rounds: int = 3) -> Findings:
    """Tokens per second of decoding through our engine and through a bare loop over the same generator, in turn."""
    prompts = prompts_of(engine)
    _ours(engine, prompts, 16)  # kernels are compiled and tuned at their first use
    ours, bare = [], []
    for _ in range(rounds):
        ours.append(_ours(engine, prompts, new_tokens))
        bare.append(_bare(engine, prompts, new_tokens))
    best = {"ours": max(ours), "bare": max(bare)}
    figures = {"tokens_per_second": best, "ratio": best["ours"] / best["bare"], "rounds": rounds}
    return figures["ratio"] >= SLOWEST_ENGINE, figures


def _ours(engine: ExllamaEngine, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    engine.reset()
    tokens, began = 0, time.perf_counter()
    for prompt in prompts:
        steps = engine.generate(prompt, SamplingSettings(), StopSettings(new_tokens))
        tokens += sum(len(step.token_ids) for step in steps)
    return tokens / (time.perf_counter() - began)


def _bare(engine: ExllamaEngine, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """ExLlamaV3's generator as its examples use it, on the engine's models and caches."""
    engine.reset()
    library: ModuleType = engine._model.library
    generator = engine._ready_generator()
    tokens, began = 0, time.perf_counter()
    for prompt in prompts:
        job = library.Job(
            input_ids=torch.tensor([list(prompt)], dtype=torch.int64),
            max_new_tokens=new_tokens,
            sampler=make_sampler(library, SamplingSettings()),
        )
        generator.enqueue(job)
        while generator.num_remaining_jobs():
            for result in generator.iterate():
                if result["stage"] == "streaming" and "token_ids" in result:
                    tokens += result["token_ids"].shape[-1]
    seconds = time.perf_counter() - began
    engine.reset()
    return tokens / seconds
