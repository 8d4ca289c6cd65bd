"""The project's prompts are many, various, its own and installed; the corpora are read without importing exllamav3."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import unicodedata
from collections import Counter
from pathlib import Path

import pytest

from calibration_data import KINDS, TARGET_PROMPTS_FILE, Prompt, load_prompts, standard_corpora, target_prompts
from calibration_data import corpora as corpora_module
from calibration_data.corpora import Corpus
from calibration_data.splitting import split_segments
from quantize.errors import Exl3DflashError

PROMPTS = load_prompts()


def text_of(prompt: Prompt) -> str:
    return "\n".join(message["content"] for message in prompt.messages)


def test_at_least_thirty_prompts_of_each_of_ten_kinds() -> None:
    counts = Counter(prompt.kind for prompt in PROMPTS)
    assert tuple(counts) == KINDS
    assert len(KINDS) == 10
    assert min(counts.values()) >= 30
    assert len(PROMPTS) >= 300


def test_prompts_are_conversations_that_wait_for_an_answer() -> None:
    assert len({prompt.id for prompt in PROMPTS}) == len(PROMPTS)
    for prompt in PROMPTS:
        roles = [message["role"] for message in prompt.messages]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == [("user", "assistant")[i % 2] for i in range(len(turns))], prompt.id
        assert len(turns) % 2 == 1, prompt.id
        assert all(
            message["content"].strip() and "{documents}" not in message["content"] for message in prompt.messages
        )
    assert sum(len(prompt.messages) > 2 for prompt in PROMPTS) >= 10
    assert sum(prompt.messages[0]["role"] == "system" for prompt in PROMPTS) >= 20


def shingles(text: str, length: int = 12) -> set[str]:
    flat = " ".join(text.casefold().split())
    return {flat[i : i + length] for i in range(max(1, len(flat) - length + 1))}


def test_no_prompt_is_nearly_another() -> None:
    """Shared over all 12-character shingles: below 0.2; 0.6 where prompts quote a document in common."""
    sets = [(prompt.id, shingles(text_of(prompt))) for prompt in PROMPTS]
    for (first_id, first), (second_id, second) in itertools.combinations(sets, 2):
        bound = 0.6 if "long_context" in first_id and "long_context" in second_id else 0.2
        if min(len(first), len(second)) < bound * max(len(first), len(second)):  # cannot reach the bound
            continue
        common = len(first & second)
        assert common < bound * (len(first) + len(second) - common), (first_id, second_id)


def test_multilingual_prompts_use_many_scripts() -> None:
    scripts = Counter(
        unicodedata.name(max(text_of(prompt), key=lambda c: (c.isalpha(), ord(c)))).split()[0]
        for prompt in load_prompts(["multilingual"])
    )
    assert len(scripts) >= 9, scripts
    assert scripts["LATIN"] >= 12, scripts  # as many languages in Latin script, one or two prompts each


def test_code_prompts_name_many_languages() -> None:
    text = "\n".join(text_of(prompt) for prompt in load_prompts(["code"]))
    for language in ("Python", "JavaScript", "TypeScript", "C++", "Rust", "Go", "SQL", "bash", "Java", "Kotlin", "C#"):
        assert language in text


def test_long_context_prompts_are_long() -> None:
    words = [len(text_of(prompt).split()) for prompt in load_prompts(["long_context"])]
    assert min(words) >= 800
    assert max(words) >= 3000


def test_chosen_kinds_keep_their_order_and_unknown_ones_are_refused() -> None:
    assert [prompt.kind for prompt in load_prompts(["math", "chat"])] == ["math"] * 35 + ["chat"] * 36
    with pytest.raises(Exl3DflashError, match=r"'poems'.*chat, code"):
        load_prompts(["poems"])


def test_data_is_found_from_elsewhere_without_torch_or_exllamav3(tmp_path: Path) -> None:
    """Resources are read through importlib.resources, and locating the corpora imports no CUDA code."""
    program = (
        "import sys, calibration_data as c\n"
        "print(len(c.load_prompts()), [x.name for x in c.standard_corpora()])\n"
        "assert not {'torch', 'transformers', 'exllamav3'} & set(sys.modules), 'heavy import'\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split()[0] == str(len(PROMPTS))


def write_prompts(directory: Path, *lines: str) -> Path:
    (directory / TARGET_PROMPTS_FILE).write_text("\n".join(lines), encoding="utf-8")
    return directory


def record(**changes: object) -> str:
    base = {"id": "a", "kind": "own", "messages": [{"role": "user", "content": "Where is the mill?"}]}
    return json.dumps({**base, **changes})


def test_a_target_brings_its_own_prompts(tmp_path: Path) -> None:
    assert target_prompts(None) == target_prompts(tmp_path) == []
    (prompt,) = target_prompts(write_prompts(tmp_path, record(), ""))
    assert prompt == Prompt("own", ({"role": "user", "content": "Where is the mill?"},), "a")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([""], "no prompts"),
        (["{"], "line 1 is not JSON"),
        ([record(), "[1]"], "line 2 is no JSON object"),
        ([record(), record()], "the id 'a' twice"),
        ([record(colour=1)], "unknown key 'colour'"),
        ([record(documents=["x"])], "unknown key 'documents'"),
        ([record(kind="")], "lacks an id or a kind"),
        ([record(messages="hi")], "no conversation"),
        ([record(messages=[{"role": "user", "content": " "}])], "no conversation"),
        ([record(messages=[{"role": "system", "content": "x"}])], "no turn of the user"),
        (
            [record(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])],
            "ends with the role 'assistant'",
        ),
    ],
)
def test_wrong_prompt_files_are_refused(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(Exl3DflashError, match=message) as error:
        target_prompts(write_prompts(tmp_path, *lines))
    assert TARGET_PROMPTS_FILE in str(error.value)


def test_installed_corpora() -> None:
    corpora = standard_corpora()
    assert [corpus.name for corpus in corpora] == ["c4", "code", "multilingual", "technical", "wiki", "tiny"]
    for corpus in corpora:
        documents = corpus.documents()
        assert len(documents) > 20
        assert len(set(documents)) == len(documents)
        assert corpus.weight > 0
    assert not any("<doc id" in document for document in corpora[4].documents())


def test_corpora_divide_as_they_are_written() -> None:
    assert Corpus("a", "x\n\n y\nx\n", 1, "lines").documents() == ["x\n", " y\n"]
    article = "<doc id=1>\nTitle\n" + "word " * 20 + "\n</doc>\n"
    assert Corpus("a", article + "<doc id=2>\nRedirect\n</doc>\n", 1, "articles").documents() == [
        "Title\n" + "word " * 20 + "\n"
    ]
    assert Corpus("a", "one\n<|endoftext|>\ntwo\n", 1, "stories").documents() == ["one\n", "two\n"]
    assert Corpus("a", "one\ntwo\n", 1, "segments").documents() == ["one\ntwo\n"]


def test_absent_corpora_are_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exl3DflashError, match=r"c4\.utf8.*exllamav3.*chat"):
        standard_corpora(tmp_path)
    monkeypatch.setattr(corpora_module, "find_spec", lambda name: None)
    with pytest.raises(Exl3DflashError, match=r"exllamav3 is not installed.*pip install exllamav3"):
        standard_corpora()


def test_corpora_are_found_beside_a_stand_in_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module without a spec in sys.modules (a stub of the CUDA package) does not get in the way."""
    monkeypatch.setitem(sys.modules, "exllamav3", type(sys)("exllamav3"))
    assert len(standard_corpora()) == 6


@pytest.mark.parametrize("limit", [1, 5, 7, 100])
def test_segments_are_bounded_and_complete(limit: int) -> None:
    text = "alpha beta\ngamma\n\ndeltaepsilonzeta eta\n"
    segments = split_segments(text, limit)
    assert "".join(segments) == text
    assert max(map(len, segments)) <= limit
