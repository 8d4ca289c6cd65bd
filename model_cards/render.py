"""Cards as text: facts, names and the parts that survive, poured into the templates beside this module.

Rendering is a pure function: the same inputs give the same text, and making a card from its own output changes nothing.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from model_cards import markers
from model_cards.facts import CardFacts
from model_cards.metadata import HUB_ID, CardNames, front_matter

DEMO_NAMES = ("demo-drafter", "demo-target")


@dataclass(frozen=True)
class FamilyMember:
    """One bit rate of a family, on its branch."""

    branch: str
    facts: CardFacts


def branch_name(facts: CardFacts) -> str:
    """The customary branch of a bit rate, for example `6.00bpw`."""
    return f"{facts.bits:.2f}bpw"


def render_drafter_card(
    facts: CardFacts, names: CardNames, *, kept: str = "", upstream: str = "", previous: Mapping[str, Any] | None = None
) -> str:
    """The card of one quantized drafter.

    Args:
        facts: from its report.
        names: what the report does not know.
        kept: a person's own text, kept between its markers.
        upstream: the source's card, made quotable.
        previous: front matter to inherit from, see `metadata.front_matter`.
    """
    mark = markers.card_mark(facts.fingerprint)
    return _render("drafter.md.jinja", names, mark, kept, upstream, previous or {}, facts=facts)


def render_family_card(
    members: Sequence[FamilyMember],
    names: CardNames,
    *,
    kept: str = "",
    upstream: str = "",
    previous: Mapping[str, Any] | None = None,
) -> str:
    """The card on `main` of a repository with one bit rate per branch; arguments as for one drafter."""
    ordered = sorted(members, key=lambda member: -member.facts.bpw)
    mark = markers.card_mark(family_fingerprint(members))
    first = ordered[0].facts
    return _render("family.md.jinja", names, mark, kept, upstream, previous or {}, members=ordered, facts=first)


def family_fingerprint(members: Sequence[FamilyMember]) -> str:
    """One SHA-256 for the reports of a family, whatever their order."""
    lines = sorted(f"{member.branch} {member.facts.fingerprint}\n" for member in members)
    return sha256("".join(lines).encode()).hexdigest()


def _render(
    template: str, names: CardNames, mark: str, kept: str, upstream: str, previous: Mapping[str, Any], **values: Any
) -> str:
    from huggingface_hub import ModelCard

    card_data = front_matter(names, previous)
    text = (
        _environment()
        .get_template(template)
        .render(names=names, card_mark=mark, kept=kept, upstream=upstream, **values)
    )
    card = ModelCard(f"---\n{card_data.to_yaml()}\n---\n\n{text}", ignore_metadata_errors=True)
    return str(card).rstrip("\n") + "\n"


def _environment() -> Any:
    import jinja2

    templates = str(importlib.resources.files("model_cards") / "templates")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters |= {
        "megabytes": lambda count: f"{count / 1e6:,.2f} MB",
        "thousands": lambda count: f"{count:,}",
        "percent": lambda share: f"{100 * share:.2f}",
        "bits": lambda bits: f"{bits:g}",
        "hub_link": _hub_link,
        "cell": lambda text: str(text).replace("|", "\\|").replace("\n", " "),
        "pair_name": lambda name: "demo" if name in DEMO_NAMES else name,
    }
    environment.globals |= {
        "keep_begin": markers.begin(markers.KEEP),
        "keep_end": markers.end(markers.KEEP),
        "upstream_begin": markers.begin(markers.UPSTREAM),
        "upstream_end": markers.end(markers.UPSTREAM),
    }
    return environment


def _hub_link(name: str) -> str:
    """A link where the name is a Hub id, else the name as code."""
    return f"[{name}](https://huggingface.co/{name})" if HUB_ID.fullmatch(name) else f"`{name}`"
