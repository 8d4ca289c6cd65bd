"""Makes the helpers importable (`from tests.tiny_models import ...`) without shadowing the installed packages."""

from __future__ import annotations

import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parent.parent)
if _ROOT not in sys.path:
    sys.path.append(_ROOT)
