"""Sampling with real tiny targets: drafted text has the plain distribution and, with a seed, is the plain text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from exl3_dflash.runtime.engine import SamplingSettings, StopSettings
from exl3_dflash.runtime.reference import ReferenceEngine
from exl3_dflash.runtime.sampling import Sampler, filtered_probabilities
from tests.runtime.chi_square import chi_square_p
from tests.runtime.tiny_pairs import MAKERS, TinyPair, make_pair, random_prompts

SAMPLES = 20_000
SETTINGS = {
    "temperature": SamplingSettings(temperature=1, seed=11),
    "top_p_and_top_k": SamplingSettings(temperature=1, top_k=12, top_p=0.9, seed=12),
}


@pytest.fixture(scope="module", params=MAKERS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyPair]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_pair(tmp_path_factory.mktemp("pair"), request.param)
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", SETTINGS)
def test_seeded_text_is_the_plain_text(pair: TinyPair, name: str) -> None:
    """A stronger statement than equal distributions: the same random numbers meet the same probabilities."""
    lengths = []
    for ids in random_prompts(3, 12):
        plain = ReferenceEngine(pair.target)
        engine = ReferenceEngine(pair.target, pair.drafter)
        expected = [t for step in plain.generate(ids, SETTINGS[name], StopSettings(40)) for t in step.token_ids]
        pair.drafter.guide = [*ids, *expected]
        assert [
            t for step in engine.generate(ids, SETTINGS[name], StopSettings(40)) for t in step.token_ids
        ] == expected
        lengths.append(engine.stats.accept_length)
    assert sum(lengths) / len(lengths) > 2


@pytest.mark.parametrize("name", SETTINGS)
def test_verified_draws_follow_the_plain_distribution(pair: TinyPair, name: str) -> None:
    """20,000 draws along a draft verified in one forward, against probabilities from forwards of one token each.

    An outcome is how many draft tokens were accepted and the token after them: its exact probability is a product of
    plain probabilities. The last rows are compared together with all others, so that no row can hide.
    """
    chosen = SETTINGS[name]
    prompt = random_prompts(1, 12, seed=3)[0]
    plain, session = pair.target.new_session(), pair.target.new_session()
    with torch.inference_mode():
        logits = plain.forward(torch.tensor(prompt)).logits[-1]
        draft, rows = [], []
        for _ in range(3):
            rows.append(filtered_probabilities(logits, chosen))
            draft.append(int(logits.argmax()))
            logits = plain.forward(torch.tensor(draft[-1:])).logits[-1]
        rows.append(filtered_probabilities(logits, chosen))
        session.forward(torch.tensor(prompt[:-1]))
        verified = session.forward(torch.tensor([prompt[-1], *draft])).logits
        sampler = Sampler(chosen, prompt)
        outcomes = Counter(tuple(sampler.verify(verified, draft)) for _ in range(SAMPLES))
    counts, probabilities, reached = [], [], 1.0
    for at, row in enumerate(rows):
        for token, probability in enumerate(row.tolist()):
            if at == len(draft) or token != draft[at]:
                counts.append(outcomes[*draft[:at], token])
                probabilities.append(reached * probability)
        reached *= float(row[draft[at]]) if at < len(draft) else 0
    assert sum(counts) == SAMPLES
    assert sum(probabilities) == pytest.approx(1)
    assert chi_square_p(torch.tensor(counts), torch.tensor(probabilities, dtype=torch.float64)) > 1e-3
