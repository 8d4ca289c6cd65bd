"""A target on transformers: any causal language model with a list of decoder layers, on a CPU or a CUDA device.

The decoder is called directly (token ids in, hidden states after the final norm out), taps are taken by hooks on the
layers (so that the last layer's tap is the raw residual; the last entry of transformers' `hidden_states` is after the
final norm), and logits are computed only for rows that are asked for, by the model's own code (`anatomy.HeadOnly`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from exl3_dflash.errors import Exl3DflashError
from exl3_dflash.target.anatomy import (
    HeadOnly,
    cache_argument,
    collect_outputs,
    find_body_name,
    find_decoder,
    find_layers,
    text_config,
)
from exl3_dflash.target.base import TapRows, TargetFacts
from exl3_dflash.target.cache import RewindableCache
from exl3_dflash.target.probe import ModelProbe, continues_in_chunks, probe_model
from exl3_dflash.target.session import SessionParts, TransformersSession
from exl3_dflash.target.tokenizer import TransformersTokenizer


class TransformersTarget:
    """`base.Target` on a transformers model. Build it with `load.load_target`."""

    def __init__(
        self,
        model: Any,
        tokenizer: TransformersTokenizer,
        *,
        name: str,
        quantized: str = "none",
        sha256: str | None = None,
    ) -> None:
        """model: a loaded transformers causal LM on its final device and dtype; it is frozen and set to evaluation."""
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self._decoder = find_decoder(model)
        self._config = text_config(model)
        self._layers = find_layers(self._decoder, int(self._config.num_hidden_layers))
        self._cache_argument = cache_argument(self._decoder)
        body_name = find_body_name(model, self._decoder)
        trial = {"use_cache": True, self._cache_argument: self.new_cache().transformers_cache}
        probe = probe_model(model, getattr(model, body_name), self._layers, trial)
        self._head_only = HeadOnly(model, body_name, probe.body_output_type)
        probe.check_head(self._head_only, type(model).__name__)
        self._outer_embedding_scale = probe.outer_embedding_scale
        self.facts = self._collect_facts(probe, name, quantized, sha256)
        self._continues_in_chunks = not self.facts.recurrent or continues_in_chunks(
            self.run_chunk, self.new_cache, self.facts.vocab_size
        )

    @property
    def device(self) -> torch.device:
        """Where ids go and taps and logits come from."""
        return torch.device(self.model.get_input_embeddings().weight.device)

    @property
    def dtype(self) -> torch.dtype:
        """Of embeddings and taps."""
        dtype: torch.dtype = self.model.get_input_embeddings().weight.dtype
        return dtype

    @torch.no_grad()
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """ids (...) to the rows (..., Ht) that a drafter starts from: the table's, scaled as the model scales them.

        This is the first layer's input, but for models that norm it (Muse-Glimmer): their drafters read it unnormed.
        """
        table = self.model.get_input_embeddings()
        if getattr(table, "embed_norm", None) is not None:
            return functional.embedding(ids.to(self.device), table.weight)
        rows: torch.Tensor = table(ids.to(self.device))
        return rows if self._outer_embedding_scale == 1.0 else rows * self._outer_embedding_scale

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalised hidden (..., Ht) to logits (..., V) float32, with the model's own logit scale and softcap.

        Differentiable in `hidden` where that requires a gradient; the weights never do.
        """
        rows = hidden.to(self.device, self.dtype).reshape(1, -1, hidden.shape[-1])
        return self._head_only(rows).float().reshape(*hidden.shape[:-1], -1)

    def output_matrix(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalised hidden (..., Ht) to logits (..., V) float32, without the model's own logit scale and softcap.

        Differentiable as `head` is.
        """
        logits: torch.Tensor = self.model.get_output_embeddings()(hidden.to(self.device, self.dtype))
        return logits.float()

    @torch.no_grad()
    def tap_rows(self, ids: torch.Tensor, tap_ids: Sequence[int], want_logits: bool = False) -> TapRows:
        """One row ids (S,) without a cache: taps (S, K*Ht), logits (S, V) only where wanted."""
        hidden, taps = self._run(ids, tap_ids, {"use_cache": False})
        return TapRows(taps=taps, logits=self.head(hidden) if want_logits else None)

    def new_session(self) -> TransformersSession:
        """An empty session."""
        return TransformersSession(
            SessionParts(
                run_chunk=self.run_chunk,
                head=self.head,
                new_cache=self.new_cache,
                continues_in_chunks=self._continues_in_chunks,
            )
        )

    def new_cache(self) -> RewindableCache:
        """An empty cache for one sequence."""
        return RewindableCache(self._config)

    @torch.no_grad()
    def run_chunk(
        self, ids: torch.Tensor, start: int, cache: RewindableCache, tap_ids: Sequence[int] = ()
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ids (T,) at positions start.. on `cache`: hidden after the final norm (T, Ht), taps (T, K*Ht)."""
        positions = torch.arange(start, start + len(ids), device=self.device)[None]
        options = {"use_cache": True, "position_ids": positions, self._cache_argument: cache.transformers_cache}
        return self._run(ids, tap_ids, options)

    def _run(
        self, ids: torch.Tensor, tap_ids: Sequence[int], options: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._check_tap_ids(tap_ids)
        with collect_outputs(self._layers, tap_ids) as outputs:
            result = self._decoder(input_ids=ids.to(self.device)[None], **options)
        hidden: torch.Tensor = result.last_hidden_state[0]
        return hidden, self._concatenate(outputs, tap_ids, hidden)

    def _concatenate(
        self, outputs: dict[int, torch.Tensor], tap_ids: Sequence[int], hidden: torch.Tensor
    ) -> torch.Tensor:
        """Layer outputs (1, T, Ht) to taps (T, K*Ht) in the listed order; hidden gives T, dtype and device."""
        expected = (1, hidden.shape[0], self.facts.hidden_size)
        for layer_id, output in outputs.items():
            if tuple(output.shape) != expected:
                raise Exl3DflashError(
                    f"layer {layer_id} of {self.facts.architecture} gives states of shape {tuple(output.shape)}",
                    expected=f"one residual stream {expected}",
                    fix="choose a target of another architecture",
                )
        if not tap_ids:
            return hidden.new_empty(hidden.shape[0], 0)
        return torch.cat([outputs[layer_id][0].to(hidden.device) for layer_id in tap_ids], dim=-1)

    def _check_tap_ids(self, tap_ids: Sequence[int]) -> None:
        outside = [layer_id for layer_id in tap_ids if not 0 <= layer_id < len(self._layers)]
        if outside:
            raise Exl3DflashError(
                f"tap {outside[0]} is no layer of {self.facts.name}",
                expected=f"layers 0 to {len(self._layers) - 1}",
                fix="pair the drafter with the target that it was trained for",
            )

    def _collect_facts(self, probe: ModelProbe, name: str, quantized: str, sha256: str | None) -> TargetFacts:
        softcap = getattr(self._config, "final_logit_softcapping", None)
        limit = getattr(self._config, "max_position_embeddings", None)
        return TargetFacts(
            name=name,
            architecture=type(self.model).__name__,
            hidden_size=probe.hidden_size,
            num_layers=len(self._layers),
            vocab_size=int(self.model.get_input_embeddings().weight.shape[0]),
            head_size=probe.head_size,
            tokenizer_size=self.tokenizer.size,
            embedding_scale=probe.embedding_scale,
            final_logit_softcap=None if softcap is None else float(softcap),
            recurrent=self.new_cache().recurrent,
            quantized=quantized,
            sha256=sha256,
            max_position_embeddings=None if limit is None else int(limit),
            eos_token_ids=self.tokenizer.eos_token_ids,
        )
