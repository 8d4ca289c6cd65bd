"""Bits where they count: the division of a size budget among groups of tensors that costs least.

What it computes. Every group (tensors that must share their bits) has a size and a predicted cost at each rate; the sum
of costs is minimized over all choices of one rate per group whose mean, weighted by size, does not exceed the budget.
Exactly, by dynamic programming over the budget: `best[c]` is the least cost of the groups so far within c units of
size, and a unit is the greatest common divisor of all sizes, at most the 128 x 128 block of the format times half a
bit. For a drafter of 8 layers that is 33 groups times some 10^6 units. More budget never costs more, since every choice
stays possible; and what is left over is less than the next step of any group that can still improve.

Groups (`bit_groups`): ExLlamaV3 runs q, k and v, and gate and up, as one kernel where their bits agree, and separately
where they do not, so those share their bits here. It allocates in the same groups itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

PLAN_RATES = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8)
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}


@dataclass(frozen=True)
class BitGroup:
    """Tensors that get the same bits.

    Attributes:
        names: of the linears.
        weights: stored weights, padding included.
        costs: predicted cost by rate; the keys are the rates to choose from.
    """

    names: tuple[str, ...]
    weights: int
    costs: Mapping[float, float]


def bit_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Linears by the groups that share bits, in the order of their first members."""
    groups: dict[str, list[str]] = {}
    for name in names:
        parent, _, kind = name.rpartition(".")
        groups.setdefault(f"{parent}.{FUSED.get(kind, kind)}", []).append(name)
    return [tuple(members) for members in groups.values()]


def plan_rates(codebook: str) -> tuple[float, ...]:
    """The rates that a plan chooses from; half rates exist with mul1 only."""
    return tuple(rate for rate in PLAN_RATES if codebook == "mul1" or rate == int(rate))


def allocate(groups: Sequence[BitGroup], bits: float) -> dict[str, float]:
    """The cheapest rate of every group within a mean of `bits` per weight.

    Args:
        groups: with costs that fall as the rate rises.
        bits: the budget; at least the mean of the groups' lowest rates.

    Returns:
        Bits by linear.
    """
    half_bits = [{rate: round(2 * rate) * group.weights for rate in group.costs} for group in groups]
    unit = math.gcd(*(size for sizes in half_bits for size in sizes.values())) if groups else 1
    capacity = math.floor(2 * bits * sum(group.weights for group in groups) / unit + 1e-9)
    best = np.zeros(capacity + 1)
    choices = []
    for group, sizes in zip(groups, half_bits, strict=True):
        total, choice = np.full(capacity + 1, np.inf), np.zeros(capacity + 1, np.int8)
        for index, rate in enumerate(sorted(group.costs)):
            size = sizes[rate] // unit
            if size > capacity:
                break
            candidate = best[: capacity + 1 - size] + group.costs[rate]
            better = candidate < total[size:]
            total[size:][better] = candidate[better]
            choice[size:][better] = index
        best = total
        choices.append(choice)
    assert np.isfinite(best[capacity]), "a budget below the lowest rates"
    return _read_back(groups, choices, capacity, unit)


def _read_back(groups: Sequence[BitGroup], choices: Sequence[np.ndarray], capacity: int, unit: int) -> dict[str, float]:
    """The choices that led to the best total, from the last group to the first."""
    chosen: dict[str, float] = {}
    for group, choice in zip(reversed(groups), reversed(choices), strict=True):
        rate = sorted(group.costs)[choice[capacity]]
        capacity -= round(2 * rate) * group.weights // unit
        chosen |= dict.fromkeys(group.names, rate)
    return chosen
