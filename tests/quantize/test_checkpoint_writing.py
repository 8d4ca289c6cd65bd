"""Writing model directories: complete or not at all, laid out as ExLlamaV3's converter does."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import quantize.checkpoint_writer as writer_module
from quantize.checkpoint import CheckpointWriter, QuantizationConfig, StoredLinear, TensorDirectory, mean_bits
from quantize.codebook import codebook_marker
from quantize.errors import Exl3DflashError
from quantize.quantization_config import quantized_config

QUANTIZATION = QuantizationConfig(3.999, 8, "mul1", "auto", 250, 2048).to_dict()
TENSORS = {
    "fc.trellis": torch.arange(64 * 40, dtype=torch.int16).view(8, 8, 40),
    "fc.suh": torch.ones(128).half(),
    "fc.svh": torch.ones(128).half(),
    "fc.mul1": codebook_marker("mul1"),
    "norm.weight": torch.randn(7).bfloat16(),
    "mask_embedding": torch.randn(5),
    "layers.0.self_attn.attention_sink_bias": torch.randn(3),
}


def write(out_dir: Path, *, force: bool = False, shard_bytes: int = 2**30, files: bool = True) -> Path:
    with CheckpointWriter(out_dir, force=force, shard_bytes=shard_bytes) as writer:
        for name, tensor in TENSORS.items():
            assert tensor is not None
            writer.add(name, tensor)
        writer.set_config({"hidden_size": 128}, QUANTIZATION)
        if files:
            writer.add_file("report.json", "{}")
        return writer.finish()


def same_tensors(path: Path) -> None:
    directory = TensorDirectory.open(path)
    assert set(directory.names()) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert tensor is not None
        assert directory.dtype(name) == tensor.dtype
        assert torch.equal(directory.get(name), tensor)


def test_one_file(tmp_path: Path) -> None:
    out = write(tmp_path / "new" / "parents" / "out")
    assert sorted(file.name for file in out.iterdir()) == [
        "config.json", "model.safetensors", "quantization_config.json", "report.json",
    ]  # fmt: skip
    same_tensors(out)
    assert load_file(out / "model.safetensors").keys() == TENSORS.keys()
    assert [file.name for file in out.parent.iterdir()] == ["out"]


def test_shards_and_index(tmp_path: Path) -> None:
    out = write(tmp_path / "out", shard_bytes=300)
    shards = sorted(file.name for file in out.glob("*.safetensors"))
    assert shards == [f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
    assert len(shards) > 1
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values() if tensor is not None)
    assert index["weight_map"].keys() == TENSORS.keys()
    same_tensors(out)
    for shard in shards:
        sizes = [tensor.nbytes for tensor in load_file(out / shard).values()]
        assert sum(sizes) <= 300 or len(sizes) == 1


def test_configuration_files(tmp_path: Path) -> None:
    out = write(tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    stated = {
        "quant_method": "exl3",
        "version": "1.6.5",
        "bits": 4.0,
        "head_bits": 8,
        "calibration": {"rows": 250, "cols": 2048},
        "out_scales": "auto",
        "codebook": "mul1",
    }
    assert config == {"hidden_size": 128, "quantization_config": stated}
    storage = json.loads((out / "quantization_config.json").read_text())
    modules = storage.pop("tensor_storage")
    assert storage == stated
    assert modules == {
        "fc": {
            "stored_tensors": {
                "fc.trellis": {"shape": [8, 8, 40], "n_bytes": 5120, "dtype": "torch.int16"},
                "fc.suh": {"shape": [128], "n_bytes": 256, "dtype": "torch.float16"},
                "fc.svh": {"shape": [128], "n_bytes": 256, "dtype": "torch.float16"},
                "fc.mul1": {"shape": [], "n_bytes": 4, "dtype": "torch.int32"},
            },
            "quant_format": "exl3",
            "bits_per_weight": 2.5,
            "mul1_multiplier": 0x83DCD12D,
        },
        "norm": {"stored_tensors": {"norm.weight": {"shape": [7], "n_bytes": 14, "dtype": "torch.bfloat16"}}},
    }


def test_config_of_the_source_is_kept() -> None:
    source = {"tie_word_embeddings": True, "quantization_config": {"quant_method": "fp8"}}
    result = quantized_config(source, {"quant_method": "exl3"})
    assert result["tie_word_embeddings"] is False
    assert result["quantization_config"] == {
        "quant_method": "exl3", "original_quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    assert source["tie_word_embeddings"] is True
    again = quantized_config(result, {"quant_method": "exl3"})
    assert again["quantization_config"] == {"quant_method": "exl3"}


def test_mean_bits() -> None:
    assert mean_bits([StoredLinear(4, "mul1", 128, 128), StoredLinear(6, "mul1", 128, 384)]) == 5.5
    assert mean_bits([]) == 0.0


def test_views_and_transposes_are_stored_as_they_are(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("t", base.T)
        writer.add("row", base[1])
        writer.add("grad", torch.nn.Parameter(base[:, 1]))
        out = writer.finish()
    directory = TensorDirectory.open(out)
    assert torch.equal(directory.get("t"), base.T)
    assert torch.equal(directory.get("row"), base[1])
    assert torch.equal(directory.get("grad"), base[:, 1])


def refused(out_dir: Path, *, force: bool = False) -> str:
    with pytest.raises(Exl3DflashError) as caught:
        write(out_dir, force=force)
    return str(caught.value)


def test_destination_that_exists(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    write(out)  # an empty directory is taken
    same_tensors(out)
    (out / "keep.txt").write_text("old")
    assert "exists and is not empty" in refused(out)
    assert (out / "keep.txt").exists()
    write(out, force=True, files=False)
    assert not (out / "keep.txt").exists()
    assert not (out / "report.json").exists()
    same_tensors(out)
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_force_deletes_model_directories_only(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    assert "not a model directory" in refused(tmp_path / "home", force=True)
    assert "is a file" in refused(tmp_path / "home" / "thesis.tex", force=True)
    assert (tmp_path / "home" / "thesis.tex").exists()


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def broken_write(out: Path, stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace `out` with something else, and fail at `stage`."""
    with CheckpointWriter(out, force=True) as writer:
        writer.add("other", torch.ones(3))
        writer.add_file("report.json", "{}")
        if stage == "exception":
            raise Exl3DflashError("some other step failed")
        if stage == "interrupt":
            raise KeyboardInterrupt
        if stage == "disk full":
            monkeypatch.setattr(writer_module, "write_file", raises(OSError(errno.ENOSPC, "No space left on device")))
        else:
            real = Path.replace
            monkeypatch.setattr(Path, "replace", lambda self, to: fail_once(self, to, real))
        writer.finish()


@pytest.mark.parametrize("stage", ["exception", "interrupt", "disk full", "rename"])
def test_nothing_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str) -> None:
    out = write(tmp_path / "deep" / "out")
    before = snapshot(tmp_path)
    with pytest.raises((Exl3DflashError, KeyboardInterrupt)):
        broken_write(out, stage, monkeypatch)
    monkeypatch.undo()
    assert snapshot(tmp_path) == before
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["out"]
    same_tensors(out)


def raises(error: BaseException) -> Callable[..., None]:
    def call(*args: object, **kwargs: object) -> None:
        raise error

    return call


def fail_once(source: Path, to: Path, real: Callable[[Path, Path], Path]) -> Path:
    """Renames work, but not that of the new directory onto the old one's name."""
    if source.name.endswith(".partial"):
        raise OSError(errno.EACCES, "Permission denied")
    return real(source, to)


def test_a_complete_directory_can_be_refused_before_it_gets_its_name(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def check(folder: Path) -> None:
        seen.append(sorted(file.name for file in folder.iterdir()))
        raise Exl3DflashError("the audit failed")

    with CheckpointWriter(tmp_path / "out") as writer:
        writer.add("x", torch.ones(3))
        writer.set_config({}, QUANTIZATION)
        assert writer.tensor_bytes == 12
        with pytest.raises(Exl3DflashError, match="the audit failed"):
            writer.finish(check)
    assert seen == [["config.json", "model.safetensors", "quantization_config.json"]]
    assert list(tmp_path.iterdir()) == []


def test_leaving_without_finish_removes_the_parents_it_made(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path / "a" / "b" / "out") as writer:
        writer.add("x", torch.ones(1))
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with CheckpointWriter(tmp_path / "fits", expected_bytes=5 * 10**8):
        pass
    with pytest.raises(Exl3DflashError, match=r"1\.00 GB free; expected 2\.02 GB"):
        CheckpointWriter(tmp_path / "out", expected_bytes=2 * 10**9).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_disk_that_fills_up_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "write_file", raises(OSError(errno.ENOSPC, "No space left on device")))
    assert "cannot be written: No space left on device; fix: free some space" in refused(tmp_path / "out")


def test_parent_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be written" in refused(tmp_path / "file" / "sub" / "out")


def test_leftovers_of_killed_writers_go_and_what_they_were_replacing_comes_back(tmp_path: Path) -> None:
    kept = [".out.00bpw.abcd1234.partial", "out.abcd1234.partial", "notes.old", ".out.config.old.txt"]
    for name in (".out.abcd1234.partial", ".out.ef_01234.old", *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    with CheckpointWriter(tmp_path / "out", force=True) as writer:
        writer.discard_leftovers()
        assert (tmp_path / "out" / "config.json").read_text() == ".out.ef_01234.old"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["out", *kept])
    (tmp_path / ".out.ef_01234.old").mkdir()
    with CheckpointWriter(tmp_path / "out", force=True) as writer:
        writer.discard_leftovers()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["out", *kept])
