"""What we call in ExLlamaV3 exists there, with these arguments: in the installed version and in an older one.

The calls are the real ones: a pair is loaded and answers, and every call into the library is kept and then bound to the
signatures that were read from each version's source (`exllama_signatures`).
"""

from __future__ import annotations

import importlib.util
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from exl3_dflash.runtime.engine import SamplingSettings, StopSettings
from exl3_dflash.runtime.exllama_model import ExllamaSettings
from exl3_dflash.runtime.exllama_sampling import make_sampler
from tests.demo_pair import demo_directories

from .exllama_pair import load_theirs, prompts_of
from .exllama_signatures import ATTRIBUTES, RECORD, SOURCES, bind, read_attributes, read_signatures

pytestmark = pytest.mark.conformance

VERSIONS = json.loads(RECORD.read_text())
FILTERED = SamplingSettings(0.7, top_k=20, top_p=0.9, min_p=0.05, repetition_penalty=1.1, seed=3)
Calls = list[tuple[str, tuple[Any, ...], dict[str, Any]]]


PLACES = ("Config", "Model", "Tokenizer", "generator", "sampler")  # where watched names are looked up


class Watched:
    """The library, a class or a function of it; calls of what is in SOURCES are kept."""

    def __init__(self, thing: Any, name: str, calls: Calls) -> None:
        self._thing, self._name, self._calls = thing, name, calls

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(self._thing, attribute)
        name = f"{self._name}.{attribute}" if self._name[:1].isupper() else attribute
        return Watched(value, name, self._calls) if name in SOURCES or name in PLACES else value

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self._calls.append((self._name, arguments, options))
        return self._thing(*arguments, **options)


@pytest.fixture(scope="module")
def calls(generator_library: types.ModuleType) -> Calls:
    """Every call of a session: loading, drafted and plain decoding, an aborted request, taps, all kinds of sampling."""
    kept: Calls = []
    library: Any = Watched(generator_library, "", kept)
    theirs = load_theirs(library, *demo_directories())
    loaded = theirs.target.loaded
    for name in ("forward", "prefill"):
        setattr(loaded.model, name, _kept(f"Model.{name}", getattr(loaded.model, name), kept))
    engine = theirs.engine()
    generator = engine._ready_generator()
    for name in ("enqueue", "cancel", "iterate", "num_remaining_jobs"):
        setattr(generator, name, _kept(f"Generator.{name}", getattr(generator, name), kept))
    prompt = prompts_of(engine)[0]
    list(engine.generate(prompt, FILTERED, StopSettings(6, frozenset(engine.tokenizer.eos_token_ids))))
    engine.cancel(engine.submit(prompt, FILTERED, StopSettings(6)))
    theirs.target.tap_rows(torch.tensor(prompt), (0, 1), want_logits=True)
    theirs.target.new_session().forward(torch.tensor(prompt), (0, 1), 0)
    make_sampler(library, SamplingSettings(0.7, top_p=0.9, min_p=0.05))
    load_theirs(library, demo_directories()[0], None, ExllamaSettings(cache_bits=6, cache_tokens=256))
    for name in ("forward", "prefill"):
        delattr(loaded.model, name)
    return kept


def _kept(name: str, function: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        calls.append((name, arguments, options))
        return function(*arguments, **options)

    return call


@pytest.mark.parametrize("version", VERSIONS)
def test_our_calls_fit_the_signatures_of(version: str, calls: Calls) -> None:
    signatures = VERSIONS[version]["signatures"]
    for name, arguments, options in calls:
        bind(signatures[name], arguments, options)
    made = {name for name, _, _ in calls}
    bound_below = {"Model.load", "Cache.get_new_state", *(name for name in SOURCES if name.startswith("Linear"))}
    assert made == set(SOURCES) - bound_below


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_that_need_a_gpu_fit_the_signatures_of(version: str) -> None:
    signatures = VERSIONS[version]["signatures"]
    takes_draft = any(name == "draft_model" for name, _, _ in signatures["Model.load"])
    assert takes_draft == (version != "1.4.2")  # looked for before it is given
    for more in ({"device": None}, {"use_per_device": [1.0], "max_batch_size": 2}, {"max_batch_size": 2}):
        draft = {"draft_model": None} if takes_draft else {}
        bind(signatures["Model.load"], (), {"max_chunk_size": 1, **more, **draft})
    bind(signatures["Cache.get_new_state"], (), {})
    for kind in ("LinearEXL3", "LinearFP16"):
        bind(signatures[f"{kind}.forward"], (None, {}, torch.float), {})
        bind(signatures[f"{kind}.get_weight_tensor"], (), {})


@pytest.mark.parametrize("version", VERSIONS)
def test_attributes_that_we_read_exist_in(version: str) -> None:
    assert VERSIONS[version]["attributes"] == {owner: list(names) for (_, owner), names in ATTRIBUTES.items()}


def test_the_record_is_that_of_the_installed_version(generator_library: types.ModuleType) -> None:
    spec = importlib.util.find_spec("exllamav3")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    version = importlib.import_module("exllamav3.version").__version__
    signatures = read_signatures(package)
    if version in VERSIONS:
        assert json.loads(json.dumps(signatures)) == VERSIONS[version]["signatures"]
    else:  # another version must at least have everything
        assert set(signatures) == set(SOURCES)
        assert read_attributes(package) == VERSIONS["1.6.5"]["attributes"]
