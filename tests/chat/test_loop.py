"""Whole chats with a scripted user."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from exl3_dflash.chat.commands import COMMANDS
from exl3_dflash.chat.loop import run_chat
from exl3_dflash.chat.session import ChatSession
from exl3_dflash.chat.ui import PlainUI
from tests.chat.conftest import ScriptedUI, make_session


def talk(session: ChatSession, *messages: str, patience: int | None = None) -> ScriptedUI:
    ui = ScriptedUI(messages, patience)
    run_chat(session, ui)
    return ui


def test_turns_stream_the_plain_answers_and_show_statistics(session: ChatSession) -> None:
    ui = talk(session, "hello", "   ", "again")
    plain = talk(make_session(drafted=False), "hello", "again")
    assert ui.answers == plain.answers
    assert [message["role"] for message in session.conversation.messages] == ["user", "assistant"] * 2
    assert session.conversation.messages[1]["content"] == ui.answers[0]
    assert session.answers[1].stats.reused_tokens > 10
    assert "accept length" in ui.notes[0]
    assert "accept rate" in ui.notes[0]
    assert "tokens/s" in ui.notes[0]
    assert "plain decoding" in plain.notes[0]
    assert not ui.errors


def test_exit_leaves_and_help_lists_every_command(session: ChatSession) -> None:
    ui = talk(session, "/help", "/exit", "never read")
    assert ui.answers == []
    assert all(f"/{name}" in ui.notes[0] for name in COMMANDS)


def test_system_and_reset(session: ChatSession) -> None:
    ui = talk(session, "/system be kind", "hello", "/reset", "/system", "/system off")
    assert ui.notes[0] == ui.notes[3] == "system prompt: be kind"
    assert ui.notes[-1] == "system prompt: none"
    assert session.conversation.for_template() == []
    assert session.answers[0].stats.prompt_tokens == len("be kind") + len("hello") + 3


def test_think_sets_the_template_switch(session: ChatSession) -> None:
    ui = talk(session, "/think off", "hello", "/think default", "/think", "/think maybe")
    assert session.engine.tokenizer.thinking is False
    assert ui.notes[0] == "thinking: off"
    assert ui.notes[-1] == "thinking: default"
    assert "expected on, off or default" in ui.errors[0]
    session.engine.tokenizer.supports_thinking = False
    assert "no thinking switch" in talk(session, "/think on").errors[0]


def test_draft_switches_between_plain_and_drafted(session: ChatSession) -> None:
    ui = talk(session, "/draft off", "hello", "/draft 2", "/draft", "/retry", "/draft on", "/draft 9", "/draft x")
    assert [answer.stats.verify_steps == 0 for answer in session.answers] == [True, False]
    assert session.answers[0].text == session.answers[1].text
    assert ui.notes[0] == "draft tokens per step: none, plain decoding"
    assert ui.notes[2] == ui.notes[3] == "draft tokens per step: 2"
    assert session.engine.draft_tokens == 4
    assert len(ui.errors) == 2
    assert "no drafter" in talk(make_session(drafted=False), "/draft on").errors[0]


def test_temperature_and_its_mistakes(session: ChatSession) -> None:
    ui = talk(session, "/temp 0.7", "/temp", "/temp hot", "/temp -1")
    assert ui.notes == ["temperature: 0.7"] * 2
    assert session.sampling.temperature == 0.7
    assert "expected a number" in ui.errors[0]
    assert "temperature is -1" in ui.errors[1]


def test_stats_of_the_session(session: ChatSession) -> None:
    ui = talk(session, "/stats", "hello", "/draft off", "hello", "/stats")
    assert ui.notes[0] == "no answers yet"
    assert "2 answers" in ui.notes[-1]
    assert "(token-weighted)" in ui.notes[-1]
    assert "plain: " in ui.notes[-1]


def test_retry_replaces_the_answer() -> None:
    session = make_session(seed=3)
    ui = talk(session, "hello", "/retry", "/retry")
    assert len(set(ui.answers)) == 3
    assert [message["content"] for message in session.conversation.messages] == ["hello", ui.answers[-1]]
    assert "no message to retry" in talk(make_session(), "/retry").errors[0]


def test_interrupted_answer_is_kept_as_far_as_it_went(session: ChatSession) -> None:
    ui = talk(session, "hello", patience=2)
    whole = talk(make_session(), "hello").answers[0]
    assert whole.startswith(ui.answers[0])
    assert len(ui.answers[0]) < len(whole)
    assert "interrupted" in ui.notes[0]
    assert session.conversation.messages[-1] == {"role": "assistant", "content": ui.answers[0]}


def test_full_context_is_one_message_and_the_chat_goes_on() -> None:
    session = make_session(context=24, count=100)
    ui = talk(session, "hello", "more", "/reset", "hi")
    assert "cut: the context is full" in ui.notes[0]
    assert len(session.answers[0].token_ids) == 24 - len("hello") - 2
    assert ui.errors[0].startswith("the context is full: the prompt has 30 tokens")
    assert "new conversation" in ui.errors[0]
    assert len(ui.errors) == 1
    assert [message["content"] for message in session.conversation.messages] == ["hi", ui.answers[-1]]


def test_failed_retry_keeps_the_old_answer(session: ChatSession) -> None:
    talk(session, "hello")
    kept = list(session.conversation.messages)
    session.conversation.system = "long" * 400
    session.engine._target.facts = replace(session.engine._target.facts, max_position_embeddings=50)
    assert "context is full" in talk(session, "/retry").errors[0]
    assert session.conversation.messages == kept


def test_save_and_load(session: ChatSession, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    ui = talk(session, "/system kind", "hello", f"/save {path}", "more", "/save")
    other = make_session()
    loaded = talk(other, f"/load {path}", "more")
    assert loaded.notes[0] == "loaded 2 messages"
    assert loaded.answers == ui.answers[1:]
    assert other.conversation == session.conversation
    assert "/save needs a file" in ui.errors[0]
    assert list(tmp_path.iterdir()) == [path]


def test_unknown_command(session: ChatSession) -> None:
    ui = talk(session, "/quit now", "/", " /etc/hosts is what?")
    assert "unknown command /quit" in ui.errors[0]
    assert "/help" in ui.errors[0]
    assert len(ui.answers) == 1


def test_engine_failure_is_reported_and_leaves_no_trace(session: ChatSession) -> None:
    session.engine.generate = lambda *_: (_ for _ in ()).throw(ValueError("bug"))
    with pytest.raises(ValueError, match="bug"):
        talk(session, "hello")
    assert session.conversation.messages == []


def test_plain_interface_reads_lines_and_writes_text() -> None:
    sink, notes = io.StringIO(), io.StringIO()
    session = make_session()
    run_chat(session, PlainUI(io.StringIO("one\\\ntwo\n/temp\n/nope\nlast\\"), sink, notes))
    contents = [message["content"] for message in session.conversation.messages]
    assert contents[::2] == ["one\ntwo", "last"]
    assert sink.getvalue() == "".join(f"{content}\n" for content in contents[1::2])
    assert "temperature: 0\n" in notes.getvalue()
    assert "error: unknown command" in notes.getvalue()
    quiet = io.StringIO()
    run_chat(make_session(), PlainUI(io.StringIO("hi\n/nope\n"), io.StringIO(), quiet, quiet=True))
    assert quiet.getvalue().startswith("error: unknown command")


def test_answer_json_has_the_contract_keys(session: ChatSession) -> None:
    talk(session, "hello")
    content = json.loads(json.dumps(session.answers[0].to_json(), allow_nan=False))
    assert {"text", "token_ids", "accept_length", "accept_rate", "verify_steps", "tokens_per_second"} <= set(content)
    assert content["time_to_first_token"] > 0
    assert content["new_tokens"] == len(content["token_ids"])
