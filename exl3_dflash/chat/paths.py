"""Where the chat keeps its input history: the platform's place for state, or `EXL3_DFLASH_HISTORY`."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

APPLICATION = "exl3-dflash"
HISTORY_VARIABLE = "EXL3_DFLASH_HISTORY"


def state_directory(platform: str = sys.platform, environment: Mapping[str, str] = os.environ) -> Path:
    """The directory for files that outlive a session but are no settings, for example ~/.local/state/exl3-dflash."""
    if platform == "win32":
        local = environment.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / APPLICATION
    if platform == "darwin":
        return Path.home() / "Library" / "Application Support" / APPLICATION
    base = environment.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / APPLICATION


def history_file(environment: Mapping[str, str] = os.environ) -> Path:
    """The chat's history file."""
    chosen = environment.get(HISTORY_VARIABLE)
    return Path(chosen).expanduser() if chosen else state_directory(environment=environment) / "chat_history"


def prepare_private_file(path: Path) -> bool:
    """Create `path` and its directory, readable by the user alone; False where that is not possible."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600, exist_ok=True)
    except OSError:
        return False
    return os.access(path, os.R_OK | os.W_OK)
