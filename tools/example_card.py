"""Makes `model_cards/examples/demo-drafter-6.00bpw`: the card that the tool writes for the embedded drafter.

Run it after the embedded pair or a card template has changed:

    python tools/example_card.py

The report is committed beside the card, because a card is a function of its report. What differs from run to run or
from machine to machine is taken out of it: the output path, all timings, and local parts of versions (`+cpu`).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from exl3_dflash.conversion.job import quantize_drafter
from exl3_dflash.conversion.settings import JobSettings
from exl3_dflash.hub.cards import CardSettings, make_card
from exl3_dflash.progress import Reporter
from model_cards import License

EXAMPLE = Path(__file__).resolve().parents[1] / "model_cards" / "examples" / "demo-drafter-6.00bpw"
CARD_SETTINGS = CardSettings(license=License("mit"), offline=True)


def normalised(report: dict[str, Any]) -> dict[str, Any]:
    """The report without what depends on the run and the machine."""
    tensors = [{**tensor, "seconds": 0.0} for tensor in report["tensors"]]
    versions = {name: version.partition("+")[0] for name, version in report["versions"].items()}
    return {**report, "out_dir": EXAMPLE.name, "seconds": 0.0, "tensors": tensors, "versions": versions}


def main() -> None:
    """Quantize the embedded drafter and write report and card."""
    with tempfile.TemporaryDirectory() as folder:
        settings = JobSettings(
            source="demo",
            target="demo",
            out_dir=Path(folder) / "demo",
            cal_data="chat",
            cal_rows=32,
            cal_cols=512,
            eval_rows=16,
            device="cpu",
            dtype="float32",
            threads=1,
        )
        report = normalised(quantize_drafter(settings, Reporter(quiet=True)).to_json())
    EXAMPLE.mkdir(parents=True, exist_ok=True)
    (EXAMPLE / "quantize_report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    (EXAMPLE / "README.md").unlink(missing_ok=True)
    make_card(EXAMPLE, CARD_SETTINGS).write()


if __name__ == "__main__":
    main()
