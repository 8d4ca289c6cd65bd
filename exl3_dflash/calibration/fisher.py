"""What an error at the output of each linear costs: second moments of the gradient of the draft's own log-likelihood.

What and why. An error e in a linear's outputs moves the draft's distribution p by a divergence of about `e^T G e / 2`,
with `G = E[g g^T]` and g the gradient of `log p(label)` at these outputs, labels drawn from p itself: the Fisher
information. Two labels per block row are drawn by default.

Survival: block row k decides nothing unless every earlier draft of its block was accepted. With `survival` only rows up
to and including the first one that differs from the target's greedy token count.

One backward pass per label sums the gradients of all rows of a group of anchors; since scores of independent rows have
mean zero, cross terms vanish on average, and a context row gets what all its readers contribute. Context and block rows
of a k_proj or v_proj are therefore simply added up.

Memory: the graph of one group of anchors (`GROUP_ROWS` block rows and the context before the last of them), logits in
chunks, and one packed (out, out) matrix per linear. What reads the final hidden state has none: a head's would be
vocabulary squared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from exl3_dflash.calibration.state import PassState, pack_sums, unpack_sums
from exl3_dflash.drafter.checkpoint import LinearSpec
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.drafter.modules import BLOCK, InputCallback, OutputCallback
from exl3_dflash.target.base import Target
from quantize.hessian import Hessian, HessianAccumulator

GROUP_ROWS = 512  # block rows of one backward pass
LOGIT_CHUNK_ELEMENTS = 1 << 24  # 64 MiB of FP32 logits at a time
NO_LABEL = -1


@dataclass(frozen=True)
class FisherSettings:
    """How gradients are sampled: labels drawn per block row, and whether rows behind a rejected draft are left out."""

    samples: int = 2
    survival: bool = True


class OutputHessians(Mapping[str, Hessian]):
    """Output-side Hessians by linear name; each is made a full matrix only when it is asked for, and not kept."""

    def __init__(self, accumulators: Mapping[str, HessianAccumulator]) -> None:
        self._accumulators = accumulators

    def __getitem__(self, name: str) -> Hessian:
        return self._accumulators[name].finish()

    def __iter__(self) -> Iterator[str]:
        return iter(self._accumulators)

    def __len__(self) -> int:
        return len(self._accumulators)

    @property
    def dropped_rows(self) -> int:
        """Gradient rows left out because they were not finite, summed over linears."""
        return sum(accumulator.dropped_rows for accumulator in self._accumulators.values())


class FisherCapture:
    """Accumulates gradients at the outputs of a drafter's linears.

    Args:
        linears: those of the drafter's linears that lead to its final hidden state.
        device: where the sums are kept.
        settings: how gradients are sampled.
        seed: of the labels.
    """

    def __init__(
        self, linears: Iterable[LinearSpec], device: torch.device | str, settings: FisherSettings, seed: int
    ) -> None:
        self._device = device
        self._sums = {linear.name: HessianAccumulator(linear.out_features, device) for linear in linears}
        self._settings = settings
        self._generator = torch.Generator().manual_seed(seed)

    def finish(self) -> OutputHessians:
        """What was accumulated."""
        return OutputHessians(self._sums)

    def state(self) -> PassState:
        """Everything summed so far, and where the labels' generator is."""
        sums = pack_sums("outputs", self._sums)
        return PassState(sums.tensors | {"random.labels": self._generator.get_state()}, sums.facts)

    def restore(self, state: PassState) -> None:
        """Go on from what `state` gave."""
        self._sums = unpack_sums("outputs", state, self._device)
        self._generator.set_state(state.tensors["random.labels"])

    def watch(self, name: str) -> OutputCallback | None:
        """The callback that adds the gradient at the outputs (..., out) of linear `name`, once it is computed."""
        accumulator = self._sums.get(name)
        if accumulator is None:
            return None

        def hook(outputs: torch.Tensor) -> None:
            if not outputs.requires_grad:  # the first linears of the graph: nothing before them is differentiated
                outputs.requires_grad_()
            outputs.register_hook(accumulator.add)

        return hook

    def run_row(
        self,
        drafter: DrafterModel,
        target: Target,
        taps: torch.Tensor,
        greedy: torch.Tensor,
        anchor_ids: torch.Tensor,
        anchors: torch.Tensor,
        see_input: InputCallback,
    ) -> torch.Tensor:
        """Forward and backward over all blocks of one token row.

        Args:
            drafter, target: the pair.
            taps: (S, K * Ht), features of the row.
            greedy: int64 (S,), the target's greedy token after each position.
            anchor_ids: int64 (N,), tokens at the anchors.
            anchors: int64 (N,), positions.
            see_input: also sees every linear's input, each once.

        Returns:
            Final hidden states (N, B, H), groups of anchors from the last to the first, detached.
        """
        rows = drafter.config.block_size
        labels = self._labels(greedy, anchors, rows).to(drafter.device)
        hidden: list[torch.Tensor] = []
        for chosen in anchors.argsort(descending=True).split(max(1, GROUP_ROWS // rows)):
            positions = anchors[chosen]
            context = taps if not hidden else taps[: int(positions.max())]
            skip_context = bool(hidden)  # seen with the first group already

            def see(name: str, stream: str, x: torch.Tensor, skip: bool = skip_context) -> OutputCallback | None:
                if stream == BLOCK or not skip:
                    see_input(name, stream, x.detach())
                return self.watch(name)

            with torch.enable_grad():
                embeddings = drafter.block_embeddings(target, anchor_ids[chosen])
                with drafter.observe(see):
                    result = drafter.forward_anchors(context, embeddings, positions, chunk=len(chosen))
                self._backward(drafter, target, result, anchor_ids[chosen], labels[chosen.to(labels.device)])
            hidden.append(result.detach())
        return torch.cat(hidden)

    @staticmethod
    def _labels(greedy: torch.Tensor, anchors: torch.Tensor, rows: int) -> torch.Tensor:
        """The target's tokens for rows 1..B-1 of each block, (N, B - 1); NO_LABEL past the end of the row."""
        padded = torch.nn.functional.pad(greedy.cpu(), (0, rows), value=NO_LABEL)
        return padded[anchors[:, None] + torch.arange(rows - 1)]

    def _backward(
        self,
        drafter: DrafterModel,
        target: Target,
        hidden: torch.Tensor,
        anchor_ids: torch.Tensor,
        labels: torch.Tensor,
    ) -> None:
        inputs = (hidden.detach(), anchor_ids, labels)
        gradients = score_gradients(drafter, target, *inputs, self._settings, self._generator)
        for index, gradient in enumerate(gradients):
            hidden.backward(gradient, retain_graph=index + 1 < len(gradients))


def score_gradients(
    drafter: DrafterModel,
    target: Target,
    hidden: torch.Tensor,
    anchor_ids: torch.Tensor,
    labels: torch.Tensor,
    settings: FisherSettings,
    generator: torch.Generator,
) -> torch.Tensor:
    """Gradients of the summed log-likelihood of drawn labels at the final hidden states.

    Args:
        drafter, target: for logits and proposals.
        hidden: (N, B, H), detached; row 0 (the anchor's) predicts nothing.
        anchor_ids: int64 (N,), tokens at the anchors.
        labels: int64 (N, B - 1), the target's tokens.
        settings: samples, survival.
        generator: a CPU generator for the labels.

    Returns:
        (samples, N, B, H).
    """
    gradients = hidden.new_zeros(settings.samples, *hidden.shape)
    chunk = max(1, LOGIT_CHUNK_ELEMENTS // ((hidden.shape[1] - 1) * target.facts.head_size))
    for start in range(0, len(hidden), chunk):
        chosen = slice(start, start + chunk)
        with torch.enable_grad():
            rows = hidden[chosen, 1:].detach().requires_grad_()
            proposal = drafter.propose(target, anchor_ids[chosen], rows)
            log_probs = proposal.logits.log_softmax(-1)  # (n, B - 1, D)
        weights = torch.ones_like(labels[chosen])
        if settings.survival:
            weights = survival_weights(proposal.ids.to(labels.device), labels[chosen])
        for index in range(settings.samples):
            drawn = draw(log_probs.detach().exp(), generator)
            with torch.enable_grad():
                score = (log_probs.gather(-1, drawn[..., None])[..., 0] * weights.to(log_probs.device)).sum()
            (gradient,) = torch.autograd.grad(score, rows, retain_graph=index + 1 < settings.samples)
            gradients[index, chosen, 1:] = gradient
    return gradients


def survival_weights(drafts: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """1 for every row of `drafts (n, B - 1)` whose earlier drafts all equal `labels (n, B - 1)`, else 0."""
    accepted = (drafts == labels).long().cumprod(-1)
    return torch.cat([torch.ones_like(accepted[:, :1]), accepted[:, :-1]], dim=1)


def draw(probabilities: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One label per row of probabilities (..., V), by inversion, so that any device draws from a CPU generator."""
    cumulative = probabilities.cumsum(-1)
    uniform = torch.rand(probabilities.shape[:-1], generator=generator).to(cumulative)[..., None]
    drawn = torch.searchsorted(cumulative, uniform * cumulative[..., -1:], right=True)[..., 0]
    return drawn.clamp(max=probabilities.shape[-1] - 1)
