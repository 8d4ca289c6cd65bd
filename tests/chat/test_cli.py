"""`exl3-dflash chat` from the command line, on a tiny pair: one answer, JSON, a pipe, and wrong usage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from exl3_dflash.cli import chat
from exl3_dflash.errors import Exl3DflashError
from tests.tiny_models import make_tiny_drafter
from tests.tiny_targets import make_tiny_llama

LIMIT = ("--max-new-tokens", "12")


class Program:
    """Runs the command with a pair's options in front."""

    def __init__(self, directory: Path) -> None:
        self._app = typer.Typer()
        chat.register(self._app)
        self.target = ("--target", str(make_tiny_llama(directory / "llama")), "--threads", "1")
        self.pair = (*self.target, "--drafter", str(make_tiny_drafter(directory / "drafter")))

    def __call__(self, *arguments: str, typed: str | None = None) -> Result:
        return CliRunner().invoke(self._app, arguments, input=typed, catch_exceptions=True)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    threads = torch.get_num_threads()
    yield Program(tmp_path_factory.mktemp("chat"))
    torch.set_num_threads(threads)


def test_one_answer_is_the_same_with_and_without_drafting(program: Program) -> None:
    drafted = program(*program.pair, *LIMIT, "--prompt", "hello")
    plain = program(*program.target, *LIMIT, "--prompt", "hello", "--no-draft")
    assert (drafted.exit_code, plain.exit_code) == (0, 0)
    assert drafted.stdout == plain.stdout != "\n"
    assert "accept length" in drafted.stderr
    assert "plain decoding" in plain.stderr
    assert program(*program.pair, *LIMIT, "--prompt", "hello", "-q").stderr == ""


def test_json_is_one_object_with_the_contract_keys(program: Program) -> None:
    result = program(*program.pair, *LIMIT, "--prompt", "hello", "--json", "--draft-tokens", "2", "--seed", "5")
    content = json.loads(result.stdout)
    assert {"text", "token_ids", "accept_length", "accept_rate", "verify_steps"} <= set(content)
    assert {"tokens_per_second", "time_to_first_token", "stop_reason", "versions", "pair"} <= set(content)
    assert content["proposed"] <= 2 * content["verify_steps"]
    assert content["accept_length"] == (content["new_tokens"] - 1) / content["verify_steps"]
    assert content["sampling"]["seed"] == 5
    plain = json.loads(program(*program.pair, *LIMIT, "--prompt", "hello", "--json", "--no-draft").stdout)
    assert (plain["accept_length"], plain["verify_steps"], plain["proposed"]) == (None, 0, 0)
    assert plain["token_ids"] == content["token_ids"]
    piped = json.loads(program(*program.pair, *LIMIT, "--json", typed="hello\n").stdout)
    assert piped["token_ids"] == content["token_ids"]


def test_pipe_is_a_conversation(program: Program) -> None:
    result = program(*program.pair, *LIMIT, "--system", "be kind", typed="hello\n/temp\n/nope\nagain\n/exit\nnever\n")
    assert result.exit_code == 0
    assert result.stderr.count("accept length") == 2
    assert "temperature: 0\n" in result.stderr
    assert "error: unknown command /nope" in result.stderr


def test_sampling_options_and_thinking_reach_the_engine(program: Program) -> None:
    options = ("--temperature", "0.9", "--top-p", "0.8", "--top-k", "9", "--min-p", "0.01", "--seed", "1")
    arguments = (*LIMIT, *options, "--repetition-penalty", "1.2", "--no-think", "--prompt", "hello", "--json")
    first, second = (json.loads(program(*program.pair, *arguments).stdout) for _ in range(2))
    plain = json.loads(program(*program.target, *arguments, "--no-draft").stdout)
    assert first["token_ids"] == second["token_ids"] == plain["token_ids"]
    assert first["sampling"]["top_k"] == 9
    assert first["thinking"] is False


def test_wrong_usage_exits_with_2_and_wrong_values_are_explained(program: Program) -> None:
    assert program(*program.target, "--prompt", "hello").exit_code == 2
    assert program(*program.pair, "--prompt", "  ").exit_code == 2
    assert program(*program.pair, "--prompt", "hello", "--threads", "-1").exit_code == 2
    for arguments in (("--temperature", "-1"), ("--max-new-tokens", "0"), ("--draft-tokens", "4")):
        error = program(*program.pair, "--prompt", "hello", *arguments).exception
        assert isinstance(error, Exl3DflashError)
        assert "expected" in str(error)
