"""What is refused before a byte goes out: damaged, incomplete, untrue, or not meant to be published."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub.preflight import check_directory
from tests.family_models import make_family_drafter
from tests.hub.conftest import TOKEN, Run


def edit_json(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | changes))


def test_a_good_directory_is_listed_with_its_hashes(drafters: tuple[Path, Path]) -> None:
    checked = check_directory(drafters[0])
    assert {file.name for file in checked.files} == {path.name for path in drafters[0].iterdir()}
    assert sum(file.size for file in checked.files) == sum(path.stat().st_size for path in drafters[0].iterdir())


def test_tensors_that_are_written_under_other_names(tmp_path: Path, run: Run) -> None:
    source = make_family_drafter(tmp_path / "source", "muse-glimmer")
    out = tmp_path / "out"
    quantize_drafter(JobSettings(str(source), None, out, bits=2, calibration="none", threads=1))
    assert run("card", out, "--license", "mit", "-q")[0] == 0
    assert len(check_directory(out).files) == 6


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors.partial",
        "pytorch_model.bin",
        ".env",
        "old.safetensors",
        "train.log",
        "card.md~",
        "draft.gguf",
    ],
)
def test_stray_files(drafters: tuple[Path, Path], name: str) -> None:
    if name == "old.safetensors":
        shutil.copy(drafters[0] / "model.safetensors", drafters[0] / name)
    else:
        (drafters[0] / name).write_text("x")
    with pytest.raises(Exl3DflashError, match="holds what does not belong to a drafter: .*" + name.replace(".", r"\.")):
        check_directory(drafters[0])


def test_folders_and_links(drafters: tuple[Path, Path], tmp_path: Path) -> None:
    (drafters[0] / "checkpoints").mkdir()
    (tmp_path / "passwords.txt").write_text("secret")
    (drafters[0] / "notes.txt").symlink_to(tmp_path / "passwords.txt")
    with pytest.raises(Exl3DflashError, match=r"checkpoints, notes\.txt"):
        check_directory(drafters[0])


def test_a_token_in_a_file_does_not_go_out(drafters: tuple[Path, Path]) -> None:
    (drafters[0] / "notes.txt").write_text(f"export HF_TOKEN={TOKEN}\n")
    with pytest.raises(Exl3DflashError, match=r"notes\.txt contains a Hugging Face token") as raised:
        check_directory(drafters[0])
    assert TOKEN not in str(raised.value)


def test_a_shard_that_is_absent(drafters: tuple[Path, Path]) -> None:
    """FIELD_REPORTS 16."""
    index = {"weight_map": {"norm.weight": "model-00001-of-00002.safetensors"}}
    (drafters[0] / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(Exl3DflashError, match=r"lists model-00001-of-00002\.safetensors, absent from the folder"):
        check_directory(drafters[0])


def test_an_interrupted_copy_and_the_wrong_folder(drafters: tuple[Path, Path], tmp_path: Path) -> None:
    """FIELD_REPORTS 16."""
    weights = drafters[0] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(Exl3DflashError, match=r"model\.safetensors"):
        check_directory(drafters[0])
    with pytest.raises(Exl3DflashError, match=r"has no quantize_report\.json"):
        check_directory(tmp_path)


def test_a_gap_in_the_data_section(drafters: tuple[Path, Path]) -> None:
    """FIELD_REPORTS 17."""
    weights = drafters[0] / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + bytes(64))
    with pytest.raises(Exl3DflashError, match=r"model\.safetensors"):
        check_directory(drafters[0])


@pytest.mark.parametrize("name", ["candidate_selector.codebook.weight", "candidate_selector.codebook"])
def test_parts_of_another_architecture_are_named(drafters: tuple[Path, Path], name: str) -> None:
    """FIELD_REPORTS 17: a selector, however it is named, is refused by name and not dropped."""
    weights = drafters[0] / "model.safetensors"
    tensors = load_file(weights)
    save_file(tensors | {name: tensors["norm.weight"].clone()}, weights)
    with pytest.raises(Exl3DflashError, match=f"{name} is not supported in this version .*candidate selector"):
        check_directory(drafters[0])


def test_a_tensor_less(drafters: tuple[Path, Path]) -> None:
    weights = drafters[0] / "model.safetensors"
    tensors = load_file(weights)
    del tensors["layers.0.mlp.up_proj.suh"]
    save_file(tensors, weights)
    with pytest.raises(Exl3DflashError, match=r"up_proj has no suh"):
        check_directory(drafters[0])


def test_weights_and_report_of_different_jobs(drafters: tuple[Path, Path]) -> None:
    for name in ("quantize_report.json", "README.md"):
        shutil.copy(drafters[1] / name, drafters[0] / name)
    with pytest.raises(Exl3DflashError, match="its report says"):
        check_directory(drafters[0])


def test_a_calibration_that_was_not_run_is_not_claimed(drafters: tuple[Path, Path]) -> None:
    """FIELD_REPORTS 19: other converters write 250 x 2048 whatever they did."""
    for name in ("config.json", "quantization_config.json"):
        file = drafters[0] / name
        file.write_text(file.read_text().replace('"rows": 0', '"rows": 250').replace('"cols": 0', '"cols": 2048'))
    with pytest.raises(Exl3DflashError, match="claims 250 calibration rows, 0 were run"):
        check_directory(drafters[0])


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("license: apache-2.0", "license: null", "license is None"),
        ("license: apache-2.0\n", "", "license is None"),
        ("license: apache-2.0", "license: [", "is not YAML"),
        ("license: apache-2.0", "license: other", "license_name is missing"),
        ("- dflash\n", "", "tag dflash is missing"),
        ("pipeline_tag: text-generation", "pipeline_tag: tabular", "pipeline_tag is 'tabular'"),
        ("license: apache-2.0", "license: mit\nbase_model: ./local", "base_model is './local'"),
        ("<!-- exl3-dflash:card report=", "<!-- x ", "is not this drafter's card"),
        ("<!-- /exl3-dflash:keep -->", "", "repair the two lines by hand"),
    ],
)
def test_a_bad_card(drafters: tuple[Path, Path], old: str, new: str, said: str) -> None:
    """FIELD_REPORTS 21: found before the upload, not after it."""
    card = drafters[0] / "README.md"
    text = card.read_text()
    assert old in text
    card.write_text(text.replace(old, new))
    with pytest.raises(Exl3DflashError, match=said.replace("[", r"\[")):
        check_directory(drafters[0])


def test_no_card_or_that_of_the_source(drafters: tuple[Path, Path], quantized_originals: tuple[Path, Path]) -> None:
    shutil.copy(quantized_originals[0] / "README.md", drafters[0] / "README.md")
    with pytest.raises(Exl3DflashError, match="is not this drafter's card"):
        check_directory(drafters[0])
    (drafters[0] / "README.md").unlink()
    with pytest.raises(Exl3DflashError, match=r"has no README\.md"):
        check_directory(drafters[0])


def test_a_card_of_an_older_report(drafters: tuple[Path, Path]) -> None:
    edit_json(drafters[0] / "quantize_report.json", seed=1)
    with pytest.raises(Exl3DflashError, match="was made from another report"):
        check_directory(drafters[0])


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["{0}", "not-a-repository"], 1, "is not the name of a Hugging Face repository"),
        (["{0}", "{1}", "me/x", "--branch", "y"], 1, "--branch with several directories"),
        (["{0}", "{1}", "me/x", "--pr"], 1, "one directory for main"),
        (["{0}", "me/x@a", "--branch", "b"], 1, "one branch"),
        (["{0}", "{0}", "me/x"], 1, "is named twice"),
        (["{0}"], 2, "give at least one"),
        (["/nowhere", "me/x"], 1, "/nowhere is not a directory"),
    ],
)
def test_usage(drafters: tuple[Path, Path], run: Run, arguments: list[str], code: int, said: str) -> None:
    filled = [argument.format(*drafters) for argument in arguments]
    found, _, stderr = run("publish", *filled, "--dry-run", "-q")
    assert found == code
    assert said in " ".join(stderr.split())
