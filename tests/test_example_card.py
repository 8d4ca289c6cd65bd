"""The committed example is what the tool makes today, of the drafter that is embedded today.

Made anew by `python tools/example_card.py`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from huggingface_hub import ModelCard

from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.hub.cards import CardSettings, make_card
from model_cards import License

EXAMPLE = Path(__file__).resolve().parents[1] / "model_cards" / "examples" / "demo-drafter-6.00bpw"
SETTINGS = CardSettings(license=License("mit"), offline=True)


def test_the_card_is_what_the_tool_makes_of_the_report(tmp_path: Path) -> None:
    directory = tmp_path / EXAMPLE.name
    directory.mkdir()
    shutil.copy(EXAMPLE / "quantize_report.json", directory)
    assert make_card(directory, SETTINGS).text == (EXAMPLE / "README.md").read_text()
    assert ModelCard.load(EXAMPLE / "README.md").data.license == "mit"


def test_the_report_is_of_the_embedded_drafter(tmp_path: Path) -> None:
    """Whatever does not depend on calibration is the same in a fresh job: weights, tensors, sizes, settings."""
    committed = json.loads((EXAMPLE / "quantize_report.json").read_text())
    fresh = quantize_drafter(JobSettings("demo", None, tmp_path / "out", calibration="none", threads=1)).to_json()
    keys = ("source", "source_sha256", "bits", "bpw", "head_bits", "head_quantized", "codebook", "out_scales")
    keys += ("size_bytes", "source_bytes", "copied", "notes", "tap_shift", "seed")
    assert {key: committed[key] for key in keys} == {key: fresh[key] for key in keys}
    shapes = [[(tensor["name"], tensor["shape"]) for tensor in report["tensors"]] for report in (committed, fresh)]
    assert shapes[0] == shapes[1]
    assert committed["seconds"] == 0
    assert not [tensor for tensor in committed["tensors"] if tensor["seconds"] or tensor["fallback"]]
