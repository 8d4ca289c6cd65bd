"""Sessions: any mixture of forwards and rollbacks gives what decoding the same tokens one by one gives (FP32)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target import session as session_module
from exl3_dflash.target.base import TapRows
from exl3_dflash.target.cache import RewindableCache
from exl3_dflash.target.probe import continues_in_chunks
from exl3_dflash.target.session import TransformersSession
from exl3_dflash.target.transformers_target import TransformersTarget
from tests.target.families import MakeTarget

TOKENS = torch.randint(0, 256, (48,), generator=torch.Generator().manual_seed(5))
OTHER = torch.tensor([33, 34, 35, 36, 37, 38, 39])
TAPS = (3, 0)
TOLERANCE = 2e-4  # FP32 rounding of the chunked and the one-token form of a recurrent layer; faults are above 1e-2

# Every way a state is kept: full attention, sliding windows of 7 tokens, gated delta, convolutions, Mamba, both at
# once.
FAMILIES = ["llama", "mistral", "gemma3_text", "gpt_oss", "qwen3_next", "qwen3_5_text", "lfm2", "mamba", "falcon_h1"]
RECURRENT = ["qwen3_next", "qwen3_5_text", "lfm2", "mamba", "falcon_h1"]


def decode_one_by_one(target: TransformersTarget, tokens: torch.Tensor) -> TapRows:
    """The reference: a fresh session fed with one token at a time."""
    session = target.new_session()
    rows = [session.forward(token[None], TAPS) for token in tokens]
    logits = [row.logits for row in rows if row.logits is not None]
    return TapRows(taps=torch.cat([row.taps for row in rows]), logits=torch.cat(logits))


def assert_same(row: TapRows, reference: TapRows, where: slice) -> None:
    assert row.logits is not None
    assert reference.logits is not None
    for values, wanted in ((row.taps, reference.taps[where]), (row.logits, reference.logits[where])):
        assert values.shape == wanted.shape
        assert (values - wanted).abs().max() <= TOLERANCE * wanted.abs().max()


def replay(target: TransformersTarget, session: TransformersSession, script: Sequence[int | slice]) -> None:
    """Run a script on TOKENS: a slice is a forward (which is checked), an int is a rollback to that length."""
    reference = decode_one_by_one(target, TOKENS)
    for step in script:
        if isinstance(step, int):
            session.rollback(step)
            assert session.length == step
        else:
            assert_same(session.forward(TOKENS[step], TAPS), reference, step)
            assert session.ids == TOKENS[: step.stop].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_forwards_of_any_size_equal_one_token_decoding(tiny_target: MakeTarget, family: str) -> None:
    target = tiny_target(family)
    replay(target, target.new_session(), [slice(0, 1), slice(1, 9), slice(9, 10), slice(10, 11), slice(11, 48)])
    reference = decode_one_by_one(target, TOKENS)
    assert_same(target.tap_rows(TOKENS, TAPS, want_logits=True), reference, slice(0, 48))


@pytest.mark.parametrize("family", FAMILIES)
def test_rollback_equals_a_fresh_session(tiny_target: MakeTarget, family: str) -> None:
    """Rejected drafts (a few tokens back), nothing accepted, far back past several windows, and to the start."""
    target = tiny_target(family)
    assert target.new_cache().rewindable, "would start over at every rollback"
    replay(
        target,
        target.new_session(),
        [
            *(slice(0, 17), slice(17, 25), 20, slice(20, 28), 18, slice(18, 26), 17, slice(17, 25), 24),
            *(slice(24, 28), 21, slice(21, 29), 29, slice(29, 37), 36, 30),
            *(slice(30, 31), slice(31, 39), 31, slice(31, 39), 9, slice(9, 26), 2, slice(2, 3), 0, slice(0, 48)),
            *(47, slice(47, 48)),
        ],
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_rolled_back_tokens_leave_no_trace(tiny_target: MakeTarget, family: str) -> None:
    target = tiny_target(family)
    reference = decode_one_by_one(target, TOKENS)
    session = target.new_session()
    session.forward(TOKENS[:12])
    for length in (12, 10, 1, 0):
        session.forward(OTHER)
        session.rollback(length)
        assert_same(session.forward(TOKENS[length:20], TAPS), reference, slice(length, 20))
        session.rollback(12)
    for part in (OTHER[:3], OTHER[3:]):  # two forwards, so that a state is kept between them
        session.forward(part)
    session.rollback(12)
    session.forward(TOKENS[12:20])
    session.rollback(17)
    assert_same(session.forward(TOKENS[17:24], TAPS), reference, slice(17, 24))


@pytest.mark.parametrize("family", ["llama", "qwen3_next", "mamba"])
def test_a_long_prompt_runs_in_chunks(tiny_target: MakeTarget, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "CHUNK_TOKENS", 5)
    target = tiny_target(family)
    replay(target, target.new_session(), [slice(0, 33), 14, slice(14, 48), 46, slice(46, 48), 3, slice(3, 9)])


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_a_cache_that_cannot_rewind_starts_over(
    tiny_target: MakeTarget, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(family)
    session = target.new_session()
    monkeypatch.setattr(session._cache, "rewindable", False)
    replay(target, session, [slice(0, 17), 11, slice(11, 20)])


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_an_interrupted_forward_changes_nothing(tiny_target: MakeTarget, family: str) -> None:
    """Ctrl-C in the middle of the layers leaves some of them one step ahead; the session must not use that cache."""
    target = tiny_target(family)
    session = target.new_session()
    session.forward(TOKENS[:11])

    def interrupt(*inputs: object) -> None:
        raise KeyboardInterrupt

    handle = target.model.get_decoder().layers[2].register_forward_pre_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            session.forward(TOKENS[11:15])
    finally:
        handle.remove()
    assert session.ids == TOKENS[:11].tolist()
    replay(target, session, [slice(11, 15), 12, slice(12, 20)])


def test_logits_only_for_the_rows_that_are_read(tiny_target: MakeTarget) -> None:
    target = tiny_target("llama")
    session = target.new_session()
    everything = session.forward(TOKENS[:8]).logits
    session.rollback(0)
    last = session.forward(TOKENS[:8], logit_rows=1)
    session.rollback(0)
    assert everything is not None
    assert everything.shape == (8, 288)
    assert last.taps.shape == (8, 0)
    assert last.logits is not None
    assert torch.allclose(last.logits, everything[-1:], atol=1e-5)
    assert session.forward(TOKENS[:8], TAPS, logit_rows=0).logits is None


@pytest.mark.parametrize("length", [-1, 4])
def test_rollback_outside_the_session_is_refused(tiny_target: MakeTarget, length: int) -> None:
    session = tiny_target("llama").new_session()
    session.forward(TOKENS[:3])
    with pytest.raises(Exl3DflashError, match=f"rollback to {length} tokens; expected 0 to 3"):
        session.rollback(length)


def test_sessions_do_not_share_state(tiny_target: MakeTarget) -> None:
    target = tiny_target("qwen3_next")
    reference = decode_one_by_one(target, TOKENS)
    first, second = target.new_session(), target.new_session()
    first.forward(TOKENS[:9])
    second.forward(OTHER)
    assert_same(first.forward(TOKENS[9:14], TAPS), reference, slice(9, 14))


@pytest.mark.parametrize("family", RECURRENT)
def test_multi_token_continuation_is_used_only_where_it_is_right(tiny_target: MakeTarget, family: str) -> None:
    """Mamba's layers in transformers drop their state when several tokens come; the check at load time sees it."""
    target = tiny_target(family)
    reference = decode_one_by_one(target, TOKENS)
    cache = target.new_cache()
    target.run_chunk(TOKENS[:20], 0, cache, TAPS)
    _, taps = target.run_chunk(TOKENS[20:28], 20, cache, TAPS)
    right = bool((taps - reference.taps[20:28]).abs().max() <= TOLERANCE * reference.taps.abs().max())
    assert continues_in_chunks(target.run_chunk, target.new_cache, 288) is right
    assert target.new_session()._parts.continues_in_chunks is right


def test_a_forgotten_state_is_noticed(tiny_target: MakeTarget) -> None:
    """The same check on a gated-delta model whose state is dropped whenever several tokens come."""
    target = tiny_target("qwen3_next")

    def forgetful(ids: torch.Tensor, start: int, cache: RewindableCache) -> tuple[torch.Tensor, torch.Tensor]:
        if len(ids) > 1:
            cache.restore(target.new_cache().recurrent_state())
        return target.run_chunk(ids, start, cache)

    assert continues_in_chunks(target.run_chunk, target.new_cache, 288)
    assert not continues_in_chunks(forgetful, target.new_cache, 288)


def test_recurrent_rollback_reruns_few_tokens(tiny_target: MakeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejected drafts must not cost a prefill: the copy before the last forward is used."""
    target = tiny_target("qwen3_next")
    session = target.new_session()
    session.forward(TOKENS[:20])
    ran: list[int] = []
    run_chunk = session._parts.run_chunk
    object.__setattr__(session._parts, "run_chunk", lambda ids, *rest: (ran.append(len(ids)), run_chunk(ids, *rest))[1])
    for start in (20, 23, 26):
        session.forward(TOKENS[start : start + 8])
        session.rollback(start + 3)
    assert ran == [8, 3, 8, 3, 8]
