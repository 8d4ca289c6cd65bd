"""Output-side Hessians against the gradients torch.autograd gives for explicit variables at the outputs, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from exl3_dflash.calibration import fisher
from exl3_dflash.calibration.anchors import sample_anchors
from exl3_dflash.calibration.capture import Calibration, calibrate
from exl3_dflash.calibration.fisher import FisherSettings, draw, survival_weights
from exl3_dflash.calibration.rowset import TokenRow
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.drafter.model import DrafterModel
from exl3_dflash.drafter.modules import TracedLinear
from exl3_dflash.target.load import load_target
from tests.family_models import make_family_drafter
from tests.tiny_models import make_tiny_drafter
from tests.tiny_targets import make_tiny_llama

ANCHORS, LENGTH, BLOCK_SIZE = 5, 40, 4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("pair")
    make_tiny_llama(folder / "target")
    make_tiny_drafter(folder / "drafter", optional=["lm_head.weight"])
    target = load_target(folder / "target", device="cpu", dtype="float32")
    checkpoint = DrafterCheckpoint.open(folder / "drafter")
    return target, checkpoint, DrafterModel.from_checkpoint(checkpoint, dtype=torch.float64)


def text_row(seed: int = 5) -> TokenRow:
    ids = torch.randint(0, 256, (LENGTH,), generator=torch.Generator().manual_seed(seed))
    return TokenRow(ids, 0, "text")


def run(pair, settings: FisherSettings | None, rows: int = 1, seed: int = 3) -> Calibration:
    target, checkpoint, drafter = pair
    return calibrate(
        drafter,
        checkpoint.linears,
        target,
        [text_row(5 + index) for index in range(rows)],
        accept_length=2.0,
        anchors_per_row=ANCHORS,
        fisher=settings,
        seed=seed,
    )


@contextmanager
def variables_at_outputs() -> Iterator[dict[str, list[torch.Tensor]]]:
    """Adds a zero variable to the outputs of every linear, and lists them by name."""
    variables: dict[str, list[torch.Tensor]] = {}

    def forward(self: TracedLinear, x: torch.Tensor, stream: str) -> torch.Tensor:
        outputs = functional.linear(x.to(self.weight.dtype), self.weight, self.bias)
        variable = torch.zeros_like(outputs, requires_grad=True)
        variables.setdefault(self.name, []).append(variable)
        return outputs + variable

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TracedLinear, "forward", forward)
        yield variables


def logits_with_variables(pair) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]], torch.Tensor]:
    """Draft logits (N, B - 1, V) of the row that `run` sees, its variables, and its target tokens (N, B - 1)."""
    target, _, drafter = pair
    row = text_row()
    anchors = sample_anchors(LENGTH, 0, 1, ANCHORS, torch.Generator().manual_seed(3))
    features = target.tap_rows(row.ids, (0, 2, 3), want_logits=True)
    with variables_at_outputs() as variables:
        hidden = drafter.forward_anchors(
            features.taps, drafter.block_embeddings(target, row.ids[anchors]), anchors, chunk=ANCHORS
        )
        logits = drafter.logits(target, hidden[:, 1:])
    greedy = torch.cat([features.logits.argmax(-1), torch.full((BLOCK_SIZE,), -1)])
    return logits, variables, greedy[anchors[:, None] + torch.arange(BLOCK_SIZE - 1)]


def first_label(probabilities: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.full(probabilities.shape[:-1], 7)


def outer_sum(gradient: torch.Tensor) -> torch.Tensor:
    flat = gradient.reshape(-1, gradient.shape[-1])
    return flat.T @ flat


@pytest.mark.parametrize("survival", [False, True])
def test_sums_of_outer_products_of_the_gradients(pair, survival: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fisher, "draw", first_label)
    monkeypatch.setattr(fisher, "LOGIT_CHUNK_ELEMENTS", 2000)
    made = run(pair, FisherSettings(samples=1, survival=survival)).output_hessians
    logits, variables, labels = logits_with_variables(pair)
    weights = survival_weights(logits.argmax(-1), labels) if survival else torch.ones(ANCHORS, BLOCK_SIZE - 1)
    (logits.log_softmax(-1)[..., 7] * weights).sum().backward()
    assert set(made) == set(variables) - {"lm_head"}
    for name, hessian in made.items():
        wanted = sum(outer_sum(variable.grad) for variable in variables[name])  # type: ignore[arg-type]
        rows = sum(len(variable) for variable in variables[name])
        assert hessian.rows == rows, name
        assert (hessian.matrix * rows - wanted).norm() < 1e-5 * wanted.norm(), name


def test_the_mean_over_labels_is_the_fisher_information(pair) -> None:
    """Sum over block rows of J^T (diag p - p p^T) J, exact, against many drawn labels."""
    made = run(pair, FisherSettings(samples=300, survival=False)).output_hessians
    logits, variables, _ = logits_with_variables(pair)
    for name in ("layers.1.mlp.down_proj", "layers.0.self_attn.v_proj"):
        exact = torch.tensor(0.0)
        for row in logits.flatten(0, 1):
            probabilities = row.softmax(-1).detach()
            values, vectors = torch.linalg.eigh(torch.diag(probabilities) - torch.outer(probabilities, probabilities))
            weighted = (vectors * values.clamp_min(0.0).sqrt()).T  # (V, V), one gradient for each line
            parts = torch.autograd.grad(row, variables[name], weighted, retain_graph=True, is_grads_batched=True)
            exact = exact + sum(outer_sum(part) for part in parts)
        hessian = made[name]
        estimate = hessian.matrix.double() * hessian.rows / 300
        assert (estimate - exact).norm() < 0.15 * exact.norm(), name


def test_only_rows_up_to_the_first_wrong_draft_count() -> None:
    drafts = torch.tensor([[1, 2, 3], [1, 0, 3], [0, 2, 3]])
    assert survival_weights(drafts, torch.tensor([[1, 2, 3]] * 3)).tolist() == [[1, 1, 1], [1, 1, 0], [1, 0, 0]]


def test_drawn_labels_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0]).expand(20000, -1)
    drawn = draw(probabilities, torch.Generator().manual_seed(0))
    assert torch.allclose(drawn.bincount(minlength=6) / 20000, probabilities[0], atol=0.02)
    assert set(drawn.unique().tolist()) == {1, 3, 4}


def test_groups_of_anchors_change_neither_the_inputs_nor_the_block_side(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The input side is that of one-sided calibration, context rows are counted once, blocks do not mix."""
    monkeypatch.setattr(fisher, "draw", first_label)
    whole, one_sided = run(pair, FisherSettings(samples=1), rows=2), run(pair, None, rows=2)
    monkeypatch.setattr(fisher, "GROUP_ROWS", 2 * BLOCK_SIZE)
    grouped = run(pair, FisherSettings(samples=1), rows=2)
    for group, hessian in one_sided.hessians.items():
        for other in (whole.hessians[group], grouped.hessians[group]):
            assert (other.rows, other.count) == (hessian.rows, hessian.count)
            torch.testing.assert_close(other.matrix, hessian.matrix, rtol=1e-4, atol=1e-6)
    for name in ("layers.0.self_attn.q_proj", "layers.1.mlp.up_proj", "layers.1.self_attn.o_proj"):
        wanted = whole.output_hessians[name].matrix
        assert (grouped.output_hessians[name].matrix - wanted).norm() < 1e-5 * wanted.norm()
    assert not one_sided.output_hessians


def test_labels_depend_on_the_seed_and_on_nothing_else(pair) -> None:
    torch.manual_seed(11)
    state = torch.get_rng_state()
    first, again, other = (run(pair, FisherSettings(), seed=seed).output_hessians["fc"].matrix for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_drafter_that_scores_with_the_targets_head_after_a_measurement(pair, tmp_path: Path) -> None:
    """No head of its own; rotary tables were made under inference mode, as a measurement makes them."""
    target = pair[0]
    checkpoint = DrafterCheckpoint.open(make_tiny_drafter(tmp_path / "drafter"))
    drafter = DrafterModel.from_checkpoint(checkpoint)
    with torch.inference_mode():
        drafter.extend_context(drafter.new_cache(), torch.zeros(3, 96))
    made = run((target, checkpoint, drafter), FisherSettings())
    assert set(made.output_hessians) == {linear.name for linear in checkpoint.linears}
    assert all(hessian.usable() is None for hessian in made.output_hessians.values())
    assert made.dropped_gradients == 0


def test_gradients_that_are_not_finite_are_dropped_and_counted(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    real: Callable[..., torch.Tensor] = fisher.score_gradients

    def poisoned(*args: object) -> torch.Tensor:
        gradients = real(*args)
        gradients[0, 0] = torch.nan
        return gradients

    monkeypatch.setattr(fisher, "score_gradients", poisoned)
    made = run(pair, FisherSettings())
    assert made.dropped_gradients > 0
    assert all(torch.isfinite(hessian.matrix).all() for hessian in made.output_hessians.values())


@pytest.mark.parametrize("member", ["dflash2", "laguna", "speculators"])
def test_other_members_of_the_family(pair, tmp_path: Path, member: str) -> None:
    """Selectors and heads read the final hidden state and have no output side; everything before them has."""
    checkpoint = DrafterCheckpoint.open(make_family_drafter(tmp_path / member, member))
    made = run((pair[0], checkpoint, DrafterModel.from_checkpoint(checkpoint)), FisherSettings())
    outside = {"candidate_selector.hidden_projection", "lm_head"}
    assert set(made.output_hessians) == {linear.name for linear in checkpoint.linears} - outside
    assert all(hessian.usable() is None for hessian in made.output_hessians.values())
