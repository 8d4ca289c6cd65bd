"""Cards: valid metadata, no number that is not the report's, nothing claimed that was not done, nothing lost."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from exl3_dflash.conversion.plan import loader_notes
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub.cards import CardSettings, make_card, make_drafter_and_family_cards
from model_cards import License
from model_cards.metadata import known_licenses
from model_cards.upstream import parse_card, quotable
from tests.card_reports import COMMIT, UPSTREAM_CARD, make_report, write_directory
from tests.family_models import make_family_drafter
from tests.tiny_models import make_tiny_drafter

REPOSITORY = "me/Qwen3.6-35B-A3B-DFlash-exl3"
SETTINGS = CardSettings(REPOSITORY, branch="4.00bpw", offline=True)
SOURCE = "https://huggingface.co/z-lab/Qwen3.6-35B-A3B-DFlash"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "qwen-4bpw", make_report())


def text_of(directory: Path, settings: CardSettings = SETTINGS) -> str:
    return make_card(directory, settings).text


def own_part(text: str) -> str:
    """The card without front matter and without the source's card."""
    return text.split("---\n", 2)[2].split("## The source's card")[0]


def test_metadata_parses_and_is_complete(directory: Path) -> None:
    make_card(directory, SETTINGS).write()
    data = ModelCard.load(directory / "README.md").data
    assert data.base_model == "z-lab/Qwen3.6-35B-A3B-DFlash"
    assert data.base_model_relation == "quantized"
    assert data.quantized_by == "me"
    assert data.license == "apache-2.0"
    assert data.language == ["en", "zh"]
    assert data.pipeline_tag == "text-generation"
    assert {"exl3", "dflash", "speculative-decoding"} <= set(data.tags)
    assert "extra_gated_prompt" not in data


def numbers(text: str) -> list[str]:
    return re.findall(r"[0-9a-f]{40,}|\d+(?:,\d{3})*(?:\.\d+)*", text)


def formatted_leaves(value: Any) -> set[str]:
    """Every way in which a card may write the numbers of a report."""
    if isinstance(value, dict):
        return set().union(*map(formatted_leaves, value.values()), *map(formatted_leaves, value), set())
    if isinstance(value, list):
        return set().union(*map(formatted_leaves, value), {str(len(value))})
    if isinstance(value, str):
        return set(numbers(value))
    if isinstance(value, bool) or value is None:
        return set()
    written = {f"{value:g}", f"{value:.4f}", f"{value:.3f}", f"{value:.6f}", f"{100 * value:.2f}", f"{value:.2f}"}
    return written | {str(value), f"{value:,}", f"{value / 1e6:,.2f}"}


def scaled(value: Any) -> Any:
    """The same report with other numbers everywhere."""
    if isinstance(value, dict):
        return {key: scaled(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [scaled(entry) for entry in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    return value * 3 + 11 if isinstance(value, int) else value * 1.37 + 0.01


@pytest.mark.parametrize("changes", [{}, {"fidelity": None}, {"head_quantized": True}], ids=["", "unmeasured", "head"])
def test_every_number_is_the_reports(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Numbers that stay when all of the report's change belong to the template; the others must be the report's."""
    report = make_report(**changes)
    other = scaled(copy.deepcopy(report)) | {"versions": {"torch": "9.8.7"}}
    first = own_part(text_of(write_directory(tmp_path / "a", report)))
    second = own_part(text_of(write_directory(tmp_path / "a", other, card=UPSTREAM_CARD)))
    constants = set(numbers(second))
    allowed = formatted_leaves(report)
    allowed |= {str(report["calibration"]["rows"] + report["calibration"]["dropped_rows"])}  # rows that were asked for
    if report["fidelity"]:
        allowed |= {str(report["fidelity"]["rows"] + report["fidelity"]["dropped_rows"])}
    fingerprint = re.search(r"report=([0-9a-f]{64})", first)
    assert fingerprint
    changed = [number for number in numbers(first) if number not in constants and number != fingerprint[1]]
    assert len(changed) > 15
    assert [number for number in changed if number not in allowed] == []


def test_values_stand_where_they_belong(directory: Path) -> None:
    text = own_part(text_of(directory))
    for line in (
        f"| Source | [z-lab/Qwen3.6-35B-A3B-DFlash]({SOURCE}) at commit `{COMMIT}` |",
        "| Bits per weight | 4 asked for, 4.0317 stored,",
        "| Codebook | `mul1` |",
        "| Output scales | `auto` |",
        "inputs and outputs (`two-sided`) |",
        "| Quantized tensors | 9 |",
        "| Tap shift | 1, pinned in `config.json` |",
        "| Probed, as the source leaves it open | `tap_shift` 1: better |",
        "241,172,480 bytes (241.17 MB); the source's 947,912,704 bytes (947.91 MB)",
        "| unquantized | 5.432 (5.219 to 5.658) | 100.00 (100.00 to 100.00) | 100.00 | 0.000000 |",
        "| this drafter | 5.409 (5.196 to 5.632) | 99.57 (99.31 to 99.83) | 97.34 | 0.004187 |",
        "51,234 anchors in 31 rows (1 more rows were not finite and were dropped)",
        "247 rows of up to 2,048 tokens, 402,817 tokens and 96,411 anchors in all",
        "3 rows were not finite and were dropped",
        "--cal-data chat --cal-rows 250 --cal-cols 2048 --eval-rows 32",
        f"exl3-dflash chat --target Qwen/Qwen3.6-35B-A3B --drafter {REPOSITORY}@4.00bpw",
        "draft_model_name: Qwen3.6-35B-A3B-DFlash-exl3-4.00bpw",
        "exllamav3 1.6.5",
    ):
        assert line in text, line


def test_calibration_that_was_not_run_is_said(tmp_path: Path) -> None:
    """FIELD_REPORTS 19."""
    none = {"mode": "none", "source": None, "rows": 0, "cols": 0, "tokens": 0, "anchors": 0, "dropped_rows": 0}
    text = own_part(text_of(write_directory(tmp_path / "a", make_report(calibration=none, fidelity=None))))
    assert "| Calibration | none was run" in text
    assert "**Quantized without calibration.**" in text
    assert "Nothing was measured" in text
    assert "--calibration none" in text
    assert "2048" not in text
    assert "250" not in text


def test_head_bits_are_inert_without_a_head(tmp_path: Path) -> None:
    """FIELD_REPORTS 20."""
    without = own_part(text_of(write_directory(tmp_path / "a", make_report())))
    assert "`head_bits` in the configuration means nothing here" in without
    assert "--head-bits" not in without
    having = own_part(text_of(write_directory(tmp_path / "b", make_report(head_quantized=True, head_bits=5.0))))
    assert "| Head | the drafter's own, 5 bits |" in having
    assert "--head-bits 5" in having


def test_fallbacks_copies_and_notes_are_said(tmp_path: Path) -> None:
    report = make_report(copied={"fc": "320 x 96 | odd"}, notes=["hidden size 96 cannot be run by ExLlamaV3"])
    report["tensors"][1]["fallback"] = "no rows"
    report["tensors"][2]["output_fallback"] = "no gradients"
    text = own_part(text_of(write_directory(tmp_path / "a", report)))
    assert "9, of which 1 without a usable Hessian: `layers.0.mlp.up_proj` (no rows)" in text
    assert "without a usable output side: `layers.1.mlp.up_proj` (no gradients)" in text
    report["calibration"]["method"] = "one-sided"
    text = own_part(text_of(write_directory(tmp_path / "b", report)))
    assert "--cal-cols 2048 --method one-sided" in text
    assert "output side" not in text
    text = own_part(text_of(write_directory(tmp_path / "a", report)))
    assert "| Left unquantized | `fc` (320 x 96 \\| odd) |" in text
    assert "- **hidden size 96 cannot be run by ExLlamaV3**" in text


@pytest.mark.parametrize(
    ("plan", "command", "said"),
    [
        ("uniform", "--bits 4 --codebook", "4 asked for, "),
        ("mixed", "--bits 4 --plan mixed --codebook", "4 asked for on average, divided among tensors"),
        ("recipe", "--recipe recipe.yaml --codebook", "divided among tensors as `recipe.yaml` says"),
    ],
)
def test_where_bits_come_from_is_said_and_repeated(tmp_path: Path, plan: str, command: str, said: str) -> None:
    text = own_part(text_of(write_directory(tmp_path / "a", make_report(plan=plan))))
    assert command in text
    assert said in text


@pytest.mark.parametrize("kept", [True, False])
def test_tuning_and_thinking_are_said_and_repeated(tmp_path: Path, kept: bool) -> None:
    calibration = make_report()["calibration"] | {"thinking": "both"}
    reason = "" if kept else "2 usable rows of fewer than 4 prompts"
    tuning = {"kept": kept, "reason": reason, "rows": 217, "parameters": 60416}
    text = own_part(text_of(write_directory(tmp_path / "a", make_report(calibration=calibration, tuning=tuning))))
    assert "--thinking both --tune" in text
    assert ("60,416 scales and norm weights" in text) is kept
    assert ("| Tuned | not: 2 usable rows of fewer than 4 prompts;" in text) is not kept
    plain = own_part(text_of(write_directory(tmp_path / "b", make_report())))
    assert "Tuned" not in plain
    assert "--thinking" not in plain


@pytest.mark.parametrize("name", ["speculators", "plain", "odd"])
def test_exllamav3_is_offered_only_where_it_runs_the_drafter(tmp_path: Path, name: str) -> None:
    """Holds the card against the notes that the job really writes."""
    if name == "speculators":
        source = make_family_drafter(tmp_path / "source", "speculators")
    else:
        wide = {"hidden_size": 128} if name == "plain" else {}
        source = make_tiny_drafter(tmp_path / "source", num_hidden_layers=1, **wide)
    notes = list(loader_notes(DrafterCheckpoint.open(source)))
    text = own_part(text_of(write_directory(tmp_path / "a", make_report(notes=notes))))
    assert ("from exllamav3 import" in text) == ("TabbyAPI, in" in text) == (name == "plain")
    assert ("ExLlamaV3 cannot run this drafter" in text) == (name != "plain")


def test_paths_of_the_machine_stay_out(tmp_path: Path) -> None:
    report = make_report(source="my-drafter", source_revision=None, target="my-target")
    report["calibration"]["source"] = "/home/somebody/secret-project/rows.jsonl"
    card = make_card(write_directory(tmp_path / "a", report), SETTINGS)
    assert "somebody" not in card.text
    assert "`rows.jsonl`" in card.text
    assert "base_model" not in card.metadata
    assert any("--base-model" in note for note in card.notes)


def test_the_sources_card_stands_below_without_its_front_matter(directory: Path) -> None:
    text = text_of(directory)
    below = text.split("<!-- exl3-dflash:upstream -->")[1]
    assert "extra_gated_prompt" not in text
    assert "| HumanEval | on | 5.87 | 3.6x |" in below
    assert "[**Paper**](https://arxiv.org/abs/2602.06036)" in below
    assert f"[**Training code**]({SOURCE}/blob/{COMMIT}/training/README.md)" in below
    assert "[Results](#results)" in below
    assert f'src="{SOURCE}/resolve/{COMMIT}/assets/overview.png"' in below
    assert f"[![chart]({SOURCE}/resolve/{COMMIT}/assets/chart.svg)]({SOURCE}/blob/{COMMIT}/docs/chart.md)" in below
    assert "[not a link](train.py)" in below
    assert "{{ n_prompts }} prompts; 100 % of `{% raw %}` stays text" in below


def test_making_it_again_changes_nothing_and_keeps_what_was_added(directory: Path) -> None:
    make_card(directory, SETTINGS).write()
    file = directory / "README.md"
    first = file.read_text()
    assert text_of(directory) == first
    added = first.replace("<!-- exl3-dflash:keep -->", "<!-- exl3-dflash:keep -->\n\n## Thanks\n\n| a | b |\n\n$x_1$\n")
    added = added.replace("tags:\n", "tags:\n- my-tag\n").replace(
        "license: apache-2.0", "license: apache-2.0\nx: [1, 2]"
    )
    file.write_bytes(added.replace("\n", "\r\n").encode())  # as an editor on another system leaves it
    (directory / "quantize_report.json").write_text(json.dumps(make_report(seed=99)))
    make_card(directory, SETTINGS).write()
    again = file.read_text()
    assert "## Thanks\n\n| a | b |\n\n$x_1$\n" in again
    assert "| Seed | 99 |" in again
    assert ModelCard(again).data.x == [1, 2]
    assert "my-tag" in ModelCard(again).data.tags
    assert again.count("## Results") == 1
    assert text_of(directory) == again


def test_broken_markers_are_not_guessed_about(directory: Path) -> None:
    make_card(directory, SETTINGS).write()
    file = directory / "README.md"
    file.write_text(file.read_text().replace("<!-- /exl3-dflash:keep -->", ""))
    before = file.read_text()
    with pytest.raises(Exl3DflashError, match="repair the two lines"):
        make_card(directory, SETTINGS)
    assert file.read_text() == before


@pytest.mark.parametrize("line", ["license: null", "license:", "license: ''", "license: None", "tags: [a]"])
def test_a_license_is_never_null(tmp_path: Path, line: str) -> None:
    """FIELD_REPORTS 21."""
    directory = write_directory(tmp_path / "a", make_report(), UPSTREAM_CARD.replace("license: apache-2.0", line))
    with pytest.raises(Exl3DflashError, match=r"license.*give --license"):
        make_card(directory, SETTINGS)
    given = CardSettings(REPOSITORY, license=License("mit"), offline=True)
    assert ModelCard(text_of(directory, given)).data.license == "mit"


def test_licenses_that_were_asked_for_or_inherited(directory: Path) -> None:
    def asked(*license_: str) -> CardSettings:
        return CardSettings(REPOSITORY, license=License(*license_), offline=True)

    with pytest.raises(Exl3DflashError, match=r"'apache2' is not a license identifier.*apache-2\.0"):
        make_card(directory, asked("apache2"))
    with pytest.raises(Exl3DflashError, match="--license other has no name"):
        make_card(directory, asked("other"))
    data = ModelCard(text_of(directory, asked("other", "my-license", "https://example.org/l"))).data
    assert (data.license, data.license_name, data.license_link) == ("other", "my-license", "https://example.org/l")
    assert "apache-2.0" in known_licenses()
    (directory / "README.md").write_text(UPSTREAM_CARD.replace("license: apache-2.0", "license: Apache-2.0"))
    assert ModelCard(text_of(directory)).data.license == "apache-2.0"
    source = UPSTREAM_CARD.replace("license: apache-2.0", "license: other\nlicense_name: qwen\nlicense_link: LICENSE")
    (directory / "README.md").write_text(source)
    data = ModelCard(text_of(directory)).data
    assert (data.license, data.license_name, data.license_link) == ("other", "qwen", "LICENSE")


@pytest.mark.parametrize("front", ["a: [", "- a list", "just text", "key: {a: b"])
def test_bad_front_matter_is_one_line(tmp_path: Path, front: str) -> None:
    """FIELD_REPORTS 21."""
    directory = write_directory(tmp_path / "a", make_report(), f"---\n{front}\n---\n# Card\n")
    with pytest.raises(Exl3DflashError, match=r"front matter of .*README") as raised:
        make_card(directory, SETTINGS)
    assert "\n" not in str(raised.value)


def test_damaged_reports_are_one_line(tmp_path: Path) -> None:
    directory = write_directory(tmp_path / "a", make_report())
    file = directory / "quantize_report.json"
    report = make_report()
    del report["bpw"]
    for content, said in ((json.dumps(report), "lacks 'bpw'"), ("[]", "damaged"), ("{", "damaged")):
        file.write_text(content)
        with pytest.raises(Exl3DflashError, match=said):
            make_card(directory, SETTINGS)


def test_a_family_links_its_branches_by_size_and_retention(tmp_path: Path) -> None:
    reports = [make_report(), make_report(bits=6.0, bpw=6.0317, size_bytes=360710144), make_report(bits=2.5, bpw=2.53)]
    reports[2] |= {"fidelity": None, "accept_length": None}
    directories = [write_directory(tmp_path / str(number), report) for number, report in enumerate(reports)]
    cards = make_drafter_and_family_cards(directories, SETTINGS, tmp_path / "main" / "README.md")
    text = cards[-1].text
    rows = [line for line in text.splitlines() if line.startswith("| [")]
    assert [row.split("]")[0] for row in rows] == ["| [6.00bpw", "| [4.00bpw", "| [2.50bpw"]
    assert f"https://huggingface.co/{REPOSITORY}/tree/6.00bpw) | 6.0317 | 360.71 MB | 5.409" in rows[0]
    assert "| 99.57 (99.31 to 99.83) | 247 rows |" in rows[1]
    assert "| not measured | not measured |" in rows[2]
    assert ModelCard(text).data.base_model == "z-lab/Qwen3.6-35B-A3B-DFlash"
    assert f"{REPOSITORY}@2.50bpw" in cards[2].text
    cards[-1].write()
    kept = cards[-1].file.read_text().replace("<!-- exl3-dflash:keep -->", "<!-- exl3-dflash:keep -->\nMine.")
    cards[-1].file.write_text(kept)
    again = make_drafter_and_family_cards(directories, SETTINGS, cards[-1].file)[-1].text
    assert "Mine." in again


def test_a_family_is_of_one_source(tmp_path: Path) -> None:
    first = write_directory(tmp_path / "a", make_report())
    second = write_directory(tmp_path / "b", make_report(bits=6.0, source_sha256="cd" * 32))
    with pytest.raises(Exl3DflashError, match="different drafters"):
        make_drafter_and_family_cards([first, second], SETTINGS, tmp_path / "README.md")
    same = write_directory(tmp_path / "c", make_report())
    with pytest.raises(Exl3DflashError, match=r"second 4\.00bpw"):
        make_drafter_and_family_cards([first, same], SETTINGS, tmp_path / "README.md")


def test_a_card_inside_a_card_cannot_pass_for_it(directory: Path) -> None:
    inner = text_of(directory)
    quoted = quotable(parse_card(inner, "inner").text, None, None)
    assert "exl3-dflash:keep" not in quoted
    assert parse_card(quoted, "quoted").fingerprint is None
