"""Whatever gets in a job's way is one clear message, costs nothing that was finished, and leaves no trace behind."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from exl3_dflash.conversion import identity
from exl3_dflash.conversion import job as job_module
from exl3_dflash.conversion.executor import InProcess
from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.conversion.work_directory import WorkDirectory
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.progress import Reporter
from tests.conversion.small_job import contents, job_in, make_pair


class Notes(Reporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.lines: list[str] = []

    def note(self, text: str) -> None:
        self.lines.append(text)


@contextmanager
def stop_after(tensors: int) -> Iterator[None]:
    """Ctrl-C when so many tensors are encoded."""
    run = InProcess.run

    def stopped(self: InProcess, tasks: Any) -> Any:
        for number, result in enumerate(run(self, tasks)):
            if number == tensors:
                raise KeyboardInterrupt
            yield result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InProcess, "run", stopped)
        yield


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> JobSettings:
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def reference(settings: JobSettings, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed job writes."""
    folder = tmp_path_factory.mktemp("reference")
    quantize_drafter(job_in(settings, folder))
    assert [path.name for path in folder.iterdir()] == ["out"]
    return contents(folder / "out")


@pytest.fixture(scope="module")
def stopped_once(settings: JobSettings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The work directory of a job that was stopped after two tensors."""
    folder = tmp_path_factory.mktemp("stopped")
    with stop_after(2), pytest.raises(KeyboardInterrupt):
        quantize_drafter(job_in(settings, folder))
    assert [path.name for path in folder.iterdir()] == ["out.work"]
    return folder / "out.work"


@pytest.fixture
def stopped(stopped_once: Path, tmp_path: Path) -> Path:
    """A copy of it beside `out`."""
    shutil.copytree(stopped_once, tmp_path / "out.work")
    return tmp_path / "out.work"


@pytest.fixture
def no_long_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "load_target", lambda *_, **__: pytest.fail("the target was loaded"))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "lock"}


def changed_copy(model: str, folder: Path, name: str) -> str:
    """A copy of a model directory in which one file is a little different."""
    copy = folder / "changed"
    shutil.copytree(model, copy)
    file = copy / name
    if name.endswith(".json"):
        file.write_text(json.dumps({**json.loads(file.read_text()), "comment": "a little different"}))
    else:
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    return str(copy)


CHANGES = {
    "bits": ({"bits": 4.0}, ["settings.bits was 6, is 4"]),
    "several": (
        {"bits": 4.0, "seed": 7, "method": "one-sided"},
        ["settings.bits was", "settings.seed was 0, is 7", "settings.method was two-sided, is one-sided"],
    ),
    "source": ({"source": "model.safetensors"}, ["source_sha256 was"]),
    "source config": ({"source": "config.json"}, ["source_config_sha256 was"]),
    "target": ({"target": "model.safetensors"}, ["target_sha256 was"]),
    "target config": ({"target": "config.json"}, ["target_config_sha256 was"]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_job_is_refused_with_every_difference(
    settings: JobSettings, stopped: Path, no_long_work: None, change: str
) -> None:
    options, said = CHANGES[change]
    for role in {"source", "target"} & set(options):
        options = {role: changed_copy(getattr(settings, role), stopped.parent, options[role])}
    before = files(stopped)
    with pytest.raises(Exl3DflashError) as error:
        quantize_drafter(job_in(settings, stopped.parent, resume=True, **options))
    assert str(error.value).count(" was ") == len(said) + 1, "nothing else is named"  # "the job was another one"
    assert all(part in str(error.value) for part in said)
    assert files(stopped) == before


def test_other_versions_and_other_text_are_refused(
    settings: JobSettings, stopped: Path, no_long_work: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = stopped.parent / "text.txt"
    text.write_text(Path(settings.cal_data).read_text() + "One more line.\n")
    manifest = json.loads((stopped / "manifest.json").read_text())
    manifest["settings"]["cal_data"] = str(text)
    (stopped / "manifest.json").write_text(json.dumps(manifest))
    monkeypatch.setattr(identity, "package_versions", lambda: {**manifest["versions"], "torch": "1.0"})
    with pytest.raises(Exl3DflashError, match=r"cal_data_sha256 was .*; versions\.torch was .*, is 1\.0"):
        quantize_drafter(job_in(settings, stopped.parent, resume=True, cal_data=str(text)))


@pytest.mark.parametrize("damage", ["flipped", "truncated"])
def test_damaged_results_are_made_again_with_a_note(
    settings: JobSettings, reference: dict[str, bytes], stopped: Path, damage: str
) -> None:
    results = sorted(stopped.glob("*.safetensors"))
    assert {"rows", "unquantized", "calibration"} < {path.stem for path in results}
    for path in results:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content if damage == "flipped" else content[: len(content) // 2])
    notes = Notes()
    quantize_drafter(job_in(settings, stopped.parent, resume=True), notes)
    assert contents(stopped.parent / "out") == reference
    for path in results:
        assert any(f"{path} is damaged" in line for line in notes.lines)


def test_what_is_finished_is_not_done_again(
    settings: JobSettings, reference: dict[str, bytes], stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in ("exl3_dflash.conversion.job.load_rows", "exl3_dflash.calibration.capture._run_row"):
        monkeypatch.setattr(step, lambda *_, **__: pytest.fail("done already"))
    before = {path.stem for path in stopped.glob("tensor-*")}
    encoded = []
    run = InProcess.run

    def watched(self: InProcess, tasks: Any) -> Any:
        for name, linear in run(self, tasks):
            encoded.append(f"tensor-{name}")
            yield name, linear

    monkeypatch.setattr(InProcess, "run", watched)
    quantize_drafter(job_in(settings, stopped.parent, resume=True))
    assert len(before) == 2
    assert not before & set(encoded)
    assert contents(stopped.parent / "out") == reference
    assert not stopped.exists()


def test_a_second_job_is_refused_at_once(settings: JobSettings, stopped: Path, no_long_work: None) -> None:
    before = files(stopped)
    for options in ({}, {"resume": True}, {"restart": True}):
        with WorkDirectory(stopped, resume=True), pytest.raises(Exl3DflashError, match="another job is running"):
            quantize_drafter(job_in(settings, stopped.parent, **options))
    assert files(stopped) == before


def test_a_small_disk_is_refused_before_any_work(
    settings: JobSettings, tmp_path: Path, no_long_work: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=16 << 20))
    with pytest.raises(Exl3DflashError, match=r"GB free; expected .* GB; fix: free some space"):
        quantize_drafter(job_in(settings, tmp_path))
    assert list(tmp_path.iterdir()) == []


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """The system refuses to write further than this into any file, as a full disk would."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("full_at", ["calibration", "output"])
def test_a_disk_that_fills_up_costs_nothing_that_was_finished(
    settings: JobSettings,
    reference: dict[str, bytes],
    stopped_once: Path,
    tmp_path: Path,
    full_at: str,
) -> None:
    room = (stopped_once / "calibration.safetensors").stat().st_size - 1
    options: dict[str, Any] = {}
    if full_at == "output":
        shutil.copytree(stopped_once, tmp_path / "out.work")
        room, options = len(reference["model.safetensors"]) - 1, {"resume": True}
        assert room < len(reference["model.safetensors"])
    with largest_file(room), pytest.raises(Exl3DflashError) as error:
        quantize_drafter(job_in(settings, tmp_path, **options))
    assert "cannot be written: File too large" in str(error.value)
    assert str(error.value).endswith("fix: free some space, then continue with --resume")
    assert [path.name for path in tmp_path.iterdir()] == ["out.work"]
    assert not list((tmp_path / "out.work").glob("*.partial"))
    quantize_drafter(job_in(settings, tmp_path, resume=True))
    assert contents(tmp_path / "out") == reference


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which nobody can write")
def test_a_place_that_cannot_be_written_is_refused(settings: JobSettings, tmp_path: Path, no_long_work: None) -> None:
    with pytest.raises(Exl3DflashError, match=r"/proc.* cannot be written"):
        quantize_drafter(replace(settings, out_dir=Path("/proc/out")))
    with pytest.raises(Exl3DflashError, match=r"/proc.* cannot be written"):
        quantize_drafter(replace(settings, out_dir=Path("/proc/out"), work_dir=tmp_path / "work"))
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_changes_meanwhile_ends_the_job(
    settings: JobSettings, reference: dict[str, bytes], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    shutil.copytree(settings.source, source)
    weights = source / "model.safetensors"
    original = weights.read_bytes()

    class Changing(Notes):
        def bar(self, label: str, total: float, unit: str) -> Any:
            if label == "quantize":
                weights.with_suffix(".new").write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
                weights.with_suffix(".new").replace(weights)
            return super().bar(label, total, unit)

    with pytest.raises(Exl3DflashError, match=r"model\.safetensors changed while the job was running"):
        quantize_drafter(job_in(settings, tmp_path, source=str(source)), Changing())
    assert not (tmp_path / "out").exists()
    with pytest.raises(Exl3DflashError, match="source_sha256 was"):
        quantize_drafter(job_in(settings, tmp_path, source=str(source), resume=True))
    quantize_drafter(job_in(settings, tmp_path, resume=True))
    report = json.loads((tmp_path / "out" / "quantize_report.json").read_text())
    assert report["source_sha256"] == json.loads(reference["quantize_report.json"])["source_sha256"]
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == reference["model.safetensors"]


def test_a_job_stopped_after_its_output_was_in_place_is_done(
    settings: JobSettings, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: WorkDirectory) -> None:
        raise KeyboardInterrupt

    out = stopped.parent / "out"
    with monkeypatch.context() as patch:
        patch.setattr(WorkDirectory, "remove", interrupt)
        with pytest.raises(KeyboardInterrupt):
            quantize_drafter(job_in(settings, stopped.parent, resume=True))
    before = files(out)
    monkeypatch.setattr(job_module, "load_target", lambda *_, **__: pytest.fail("the target was loaded"))
    with pytest.raises(Exl3DflashError, match=r"settings\.bits"):
        quantize_drafter(job_in(settings, stopped.parent, resume=True, bits=4))
    report = quantize_drafter(job_in(settings, stopped.parent, resume=True))
    assert report.to_json() == json.loads(before["quantize_report.json"])
    assert files(out) == before
    assert not stopped.exists()
