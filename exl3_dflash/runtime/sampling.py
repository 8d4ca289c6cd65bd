"""Draw tokens from the target's logits, one by one or along a verified draft, with the same distribution.

For each position the distribution is: repetition penalty over the true prefix, then division by the temperature,
softmax, top-k, top-p and min-p in this order. Plain decoding draws once per token. Verification of a draft d_1..d_m
draws at position k only if d_1..d_{k-1} were drawn before it, and goes on while the draw equals the draft:

    logits (m+1, V) --draw--> t_1 == d_1? --draw--> t_2 == d_2? ... t_{n+1} != d_{n+1}: emit t_1..t_{n+1}

Every emitted token is therefore a draw from the target given its true prefix, and exactly one uniform number is used
per emitted token: drafting changes neither the distribution nor, with a seed, the text (numerical near-ties aside).
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.runtime.engine import SamplingSettings


def check_finite(peaks: torch.Tensor, model: str) -> None:
    """Refuse logits of `model` ("target" or "drafter") whose rows' largest values, peaks (...), are not all finite.

    NaN wins every torch.max, so the peaks stand for all values but -inf. A drafter's NaN would cost no correctness,
    only all acceptance, in silence.
    """
    if not bool(torch.isfinite(peaks).all()):
        raise Exl3DflashError(
            f"the {model} produced non-finite logits",
            expected="finite numbers",
            fix=f"run with --dtype float32 or bfloat16, or check the {model}'s files",
        )


def penalized(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """logits (V,) with the repetition penalty on every token of seen (V,) bool."""
    scaled = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(seen, scaled, logits)


def filtered_probabilities(logits: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """logits (V,), penalty applied, to probabilities (V,) float64 that sum to 1, for a temperature above 0."""
    probabilities = torch.softmax(logits.double() / settings.temperature, dim=-1)
    if 0 < settings.top_k < len(probabilities):
        kept = probabilities.topk(settings.top_k)
        probabilities = torch.zeros_like(probabilities).scatter_(0, kept.indices, kept.values)
    if settings.top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        before = ordered.cumsum(0) - ordered
        probabilities[order[before >= settings.top_p * ordered.sum()]] = 0
    if settings.min_p > 0:
        probabilities[probabilities < settings.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


class Sampler:
    """The drawing side of one request: settings, the random stream and which tokens were seen.

    Args:
        settings: checked sampling settings.
        prompt: ids (T,) of the prompt, which the repetition penalty counts.
    """

    def __init__(self, settings: SamplingSettings, prompt: Sequence[int]) -> None:
        self._settings = settings
        self._random = random.Random(settings.seed)
        self._history = list(prompt)
        self._seen: torch.Tensor | None = None

    def sample(self, logits: torch.Tensor) -> int:
        """Draw the next token from logits (V,) and remember it as seen.

        Raises:
            Exl3DflashError: the logits are not finite.
        """
        logits = self._with_penalty(logits)
        peak, best = logits.max(-1)
        check_finite(peak, "target")
        token = int(best) if self._settings.greedy else self._draw(filtered_probabilities(logits, self._settings))
        self._remember(token)
        return token

    def verify(self, logits: torch.Tensor, draft: Sequence[int]) -> list[int]:
        """Tokens that logits (m+1, V) give after a draft of m tokens: the accepted ones and one more, 1 to m+1 tokens.

        Raises:
            Exl3DflashError: the logits are not finite.
        """
        assert len(logits) == len(draft) + 1
        if self._settings.greedy and self._settings.repetition_penalty == 1:
            return self._verify_greedy(logits, draft)
        tokens = [self.sample(logits[0])]
        while len(tokens) <= len(draft) and tokens[-1] == draft[len(tokens) - 1]:
            tokens.append(self.sample(logits[len(tokens)]))
        return tokens

    def _verify_greedy(self, logits: torch.Tensor, draft: Sequence[int]) -> list[int]:
        """All argmaxes at once: one transfer from the device per step."""
        peaks, best = logits.max(-1)
        choices = best.tolist()
        accepted = next((k for k, token in enumerate(draft) if token != choices[k]), len(draft))
        check_finite(peaks[: accepted + 1], "target")
        return choices[: accepted + 1]

    def _with_penalty(self, logits: torch.Tensor) -> torch.Tensor:
        if self._settings.repetition_penalty == 1:
            return logits
        if self._seen is None:
            self._seen = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
            self._seen[torch.tensor(self._history, dtype=torch.int64, device=logits.device)] = True
        return penalized(logits, self._seen, self._settings.repetition_penalty)

    def _remember(self, token: int) -> None:
        if self._seen is not None:
            self._seen[token] = True

    def _draw(self, probabilities: torch.Tensor) -> int:
        """Inverse of the cumulative distribution at one uniform number: a token of probability 0 is never drawn."""
        cumulative = probabilities.cumsum(0)
        point = torch.tensor([self._random.random()], dtype=torch.float64, device=cumulative.device) * cumulative[-1]
        last = int(probabilities.nonzero()[-1])
        return min(int(torch.searchsorted(cumulative, point, right=True)), last)
