"""The target's tokenizer: bytes round-trip, special tokens, end ids, the chat template and its thinking switch."""

from __future__ import annotations

from pathlib import Path

import pytest

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target.base import ChatMessage
from exl3_dflash.target.tokenizer import TransformersTokenizer, eos_ids_of, thinking_switches
from tests.tiny_targets import CHAT_TEMPLATE, IM_END_ID, IM_START_ID, write_tiny_tokenizer

HELLO: list[ChatMessage] = [{"role": "user", "content": "hi"}]


def load(path: Path, chat_template: str | None = CHAT_TEMPLATE) -> TransformersTokenizer:
    write_tiny_tokenizer(path, chat_template)
    return TransformersTokenizer.load(path, eos_token_ids=(257,))


@pytest.mark.parametrize("text", ["plain", " two  spaces , kept .", "žluťoučký 🙂\n\ttabs", "", "a<|im_end|>b"])
def test_text_round_trips(tmp_path: Path, text: str) -> None:
    tokenizer = load(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    ids = tokenizer.encode("<|im_start|>x<|im_end|>")
    assert (ids[0], ids[-1], len(ids)) == (IM_START_ID, IM_END_ID, 3)
    assert tokenizer.decode(ids, skip_special=True) == "x"
    assert tokenizer.size == 261
    assert tokenizer.eos_token_ids == (257, IM_END_ID)


def test_chat_template_with_thinking_on_and_off(tmp_path: Path) -> None:
    tokenizer = load(tmp_path)
    assert tokenizer.has_chat_template
    assert tokenizer.supports_thinking
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.apply_chat_template(HELLO)) == prompt
    assert tokenizer.decode(tokenizer.apply_chat_template(HELLO, thinking=True)) == prompt
    assert tokenizer.decode(tokenizer.apply_chat_template(HELLO, thinking=False)) == prompt + "<think>\n\n</think>\n\n"
    without = tokenizer.apply_chat_template(HELLO, add_generation_prompt=False)
    assert tokenizer.decode(without) == "<|im_start|>user\nhi<|im_end|>\n"


def test_a_template_without_a_switch(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert tokenizer.has_chat_template
    assert not tokenizer.supports_thinking
    assert tokenizer.decode(tokenizer.apply_chat_template(HELLO, thinking=False)) == "user: hi\n"
    with pytest.raises(Exl3DflashError, match="no thinking switch"):
        tokenizer.apply_chat_template(HELLO, thinking=True)


def test_no_template(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, chat_template=None)
    assert not tokenizer.has_chat_template
    with pytest.raises(Exl3DflashError, match=r"has no chat template; expected chat_template\.jinja"):
        tokenizer.apply_chat_template(HELLO)


def test_a_template_that_refuses_a_conversation(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, "{{ raise_exception('no system message, please') }}")
    with pytest.raises(Exl3DflashError, match="refuses this conversation: no system message, please"):
        tokenizer.apply_chat_template([{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    ("template", "switches"),
    [
        ("{% if enable_thinking is defined %}{% endif %}", ("enable_thinking",)),
        ("{%- if not thinking %}{%- endif %}", ("thinking",)),
        ("{{ message.thinking }} {% if 'thinking' in message %}{% endif %}", ()),
        ("I am thinking {{ x }}", ()),
        ("{% set thinking_text = 1 %}", ()),
        ("", ()),
    ],
)
def test_thinking_switches(template: str, switches: tuple[str, ...]) -> None:
    assert thinking_switches(template) == switches


def test_end_ids_of_every_configuration() -> None:
    class One:
        eos_token_id = 7

    class Many:
        eos_token_id = (3, 9)

    class Absent:
        eos_token_id = None

    assert eos_ids_of(One(), Many(), Absent(), None) == (3, 7, 9)
