"""The division of a budget: against all plans there are, within the budget, monotone, and grouped as it must be."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from exl3_dflash.conversion.allocation import PLAN_RATES, BitGroup, allocate, bit_groups, plan_rates

BLOCK = 128 * 128


def falling_costs(scale: float, wobble: list[float]) -> dict[float, float]:
    """Costs that fall with every rate, not always convexly."""
    total, costs = 0.0, {}
    for rate, extra in zip(reversed(PLAN_RATES), wobble, strict=True):
        total += scale * (4.0**-rate + extra)
        costs[rate] = total
    return costs


group_lists = st.lists(
    st.tuples(
        st.integers(1, 9),
        st.floats(0.01, 100.0),
        st.lists(st.floats(1e-4, 0.1), min_size=len(PLAN_RATES), max_size=len(PLAN_RATES)),
    ),
    min_size=1,
    max_size=4,
).map(
    lambda rows: [
        BitGroup((f"group{index}",), blocks * BLOCK, falling_costs(scale, wobble))
        for index, (blocks, scale, wobble) in enumerate(rows)
    ]
)


def cost(groups: list[BitGroup], bits: dict[str, float]) -> float:
    return sum(group.costs[bits[group.names[0]]] for group in groups)


def mean(groups: list[BitGroup], bits: dict[str, float]) -> float:
    return sum(g.weights * bits[g.names[0]] for g in groups) / sum(g.weights for g in groups)


@settings(max_examples=30, deadline=None)
@given(groups=group_lists, budget=st.floats(1.0, 8.0))
def test_no_plan_is_cheaper(groups: list[BitGroup], budget: float) -> None:
    chosen = allocate(groups, budget)
    plans = itertools.product(PLAN_RATES, repeat=len(groups))
    named = (dict(zip((group.names[0] for group in groups), plan, strict=True)) for plan in plans)
    cheapest = min(cost(groups, plan) for plan in named if mean(groups, plan) <= budget)
    assert cost(groups, chosen) == pytest.approx(cheapest, rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(groups=group_lists, budgets=st.tuples(st.floats(1.0, 8.0), st.floats(1.0, 8.0)))
def test_budgets_are_kept_used_and_monotone(groups: list[BitGroup], budgets: tuple[float, float]) -> None:
    costs = []
    for budget in sorted(budgets):
        chosen = allocate(groups, budget)
        used = mean(groups, chosen)
        assert used <= budget + 1e-9
        left = (budget - used) * sum(group.weights for group in groups)
        for group in groups:
            higher = [rate for rate in PLAN_RATES if rate > chosen[group.names[0]]]
            if higher:
                assert left < (higher[0] - chosen[group.names[0]]) * group.weights + 1e-6
        costs.append(cost(groups, chosen))
    assert costs[1] <= costs[0]


def lower_bound(groups: list[BitGroup], budget: float) -> float:
    """No plan within the budget costs less: the best Lagrangian bound over many prices of a bit."""
    capacity = budget * sum(group.weights for group in groups)

    def bound(price: float) -> float:
        each = (min(cost + price * rate * group.weights for rate, cost in group.costs.items()) for group in groups)
        return sum(each) - price * capacity

    return max(bound(2.0 ** (step / 10)) for step in range(-150, 50))


def test_a_real_size_is_solved_to_the_bound() -> None:
    """33 groups of the sizes of an 8-layer drafter."""
    layer = [5120 * 6144, 4096 * 5120, 10240 * 17408, 17408 * 5120]
    sizes = [25600 * 5120, *(layer * 8)]
    groups = [
        BitGroup((str(index),), size, {rate: (1 + index % 5) * size * 4.0**-rate for rate in PLAN_RATES})
        for index, size in enumerate(sizes)
    ]
    chosen = allocate(groups, 3.0)
    assert mean(groups, chosen) <= 3.0
    assert lower_bound(groups, 3.0) <= cost(groups, chosen) <= 1.01 * lower_bound(groups, 3.0)
    assert cost(groups, chosen) < 0.95 * cost(groups, {group.names[0]: 3 for group in groups})


def test_a_group_with_one_rate_keeps_it() -> None:
    groups = [
        BitGroup(("fixed",), BLOCK, {2.5: 1.0}),
        BitGroup(("free",), BLOCK, {rate: 4.0**-rate for rate in PLAN_RATES}),
    ]
    assert allocate(groups, 3.0) == {"fixed": 2.5, "free": 3.5}


def test_groups_are_those_that_exllamav3_fuses() -> None:
    layers = [f"layers.{layer}.{part}" for layer in (0, 1) for part in ("self_attn.q_proj", "self_attn.k_proj")]
    names = ["fc", *layers, "layers.0.self_attn.v_proj", "layers.0.mlp.gate_proj", "layers.0.mlp.up_proj", "other.fc"]
    assert bit_groups(names) == [
        ("fc",),
        ("layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj", "layers.0.self_attn.v_proj"),
        ("layers.1.self_attn.q_proj", "layers.1.self_attn.k_proj"),
        ("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"),
        ("other.fc",),
    ]


def test_half_rates_need_mul1() -> None:
    assert plan_rates("mul1") == PLAN_RATES
    assert all(rate == int(rate) for rate in plan_rates("mcg"))
