"""A transformers tokenizer as the project uses it: plain ids and text, the chat template, every end-of-answer id."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target.base import ChatMessage
from exl3_dflash.target.messages import first_line

THINKING_SWITCHES = ("enable_thinking", "thinking")
_TEMPLATE_CODE = re.compile(r"\{[{%].*?[}%]\}", re.DOTALL)
_TEMPLATE_STRING = re.compile(r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"", re.DOTALL)


class TransformersTokenizer:
    """`base.TargetTokenizer` on a transformers tokenizer."""

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int] = ()) -> None:
        """tokenizer: a transformers tokenizer; eos_token_ids: further end ids (from generation_config and config)."""
        self._tokenizer = tokenizer
        own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self._eos_token_ids = tuple(sorted({*own, *eos_token_ids}))
        self._size = 1 + max(tokenizer.get_vocab().values())
        self._switches = thinking_switches(_template_text(tokenizer))

    @classmethod
    def load(cls, path: str | Path, eos_token_ids: Sequence[int] = ()) -> TransformersTokenizer:
        """The tokenizer of a model directory."""
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        except Exception as error:  # transformers raises OSError, ValueError, KeyError and others for the same fault
            raise Exl3DflashError(
                f"no usable tokenizer in {path}: {first_line(error)}",
                expected="tokenizer.json and tokenizer_config.json beside the weights",
                fix="copy the tokenizer files of the original model into the directory",
            ) from error
        return cls(tokenizer, eos_token_ids)

    @property
    def size(self) -> int:
        """Number of ids the tokenizer knows (largest id + 1)."""
        return self._size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends an answer, sorted."""
        return self._eos_token_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat_template` can work."""
        return bool(_template_text(self._tokenizer))

    @property
    def supports_thinking(self) -> bool:
        """Whether the chat template reads a thinking switch."""
        return bool(self._switches)

    @property
    def special_tokens(self) -> dict[int, str]:
        """Tokens that were added to the vocabulary of ordinary text, by id."""
        return {int(index): str(text) for text, index in self._tokenizer.get_added_vocab().items()}

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Ids of `text`; special tokens written in the text are recognised."""
        return [int(token) for token in self._tokenizer.encode(text, add_special_tokens=add_special, verbose=False)]

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of `ids`, without clean-up of spaces."""
        return str(
            self._tokenizer.decode(
                [int(token) for token in ids], skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
            )
        )

    def apply_chat_template(
        self, messages: Sequence[ChatMessage], thinking: bool | None = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation; see `base.TargetTokenizer`. thinking True needs a template that can think."""
        if not self.has_chat_template:
            raise Exl3DflashError(
                "the target's tokenizer has no chat template",
                expected="chat_template.jinja, or chat_template in tokenizer_config.json",
                fix="choose an instruction-tuned target, or add its chat template to the directory",
            )
        if thinking and not self.supports_thinking:
            raise Exl3DflashError(
                "the target's chat template has no thinking switch",
                expected=f"a template that reads {' or '.join(THINKING_SWITCHES)}",
                fix="leave thinking out",
            )
        options = {} if thinking is None else dict.fromkeys(self._switches, thinking)
        try:
            ids = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                tokenize=True,
                return_dict=False,
                tokenizer_kwargs={"verbose": False},  # texts beyond the model's length are cut by the caller
                **options,
            )
        except Exception as error:  # templates raise jinja2 errors of their own, for example for a system message
            raise Exl3DflashError(
                f"the target's chat template refuses this conversation: {first_line(error)}",
                expected="messages in an order that the template supports",
            ) from error
        return [int(token) for token in ids]


def thinking_switches(template: str) -> tuple[str, ...]:
    """The names of THINKING_SWITCHES that a chat template's code reads as variables (not as fields or in text)."""
    code = " ".join(_TEMPLATE_STRING.sub("''", block) for block in _TEMPLATE_CODE.findall(template))
    return tuple(name for name in THINKING_SWITCHES if re.search(rf"(?<![\w.]){name}(?!\w)", code))


def eos_ids_of(*sources: Any) -> tuple[int, ...]:
    """The eos_token_id values of configurations (each an int, a list, or absent), sorted."""
    found: set[int] = set()
    for source in sources:
        value = getattr(source, "eos_token_id", None)
        if value is not None:
            found.update(int(token) for token in (value if isinstance(value, (list, tuple)) else [value]))
    return tuple(sorted(found))


def _template_text(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None) or ""
    if isinstance(template, dict):  # several named templates: the default one is applied
        return str(template.get("default", ""))
    return str(template)
