"""The main job on the embedded pair: quantize, audit, compare with plain decoding, answer once (`exl3-dflash demo`).

Everything runs in FP32 on the CPU, so that "identical to plain decoding" is a statement about the code and not about
rounding. The prompts are the pair's own held-out ones, which neither training nor calibration has seen.
"""

from __future__ import annotations

import importlib.resources
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.report import QuantizeReport
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.measure.generation import EngineRun, compare_engines, run_request
from exl3_dflash.progress import Reporter
from exl3_dflash.runtime.engine import SamplingSettings, StopSettings
from exl3_dflash.runtime.load import load_pair
from exl3_dflash.runtime.reference import ReferenceEngine
from exl3_dflash.target.base import ChatMessage

DEMO = "demo"
CAL_ROWS = 96
EVAL_ROWS = 48
MAX_NEW_TOKENS = 160


@dataclass(frozen=True)
class DemoResult:
    """Everything the demo shows."""

    quantize: QuantizeReport
    runs: list[EngineRun]
    question: str
    answer: str

    def to_json(self) -> dict[str, Any]:
        """Plain data for `--json`."""
        return {
            "quantize": self.quantize.to_json(),
            "runs": [asdict(run) for run in self.runs],
            "chat": {"question": self.question, "answer": self.answer},
        }


def heldout_prompts() -> list[list[ChatMessage]]:
    """The embedded pair's held-out prompts, as chat messages."""
    text = importlib.resources.files("exl3_dflash").joinpath("demo/heldout_prompts.jsonl").read_text("utf-8")
    return [json.loads(line)["messages"] for line in text.splitlines() if line.strip()]


@contextmanager
def _output_directory(out: Path | None) -> Iterator[Path]:
    """The given directory, or a temporary one that is gone afterwards."""
    if out is not None:
        yield out
        return
    with tempfile.TemporaryDirectory(prefix="exl3-dflash-demo-") as directory:
        yield Path(directory) / "drafter"


def run_demo(reporter: Reporter, *, out: Path | None = None, prompts: int = 32, threads: int = 1) -> DemoResult:
    """Run the demo.

    Args:
        reporter: where to tell what happens.
        out: keep the quantized drafter here; by default it goes to a temporary directory.
        prompts: held-out prompts to generate from.
        threads: CPU threads; 0 means the physical cores. One is the default: matrices this small gain nothing from
            more, and lose much where another program keeps a core busy.
    """
    with _output_directory(out) as directory:
        settings = JobSettings(
            source=DEMO,
            target=DEMO,
            out_dir=directory,
            cal_data="chat",
            cal_rows=CAL_ROWS,
            cal_cols=512,
            eval_rows=EVAL_ROWS,
            device="cpu",
            dtype="float32",
            threads=threads,
        )
        report = quantize_drafter(settings, reporter)
        unquantized = load_pair(DEMO, DEMO, device="cpu", dtype="float32", threads=threads)
        quantized = load_pair(DEMO, str(directory), device="cpu", dtype="float32", threads=threads)
    engines = {
        "plain": ReferenceEngine(unquantized.target, None),
        "drafted, unquantized": ReferenceEngine(unquantized.target, unquantized.drafter),
        f"drafted, {report.bits:g} bpw": ReferenceEngine(unquantized.target, quantized.drafter),
    }
    tokenizer = unquantized.target.tokenizer
    chosen = _spread(heldout_prompts(), prompts)
    ids = [tokenizer.apply_chat_template(messages) for messages in chosen]
    stops = StopSettings(max_new_tokens=MAX_NEW_TOKENS, token_ids=frozenset(tokenizer.eos_token_ids))
    with reporter.bar("generate", len(ids) * len(engines), "answer") as advance:
        runs = compare_engines(engines, ids, SamplingSettings(), stops, lambda: advance(1))
    output, _ = run_request(list(engines.values())[-1], ids[0], SamplingSettings(), stops)
    answer = tokenizer.decode([token for token in output if token not in tokenizer.eos_token_ids])
    return DemoResult(report, runs, chosen[0][-1]["content"], answer)


def _spread(prompts: list[list[ChatMessage]], count: int) -> list[list[ChatMessage]]:
    """`count` prompts evenly over the file, which is ordered by kind."""
    count = min(count, len(prompts))
    return [prompts[index * len(prompts) // count] for index in range(count)]


def render(result: DemoResult) -> str:
    """The tables as plain text."""
    report = result.quantize
    lines = [report.summary(), "audit: every tensor read back, decoded and accounted for", ""]
    lines.append(
        f"{'real runs, held-out prompts':<28} {'accept length':>13} {'tokens/s':>9} {'speedup':>8} {'identical':>10}"
    )
    for run in result.runs:
        accept = "-" if run.accept_length is None else f"{run.accept_length:.2f}"
        identical = "baseline" if run is result.runs[0] else f"{run.identical}/{run.requests}"
        lines.append(f"{run.name:<28} {accept:>13} {run.tokens_per_second:>9.0f} {run.speedup:>7.2f}x {identical:>10}")
    lines += [
        "",
        f"drafter: {report.source_bytes / 1024:.0f} KiB unquantized, {report.size_bytes / 1024:.0f} KiB quantized",
        "",
        f"> {result.question}",
        result.answer,
    ]
    return "\n".join(lines)
