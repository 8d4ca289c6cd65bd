"""Names that are downloaded from the stub Hub: pinned, complete, resumed, and one line where they cannot be had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub.resolve import resolve
from tests.hub.conftest import TOKEN, UPSTREAM, Run
from tests.hub.stub_hub import StubHub
from tests.tiny_models import make_tiny_drafter

NAME = "z-lab/Tiny-DFlash"


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> dict[str, bytes]:
    """The files of an unquantized drafter with its card."""
    files = files_of(make_tiny_drafter(tmp_path / "source", num_hidden_layers=1))
    return files | {"README.md": UPSTREAM.encode(), "LICENSE": b"Apache", "pytorch_model.bin": b"x", "a.onnx": b"x"}


def test_a_revision_is_pinned_although_its_name_moves_on(hub: StubHub, source: dict[str, bytes], tmp_path) -> None:
    """FIELD_REPORTS 12: the same name held different weights within days."""
    old = hub.add(NAME, source)
    first = resolve(NAME, "drafter")
    other = files_of(make_tiny_drafter(tmp_path / "other", num_hidden_layers=1, seed=7))
    new = hub.add(NAME, {**source, **other})
    second, pinned = resolve(NAME, "drafter"), resolve(f"{NAME}@{old}", "drafter")
    assert (first.revision, second.revision, pinned.revision) == (old, new, old)
    digests = [DrafterCheckpoint.open(model.path).sha256 for model in (first, second, pinned)]
    assert digests[0] == digests[2] != digests[1]
    assert resolve(str(first.path), "drafter") == first  # the cache's own folder keeps name and commit


def test_the_card_goes_along_and_foreign_weights_do_not(hub: StubHub, source: dict[str, bytes]) -> None:
    hub.add(NAME, source)
    path = resolve(NAME, "drafter").path
    assert {file.name for file in path.iterdir()} == {"config.json", "model.safetensors", "README.md", "LICENSE"}


def test_a_job_records_the_commit_and_carries_the_card(hub: StubHub, source: dict[str, bytes], tmp_path, run: Run):
    """FIELD_REPORTS 12, and the way of a license: from the source's card into ours."""
    commit = hub.add(NAME, source)
    out = tmp_path / "out"
    code, stdout, stderr = run(
        "quantize", NAME, "--out", out, "--bits", 2, "--calibration", "none", "--threads", 1, "--json", "-q"
    )
    assert code == 0, stderr
    report = json.loads(stdout)
    assert (report["source"], report["source_revision"]) == (NAME, commit)
    code, _, stderr = run("card", out, "--repo", "me/tiny")
    assert code == 0, stderr
    card = (out / "README.md").read_text()
    assert f"[{NAME}](https://huggingface.co/{NAME}) at commit `{commit}`" in card
    assert f"`{report['source_sha256']}`" in card
    assert "license: apache-2.0" in card
    assert f"[the paper](https://huggingface.co/{NAME}/blob/{commit}/paper.pdf)" in card


def test_the_card_of_the_source_is_fetched_where_it_did_not_go_along(
    hub: StubHub, source: dict[str, bytes], drafters: tuple[Path, Path], run: Run
) -> None:
    report = drafters[0] / "quantize_report.json"
    facts = json.loads(report.read_text()) | {"source": NAME, "source_revision": hub.add(NAME, source)}
    report.write_text(json.dumps(facts))
    (drafters[0] / "README.md").unlink()
    code, _, stderr = run("card", drafters[0], "--offline")
    assert code == 1
    assert "the license is not known" in stderr
    code, _, stderr = run("card", drafters[0])
    assert code == 0, stderr
    assert "# Tiny drafter" in (drafters[0] / "README.md").read_text()
    hub.add("z-lab/bare", {"config.json": b"{}"})
    report.write_text(json.dumps(facts | {"source": "z-lab/bare", "source_revision": None}))
    (drafters[0] / "README.md").unlink()
    code, _, stderr = run("card", drafters[0], "--license", "mit")
    assert code == 0
    assert "z-lab/bare has no card" in stderr


def test_an_interrupted_download_is_continued(hub: StubHub, source: dict[str, bytes]) -> None:
    hub.add(NAME, source)
    hub.fail("GET .*/model.safetensors", 500)
    with pytest.raises(Exl3DflashError, match=r"interrupted .* status 500.*run the command again to continue"):
        resolve(NAME, "drafter")
    before = len(hub.requests)
    assert DrafterCheckpoint.open(resolve(NAME, "drafter").path)
    assert not [line for line in hub.requests[before:] if line.startswith("GET") and line.endswith("config.json")]


def test_a_repository_that_lacks_a_shard(hub: StubHub, source: dict[str, bytes], run: Run) -> None:
    """FIELD_REPORTS 16."""
    index = {"weight_map": {"norm.weight": "model-00002-of-00002.safetensors"}}
    hub.add(NAME, {**source, "model.safetensors.index.json": json.dumps(index).encode()})
    code, _, stderr = run("inspect", NAME)
    assert code == 1
    assert "lists model-00002-of-00002.safetensors, absent from the folder" in stderr
    assert len(stderr.strip().splitlines()) == 1


def test_gated_missing_busy_and_offline_are_one_line_each(
    hub: StubHub, source: dict[str, bytes], run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, source, gated=True)
    hub.add("z-lab/open", source)
    cases = {
        NAME: "access to this Hugging Face repository is restricted",
        "z-lab/none": "no such Hugging Face repository",
        "z-lab/open@v9": "the repository has no such revision",
    }
    for name, said in cases.items():
        code, _, stderr = run("inspect", name)
        assert code == 1
        assert said in stderr
        assert len(stderr.strip().splitlines()) == 1
    hub.fail("/api/models/z-lab/open", 429)
    assert "rate limit is reached" in run("inspect", "z-lab/open")[2]
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    code, _, stderr = run("inspect", "z-lab/open")
    assert "the hub cannot be reached" in stderr
    assert TOKEN not in stderr


def test_what_is_in_the_cache_is_used_without_a_network(
    hub: StubHub, source: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(NAME, source)
    online = resolve(NAME, "drafter")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    assert resolve(NAME, "drafter") == online
