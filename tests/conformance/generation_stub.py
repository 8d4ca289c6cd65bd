"""What ExLlamaV3's generator needs on a CPU beyond `extension_stub`: paged attention, staging, sampling, pinned memory.

Each function keeps the argument order, dtypes and shape checks of the CUDA function that it stands for. The attention
does what its arguments say, in FP32 and without any kernel's shortcuts: it writes the new keys and values into their
pages and attends to everything that the table, the lengths, the window and the causal flag allow.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch

from .extension_stub import check

PAGE = 256


def paged_kv_cache_update(
    k: torch.Tensor, v: torch.Tensor, k_cache: Any, v_cache: Any, table: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Rows k, v (B, S, heads, dim) into pages (pages, 256, heads, dim) at positions lengths[b].. of row b's table."""
    for tensor in (k, v, k_cache, v_cache):
        check(tensor.dtype == torch.half and tensor.dim() == 4, "k, v and the caches must be half and 4-dimensional")
    check(table.dtype == torch.int32 and lengths.dtype == torch.int32, "block_table and cache_seqlens must be kInt")
    check(k_cache.shape[1] == PAGE and k.shape[3] % 8 == 0, "this kernel needs page_size == 256")
    check(table.dim() == 2 and min(len(table), len(lengths)) >= len(k), "the block table must cover the batch")
    check(all(t.is_contiguous() for t in (k, v, k_cache, v_cache, table, lengths)), "all tensors must be contiguous")
    for row in range(len(k)):
        positions = int(lengths[row]) + torch.arange(k.shape[1])
        pages = table[row, positions // PAGE].long()
        k_cache[pages, positions % PAGE] = k[row]
        v_cache[pages, positions % PAGE] = v[row]


def attend(args: Any) -> torch.Tensor:
    """ExLlamaV3's `AttnArgs` to the attention's output (B, S, heads, dim), half."""
    if args.k_cache is None:
        return torch.stack([_attend_row(args, row, args.k[row], args.v[row]) for row in range(args.bsz)])
    paged_kv_cache_update(
        args.k.contiguous(), args.v.contiguous(), args.k_cache, args.v_cache, args.block_table, args.cache_seqlens
    )
    rows = []
    for row in range(args.bsz):
        total = int(args.cache_seqlens[row]) + args.q_len
        pages = args.block_table[row, : -(-total // PAGE)].long()
        k, v = (cache[pages].flatten(0, 1)[:total] for cache in (args.k_cache, args.v_cache))
        rows.append(_attend_row(args, row, k, v))
    return torch.stack(rows)


def _attend_row(args: Any, row: int, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One sequence: queries (S, heads, dim) at the end of keys and values (T, kv heads, dim)."""
    q = args.q[row].float()
    groups = args.num_q_heads // args.num_kv_heads
    k, v = (tensor.float().repeat_interleave(groups, dim=1) for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * args.sm_scale
    if args.softcap:
        scores = args.softcap * torch.tanh(scores / args.softcap)
    ahead = torch.arange(len(k))[None] - torch.arange(len(k) - len(q), len(k))[:, None]
    hidden = ahead > 0 if args.causal else torch.zeros_like(ahead, dtype=torch.bool)
    if args.window_size is not None and args.window_size >= 0:
        hidden |= (-ahead > args.window_size) | (ahead > args.window_right)
    scores = scores.masked_fill(hidden, float("-inf"))
    if args.sinks is not None:
        scores = torch.cat([scores, args.sinks.float().view(-1, 1, 1).expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v).half()


def paged_attn_triton_decode(
    q: torch.Tensor, k: Any, v: Any, k_cache: Any, v_cache: Any, table: Any, lengths: Any, *, causal: bool,
    softmax_scale: float, window_size: tuple[int, int], softcap: float, sinks: Any, max_kv_len: int,
) -> torch.Tensor:  # fmt: skip
    """The kernel of sliding layers that keep a ring of pages; at most 16 new rows."""
    check(q.shape[1] <= 16 and max_kv_len <= len(table[0]) * PAGE, "paged_attn_triton_decode supports q_len <= 16")
    left, right = window_size
    return attend(
        SimpleNamespace(
            q=q, k=k, v=v, k_cache=k_cache, v_cache=v_cache, block_table=table, cache_seqlens=lengths, causal=causal,
            bsz=len(q), q_len=q.shape[1], num_q_heads=q.shape[2], num_kv_heads=k.shape[2], sm_scale=softmax_scale,
            window_size=left, window_right=right, softcap=softcap, sinks=sinks,
        )
    )  # fmt: skip


def generator_stage_decode(
    arena: Any, width: int, tables: Any, positions: Any, rope: Any, batch_ids: Any, ids: Any, pages: Any, offsets: Any
) -> None:
    """The tables and lengths of all rows into one arena, and the input token of each plain row into its page."""
    rows = len(tables)
    check(arena.dtype == torch.int32 and arena.is_contiguous(), "staging arena must be contiguous int32")
    check(arena.numel() >= rows * width + rows * (2 if rope else 1), "staging arena too small")
    check(len(positions) == rows, "kv_position length mismatch")
    blocks = arena[: rows * width].view(rows, width)
    blocks.zero_()
    for row, (table, position) in enumerate(zip(tables, positions, strict=True)):
        check(table.dtype == torch.int32 and table.is_contiguous(), "block index must be contiguous int32")
        count = min(table.numel(), width)
        blocks[row, :count] = table.view(-1)[:count]
        arena[rows * width + row] = position
    for row, (tokens, page, offset) in enumerate(zip(ids, pages, offsets, strict=True)):
        check(positions[row] < tokens.shape[-1] and offset < page.shape[-1], "token index out of range")
        batch_ids[row] = page[..., offset] = tokens[..., positions[row]]


def count_match_tensor(first: torch.Tensor, second: torch.Tensor, most: int) -> int:
    """Leading tokens that both rows share, at most `most`."""
    count = min(most, first.numel(), second.shape[1])
    equal = (first.reshape(-1)[:count] == second.reshape(-1)[:count]).int()
    return int(equal.cumprod(0).sum())


def partial_strings_match(text: Any, offsets: Any, strings: Any) -> int:
    """Where a stop string begins in `text`; -2 where one may still be completed, -1 where none is in sight."""
    read = np.frombuffer(text, dtype=np.uint32)
    bounds = np.frombuffer(offsets, dtype=np.uint32) // 4
    packed = np.frombuffer(strings, dtype=np.uint32)
    full, partial = len(read) + 1, len(read) + 1
    for begin, end in itertools.pairwise(bounds):
        for at in range(len(read)):
            overlap = min(len(read) - at, int(end - begin))
            if np.array_equal(read[at : at + overlap], packed[begin : begin + overlap]):
                if overlap == end - begin:
                    full = min(full, at)
                else:
                    partial = min(partial, at)
                break
    return -2 if partial < full else full if full <= len(read) else -1


def fused_sampler(logits: Any, mask: Any, bits: Any, sample: torch.Tensor, *settings: Any) -> None:
    """Greedy (mode 0), or one draw by Gumbel noise after min-p, top-k and top-p at the filter's temperature."""
    check(logits.dim() == 2 and sample.shape == (logits.shape[0], 1), "logits and sample must have a row each")
    _, dim, inverse_temperature, min_p_log, random, mode, _, top_k, top_p, filter_scale, _ = settings
    scores = logits[:, :dim].double()
    if mode == 0:
        sample.copy_(scores.argmax(-1, keepdim=True))
        return
    kept = torch.ones_like(scores, dtype=torch.bool)
    if min_p_log:
        kept &= scores >= scores.amax(-1, keepdim=True) + min_p_log
    if top_k:
        kept &= scores >= scores.masked_fill(~kept, float("-inf")).topk(top_k).values[:, -1:]
    if top_p < 1:
        probabilities = (scores.masked_fill(~kept, float("-inf")) * filter_scale).softmax(-1)
        ordered, order = probabilities.sort(-1, descending=True)
        kept &= torch.zeros_like(kept).scatter_(-1, order, ordered.cumsum(-1) - ordered < top_p)
    noise = -torch.empty_like(scores).exponential_(generator=torch.Generator().manual_seed(random)).log()
    scores = (scores * inverse_temperature + noise).masked_fill(~kept, float("-inf"))
    sample.copy_(scores.argmax(-1, keepdim=True))


def gumbel_noise_log(probabilities: torch.Tensor, out: torch.Tensor, random: int) -> None:
    """log p + Gumbel noise, of probabilities that need not be normalised."""
    noise = torch.empty_like(probabilities).exponential_(generator=torch.Generator().manual_seed(random)).log()
    out.copy_(probabilities.log() - noise)


def apply_rep_pens(logits: Any, out: Any, past: Any, penalty: float, sustain: int, decay: int) -> None:
    """Logits of tokens in past (1, T), divided where positive and multiplied where negative."""
    check(
        out.dtype == torch.float and past.dtype == torch.int64 and logits.shape == out.shape, "shapes or dtypes differ"
    )
    check(len(logits) == 1 and len(past) == 1 and past.shape[1] <= sustain, "rep. penalties only implemented for bsz 1")
    out.copy_(logits)
    seen = past[0].unique()
    out[0, seen] = torch.where(out[0, seen] > 0, out[0, seen] / penalty, out[0, seen] * penalty)


def softcap(x: torch.Tensor, y: torch.Tensor, scale: float) -> None:
    """scale * tanh(x / scale)"""
    y.copy_(scale * torch.tanh(x.float() / scale))


def _unpinned(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` without its pin_memory argument, which needs a device."""

    def call(*arguments: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return function(*arguments, **options)

    return call


@contextlib.contextmanager
def generating() -> Iterator[None]:
    """Inside `exllama_on_cpu`: its generator can run."""
    extension = importlib.import_module("exllamav3.ext").exllamav3_ext
    dispatch = importlib.import_module("exllamav3.modules.attention_fn.dispatch")
    functions: tuple[Callable[..., Any], ...] = (paged_kv_cache_update, generator_stage_decode, count_match_tensor)
    functions += (partial_strings_match, fused_sampler, gumbel_noise_log, apply_rep_pens, softcap)
    with contextlib.ExitStack() as stack:
        for name in ("empty", "zeros", "empty_like"):
            stack.enter_context(mock.patch.object(torch, name, _unpinned(getattr(torch, name))))
        for function in functions:
            stack.enter_context(mock.patch.dict(extension.__dict__, {function.__name__: function}))
        constants = {"FUSED_SAMPLER_MAX_BLOCKS": 1, "FUSED_SAMPLER_HIST_STRIDE": 1}
        stack.enter_context(mock.patch.dict(extension.__dict__, constants))
        stack.enter_context(mock.patch.object(dispatch, "attn_fns", [attend]))
        if importlib.util.find_spec("exllamav3.modules.sliding_attn"):
            rings = importlib.import_module("exllamav3.modules.sliding_attn")
            stack.enter_context(mock.patch.object(rings, "paged_attn_triton_decode", paged_attn_triton_decode))
        yield
