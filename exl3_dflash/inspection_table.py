"""An `Inspection` as text for people."""

from __future__ import annotations

from typing import Any

from exl3_dflash.inspection import InspectedTensor, Inspection


def render(found: Inspection, *, every_tensor: bool = True) -> str:
    """Facts, then one line per tensor, then sizes and what is wrong."""
    lines = [f"{label:<14} {text}" for label, text in _facts(found) if text]
    if every_tensor:
        lines += ["", f"{'tensor':<44} {'shape':>16} {'stored as':>12} {'KiB':>10}"]
        lines += [_tensor_line(tensor) for tensor in found.tensors]
    lines += ["", f"{'size':<14} {_sizes(found)}"]
    lines += [f"{'note':<14} {note}" for note in found.notes]
    lines += [f"{'problem':<14} {problem}" for problem in found.problems]
    return "\n".join(lines)


def _facts(found: Inspection) -> list[tuple[str, str]]:
    facts = [
        ("name", found.name + (f" at {found.revision}" if found.revision else "")),
        ("kind", found.kind + (f" ({found.architecture})" if found.architecture else "")),
    ]
    if found.drafter:
        facts += _drafter_lines(found.drafter)
    facts.append(("head", found.head))
    stated = found.quantization or {}
    if found.bpw is not None:
        settings = [f"{key} {stated[key]}" for key in ("bits", "head_bits", "codebook", "out_scales") if key in stated]
        text = f"{found.bpw:.4f} bits per weight stored"
        facts.append(("quantization", text + (f"; config.json: {', '.join(settings)}" if settings else "")))
        facts.append(("calibration", _calibration(found.calibration)))
    if found.provenance:
        known = [f"{key} {value}" for key, value in found.provenance.items() if value is not None]
        facts.append(("made from", ", ".join(known)))
    facts.append(("sha256", found.sha256 or ""))
    return facts


def _drafter_lines(drafter: dict[str, Any]) -> list[tuple[str, str]]:
    rope = drafter["rope"]
    sliding = ""
    if drafter["sliding_layers"]:
        sliding = f", {drafter['sliding_layers']} sliding (window {drafter['sliding_window']})"
    vocabulary = str(drafter["vocab_size"])
    if drafter["draft_vocab_size"] != drafter["vocab_size"]:
        vocabulary += f", of which it drafts {drafter['draft_vocab_size']}"
    shift = "" if drafter["tap_shift"] is None else f" shifted by {drafter['tap_shift']}"
    return [
        ("config", f"{drafter['member']}, {drafter['config_keys']}; RoPE {rope['type']}, theta {rope['theta']:g}"),
        (
            "drafter",
            f"{drafter['layers']} layers{sliding}, hidden {drafter['hidden_size']}, heads {drafter['heads']}/"
            f"{drafter['kv_heads']} x {drafter['head_dim']}, vocabulary {vocabulary}",
        ),
        ("block", f"{drafter['block_size'] or 'unknown number of'} tokens, mask token {drafter['mask_token_id']}"),
        (
            "taps",
            f"{', '.join(map(str, drafter['target_layer_ids']))}{shift} of {drafter['num_target_layers'] or '?'} "
            f"target layers, width {drafter['target_hidden_size']}",
        ),
    ]


def _calibration(calibration: dict[str, Any]) -> str:
    run, stated = calibration["run"], calibration["stated"]
    if run is not None and run.get("mode") == "none":
        return "none was run"
    if run is not None:
        return f"run: {run.get('rows')} rows of {run.get('cols')} from {run.get('source')}, {run.get('tokens')} tokens"
    if isinstance(stated, dict):
        return f"stated in config.json: {stated.get('rows')} rows of {stated.get('cols')}"
    return "nothing is stated"


def _tensor_line(tensor: InspectedTensor) -> str:
    shape = " x ".join(map(str, tensor.shape)) or "scalar"
    stored = tensor.type if tensor.bits is None else f"{tensor.bits:g} bits {tensor.type}"
    return f"{tensor.name:<44} {shape:>16} {stored:>12} {tensor.nbytes / 1024:>10,.1f}"


def _sizes(found: Inspection) -> str:
    files = f"{len(found.files)} file{'s' if len(found.files) != 1 else ''}"
    return (
        f"{found.size_bytes:,} bytes in {files}: {found.quantized_bytes:,} quantized, "
        f"{found.copied_bytes:,} not quantized"
    )
