"""How a drafter's logits become proposals: the most likely token of each row, or DFlash 2's candidate selector.

    U, C = top_k(logits of rows 1..);  a = the anchor
    for each row t:  s = U[t] + (A[a] * hidden_projection h[t]) . B[C[t]];   a = C[t][argmax s];   propose a

A and B are the predecessor and successor codebooks (V, R), by target id. The path is greedy: each row's choice depends
on the choice before it, and never on later rows, so fewer rows give the same tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from exl3_dflash.drafter.layout import SELECTOR
from exl3_dflash.drafter.modules import BLOCK, Observer, TracedLinear


class Proposal(NamedTuple):
    """What a drafter proposes for R rows after each of N anchors.

    ids: int64 (N, R), target ids.
    logits: (N, R, D) over the drafter's vocabulary, before any selector; D is V unless it is reduced.
    token_ids: int64 (D,), target ids of the logits' columns; None where they are the ids.
    """

    ids: torch.Tensor
    logits: torch.Tensor
    token_ids: torch.Tensor | None = None

    def columns(self, ids: torch.Tensor) -> torch.Tensor:
        """The columns of `logits` that stand for target ids (...), -1 where none does."""
        return columns_of(ids, self.token_ids, self.logits.shape[-1])


def columns_of(ids: torch.Tensor, token_ids: torch.Tensor | None, width: int) -> torch.Tensor:
    """Columns of logits (..., width) that stand for target ids (...), -1 where none does.

    Args:
        ids: int64, target ids; negative ones stand for no token.
        token_ids: target ids (width,) of the columns; None where they are the ids.
        width: number of columns.
    """
    if token_ids is None:
        return torch.where((ids >= 0) & (ids < width), ids, -1)
    known = token_ids.to(ids.device)
    columns = ids.new_full((int(known.max()) + 1,), -1)
    columns[known] = torch.arange(len(known), device=ids.device)
    inside = (ids >= 0) & (ids < len(columns))
    return torch.where(inside, columns[ids.clamp(0, len(columns) - 1)], -1)


class CandidateSelector(nn.Module):
    """Chooses among the best candidates of each row by what was chosen before.

    Attributes:
        predecessor_codebook, successor_codebook: (V, R), in their stored type (they are large).
    """

    predecessor_codebook: torch.Tensor
    successor_codebook: torch.Tensor

    def __init__(self, top_k: int, observer: Observer) -> None:
        super().__init__()
        self.top_k = top_k
        self.hidden_projection = TracedLinear(f"{SELECTOR}.hidden_projection", observer)
        self.register_buffer("predecessor_codebook", torch.empty(0, 0))
        self.register_buffer("successor_codebook", torch.empty(0, 0))

    def forward(
        self, logits: torch.Tensor, hidden: torch.Tensor, anchors: torch.Tensor, token_ids: torch.Tensor | None
    ) -> torch.Tensor:
        """Greedy paths.

        Args:
            logits: (N, R, D).
            hidden: (N, R, H), the final hidden states that the logits were made of.
            anchors: token ids, int64 (N,).
            token_ids: target ids (D,) of the columns of `logits`; None where they are the ids.

        Returns:
            int64 (N, R).
        """
        columns = len(self.successor_codebook) if token_ids is None else logits.shape[-1]
        unary, candidates = logits[..., :columns].topk(min(self.top_k, columns, logits.shape[-1]), dim=-1)  # (N, R, k)
        candidates = candidates if token_ids is None else token_ids[candidates]
        gates = self.hidden_projection(hidden, BLOCK).to(logits.dtype)  # (N, R, rank)
        successors = self.successor_codebook[candidates].to(logits.dtype)  # (N, R, k, rank)
        previous, path = anchors, []
        for row in range(logits.shape[1]):
            wanted = self.predecessor_codebook[previous].to(logits.dtype) * gates[:, row]  # (N, rank)
            scores = unary[:, row] + (successors[:, row] @ wanted[..., None])[..., 0]  # (N, k)
            previous = candidates[:, row].gather(-1, scores.argmax(-1, keepdim=True))[:, 0]
            path.append(previous)
        return torch.stack(path, dim=1)
