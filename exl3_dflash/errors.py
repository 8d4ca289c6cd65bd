"""The project's one user-facing error, re-exported from the lowest layer."""

from quantize.errors import Exl3DflashError

__all__ = ["Exl3DflashError"]
