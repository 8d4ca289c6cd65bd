"""Faults injected into the embedded pair, and what `exl3-dflash doctor` says about each: the table of docs/doctor.md.

    python benchmarks/doctor_faults.py            prints the table
    python benchmarks/doctor_faults.py --write    puts it into docs/doctor.md

Every fault is a copy of the pair's directories with one thing wrong, except clipped features, which a target of FP16
range makes at run time. All faults against one target share its answers, so the whole table takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.doctor.checks import FAIL, WARN, Diagnosis
from exl3_dflash.doctor.run import DoctorSettings, PreparedTarget, diagnose, prepare
from exl3_dflash.hub.resolve import resolve
from exl3_dflash.progress import Reporter
from exl3_dflash.target.base import TapRows, Target
from exl3_dflash.target.load import sketch_target

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "doctor.md"
BEGIN, END = "<!-- faults: benchmarks/doctor_faults.py --write -->", "<!-- end of faults -->"
SETTINGS = DoctorSettings(rows=12, anchors_per_row=32, device="cpu", dtype="float32", threads=1)
HEALTHY = "none: the embedded pair as it is"
FP16_LIMIT = 65504.0


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        name: for the table.
        cause: what the verdict must name; None where the pair still works and a warning must name `check`.
        check: the check that must fail, or warn where `cause` is None.
        inject: changes the copied drafter and target directories.
        wrap: changes the loaded target, if need be.
        own_target: whether the target's directory is changed, so that it must be loaded again.
    """

    name: str
    cause: str | None
    check: str
    inject: Callable[[Path, Path], None] = lambda drafter, target: None
    wrap: Callable[[Target], Any] | None = None
    own_target: bool = False


@dataclass(frozen=True)
class Outcome:
    """What the doctor made of a fault (None is the healthy pair)."""

    fault: Fault | None
    diagnosis: Diagnosis

    @property
    def named(self) -> bool:
        """Whether the right cause, and only that, was named."""
        found = self.diagnosis
        if self.fault is None:
            return found.verdict.healthy and not found.failed() and not found.warned()
        status = WARN if self.fault.cause is None else FAIL
        told = {check.name for check in found.checks if check.status == status}
        return found.verdict.cause == self.fault.cause and self.fault.check in told


class ClippedTarget:
    """A target whose features are kept in FP16: 2,000 times larger, as real models have them, and cut at its range.

    The drafter does not mind the factor, because fc is linear and its output is normed; it minds the cut.
    """

    def __init__(self, target: Target, gain: float = 2000.0) -> None:
        self._target = target
        self._gain = gain

    def tap_rows(self, ids: torch.Tensor, tap_ids: Any, want_logits: bool = False) -> TapRows:
        """The target's, clipped."""
        rows = self._target.tap_rows(ids, tap_ids, want_logits)
        return replace(rows, taps=(rows.taps * self._gain).clamp(-FP16_LIMIT, FP16_LIMIT))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def edit_config(directory: Path, **changes: Any) -> None:
    """Change keys of config.json, those of dflash_config where it has them."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        place = config["dflash_config"] if key in config.get("dflash_config", {}) else config
        place[key] = value
    path.write_text(json.dumps(config))


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a directory."""
    path = directory / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def without_tensor(name: str) -> Fault:
    """A drafter that lacks a tensor."""

    def remove(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]

    return Fault(f"tensor missing: {name}", "tensors", "tensors", lambda drafter, _: edit_tensors(drafter, remove))


def renamed_tensor(name: str) -> Fault:
    """A drafter one of whose tensors has another name."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name.replace("weight", "kernel")] = tensors.pop(name)

    return Fault(f"tensor renamed: {name}", "tensors", "tensors", lambda drafter, _: edit_tensors(drafter, rename))


def config_fault(name: str, cause: str | None, check: str, **changes: Any) -> Fault:
    """A drafter whose config says something wrong."""
    return Fault(name, cause, check, lambda drafter, _: edit_config(drafter, **changes))


def _other_weights(_: Path, target: Path) -> None:
    """A target of the same shape and vocabulary that was never trained."""
    generator = torch.Generator().manual_seed(0)

    def randomize(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.ndim == 2:
                noise = torch.randn(tensor.shape, generator=generator)
                tensors[name] = (noise * tensor.float().std()).to(tensor.dtype)

    edit_tensors(target, randomize)


def _fine_tuned(_: Path, target: Path) -> None:
    """A target that was trained further, away from what the drafter knows: its MLPs write something else."""
    generator = torch.Generator().manual_seed(0)

    def drift(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if "down_proj" in name or "o_proj" in name:
                noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std()
                tensors[name] = (tensor.float() + noise).to(tensor.dtype)

    edit_tensors(target, drift)


def with_sliding_layer(drafter: Path) -> None:
    """Give the drafter a second layer with a window of 1, under which it computes exactly what it did.

    A row of that layer sees only itself, and attention adds its own normed state to it: the direction stays, and the
    final norm takes the length away. Without the window it sees everything, and is lost.
    """
    config = json.loads((drafter / "config.json").read_text())
    hidden, heads, size = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    assert heads == config["num_key_value_heads"]
    assert hidden <= heads * size

    def add(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("layers.0.")]:
            like = tensors[name]
            silent = torch.ones_like(like) if like.ndim == 1 else torch.zeros_like(like)
            tensors[name.replace("layers.0.", "layers.1.")] = silent
        identity = torch.eye(heads * size, hidden, dtype=torch.bfloat16)
        tensors["layers.1.self_attn.v_proj.weight"] = identity
        tensors["layers.1.self_attn.o_proj.weight"] = 20 * identity.T.contiguous()

    edit_tensors(drafter, add)
    types = ["full_attention", "sliding_attention"]
    sliding = {"layer_types": types, "sliding_window": 1, "use_sliding_window": True, "is_causal": False}
    edit_config(drafter, num_hidden_layers=2, **sliding)


def _window_ignored(drafter: Path, _: Path) -> None:
    """A drafter that was made with a sliding layer, and a config that calls all layers full."""
    with_sliding_layer(drafter)
    edit_config(drafter, layer_types=["full_attention"] * 2)


def _one_bit(drafter: Path, _: Path) -> None:
    """Replace the drafter by itself at 1 bit per weight."""
    out = drafter.with_name("one-bit")
    quantize_drafter(
        JobSettings(source=str(drafter), target=None, out_dir=out, bits=1, calibration="none", eval_rows=0, threads=1)
    )
    shutil.rmtree(drafter)
    out.rename(drafter)


def tensor_kinds() -> list[str]:
    """One tensor of every kind of the embedded drafter."""
    return sorted(load_file(resolve("demo", "drafter").path / "model.safetensors"))


def measured_faults() -> list[Fault]:
    """The faults beside missing and renamed tensors."""
    full_window = {"layer_types": ["sliding_attention"], "sliding_window": 8, "is_causal": False}
    return [
        config_fault("tap ids off by one", "taps", "taps, tried", target_layer_ids=[1, 2, 3]),
        config_fault("wrong theta (1e6 for 1e4)", "rope", "rope, tried", rope_theta=1e6),
        Fault("window ignored (1 in the second layer)", "window", "window, tried", _window_ignored),
        config_fault("window where there is none (8)", "window", "window, tried", **full_window),
        config_fault("causality flipped", "causality", "causality, tried", is_causal=True),
        Fault("wrong target, same shape", "target", "acceptance", _other_weights, own_target=True),
        Fault("fine-tuned target", "target", "acceptance", _fine_tuned, own_target=True),
        Fault(
            "wrong target, other depth",
            "target",
            "layers",
            lambda drafter, _: edit_config(drafter, num_target_layers=36),
        ),
        config_fault("vocabulary padded (384 for 272)", None, "vocabulary", vocab_size=384),
        config_fault("another vocabulary (32,000)", "target", "vocabulary", vocab_size=32000),
        config_fault("mask token wrong (the letter e)", "mask token", "mask token, tried", mask_token_id=101),
        config_fault("mask token outside the vocabulary", "mask token", "tensors", mask_token_id=300),
        Fault("features clipped to FP16", "features", "features", wrap=ClippedTarget),
        Fault("quantized at 1 bit", "quantization", "quantization", _one_bit),
    ]


def all_faults() -> list[Fault]:
    """Every fault of the table."""
    kinds = tensor_kinds()
    return [*map(without_tensor, kinds), *map(renamed_tensor, kinds), *measured_faults()]


def run_faults(faults: list[Fault], prepared: PreparedTarget | None = None) -> Iterator[Outcome]:
    """The healthy pair first, then every fault, each in a fresh copy of the pair."""
    target = resolve("demo", "target").path
    ready = prepared or prepare(target, sketch_target(target), SETTINGS, Reporter(quiet=True))
    yield Outcome(None, diagnose("demo", "demo", SETTINGS, prepared=ready))
    for fault in faults:
        yield run_fault(fault, ready)


def run_fault(fault: Fault, prepared: PreparedTarget) -> Outcome:
    """One fault in a copy of the pair; `prepared` is of the healthy target."""
    with tempfile.TemporaryDirectory(prefix="exl3-dflash-fault-") as folder:
        drafter, target = Path(folder) / "drafter", Path(folder) / "target"
        shutil.copytree(resolve("demo", "drafter").path, drafter)
        shutil.copytree(resolve("demo", "target").path, target)
        fault.inject(drafter, target)
        ready: PreparedTarget | None = None if fault.own_target else prepared
        if ready is not None and fault.wrap is not None:
            ready = replace(ready, target=fault.wrap(ready.target))
        return Outcome(fault, diagnose(str(drafter), str(target), SETTINGS, prepared=ready))


def table_names() -> list[str]:
    """First column of the table: the kinds of tensors share a line for each way to lose one."""
    kinds = len(tensor_kinds())
    lost = [f"tensor missing, each of {kinds} kinds", f"tensor renamed, each of {kinds} kinds"]
    return [HEALTHY, *lost, *(fault.name for fault in measured_faults())]


def table(outcomes: list[Outcome]) -> str:
    """The outcomes as Markdown; the first is the healthy pair."""
    kinds = len(tensor_kinds())
    parts = [[outcomes[0]], outcomes[1 : 1 + kinds], outcomes[1 + kinds : 1 + 2 * kinds]]
    parts += [[outcome] for outcome in outcomes[1 + 2 * kinds :]]
    lines = ["| fault | verdict | seen by | what it says | accept length |", "|---|---|---|---|---|"]
    lines += [_line(name, part) for name, part in zip(table_names(), parts, strict=True)]
    right = sum(outcome.named for outcome in outcomes)
    return "\n".join([*lines, "", f"{right} of {len(outcomes)} are right: the cause named, and nothing on the first."])


def _line(name: str, part: list[Outcome]) -> str:
    found, fault = part[0].diagnosis, part[0].fault
    if fault is None:
        length = f"{found.acceptance.accept_length:.2f}" if found.acceptance else "not run"
        return f"| {name} | {_verdict(found)} | - | {len(found.checks)} checks pass | {length} |"
    told = [check for check in found.checks if check.name == fault.check]
    seen = _shortened(told[-1].seen) if told else "-"
    if len(part) > 1:
        seen = f"{sum(outcome.named for outcome in part)} of {len(part)} named; for example: {seen}"
    length = f"{found.acceptance.accept_length:.2f}" if found.acceptance else "not run"
    return f"| {name} | {_verdict(found)} | {fault.check} | {seen} | {length} |"


def _verdict(found: Diagnosis) -> str:
    return found.verdict.cause or ("healthy, with a warning" if found.warned() else "healthy")


def _shortened(text: str, limit: int = 160) -> str:
    text = re.sub(r"^\S*/drafter\S* does not hold the drafter that its config.json describes: ", "", text)
    text = re.sub(r"; expected every tensor of the model and no other$", "", text)
    text = text if len(text) <= limit else text[: limit - 3] + "..."
    return text.replace("|", "\\|")


def main() -> None:
    """Run everything and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into docs/doctor.md")
    options = parser.parse_args()
    text = table(list(run_faults(all_faults())))
    print(text)
    if options.write:
        document = DOCUMENT.read_text(encoding="utf-8")
        before, after = document.split(BEGIN)[0], document.split(END)[1]
        DOCUMENT.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
