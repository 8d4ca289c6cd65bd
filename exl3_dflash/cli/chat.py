"""`exl3-dflash chat`: a terminal session with a pair, one answer, or plain text through a pipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from exl3_dflash.cli.engine_options import (
    CacheBitsOption,
    CacheTokensOption,
    DynamicDraftOption,
    EngineName,
    EngineOption,
    GpuSplitOption,
    engine_choice,
)
from exl3_dflash.cli.options import (
    PAIR_NAMES,
    BlockSizeOption,
    DeviceOption,
    Dtype,
    DtypeOption,
    JsonOption,
    QuietOption,
    ThreadsOption,
    VerboseOption,
    set_verbosity,
)

if TYPE_CHECKING:
    from exl3_dflash.chat.session import ChatSession
    from exl3_dflash.runtime.load import LoadedPair


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("chat")(chat)


def chat(
    target: Annotated[str, typer.Option("--target", help=f"The model that answers: {PAIR_NAMES}.")],
    drafter: Annotated[str | None, typer.Option("--drafter", help=f"Its DFlash drafter: {PAIR_NAMES}.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Answer this once; '-' reads stdin.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System prompt.")] = None,
    temperature: Annotated[float, typer.Option("--temperature", help="0 takes the most likely token.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Keep the likeliest tokens up to this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Keep this many of the likeliest tokens; 0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option("--min-p", help="Drop tokens below this share of the likeliest.")] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1 disfavours tokens that were seen.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option("--seed", help="Repeatable sampling.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Longest answer, in tokens.")] = 1024,
    draft_tokens: Annotated[
        int | None, typer.Option("--draft-tokens", help="Tokens drafted per step; the block size less one by default.")
    ] = None,
    no_draft: Annotated[bool, typer.Option("--no-draft", help="Plain decoding: the drafter is not run.")] = False,
    think: Annotated[
        bool | None, typer.Option("--think/--no-think", help="The chat template's thinking switch.")
    ] = None,
    block_size: BlockSizeOption = None,
    engine_name: EngineOption = EngineName.auto,
    cache_tokens: CacheTokensOption = None,
    cache_bits: CacheBitsOption = None,
    gpu_split: GpuSplitOption = None,
    dynamic_draft: DynamicDraftOption = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = Dtype.auto,
    threads: ThreadsOption = 0,
    json_output: JsonOption = False,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
) -> None:
    """Chat with a target, made faster by its drafter; the text is the target's own."""
    set_verbosity(verbose, quiet)
    if drafter is None and not no_draft:
        raise typer.BadParameter("give the drafter, or --no-draft for plain decoding", param_hint="--drafter")
    from exl3_dflash.chat.conversation import Conversation
    from exl3_dflash.chat.session import ChatSession
    from exl3_dflash.runtime.engine import SamplingSettings, StopSettings
    from exl3_dflash.runtime.load import load_pair

    sampling = SamplingSettings(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    StopSettings(max_new_tokens)
    choice = engine_choice(engine_name, cache_tokens, cache_bits, gpu_split, dynamic_draft)
    question = _question(prompt, json_output)
    draft_tokens = 0 if no_draft else draft_tokens
    if not quiet:
        typer.echo(f"loading {target}{f' and {drafter}' if drafter else ''}", err=True)
    pair = load_pair(
        target,
        drafter,
        device=device,
        dtype=dtype.value,
        threads=threads,
        draft_tokens=draft_tokens,
        block_size=block_size,
        engine=choice,
    )
    if not quiet:
        for note in pair.notes:
            typer.echo(f"note: {note}", err=True)
    engine = pair.engine(draft_tokens)
    stops = StopSettings(max_new_tokens, frozenset(engine.tokenizer.eos_token_ids))
    session = ChatSession(engine, Conversation(system), sampling, stops)
    if think is not None:
        session.set_thinking(think)
    if question is None:
        _converse(session, pair, quiet)
    elif json_output:
        _print_json(session, pair, question)
    else:
        _answer_once(session, question, quiet)


def _question(prompt: str | None, json_output: bool) -> str | None:
    """The one message to answer, or None for a conversation."""
    import sys

    if prompt is None and json_output and sys.stdin.isatty():
        raise typer.BadParameter("--json gives one answer: give --prompt, or a message on stdin", param_hint="--json")
    if prompt == "-" or (prompt is None and json_output):
        prompt = sys.stdin.read().strip()
    if prompt is not None and not prompt.strip():
        raise typer.BadParameter("the message is empty", param_hint="--prompt")
    return prompt


def _converse(session: ChatSession, pair: LoadedPair, quiet: bool) -> None:
    """Talk in the terminal, or through stdin and stdout where there is none."""
    import sys

    from exl3_dflash.chat.loop import run_chat
    from exl3_dflash.chat.ui import PlainUI

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        run_chat(session, PlainUI(sys.stdin, sys.stdout, sys.stderr, quiet))
        return
    from exl3_dflash.chat.paths import history_file
    from exl3_dflash.chat.terminal import TerminalUI

    ui = TerminalUI(history_file())
    drafter = f"{pair.drafter_source.name} drafts" if pair.drafter_source else "no drafter"
    ui.note(f"{pair.target_source.name}, {drafter}. /help lists commands; Alt-Enter begins a new line; Ctrl-D leaves.")
    run_chat(session, ui)


def _answer_once(session: ChatSession, question: str, quiet: bool) -> None:
    """Stream one answer to stdout."""
    import sys

    from exl3_dflash.chat.loop import respond
    from exl3_dflash.chat.ui import PlainUI

    respond(session, PlainUI(sys.stdin, sys.stdout, sys.stderr, quiet), session.ask(question))


def _print_json(session: ChatSession, pair: LoadedPair, question: str) -> None:
    """One answer as one JSON object."""
    import json
    from dataclasses import asdict

    from exl3_dflash.conversion.report import package_versions

    for _ in session.ask(question):
        pass
    result: dict[str, Any] = session.answers[-1].to_json()
    result |= {"draft_tokens": session.engine.draft_tokens, "thinking": session.conversation.thinking}
    result |= {"sampling": asdict(session.sampling), "max_new_tokens": session.stops.max_new_tokens}
    result |= {"pair": pair.describe(), "notes": list(pair.notes), "versions": package_versions()}
    typer.echo(json.dumps(result, ensure_ascii=False, allow_nan=False))
