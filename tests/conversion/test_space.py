"""What a job asks of the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from exl3_dflash.conversion import space
from exl3_dflash.conversion.plan import make_plan
from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from tests.conversion.small_job import make_pair


def test_what_a_stopped_job_has_kept_needs_no_more_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(space, "require_space", lambda _, needed: asked.append(needed))
    settings = make_pair(tmp_path)
    checkpoint = DrafterCheckpoint.open(Path(settings.source))
    plan = make_plan(checkpoint, settings)
    space.require_job_space(plan, checkpoint, settings)
    settings.work_path.mkdir()
    for step in ("rows", "calibration"):
        (settings.work_path / f"{step}.safetensors").write_bytes(bytes(1000))
    space.require_job_space(plan, checkpoint, settings)
    assert asked[0] - asked[1] == 2000
    assert asked[1] > plan.total_bytes
