"""The lines that tell a user how an answer, and a whole session, went."""

from __future__ import annotations

from collections.abc import Sequence

from exl3_dflash.runtime.engine import GenerationStats

ENDINGS = {
    "length": "cut at the token limit",
    "context": "cut: the context is full (/reset starts over)",
    "interrupted": "interrupted",
}


def stats_line(stats: GenerationStats) -> str:
    """Tokens, speed, accept length and rate of one answer, and what is unusual about it."""
    parts = [_count(stats.new_tokens, "token"), f"first after {stats.time_to_first_token:.2f} s"]
    if stats.tokens_per_second is not None:
        parts.append(f"{stats.tokens_per_second:.1f} tokens/s")
    if stats.accept_length is not None:
        parts.append(f"accept length {stats.accept_length:.2f}")
    if stats.accept_rate is not None:
        parts.append(f"accept rate {stats.accept_rate:.0%}")
    if stats.decode_steps and not stats.verify_steps:
        parts.append("plain decoding")
    if stats.stop_reason in ENDINGS:
        parts.append(ENDINGS[stats.stop_reason])
    if stats.looping:
        parts.append(f"repeats itself over {stats.repeated_run} tokens: its acceptance says nothing")
    return " | ".join(parts)


def session_summary(answers: Sequence[GenerationStats]) -> str:
    """All answers of a session together; accept length as the mean over answers and token-weighted."""
    if not answers:
        return "no answers yet"
    lines = [
        f"{_count(len(answers), 'answer')}, {_count(sum(stats.new_tokens for stats in answers), 'token')}, "
        f"{sum(stats.reused_tokens for stats in answers)} of {sum(stats.prompt_tokens for stats in answers)} "
        "prompt tokens reused",
        f"last: {stats_line(answers[-1])}",
    ]
    drafted = [stats for stats in answers if stats.verify_steps]
    for name, group in (("drafted", drafted), ("plain", [stats for stats in answers if not stats.verify_steps])):
        if seconds := sum(stats.decode_seconds for stats in group):
            lines.append(f"{name}: {sum(stats.decoded_tokens for stats in group) / seconds:.1f} tokens/s")
    if drafted:
        steps, proposed = sum(s.verify_steps for s in drafted), sum(s.proposed for s in drafted)
        mean = sum(stats.accept_length or 0 for stats in drafted) / len(drafted)
        weighted = sum(stats.decoded_tokens for stats in drafted) / steps
        rate = f", accept rate {sum(s.accepted for s in drafted) / proposed:.0%}" if proposed else ""
        lines.append(f"accept length {mean:.2f} (mean of answers), {weighted:.2f} (token-weighted){rate}")
    return "\n".join(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
