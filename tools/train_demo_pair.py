"""Train the embedded pair `demo` from nothing and write it as two Hugging Face directories.

    python tools/train_demo_pair.py [--out exl3_dflash/demo] [--seed 0] [--threads 1] [--measure]
    python tools/train_demo_pair.py --another-drafter DIR [--adamw] [--times N]

What: a byte-level Llama target and a one-layer DFlash v1 drafter, trained on the chats of `demo_grammar`. How: see
`demo_training`. The same seed, torch version, kind of processor and number of threads give the same weights. Training
takes under five minutes of CPU time on a processor with native bfloat16, and longer without. With `--measure` the pair
is then measured with the product's own code and its cards are written with the figures.

The second form trains one more drafter for the target that is there, with AdamW alone or so many times as long: what
training does to what quantization costs (docs/calibration_methods.md).
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import torch
from demo_cards import write_cards
from demo_files import sample_prompts, write_drafter, write_prompts, write_target
from demo_measure import measure_pair
from demo_network import TargetNetwork, load_tensors
from demo_training import DRAFTER_STAGES, TARGET_STAGES, lengthened, train_drafter, train_target
from safetensors.torch import load_file
from torch import nn

ROOT = Path(__file__).resolve().parents[1]


def round_to_bfloat16(model: nn.Module) -> None:
    """Give the model the values that its file will hold."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))


def print_since(started: float, line: str) -> None:
    """One line of progress, with the CPU seconds since `started`."""
    print(f"{time.process_time() - started:6.0f} s CPU  {line}", file=sys.stderr, flush=True)


def train_pair(out: Path, seed: int) -> float:
    """Train and write both models and the prompts; returns CPU seconds."""
    started = time.process_time()
    log = partial(print_since, started)
    target = train_target(seed, TARGET_STAGES, log)
    round_to_bfloat16(target)
    target.requires_grad_(False)
    write_target(out / "target", target.tensors())
    drafter = train_drafter(target, seed, DRAFTER_STAGES, log)
    write_drafter(out / "drafter", drafter.tensors())
    seconds = time.process_time() - started
    write_prompts(out / "target" / "exl3_dflash_prompts.jsonl", sample_prompts(seed, "calibration"), "calibration")
    write_prompts(out / "heldout_prompts.jsonl", sample_prompts(seed, "heldout"), "heldout")
    return seconds


def train_another_drafter(out: Path, target_directory: Path, seed: int, adamw: bool, times: int) -> float:
    """Train a drafter for a finished target and write it; returns CPU seconds."""
    started = time.process_time()
    log = partial(print_since, started)
    target = TargetNetwork().requires_grad_(False)
    load_tensors(target, load_file(target_directory / "model.safetensors"))
    stages = lengthened(DRAFTER_STAGES, times)
    drafter = train_drafter(target, seed, stages, log, None) if adamw else train_drafter(target, seed, stages, log)
    out.mkdir(parents=True, exist_ok=True)
    write_drafter(out, drafter.tensors())
    return time.process_time() - started


def main() -> None:
    """Parse the options, train, measure, write the cards."""
    parser = argparse.ArgumentParser(description="Train the embedded pair `demo`.")
    parser.add_argument("--out", type=Path, default=ROOT / "exl3_dflash" / "demo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measure", action="store_true", help="measure the pair and write its cards")
    parser.add_argument("--another-drafter", type=Path, help="train only a drafter for the target in --out, into here")
    parser.add_argument("--adamw", action="store_true", help="train all of that drafter with AdamW")
    parser.add_argument("--times", type=int, default=1, help="train that drafter so many times as long")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.another_drafter:
        seconds = train_another_drafter(
            options.another_drafter, options.out / "target", options.seed, options.adamw, options.times
        )
        print(f"trained in {seconds:.0f} s of CPU time")
        return
    seconds = train_pair(options.out, options.seed)
    print(f"trained in {seconds:.0f} s of CPU time")
    if not options.measure:
        return
    figures = measure_pair(options.out)
    print(figures)
    write_cards(options.out, options.seed, seconds, figures)


if __name__ == "__main__":
    main()
