"""How the demo pair is trained: the target on chats of the grammar, then the drafter on the target's greedy choices.

Target. Every row is one chat, cut at the row's length. A short start on the kinds that copy made-up words makes it
read the question (on the whole mixture it would first remember questions instead). Then single turns of all kinds, and
at the end a mixture with rows up to the whole position range, so that chats of several turns work. Cross-entropy on
the answers, a tenth of it on everything else.

Drafter. Rows are chats of the grammar again; anchors are positions of the answers. The label of draft token k is the
target's greedy token after the true prefix. It counts as long as the text itself followed the target's greedy choice up
to k-1 (then the block's true continuation is known up to k), which gives valid labels without generating anything.
Draft token k is weighted with exp(-(k-1)/4), because a token only counts if all before it were right.

Both use Muon (orthogonalized momentum) for matrices and AdamW for the rest: AdamW alone was far behind on this budget.
Everything is seeded and single-threaded by default, so one machine with one torch version gives the same weights again.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from demo_grammar import Chat, sample_chat
from demo_network import (
    ASSISTANT,
    BLOCK_SIZE,
    END,
    END_OF_TEXT,
    MASK,
    SYSTEM,
    TAP_LAYERS,
    USER,
    DrafterNetwork,
    TargetNetwork,
)
from torch import Tensor, nn
from torch.nn import functional

ROLE_TOKENS = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}
QUESTION_WEIGHT = 0.1
POSITION_DECAY = 4.0
LogLine = Callable[[str], None]


@dataclass(frozen=True)
class Phase:
    """Some training steps with rows of one size and chats of so many turns; `kinds` limits the last turn's kind."""

    steps: int
    rows: int
    tokens: int
    turns: int
    kinds: tuple[str, ...] = ()


COPYING = ("spelling", "greetings", "stories")
Stages = tuple[tuple[Phase, ...], ...]
TARGET_STAGES = (
    (Phase(170, 16, 128, 1, COPYING),),
    (Phase(680, 10, 224, 1),),
    (Phase(200, 10, 224, 1), Phase(170, 5, 448, 2), Phase(60, 2, 1024, 6)),
)
DRAFTER_STAGES = ((Phase(550, 8, 256, 2), Phase(90, 4, 512, 3), Phase(30, 2, 1024, 6)),)
ANCHORS_PER_TOKEN = 1 / 8  # of a row
ANCHOR_DRAWS = 2


@dataclass(frozen=True)
class Batch:
    """Token rows: ids (R, S) and whether each token belongs to an answer (R, S)."""

    ids: Tensor
    answer: Tensor


def encode_chat(chat: Chat) -> tuple[list[int], list[bool]]:
    """Ids of a chat under the pair's chat template, and which of them the assistant writes."""
    ids: list[int] = []
    answer: list[bool] = []
    for message in chat.messages:
        text = list(message["content"].encode())
        written = message["role"] == "assistant"
        ids += [ROLE_TOKENS[message["role"]], *text, END]
        answer += [False] + [written] * (len(text) + 1)
    return ids, answer


def sample_batch(rng: random.Random, phase: Phase) -> Batch:
    """Rows of training chats, cut or padded to the phase's length."""
    ids = torch.full((phase.rows, phase.tokens), END_OF_TEXT)
    answer = torch.zeros(phase.rows, phase.tokens, dtype=torch.bool)
    for row in range(phase.rows):
        kind = rng.choice(phase.kinds) if phase.kinds else None
        chat_ids, chat_answer = encode_chat(sample_chat(rng, phase.turns, held_out=False, last_kind=kind))
        length = min(phase.tokens, len(chat_ids))
        ids[row, :length] = torch.tensor(chat_ids[:length])
        answer[row, :length] = torch.tensor(chat_answer[:length])
    return Batch(ids, answer)


class Optimizers:
    """Muon for matrices (AdamW where their rate is None) and AdamW for the rest, both on one trapezoidal schedule."""

    def __init__(
        self, model: nn.Module, steps: int, matrix_rate: float | None, other_rate: float, not_matrices: set[str]
    ) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            (matrices if parameter.ndim == 2 and name not in not_matrices else others).append(parameter)
        self._parameters = matrices + others
        adam = torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.95), weight_decay=0.0)
        if matrix_rate is None:
            adam.add_param_group({"params": matrices, "weight_decay": 0.01})
        self._optimizers: list[torch.optim.Optimizer] = [adam]
        if matrix_rate is not None:
            self._optimizers.append(
                torch.optim.Muon(matrices, lr=matrix_rate, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original")
            )
        warm, hold = max(1, steps // 30), steps * 2 // 5

        def rate(step: int) -> float:
            return min(1.0, (step + 1) / warm, max(0.02, (steps - step) / (steps - hold)))

        self._schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in self._optimizers]

    def step(self, loss: Tensor) -> None:
        """Backward, clip, update."""
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()


def count_steps(stages: Stages) -> int:
    """Training steps of all stages."""
    return sum(phase.steps for stage in stages for phase in stage)


def run_stages(rng: random.Random, stages: Stages) -> Iterator[tuple[int, Batch]]:
    """Numbered batches: stage after stage, the phases of a stage in random order."""
    step = 0
    for stage in stages:
        plan = [phase for phase in stage for _ in range(phase.steps)]
        rng.shuffle(plan)
        for phase in plan:
            yield step, sample_batch(rng, phase)
            step += 1


def train_target(seed: int, stages: Stages, log: LogLine) -> TargetNetwork:
    """Train the target from scratch."""
    torch.manual_seed(seed)
    model = TargetNetwork()
    steps = count_steps(stages)
    optimizers = Optimizers(model, steps, 0.01, 0.005, {"embedding"})
    for step, batch in run_stages(random.Random(f"target {seed}"), stages):
        logits, _ = model(batch.ids[:, :-1])
        losses = functional.cross_entropy(logits.flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
        answer = batch.answer[:, 1:].flatten()
        weights = torch.where(answer, 1.0, QUESTION_WEIGHT)
        optimizers.step((losses * weights).sum() / weights.sum())
        if step % 50 == 0 or step == steps - 1:
            log(f"target step {step}/{steps}: {losses[answer].mean().item():.3f} nats per answer byte")
    return model


def choose_anchors(batch: Batch, count: int, generator: torch.Generator) -> Tensor:
    """Random positions (R, count) inside answers, with a whole block of tokens after them."""
    usable = batch.answer.clone()
    usable[:, -BLOCK_SIZE + 1 :] = False
    usable[:, 1:] |= ~usable.any(1, keepdim=True)  # a row without answers trains nothing: all its labels are invalid
    return torch.multinomial(usable.float(), count, replacement=True, generator=generator)


def block_labels(batch: Batch, logits: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
    """The target's greedy tokens at a+1..a+B-1 and which of them are known to be right, (R, N, B-1) each."""
    offsets = torch.arange(BLOCK_SIZE - 1)
    rows = torch.arange(len(anchors))[:, None, None]
    positions = anchors[:, :, None] + offsets  # row a+k-1 of the logits predicts the token at a+k
    positions = positions.clamp(max=batch.ids.shape[1] - 2)
    labels = logits.argmax(-1)[rows, positions]
    followed = (labels == batch.ids[rows, positions + 1]) & (labels != END)
    known = torch.cat([torch.ones_like(followed[..., :1]), followed[..., :-1]], -1).long().cumprod(-1).bool()
    return labels, known & batch.answer[rows, positions + 1]


def lengthened(stages: Stages, times: int) -> Stages:
    """The same phases with so many times the steps."""
    return tuple(tuple(replace(phase, steps=phase.steps * times) for phase in stage) for stage in stages)


def train_drafter(
    target: TargetNetwork, seed: int, stages: Stages, log: LogLine, matrix_rate: float | None = 0.04
) -> DrafterNetwork:
    """Train the drafter against a finished target; each batch serves for `ANCHOR_DRAWS` steps with other anchors.

    With `matrix_rate` None its matrices are trained with AdamW as well.
    """
    torch.manual_seed(seed + 1)
    generator = torch.Generator().manual_seed(seed + 1)
    model = DrafterNetwork()
    with torch.no_grad():
        model.norm.copy_(target.norm)  # the head that it must suit is the target's
    batches = count_steps(stages)
    optimizers = Optimizers(model, batches * ANCHOR_DRAWS, matrix_rate, 0.003, set())
    for number, batch in run_stages(random.Random(f"drafter {seed}"), stages):
        with torch.no_grad():
            target_logits, outputs = target(batch.ids)
        taps = torch.cat([outputs[layer] for layer in TAP_LAYERS], -1)
        for _ in range(ANCHOR_DRAWS):
            anchors = choose_anchors(batch, int(batch.ids.shape[1] * ANCHORS_PER_TOKEN), generator)
            loss, accept_length = drafter_loss(model, target, batch, target_logits, taps, anchors)
            optimizers.step(loss)
        if number % 25 == 0 or number == batches - 1:
            log(f"drafter batch {number}/{batches}: loss {loss.item():.3f}, accept length {accept_length:.2f}")
    return model


def drafter_loss(
    model: DrafterNetwork, target: TargetNetwork, batch: Batch, target_logits: Tensor, taps: Tensor, anchors: Tensor
) -> tuple[Tensor, float]:
    """Weighted cross-entropy of the drafts from `anchors (R, N)`, and the accept length as far as labels are known."""
    labels, known = block_labels(batch, target_logits, anchors)
    first = target.embedding.detach()[batch.ids.gather(1, anchors)][:, :, None]  # (R, N, 1, H)
    masks = target.embedding.detach()[MASK].expand(*anchors.shape, BLOCK_SIZE - 1, -1)
    logits = target.head(model(taps, anchors, torch.cat([first, masks], 2))[:, :, 1:])
    losses = functional.cross_entropy(logits.flatten(0, 2), labels.flatten(), reduction="none").view_as(labels)
    weights = known * torch.exp(-torch.arange(BLOCK_SIZE - 1) / POSITION_DECAY)
    accepted = ((logits.argmax(-1) == labels) & known).long().cumprod(-1).sum() / known[..., 0].sum().clamp(min=1)
    return (losses * weights).sum() / weights.sum(), 1 + accepted.item()
