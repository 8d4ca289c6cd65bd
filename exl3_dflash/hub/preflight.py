"""Everything that can be refused about a directory before a byte of it is published; nothing here needs a network.

A directory passes if its tensors can all be read, decoded and accounted for, its card belongs to its report and has
front matter that the Hub accepts, its configuration claims no calibration that was not run, and it holds nothing else:
no left-over shard (ExLlamaV3 loads every safetensors file it finds), no temporary or hidden file, no access token.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from exl3_dflash.drafter.checkpoint import DrafterCheckpoint
from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.hub.cards import CARD_NAME
from model_cards import CardFacts, check_metadata, read_card, read_report
from quantize.audit import audit_directory

LARGEST_FILE = 50 * 10**9  # bytes: what the Hub takes as one file
TEXT_SUFFIXES = {".json", ".md", ".txt", ".jinja", ".py", ".yaml", ".yml", ".bib", ".cff", ".model", ".tiktoken"}
PICTURE_SUFFIXES = {".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg", ".pdf"}  # of the source's card
LICENSE_NAMES = re.compile(r"(LICEN[CS]E|NOTICE|COPYING|USE_POLICY)[\w.-]*", re.IGNORECASE)
TEXT_LIMIT = 16 << 20  # bytes of a file that is searched for tokens
_TOKEN = re.compile(rb"\bhf_[A-Za-z0-9]{20,}")
_CHUNK = 16 << 20


@dataclass(frozen=True)
class LocalFile:
    """One file to publish. `git_sha1` is the hash by which the Hub names a file that is not stored as a large one."""

    path: Path
    name: str
    size: int
    sha256: str
    git_sha1: str


@dataclass(frozen=True)
class CheckedDirectory:
    """A directory that may be published."""

    path: Path
    facts: CardFacts
    files: tuple[LocalFile, ...]


def check_directory(path: Path) -> CheckedDirectory:
    """Check a directory that `exl3-dflash quantize` wrote and `exl3-dflash card` described.

    Raises:
        Exl3DflashError: the first thing that is wrong with it, and how to mend it.
    """
    facts = read_report(path)
    checkpoint = DrafterCheckpoint.open(path)
    _check_tensors(path, checkpoint, facts)
    _check_claims(checkpoint, facts)
    check_card(path / CARD_NAME, facts.fingerprint)
    names = _check_strays(path, {file.name for file in checkpoint.directory.files})
    return CheckedDirectory(path, facts, tuple(local_file(path / name) for name in names))


def check_card(file: Path, fingerprint: str) -> None:
    """A card that was made here from the report with this fingerprint, with front matter that the Hub accepts."""
    made = "make it: exl3-dflash card"
    if not file.is_file():
        raise Exl3DflashError(f"{file.parent} has no {CARD_NAME}", "a card", made)
    card = read_card(file)
    if card.fingerprint is None:
        raise Exl3DflashError(f"{file} is not this drafter's card", "one made by exl3-dflash card", made)
    if card.fingerprint != fingerprint:
        raise Exl3DflashError(f"{file} was made from another report", "a card of these weights", "make it again")
    card.kept(str(file))
    check_metadata(card.metadata, str(file))


def local_file(path: Path) -> LocalFile:
    """Size and hashes of a file."""
    size = path.stat().st_size
    if size > LARGEST_FILE:
        raise Exl3DflashError(f"{path} has {size:,} bytes", f"at most {LARGEST_FILE:,} in one file", "use shards")
    sha256, git = hashlib.sha256(), hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            sha256.update(chunk)
            git.update(chunk)
    return LocalFile(path, path.name, size, sha256.hexdigest(), git.hexdigest())


def _check_tensors(path: Path, checkpoint: DrafterCheckpoint, facts: CardFacts) -> None:
    audit = audit_directory(path, expected=map(checkpoint.output_name, checkpoint.tensor_names()))
    if not audit.linears:
        raise Exl3DflashError(f"{path} has no quantized tensor", "an EXL3 drafter", "quantize it first")
    if len(audit.linears) != facts.tensor_count or audit.nbytes != facts.size_bytes:
        raise Exl3DflashError(
            f"{path} holds {len(audit.linears)} quantized tensors and {audit.nbytes:,} bytes, "
            f"its report says {facts.tensor_count} and {facts.size_bytes:,}",
            "weights and report of one job",
            "quantize the drafter again",
        )


def _check_claims(checkpoint: DrafterCheckpoint, facts: CardFacts) -> None:
    """config.json must not claim a calibration that was not run."""
    stated = (checkpoint.config.raw.get("quantization_config") or {}).get("calibration") or {}
    run = facts.calibration
    rows = run.rows if run.was_run else 0
    if stated.get("rows", 0) != rows:
        raise Exl3DflashError(
            f"{checkpoint.directory.path}: config.json claims {stated.get('rows')} calibration rows, {rows} were run",
            "one truth",
            "quantize the drafter again",
        )


def _check_strays(path: Path, weights: set[str]) -> list[str]:
    """The names of the directory's files, or an error for what does not belong into a repository."""
    names, strays = [], []
    for entry in sorted(path.iterdir()):
        known = entry.suffix in TEXT_SUFFIXES | PICTURE_SUFFIXES or LICENSE_NAMES.fullmatch(entry.name)
        if entry.name == ".gitattributes":
            continue  # the Hub's own
        if entry.is_symlink() or not entry.is_file() or entry.name.startswith("."):
            strays.append(entry.name)
        elif entry.name in weights or known:
            names.append(entry.name)
        else:
            strays.append(entry.name)
    if strays:
        raise Exl3DflashError(
            f"{path} holds what does not belong to a drafter: {', '.join(strays[:8])}",
            "weights, configuration, card and license",
            "move it elsewhere",
        )
    for name in names:
        if name not in weights:
            _check_secrets(path / name)
    return names


def _check_secrets(file: Path) -> None:
    with file.open("rb") as stream:
        found = _TOKEN.search(stream.read(TEXT_LIMIT))
    if found:
        raise Exl3DflashError(f"{file} contains a Hugging Face token", "none", "remove it from the file, and revoke it")
