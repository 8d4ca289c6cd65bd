"""Reading safetensors directories: what is there comes back, and each kind of damage is one error that names it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quantize.checkpoint import TensorDirectory, linear_names, read_linear
from quantize.codebook import codebook_marker
from quantize.errors import Exl3DflashError
from quantize.exl3_tensors import unpack_signs
from quantize.linear import decode_linear

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.tensor(7, dtype=torch.int32)}


def refusal(path: Path) -> str:
    with pytest.raises(Exl3DflashError) as caught:
        TensorDirectory.open(path)
    return str(caught.value)


def write_raw(file: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def write_shards(folder: Path, weight_map: dict[str, str] | None = None) -> None:
    save_file({"a.weight": TENSORS["a.weight"]}, folder / "first.safetensors")
    save_file({"b": TENSORS["b"]}, folder / "second.safetensors")
    index = {"weight_map": weight_map or {"a.weight": "first.safetensors", "b": "second.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize("layout", ["file", "single", "odd name", "shards", "numbered without index"])
def test_tensors_come_back_from_every_layout(tmp_path: Path, layout: str) -> None:
    path = tmp_path
    if layout == "shards":
        write_shards(tmp_path)
    elif layout == "numbered without index":
        save_file({"a.weight": TENSORS["a.weight"]}, tmp_path / "m-00001-of-00002.safetensors")
        save_file({"b": TENSORS["b"]}, tmp_path / "m-00002-of-00002.safetensors")
    else:
        name = "weights.safetensors" if layout == "odd name" else "model.safetensors"
        save_file(TENSORS, tmp_path / name)
        path = tmp_path / name if layout == "file" else tmp_path
    with TensorDirectory.open(path) as directory:
        assert directory.names() == ("a.weight", "b")
        assert list(directory) == ["a.weight", "b"]
        assert len(directory) == 2
        assert "b" in directory
        assert "c" not in directory
        assert directory.shape("a.weight") == (2, 3)
        assert directory.dtype("b") == torch.int32
        assert directory.nbytes("a.weight") == 24
        assert directory.nbytes() == 28
        for name, tensor in TENSORS.items():
            assert torch.equal(directory.get(name), tensor)
        kept = directory.get("a.weight")
    assert torch.equal(kept, TENSORS["a.weight"])  # still mapped after the directory is closed


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.bool, torch.int64, torch.uint8, torch.float8_e4m3fn]
)
def test_types_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0, 1], [1, 0]]).to(dtype)
    save_file({"x": tensor, "none": torch.empty(0, 4, dtype=dtype)}, tmp_path / "model.safetensors")
    directory = TensorDirectory.open(tmp_path)
    assert directory.get("x").dtype == directory.dtype("x") == dtype
    assert torch.equal(directory.get("x").float(), tensor.float())
    assert directory.get("none").shape == (0, 4)


def test_sha256_is_the_files_own_or_that_of_the_list(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    own = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert TensorDirectory.open(tmp_path).sha256() == own
    (tmp_path / "model.safetensors").unlink()
    write_shards(tmp_path)
    lines = [
        f"{hashlib.sha256((tmp_path / f).read_bytes()).hexdigest()}  {f}\n"
        for f in ("first.safetensors", "second.safetensors")
    ]
    assert TensorDirectory.open(tmp_path).sha256() == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(Exl3DflashError, match=r"no tensor 'fc\.weight'"):
        TensorDirectory.open(tmp_path).get("fc.weight")


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "absent")
    assert "has no safetensors file" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "pytorch_model.bin" in refusal(tmp_path)
    write_raw(tmp_path / "model.safetensors", {})
    assert "holds no tensors" in refusal(tmp_path)


def test_files_that_do_not_make_one_model(tmp_path: Path) -> None:
    for name in ("m-00001-of-00003", "m-00003-of-00003"):
        save_file({name: TENSORS["b"]}, tmp_path / f"{name}.safetensors")
    assert "2 of 3 shards of 'm'" in refusal(tmp_path)
    assert "missing: 2" in refusal(tmp_path)
    save_file(TENSORS, tmp_path / "n-00001-of-00001.safetensors")
    assert "shards of 2 models" in refusal(tmp_path)
    save_file(TENSORS, tmp_path / "other.safetensors")
    assert "4 safetensors files and no model.safetensors.index.json" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a.weight": "first.safetensors", "b": "third.safetensors"}, "lists third.safetensors, absent"),
        (
            {"a.weight": "second.safetensors", "b": "second.safetensors"},
            "'a.weight' in second.safetensors, but no shard",
        ),
        ({"a.weight": "second.safetensors", "b": "first.safetensors"}, "but it is in first.safetensors"),
        (
            {"a.weight": "first.safetensors", "b": "second.safetensors", "c": "second.safetensors"},
            "'c' in second.safetensors, but no shard has it",
        ),
        ({"b": "second.safetensors", "c": "first.safetensors"}, "'c' in first.safetensors, but no shard"),
        ({"a.weight": "../first.safetensors"}, "'../first.safetensors'"),
        ({"a.weight": 3}, "'a.weight' in 3"),
    ],
)
def test_index_and_shards_that_disagree(tmp_path: Path, weight_map: dict[str, str], message: str) -> None:
    write_shards(tmp_path, weight_map)
    assert message in refusal(tmp_path)


def test_shards_with_more_than_the_index_says(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"b": TENSORS["b"], "extra": torch.ones(2)}, tmp_path / "second.safetensors")
    assert "holds 'extra'" in refusal(tmp_path)
    save_file({"b": TENSORS["b"], "a.weight": torch.ones(2)}, tmp_path / "second.safetensors")
    assert "'a.weight' is in first.safetensors and in" in refusal(tmp_path)
    write_shards(tmp_path)
    save_file(TENSORS, tmp_path / "model.safetensors")
    assert "an index that does not list it" in refusal(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}', "{", '{"weight_map": []}'])
def test_index_that_cannot_be_used(tmp_path: Path, text: str) -> None:
    save_file(TENSORS, tmp_path / "first.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refusal(tmp_path)


@pytest.mark.parametrize("keep", [0, 7, 30, -1])
def test_file_that_is_cut_off(tmp_path: Path, keep: int) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:keep])
    message = refusal(tmp_path)
    assert "is cut off" in message
    if keep == -1:
        assert "'b' is incomplete" in message  # the last tensor


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"x": entry(0, 2), "y": entry(3, 5)}, 5, "a gap in its data between 'x' and 'y'"),
        ({"x": entry(1, 2)}, 2, "a gap in its data before 'x'"),
        ({"x": entry(0, 2), "y": entry(1, 3)}, 3, "an overlap in its data between 'x' and 'y'"),
        ({"x": entry(0, 2)}, 5, "3 bytes that belong to no tensor"),
        ({"x": entry(0, 3, [2])}, 3, "'x' covers 3 bytes"),
        ({"x": entry(2, 0, [2])}, 3, "'x' covers -2 bytes"),
        ({"x": entry(0, 2, [2], "F4")}, 2, "'x' has the type F4"),
        ({"x": {"dtype": "U8", "shape": [1]}}, 1, "header entry of 'x' is damaged"),
        ({"x": entry(0, 1, [True])}, 1, "header entry of 'x' is damaged"),
        ({"x": entry(0, 1, [-1])}, 1, "header entry of 'x' is damaged"),
        ({"x": 3}, 1, "header entry of 'x' is damaged"),
        ([1], 1, "damaged header"),
        (b"{nope", 1, "damaged header"),
        (b"\xff\xfe", 1, "damaged header"),
        (b'{"x": 1, "x": 2}', 1, "'x' twice"),
    ],
)
def test_header_that_contradicts_itself(tmp_path: Path, header: Any, data: int, message: str) -> None:
    write_raw(tmp_path / "model.safetensors", header, bytes(data))
    assert message in refusal(tmp_path)


def test_files_that_are_something_else(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n")
    assert "git lfs pull" in refusal(tmp_path)
    file.write_bytes(b"PK\x03\x04" + bytes(range(60)))
    assert "not a safetensors file" in refusal(tmp_path)


def layer(bits: float = 2, codebook: str = "mul1", rows: int = 128, columns: int = 256) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    trellis = torch.randint(-(2**15), 2**15, (rows // 16, columns // 16, int(16 * bits)), generator=random)
    marker = codebook_marker(codebook)
    return {
        "x.trellis": trellis.to(torch.int16),
        "x.suh": torch.randn(rows, generator=random).half(),
        "x.svh": torch.randn(columns, generator=random).half(),
        **({} if marker is None else {f"x.{codebook}": marker}),
    }


@pytest.mark.parametrize(("bits", "codebook"), [(1, "mul1"), (2.5, "mul1"), (4, "mcg"), (8, "3inst")])
def test_layers_are_found_and_read(tmp_path: Path, bits: float, codebook: str) -> None:
    bias = torch.randn(256).half()
    save_file({**layer(bits, codebook), "x.bias": bias, "norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    directory = TensorDirectory.open(tmp_path)
    assert linear_names(directory) == {"x": (bits, codebook, 128, 256)}
    read = read_linear(directory, "x", 100, 200)
    assert (read.bits, read.codebook, read.in_features, read.out_features) == (bits, codebook, 100, 200)
    assert read.bias is not None
    assert torch.equal(read.bias, bias[:200])
    assert decode_linear(read).shape == (100, 200)
    with pytest.raises(Exl3DflashError, match="stored as 128 x 256"):
        read_linear(directory, "x", 129, 200)
    with pytest.raises(Exl3DflashError, match="no trellis"):
        read_linear(directory, "norm", 3, 3)


def test_packed_signs_of_early_files(tmp_path: Path) -> None:
    tensors = layer()
    rows, columns = torch.randn(128).sign().half(), torch.randn(256).sign().half()
    for name, signs in (("x.su", rows), ("x.sv", columns)):
        bits = (signs.view(-1, 16) < 0).long()
        words = (bits << torch.arange(16)).sum(1)
        tensors[name] = (words - ((words >> 15) << 16)).to(torch.int16)
        assert torch.equal(unpack_signs(tensors[name]), signs)
    unpacked = {**tensors, "x.suh": rows, "x.svh": columns}
    del tensors["x.suh"], tensors["x.svh"], unpacked["x.su"], unpacked["x.sv"]
    save_file(tensors, tmp_path / "packed.safetensors")
    save_file(unpacked, tmp_path / "plain.safetensors")
    files = (tmp_path / "packed.safetensors", tmp_path / "plain.safetensors")
    packed, plain = (read_linear(TensorDirectory.open(file), "x", 128, 256) for file in files)
    assert torch.equal(decode_linear(packed), decode_linear(plain))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x.trellis": None}, "has x.suh, x.svh, x.mul1, but no trellis"),
        ({"x.trellis": torch.zeros(8, 16, 40, dtype=torch.int32)}, "x.trellis is torch.int32"),
        ({"x.trellis": torch.zeros(8, 12, 32, dtype=torch.int16)}, "multiples of 128"),
        ({"x.trellis": torch.zeros(8, 16, 72, dtype=torch.int16)}, "4.5 bits per weight"),
        ({"x.suh": None}, "x has no suh"),
        ({"x.svh": torch.zeros(128).half()}, "x.svh is torch.float16 [128]"),
        ({"x.svh": torch.zeros(256)}, "x.svh is torch.float32"),
        ({"x.su": torch.zeros(8, dtype=torch.int16)}, "suh and su"),
        ({"x.mcg": codebook_marker("mcg")}, "marked both mul1 and mcg"),
        ({"x.mul1": torch.tensor(1, dtype=torch.int32)}, "not the marker of its codebook"),
        ({"x.mul1": None, "x.trellis": torch.zeros(8, 16, 40, dtype=torch.int16)}, "2.5 bits with 3inst"),
        ({"x.bias": torch.zeros(300).half()}, "x.bias has shape [300]"),
    ],
)
def test_layer_that_does_not_fit_together(tmp_path: Path, change: dict[str, torch.Tensor | None], message: str) -> None:
    tensors = {name: tensor for name, tensor in {**layer(), **change}.items() if tensor is not None}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(Exl3DflashError) as caught:
        linear_names(TensorDirectory.open(tmp_path))
    assert message in str(caught.value)
