"""ExLlamaV3's generator over a loaded pair, and what its versions do to the length of an answer."""

from __future__ import annotations

from typing import Any

from exl3_dflash.runtime.exllama_errors import require_facts
from exl3_dflash.runtime.exllama_model import ExllamaDrafter, ExllamaModel

FACTS = ("draft_ids_pinned",)  # read of a generator that drafts


def make_generator(
    model: ExllamaModel, tokenizer: Any, drafter: ExllamaDrafter | None, draft_tokens: int, dynamic: bool
) -> Any:
    """A generator that begins with an empty cache.

    Args:
        model: the target with its cache.
        tokenizer: ExLlamaV3's own of the target.
        drafter: drafts `draft_tokens` per step; None is plain decoding.
        dynamic: see `ExllamaEngine`.

    Raises:
        Exl3DflashError: this version's generator lacks what the engine reads.
    """
    draft: dict[str, Any] = {}
    if drafter is not None:
        draft = {
            "draft_model": drafter.loaded.model,
            "draft_cache": drafter.loaded.cache,
            "num_draft_tokens": draft_tokens,
            "dynamic_draft_tokens": dynamic,
            "record_draft_stats": True,
        }
    generator = model.library.Generator(
        model=model.model,
        cache=model.cache,
        tokenizer=tokenizer,
        max_batch_size=model.settings.max_batch_size,
        max_chunk_size=model.settings.chunk_tokens,
        **draft,
    )
    require_facts(generator, FACTS if draft else ())
    return generator


def spare_tokens(generator: Any, most_draft_tokens: int, draft_tokens: int) -> int:
    """Tokens that a job must be allowed beyond its limit, at which the engine ends it.

    A job's pages hold the tokens drafted after its last one. But the drafter writes its whole block, whatever is
    drafted of it, and rows without a page would go to the cache's first page. Versions that have no `max_draft_tokens`
    also end an answer too early by what they draft.
    """
    unpaged = most_draft_tokens - draft_tokens if draft_tokens else 0
    return unpaged + (0 if hasattr(generator, "max_draft_tokens") else draft_tokens + 1)
