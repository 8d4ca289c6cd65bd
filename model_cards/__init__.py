"""Model cards for quantized drafters: text from Jinja templates, numbers from `quantize_report.json` and nowhere else.

- `facts`: the report, checked, as what a card says;
- `upstream`: the card of the source drafter, for attribution;
- `markers`: the parts of a card that survive its regeneration;
- `metadata`: the front matter, with a license that is never null;
- `render`: templates filled in, one drafter or a family of bit rates.

Knows nothing of drafters or of the network; `exl3_dflash.hub` gives it files and names.
"""

from model_cards.facts import CardFacts, Measurement, read_report
from model_cards.metadata import CardNames, License, check_metadata, choose_license
from model_cards.render import FamilyMember, branch_name, render_drafter_card, render_family_card
from model_cards.upstream import UpstreamCard, read_card

__all__ = [
    "CardFacts",
    "CardNames",
    "FamilyMember",
    "License",
    "Measurement",
    "UpstreamCard",
    "branch_name",
    "check_metadata",
    "choose_license",
    "read_card",
    "read_report",
    "render_drafter_card",
    "render_family_card",
]
