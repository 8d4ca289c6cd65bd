"""The cards of the demo pair: a README for the pair with its measured figures, and one for each model's directory."""

from __future__ import annotations

import platform
from pathlib import Path
from string import Template

import torch
from demo_measure import PairFigures
from demo_network import BLOCK_SIZE, DRAFTER_SHAPE, POSITIONS, TAP_LAYERS, TARGET_SHAPE, VOCABULARY
from safetensors import safe_open

FRONT_MATTER = """\
---
license: mit
language: en
tags: [{tags}]
---
"""


def count_weights(path: Path) -> int:
    """Numbers stored in a safetensors file."""
    with safe_open(str(path), framework="pt") as tensors:
        return sum(tensors.get_tensor(name).numel() for name in tensors.keys())  # noqa: SIM118 (not a mapping)


PAIR_CARD = Template("""\
# The embedded pair `demo`

A byte-level Llama target ($target_weights weights) and a one-layer DFlash v1 drafter ($drafter_weights weights), BF16,
$megabytes MB with everything. They exist so that every command of exl3-dflash can be tried, tested and measured in
seconds on any CPU, without a download.

The target talks about the village of Larkford and nothing else: animals, people, places, routes, days, comparisons,
stories, greetings (and remembering them), sums, counting, lists, recipes, JSON records, spelling, short code. Its
answers are often right and not always. Any other prompt gives junk; that is expected.

- `target/`: Llama of $layers layers, hidden size $hidden, vocabulary $vocabulary (256 bytes, 6 special tokens,
  padding), $positions positions, chat template. `exl3_dflash_prompts.jsonl`: prompts for on-policy calibration.
- `drafter/`: block size $block, taps $taps, MLP $intermediate, QK norms, bidirectional inside the block.
- `heldout_prompts.jsonl`: $prompts prompts of all kinds, whose user messages stand in no training chat (but for the two
  questions about an earlier greeting).

## Trained with

    python tools/train_demo_pair.py --seed $seed

Everything is made by that script: the text by a seeded grammar (`tools/demo_grammar.py`), the weights in $seconds s of
CPU time on one thread ($machine, torch $torch; the limit is 300 s). The same seed,
torch version, kind of processor and number of threads give the same weights, bit for bit. With `--measure` it also
takes the figures below and writes these pages.

Both models were trained with Muon, which learns faster than AdamW in so little time. This drafter of one layer uses
most directions of its weights and loses much at 2 and 3 bits: a strict test of quantization methods. A drafter of the
same shape that has learned less (AdamW, as many batches, accept length 3.4) loses less, one that has learned more
(AdamW, eight times as many, 7.0) loses more; the project's documentation of calibration methods has the figures.

## Measured

Held-out prompts, greedy, FP32, CPU, one thread. Accept length: tokens emitted after the prefill token / verify steps,
mean over prompts. Teacher-forced: leading draft tokens equal to the target's greedy tokens + 1, mean over all anchors
of the answers.

| figure | value |
|---|---|
| accept length, real runs of $prompts prompts | $accept_length |
| accept length, teacher-forced, $anchors anchors | $teacher_forced |
| position-wise acceptance of draft tokens 1 to $last | $acceptance |
| tokens/s plain and drafted, $timed prompts | $plain and $drafted (${speedup}x) |
| drafted answers identical to plain ones | $identical of $timed |
| mean answer | $answer_bytes bytes |

| kind of prompt | accept length |
|---|---|
$kinds
""")


def pair_card(out: Path, seed: int, seconds: float, figures: PairFigures) -> str:
    """README of the pair."""
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return PAIR_CARD.substitute(
        target_weights=f"{count_weights(out / 'target' / 'model.safetensors'):,}",
        drafter_weights=f"{count_weights(out / 'drafter' / 'model.safetensors'):,}",
        megabytes=f"{size / 1e6:.1f}",
        layers=TARGET_SHAPE.layers,
        hidden=TARGET_SHAPE.hidden,
        vocabulary=VOCABULARY,
        positions=POSITIONS,
        block=BLOCK_SIZE,
        last=BLOCK_SIZE - 1,
        taps=list(TAP_LAYERS),
        intermediate=DRAFTER_SHAPE.intermediate,
        prompts=figures.prompts,
        seed=seed,
        seconds=f"{seconds:.0f}",
        machine=f"{platform.machine()} with BF16 instructions",
        torch=torch.__version__.split("+")[0],
        accept_length=f"{figures.accept_length:.2f}",
        anchors=f"{figures.anchors:,}",
        teacher_forced=f"{figures.teacher_forced:.3f}",
        acceptance=" ".join(f"{value:.3f}" for value in figures.position_acceptance),
        timed=figures.timed_prompts,
        plain=f"{figures.plain_tokens_per_second:.0f}",
        drafted=f"{figures.drafted_tokens_per_second:.0f}",
        speedup=f"{figures.speedup:.2f}",
        identical=figures.identical,
        answer_bytes=f"{figures.answer_bytes:.0f}",
        kinds="\n".join(f"| {kind} | {value:.2f} |" for kind, value in figures.accept_length_by_kind.items()),
    )


def model_card(title: str, tags: str, text: str) -> str:
    """README of one model's directory."""
    return f"{FRONT_MATTER.format(tags=tags)}\n# {title}\n\n{text}\n"


def write_cards(out: Path, seed: int, seconds: float, figures: PairFigures) -> None:
    """Write the three READMEs below `out`."""
    target = (
        "A byte-level Llama that talks about the invented village of Larkford, trained from nothing on the text of\n"
        "a seeded grammar. It belongs to the demonstration of exl3-dflash. Prompts outside of its world give junk.\n"
        "Figures and the training command: the README one level up."
    )
    drafter = (
        "A one-layer DFlash v1 drafter for the demo target beside it, which lends tokenizer, embedding and head.\n"
        "It belongs to the demonstration of exl3-dflash. Figures and the training command: the README one level up."
    )
    (out / "README.md").write_text(pair_card(out, seed, seconds, figures), "utf-8")
    (out / "target" / "README.md").write_text(model_card("Larkford demo target", "demo, llama", target), "utf-8")
    (out / "drafter" / "README.md").write_text(model_card("Larkford demo drafter", "demo, dflash", drafter), "utf-8")
