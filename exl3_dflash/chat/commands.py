"""The slash commands, as a table: name, arguments, help and function. `/help` and completion are made from it.

A command returns what to tell the user; `Leave` ends the session and `Retry` asks again. Wrong use raises
`Exl3DflashError`, which the loop shows without ending the session.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from exl3_dflash.chat.conversation import Conversation
from exl3_dflash.chat.report import session_summary
from exl3_dflash.chat.session import ChatSession
from exl3_dflash.errors import Exl3DflashError


@dataclass(frozen=True)
class Leave:
    """The user wants to leave."""


@dataclass(frozen=True)
class Retry:
    """The last message is to be answered once more."""


Outcome = str | Leave | Retry


@dataclass(frozen=True)
class SlashCommand:
    """One row of the table; `run` gets the session and the text after the name, stripped."""

    name: str
    arguments: str
    help: str
    run: Callable[[ChatSession, str], Outcome]


def run_command(line: str, session: ChatSession) -> Outcome:
    """Run a line that begins with a slash.

    Raises:
        Exl3DflashError: an unknown command, or wrong arguments.
    """
    name, _, argument = line[1:].partition(" ")
    command = COMMANDS.get(name.strip().lower())
    if command is None:
        raise Exl3DflashError(
            f"unknown command /{name}",
            expected=" ".join(f"/{known}" for known in COMMANDS),
            fix="/help explains them; a message may begin with a slash after a space",
        )
    return command.run(session, argument.strip())


def _help(_session: ChatSession, _argument: str) -> Outcome:
    usages = {f"/{command.name} {command.arguments}".strip(): command.help for command in COMMANDS.values()}
    width = max(map(len, usages))
    return "\n".join(f"{usage:<{width}}  {text}" for usage, text in usages.items())


def _exit(_session: ChatSession, _argument: str) -> Outcome:
    return Leave()


def _reset(session: ChatSession, _argument: str) -> Outcome:
    session.reset()
    return "the conversation starts over"


def _system(session: ChatSession, argument: str) -> Outcome:
    if argument:
        session.conversation.system = None if argument == "off" else argument
    return f"system prompt: {session.conversation.system or 'none'}"


def _think(session: ChatSession, argument: str) -> Outcome:
    values = {"on": True, "off": False, "default": None}
    if argument:
        if argument not in values:
            raise Exl3DflashError(f"/think {argument}", "on, off or default")
        session.set_thinking(values[argument])
    names = {value: name for name, value in values.items()}
    return f"thinking: {names[session.conversation.thinking]}"


def _draft(session: ChatSession, argument: str) -> Outcome:
    engine = session.engine
    if argument:
        words = {"on": engine.max_draft_tokens, "off": 0}
        if argument not in words and not argument.isdecimal():
            raise Exl3DflashError(f"/draft {argument}", f"on, off or 0 to {engine.max_draft_tokens}")
        if argument == "on" and not engine.max_draft_tokens:
            raise Exl3DflashError("no drafter is loaded", fix="start the chat with --drafter")
        engine.draft_tokens = words[argument] if argument in words else int(argument)
    return f"draft tokens per step: {engine.draft_tokens or 'none, plain decoding'}"


def _temp(session: ChatSession, argument: str) -> Outcome:
    if argument:
        try:
            temperature = float(argument)
        except ValueError:
            raise Exl3DflashError(f"/temp {argument}", "a number, 0 for the most likely token") from None
        session.sampling = replace(session.sampling, temperature=temperature)
    return f"temperature: {session.sampling.temperature:g}"


def _stats(session: ChatSession, _argument: str) -> Outcome:
    return session_summary([answer.stats for answer in session.answers])


def _path(name: str, argument: str) -> Path:
    if not argument:
        raise Exl3DflashError(f"/{name} needs a file", f"/{name} FILE")
    return Path(argument).expanduser()


def _save(session: ChatSession, argument: str) -> Outcome:
    path = _path("save", argument)
    session.conversation.save(path)
    return f"saved {len(session.conversation.messages)} messages to {path}"


def _load(session: ChatSession, argument: str) -> Outcome:
    conversation = Conversation.load(_path("load", argument))
    if not session.engine.tokenizer.supports_thinking:
        conversation.thinking = None
    session.conversation = conversation
    return f"loaded {len(conversation.messages)} messages"


def _retry(_session: ChatSession, _argument: str) -> Outcome:
    return Retry()


COMMANDS = {
    command.name: command
    for command in (
        SlashCommand("help", "", "this list", _help),
        SlashCommand("exit", "", "leave (also Ctrl-D)", _exit),
        SlashCommand("reset", "", "forget the conversation, keep the settings", _reset),
        SlashCommand("system", "[TEXT|off]", "show, set or remove the system prompt", _system),
        SlashCommand("think", "[on|off|default]", "show or set the template's thinking switch", _think),
        SlashCommand("draft", "[N|on|off]", "show or set the tokens drafted per step", _draft),
        SlashCommand("temp", "[T]", "show or set the temperature", _temp),
        SlashCommand("stats", "", "speed and acceptance of this session", _stats),
        SlashCommand("save", "FILE", "write the conversation to a JSON file", _save),
        SlashCommand("load", "FILE", "go on with a saved conversation", _load),
        SlashCommand("retry", "", "answer the last message once more", _retry),
    )
}
