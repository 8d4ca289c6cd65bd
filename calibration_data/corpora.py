"""The calibration corpora that the installed exllamav3 package carries, as documents.

exllamav3 ships six UTF-8 files for its own converter. Here they are read as files: importing exllamav3 compiles CUDA
code, so the package is only located. How each file divides into documents:

    lines       every line is one document (c4, multilingual)
    articles    `<doc ...>` header, title, text, `</doc>` (wiki)
    stories     separated by `<|endoftext|>` (tiny)
    segments    one long text, cut at line ends (code, technical)

Weights are shares of the rows of a mixed calibration set. exllamav3's converter adds random token ids as well; a
drafter never runs on such text, so they are left out here, and half of its weight for encyclopaedia articles goes to
code and technical text, which drafters are mostly used for.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from calibration_data.splitting import split_segments
from quantize.errors import Exl3DflashError

Splitting = Literal["lines", "articles", "stories", "segments"]

_PARTS: tuple[tuple[str, float, Splitting], ...] = (
    ("c4", 20, "lines"),
    ("code", 25, "segments"),
    ("multilingual", 10, "lines"),
    ("technical", 15, "segments"),
    ("wiki", 20, "articles"),
    ("tiny", 5, "stories"),
)
_SHORTEST_ARTICLE = 50  # characters; redirects and empty articles are shorter


@dataclass(frozen=True)
class Corpus:
    """One body of text.

    Attributes:
        name: for rows and reports.
        text: all of it.
        weight: its share in a mix, relative to the other weights.
        splitting: how it divides into documents, see the module docstring.
    """

    name: str
    text: str
    weight: float
    splitting: Splitting

    def documents(self) -> list[str]:
        """Its documents in file order, without exact repetitions; each ends with a line break where it had one."""
        if self.splitting == "lines":
            documents = [line + "\n" for line in self.text.split("\n") if line.strip()]
        elif self.splitting == "articles":
            articles = [article.lstrip().partition("\n")[2] for article in self.text.split("</doc>")]
            documents = [article for article in articles if len(article.strip()) > _SHORTEST_ARTICLE]
        elif self.splitting == "stories":
            documents = [story.strip() + "\n" for story in self.text.split("<|endoftext|>") if story.strip()]
        else:
            documents = split_segments(self.text)
        return list(dict.fromkeys(documents))


def standard_corpora(directory: Path | None = None) -> list[Corpus]:
    """The corpora of the installed exllamav3.

    Args:
        directory: where their files are; found in the installed package where None.

    Raises:
        Exl3DflashError: exllamav3 or one of its data files is not installed.
    """
    directory = directory or _installed_directory()
    return [Corpus(name, _read(directory / f"{name}.utf8"), weight, splitting) for name, weight, splitting in _PARTS]


def _installed_directory() -> Path:
    """Where the installed exllamav3 keeps its calibration files; the package is not imported."""
    try:
        spec = find_spec("exllamav3")
    except ValueError:  # something without a spec stands in for the package in sys.modules
        spec = PathFinder.find_spec("exllamav3")
    if spec is None or not spec.submodule_search_locations:
        raise Exl3DflashError(
            "the package exllamav3 is not installed, whose calibration text is part of `default`",
            "exllamav3 1.4.2 or later",
            "pip install exllamav3, or calibrate with `chat` or a file of your own",
        )
    return Path(spec.submodule_search_locations[0]) / "conversion" / "standard_cal_data"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Exl3DflashError(
            f"cannot read the calibration text {path} ({type(error).__name__})",
            "the data files of exllamav3 1.4.2 or later",
            "install exllamav3 again, or calibrate with `chat` or a file of your own",
        ) from None
