"""Two names to a target and its drafter, checked against each other and ready to run.

Cheap checks come first: both names are resolved, the drafter's files are opened and the pair is compared before any
weight is read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from exl3_dflash.doctor.papers import require_papers
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.hub.resolve import ResolvedModel, resolve
from exl3_dflash.runtime.reference import ReferenceEngine
from exl3_dflash.runtime.request import check_draft_tokens
from exl3_dflash.target.base import Target
from exl3_dflash.target.load import load_target, sketch_target
from exl3_dflash.target.placement import parse_dtype
from quantize.encoder import default_threads


@dataclass(frozen=True)
class LoadedPair:
    """A target, its drafter (None where none was asked for), where they came from and what was noticed on the way."""

    target: Target
    drafter: DrafterModel | None
    target_source: ResolvedModel
    drafter_source: ResolvedModel | None
    drafter_sha256: str | None
    notes: tuple[str, ...]

    def engine(self, draft_tokens: int | None = None) -> ReferenceEngine:
        """An engine of its own cache over this pair; see `ReferenceEngine`."""
        return ReferenceEngine(self.target, self.drafter, draft_tokens)

    def describe(self) -> dict[str, object]:
        """Names, revisions, hashes and how it runs, for reports and `--json`."""
        facts = self.target.facts
        return {
            "target": self.target_source.name,
            "target_revision": self.target_source.revision,
            "target_sha256": facts.sha256,
            "target_quantized": facts.quantized,
            "drafter": self.drafter_source.name if self.drafter_source else None,
            "drafter_revision": self.drafter_source.revision if self.drafter_source else None,
            "drafter_sha256": self.drafter_sha256,
            "device": str(self.target.device),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
        }


def choose_torch_dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    """The torch type of a `--dtype` name; None (also for "auto") leaves the choice to the target's loader."""
    return parse_dtype(None if name == "auto" else name)


def load_pair(
    target: str,
    drafter: str | None,
    *,
    device: str = "auto",
    dtype: str | torch.dtype | None = None,
    threads: int = 0,
    draft_tokens: int | None = None,
    block_size: int | None = None,
) -> LoadedPair:
    """Load a target and its drafter.

    Args:
        target: a directory, a Hugging Face id or "demo".
        drafter: the same for the drafter; None loads no drafter.
        device: "auto", "cpu", "cuda" or "cuda:N"; both run there.
        dtype: "auto" or None, "float32", "bfloat16" or a torch type; both compute in it.
        threads: CPU threads of torch; 0 means the physical cores.
        draft_tokens: what `LoadedPair.engine` will be asked for, to be refused early where it is out of range.
        block_size: of a drafter whose config does not say it.

    Raises:
        Exl3DflashError: a name, a file or the pairing is wrong.
    """
    wanted = choose_torch_dtype(dtype)
    torch.set_num_threads(threads or default_threads())
    target_source = resolve(target, "target")
    drafter_source = resolve(drafter, "drafter") if drafter is not None else None
    checkpoint = DrafterCheckpoint.open(drafter_source.path, block_size) if drafter_source else None
    notes: tuple[str, ...] = ()
    if checkpoint is not None:
        notes = require_papers(checkpoint, sketch_target(target_source.path, target_source.name))
    if draft_tokens is not None:
        check_draft_tokens(draft_tokens, checkpoint.config.block_size - 1 if checkpoint else 0)
    model = load_target(target_source.path, device=device, dtype=wanted, name=target_source.name)
    if checkpoint is None:
        return LoadedPair(model, None, target_source, None, None, ())
    return LoadedPair(
        target=model,
        drafter=DrafterModel.from_checkpoint(checkpoint, dtype=model.dtype, device=model.device),
        target_source=target_source,
        drafter_source=drafter_source,
        drafter_sha256=checkpoint.sha256,
        notes=notes,
    )
