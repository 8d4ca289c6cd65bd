"""What tuning minimizes: the tokens of a block that the quantized drafter is expected to lose.

For block rows k = 1..B-1 of an anchor, with q the tuned drafter's distribution, p the unquantized drafter's, y_k the
target's greedy token after the true prefix, w_k = 1 while every earlier draft of the unquantized drafter agrees with
the target (survival: later rows decide nothing), else 0:

    loss = sum over k of (1 - q_1(y_1) * ... * q_k(y_k))  +  d * sum over k of w_k * KL(p_k || q_k)

The first sum is what a block has (its rows with a label) less the expected number of draft tokens that the target
accepts, were they drawn from q: a smooth form of the accept length. The second is a dense signal (a distribution
instead of a token) that keeps a few thousand scales from learning the calibration rows by heart. Its survival is that
of the unquantized drafter and not of the tuned one, or it would reward drafts that fail early.

Memory: the graph of one group of anchors (`fisher.GROUP_ROWS` block rows and the context before them); logits exist for
a chunk of anchors at a time, whose gradient at the final hidden states is collected before the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from exl3_dflash.calibration.anchors import valid_anchors
from exl3_dflash.calibration.fisher import GROUP_ROWS, LOGIT_CHUNK_ELEMENTS, NO_LABEL, survival_weights
from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.target.base import Target

MEASURED_ANCHORS = 64  # of one row, at the most


@dataclass(frozen=True, eq=False)
class TeacherRow:
    """One row with what the drafter reads and what it should say.

    Attributes:
        row: the tokens.
        taps: (S, K * Ht).
        greedy: int64 (S,), the target's greedy token after each position.
    """

    row: TokenRow
    taps: torch.Tensor
    greedy: torch.Tensor

    def labels(self, anchors: torch.Tensor, rows: int) -> torch.Tensor:
        """The target's tokens (N, B - 1) for rows 1..B-1 of each block, NO_LABEL past the end of the row."""
        padded = torch.nn.functional.pad(self.greedy, (0, rows), value=NO_LABEL)
        return padded[anchors[:, None] + torch.arange(rows - 1)]

    def measured_anchors(self) -> torch.Tensor:
        """Anchors with a label, spread over the row: all of them, or `MEASURED_ANCHORS`."""
        positions = valid_anchors(len(self.row.ids), self.row.prompt_length, 1)
        step = -(-len(positions) // MEASURED_ANCHORS)
        return torch.tensor(list(positions)[:: max(step, 1)], dtype=torch.int64)


@dataclass
class LossSums:
    """Sums over anchors: of the loss, of the draft tokens accepted in a row, and their number."""

    loss: float = 0.0
    accepted: int = 0
    anchors: int = 0

    @property
    def mean(self) -> float:
        """Loss per anchor."""
        return self.loss / max(self.anchors, 1)

    @property
    def accept_length(self) -> float:
        """Accepted draft tokens per anchor, plus the target's own."""
        return 1.0 + self.accepted / max(self.anchors, 1)


class TuningLoss:
    """The loss of one drafter against its unquantized self and the target.

    Args:
        model: the drafter under training.
        teacher: the unquantized drafter.
        target: their target.
        divergence_weight: d of the module docstring, not negative.
    """

    def __init__(self, model: DrafterModel, teacher: DrafterModel, target: Target, divergence_weight: float) -> None:
        self._model = model
        self._teacher = teacher
        self._target = target
        self._divergence_weight = divergence_weight

    def measure(self, rows: Iterable[TeacherRow]) -> LossSums:
        """The loss over the measured anchors of `rows`."""
        sums = LossSums()
        for row in rows:
            for anchors in self._groups(row.measured_anchors()):
                with torch.no_grad():
                    hidden = self._hidden(self._model, row, anchors)
                    self._gradient(row, anchors, hidden, 1.0, sums)
        return sums

    def backward(self, row: TeacherRow, anchors: torch.Tensor, scale: float, sums: LossSums) -> None:
        """Add `scale` times the gradient of the loss over `anchors (N,)` to the model's leaves, the loss to `sums`."""
        for group in self._groups(anchors):
            with torch.enable_grad():
                hidden = self._hidden(self._model, row, group)
                gradient = self._gradient(row, group, hidden.detach(), scale, sums)
            hidden.backward(gradient)

    def _groups(self, anchors: torch.Tensor) -> Iterator[torch.Tensor]:
        if len(anchors):
            yield from anchors.split(max(1, GROUP_ROWS // self._model.config.block_size))

    def _hidden(self, model: DrafterModel, row: TeacherRow, anchors: torch.Tensor) -> torch.Tensor:
        """Final hidden states (N, B, H) of blocks."""
        embeddings = model.block_embeddings(self._target, row.row.ids[anchors])
        return model.forward_anchors(row.taps[: int(anchors.max())], embeddings, anchors, chunk=len(anchors))

    def _gradient(
        self, row: TeacherRow, anchors: torch.Tensor, hidden: torch.Tensor, scale: float, sums: LossSums
    ) -> torch.Tensor:
        """The gradient (N, B, H) of `scale` times the loss at hidden states (N, B, H), zero where none is recorded.

        That at a head of the drafter's own goes to its leaves.
        """
        with torch.no_grad():
            taught = self._hidden(self._teacher, row, anchors)
        labels = row.labels(anchors, hidden.shape[1])
        gradient = torch.zeros_like(hidden)
        chunk = max(1, LOGIT_CHUNK_ELEMENTS // (labels.shape[1] * self._target.facts.head_size))
        for chosen in torch.arange(len(anchors)).split(chunk):
            states = hidden[chosen, 1:].detach().requires_grad_()
            loss = self._chunk_loss(row.row.ids[anchors[chosen]], states, taught[chosen, 1:], labels[chosen], sums)
            if loss.requires_grad:
                (loss * scale).backward()
                assert states.grad is not None
                gradient[chosen, 1:] = states.grad
        return gradient

    def _chunk_loss(
        self, ids: torch.Tensor, states: torch.Tensor, taught: torch.Tensor, labels: torch.Tensor, sums: LossSums
    ) -> torch.Tensor:
        """The summed loss of blocks of anchors `ids (n,)` with hidden states (n, B - 1, H)."""
        with torch.no_grad():
            lesson = self._teacher.propose(self._target, ids, taught)
            wanted = lesson.logits.log_softmax(-1)  # (n, B - 1, D)
        proposal = self._model.propose(self._target, ids, states)
        log_probs = proposal.logits.log_softmax(-1)
        labels = labels.to(proposal.ids.device)
        columns = self._model.draft_columns(labels).to(log_probs.device)
        known = (columns >= 0).to(log_probs.dtype)
        labelled = (labels != NO_LABEL).to(log_probs)
        survival = survival_weights(lesson.ids.to(labels.device), labels).to(log_probs) * labelled
        agreement = log_probs.gather(-1, columns.clamp(min=0)[..., None])[..., 0].exp() * known * labelled
        lost = labelled - agreement.cumprod(-1)
        divergence = (wanted.exp() * (wanted - log_probs)).sum(-1)
        loss = (lost + self._divergence_weight * survival * divergence).sum()
        sums.loss += float(loss.detach())
        sums.accepted += int((proposal.ids == labels).long().cumprod(-1).sum())
        sums.anchors += len(labels)
        return loss
