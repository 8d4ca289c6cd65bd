"""One answer from many checks: the earliest explanation in the chain of causes wins.

    files and pairing  >  features  >  a setting that accepts clearly more  >  quantization  >  the target itself

A wrong setting is named before the quantization, because it was measured; the target is blamed last, because that a
drafter is lost and nothing else explains it is no proof.
"""

from __future__ import annotations

from collections.abc import Sequence

from exl3_dflash.doctor.checks import FAIL, WARN, Check, Verdict

_LATE = ("quantization", "acceptance")


def reach_verdict(checks: Sequence[Check]) -> Verdict:
    """The verdict on a pair from all of its checks."""
    failed = [check for check in checks if check.status == FAIL]
    if not failed:
        warned = [check.name for check in checks if check.status == WARN]
        text = "the pair is healthy" + (f"; worth knowing: {', '.join(warned)}" if warned else "")
        return Verdict(True, None, text, "")
    first = min(failed, key=lambda check: _LATE.index(check.name) + 1 if check.name in _LATE else 0)
    if first.name == "acceptance":
        text = (
            "the drafter does not know this target: another or a fine-tuned target of the same shape, or damaged "
            "weights; no other setting explains it"
        )
    else:
        text = f"{first.likely_cause}: {first.seen}"
    return Verdict(False, first.likely_cause, text, first.advice)
