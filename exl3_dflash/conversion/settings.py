"""Settings of a quantization job, checked in one place before anything is loaded."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from exl3_dflash.calibration.rows import CHAT, DEFAULT
from exl3_dflash.calibration.rowset import check_thinking
from exl3_dflash.conversion.recipe import Recipe
from exl3_dflash.errors import Exl3DflashError
from quantize.codebook import CODEBOOKS
from quantize.encoder import ENCODERS
from quantize.linear import OUT_SCALES
from quantize.trellis import SUPPORTED_BITS

CALIBRATIONS = ("target", "none")
AUTO = "auto"
OWN_ANSWERS_BELOW = 3.0  # bits; measured, docs/calibration_methods.md
METHODS = ("two-sided", "one-sided")
PLANS = ("auto", "uniform", "mixed")
DEFAULT_BITS, DEFAULT_HEAD_BITS = 6.0, 8.0
LEAST_MEAN_BITS = 1.5
LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class JobSettings:
    """What to quantize and how; the options of `exl3-dflash quantize`.

    Attributes:
        source: the drafter: a directory, a Hugging Face id or `demo`.
        target: its target, named likewise; None only with calibration "none".
        out_dir: the directory to create.
        bits: mean bits per weight of the quantized linears, the head apart; with a recipe it says nothing.
        plan: all linears alike (`uniform`), bits where they count (`mixed`), or `auto`: uniform where `bits` is a rate.
        recipe: the bits of every linear, instead of a plan.
        head_bits: bits per weight of the drafter's own head, if it has one.
        codebook: `mul1`, `mcg` or `3inst`.
        encoder: the tile search: `fast` or `exact`.
        out_scales: output channel scales: `auto`, `always` or `never`.
        calibration: `target` (run the target) or `none` (no Hessian, no feedback).
        method: of calibrated layers: errors weighed by inputs and outputs (`two-sided`) or inputs only (`one-sided`).
        cal_data: `default`, `chat` or a path (see `exl3_dflash.calibration.rows`), or `auto`: see `rows_source`.
        cal_rows, cal_cols: calibration rows and tokens per row.
        thinking: of prompts of calibration and held-out rows: `default` (of the template), `on`, `off`, `both`.
        tune: train scales and norms on the calibration rows after encoding (see `conversion.tuning`).
        eval_rows: held-out rows on which the drafter is measured before and after; 0 measures nothing.
        seed: of rows, anchors and sign flips.
        block_size: of a drafter whose config does not say it.
        force: replace an existing `out_dir`.
        work_dir: where finished steps are kept while the job runs; beside `out_dir` if None.
        resume, restart: continue an interrupted job, or throw away what it left.
        executor, workers: where tensors are encoded, and how many at a time (see `conversion.executor`).
        device, dtype, threads: where and in which type target and drafter run.
    """

    source: str
    target: str | None
    out_dir: Path
    bits: float = DEFAULT_BITS
    plan: str = "auto"
    recipe: Recipe | None = None
    head_bits: float = DEFAULT_HEAD_BITS
    codebook: str = "mul1"
    encoder: str = "fast"
    out_scales: str = "auto"
    calibration: str = "target"
    method: str = "two-sided"
    cal_data: str = AUTO
    cal_rows: int = 250
    cal_cols: int = 2048
    thinking: str = "default"
    tune: bool = False
    eval_rows: int = 32
    seed: int = 0
    block_size: int | None = None
    force: bool = False
    work_dir: Path | None = None
    resume: bool = False
    restart: bool = False
    executor: str = "local"
    workers: int = 0
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0

    @property
    def work_path(self) -> Path:
        """The work directory."""
        return self.work_dir or self.out_dir.parent / f"{self.out_dir.name}.work"

    @property
    def mixes_bits(self) -> bool:
        """Whether bits are decided tensor by tensor, after calibration."""
        return self.plan_kind == "mixed"

    @property
    def plan_kind(self) -> str:
        """Where bits come from: `uniform`, `mixed` or `recipe`."""
        if self.recipe is not None:
            return "recipe"
        if self.plan != "auto":
            return self.plan
        is_rate = self.bits in SUPPORTED_BITS and (self.bits == int(self.bits) or self.codebook == "mul1")
        return "uniform" if is_rate else "mixed"

    def rows_source(self, has_chat_template: bool) -> str:
        """Where rows come from: with `auto`, the target's own answers where they pay (few bits, tuning) and can be had.

        Args:
            has_chat_template: whether the target has one.
        """
        if self.cal_data != AUTO:
            return self.cal_data
        bits = self.bits if self.recipe is None else self.recipe.target_bpw
        few = bits is not None and bits < OWN_ANSWERS_BELOW
        pays = self.calibration == "target" and (self.tune or few)
        return CHAT if pays and has_chat_template else DEFAULT

    def binding(self) -> dict[str, Any]:
        """The settings that make the result what it is, as plain data."""
        return {name: value for name, value in asdict(self).items() if name not in FREE_SETTINGS}

    def __post_init__(self) -> None:
        _check_choice("--codebook", self.codebook, CODEBOOKS)
        _check_choice("--encoder", self.encoder, ENCODERS)
        _check_choice("--out-scales", self.out_scales, OUT_SCALES)
        _check_choice("--calibration", self.calibration, CALIBRATIONS)
        _check_choice("--method", self.method, METHODS)
        _check_choice("--plan", self.plan, PLANS)
        _check_bits("--head-bits", self.head_bits, self.codebook)
        if self.recipe is None:
            self._check_mean_bits()
        for option, value, least in (
            ("--cal-rows", self.cal_rows, 1),
            ("--cal-cols", self.cal_cols, 32),
            ("--eval-rows", self.eval_rows, 0),
        ):
            if value < least:
                raise Exl3DflashError(f"{option} {value}", expected=f"at least {least}", fix=f"give {option} {least}")
        if abs(self.seed) > LARGEST_SEED:
            raise Exl3DflashError(f"--seed {self.seed}", expected="a number of 64 bits", fix="give a smaller one")
        check_thinking(self.thinking)
        if self.tune and self.calibration != "target":
            raise Exl3DflashError(
                f"--tune with --calibration {self.calibration}",
                expected="a calibration with the target, whose rows are tuned on",
                fix="leave out --tune or --calibration none",
            )
        if self.calibration == "target" and self.target is None:
            raise Exl3DflashError(
                "--target is missing",
                expected="the target that the drafter was trained for",
                fix="give --target, or --calibration none to quantize without calibration",
            )

    def check_places(self) -> None:
        """Refuse a work directory and an output in one another: the one is emptied, the other replaced as a whole."""
        out, work = self.out_dir.resolve(), self.work_path.resolve()
        if out == work or out in work.parents or work in out.parents:
            raise Exl3DflashError(
                f"--work-dir {self.work_path} and --out {self.out_dir} lie in one another",
                expected="two directories apart",
                fix="give another --work-dir",
            )

    def _check_mean_bits(self) -> None:
        if self.plan == "uniform":
            _check_bits("--bits", self.bits, self.codebook)
        elif self.mixes_bits and not LEAST_MEAN_BITS <= self.bits <= max(SUPPORTED_BITS):
            raise Exl3DflashError(
                f"--bits {self.bits:g}",
                expected=f"an average from {LEAST_MEAN_BITS:g} to {max(SUPPORTED_BITS)}, or 1",
                fix=f"give --bits {min(max(LEAST_MEAN_BITS, self.bits), max(SUPPORTED_BITS)):g}",  # of NaN the least
            )


# Settings that do not change the result, or are known better (models by their digests): free when a job is resumed.
FREE_SETTINGS = ("source", "target", "out_dir", "force", "work_dir", "resume", "restart",
                 "executor", "workers", "threads")  # fmt: skip


def _check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise Exl3DflashError(f"{option} {value!r}", expected=f"one of {', '.join(choices)}", fix=f"use {choices[0]}")


def _check_bits(option: str, bits: float, codebook: str) -> None:
    if bits not in SUPPORTED_BITS:
        raise Exl3DflashError(
            f"{option} {bits:g}",
            expected=f"one of {', '.join(f'{b:g}' for b in SUPPORTED_BITS)}",
            fix=f"use the nearest, {min(SUPPORTED_BITS, key=lambda b: abs(b - bits)):g}",
        )
    if bits != int(bits) and codebook != "mul1":
        raise Exl3DflashError(
            f"{option} {bits:g} with --codebook {codebook}",
            expected="the mul1 codebook at half rates",
            fix="use --codebook mul1 or whole bits",
        )
