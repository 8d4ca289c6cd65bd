"""Reading facts out of a config.json that may spell them in several ways and places.

The same fact has several names and three places: the `dflash_config` object (first release), the top level (later
ones), and `transformer_layer_config` (speculators format, for what describes a layer). `ConfigReader` looks in all of
them, for every name of a fact, treats null as absent, and refuses two different answers, because engines disagree about
which of them wins.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from exl3_dflash.errors import Exl3DflashError

NESTED_KEY = "dflash_config"
LAYER_CONFIG_KEY = "transformer_layer_config"


class ConfigReader:
    """Typed access to a drafter's config.json through all places and all names of a fact.

    Raises:
        Exl3DflashError: from every method, naming the key: two places that disagree, a wrong type, a value out of
            range, or (without a `default`) a key that is nowhere.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        places: list[tuple[str, Mapping[str, Any]]] = []
        for key in (NESTED_KEY, None, LAYER_CONFIG_KEY):
            place = raw if key is None else raw.get(key)
            if place is not None and not isinstance(place, Mapping):
                raise Exl3DflashError(f"{key} in config.json is {place!r}", expected="an object")
            places.append(("" if key is None else f"{key}.", place or {}))
        self._places = tuple(places)

    def entries(self, *names: str) -> list[tuple[str, Any]]:
        """Every (path, value) under which the fact is given, in the order of preference; nulls are left out."""
        return [(p + n, place[n]) for p, place in self._places for n in names if place.get(n) is not None]

    def value(self, *names: str) -> Any:
        """The fact's value, or None; names are synonyms."""
        found = self.entries(*names)
        for path, other in found[1:]:
            if other != found[0][1]:
                raise Exl3DflashError(
                    f"config.json says {found[0][0]} = {found[0][1]!r} but {path} = {other!r}",
                    expected="one value",
                    fix="remove the wrong one",
                )
        return found[0][1] if found else None

    def integer(self, *names: str, default: Any = ..., minimum: int = 1) -> Any:
        """A whole number of at least `minimum`."""
        value = self._present(names, default)
        if value is None:
            return None
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not numeric or value != int(value) or value < minimum:
            raise self._wrong(names, value, f"a whole number of at least {minimum}")
        return int(value)

    def number(self, *names: str, default: Any = ..., zero_is_none: bool = False) -> Any:
        """A positive finite number; with `zero_is_none`, zero means that there is none."""
        value = self._present(names, default)
        if value is None or (zero_is_none and value == 0 and not isinstance(value, bool)):
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise self._wrong(names, value, "a number above 0")
        return float(value)

    def boolean(self, *names: str, default: Any = ...) -> Any:
        """true or false."""
        value = self._present(names, default)
        if value is not None and not isinstance(value, bool):
            raise self._wrong(names, value, "true, false or null")
        return value

    def integers(self, *names: str, default: Any = ...) -> Any:
        """A list of whole numbers, as a tuple."""
        value = self._present(names, default)
        if value is None:
            return None
        if not isinstance(value, list) or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
            raise self._wrong(names, value, "a list of whole numbers")
        return tuple(value)

    def _present(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.value(*names)
        if value is None and default is ...:
            raise Exl3DflashError(
                f"config.json has no {names[0]!r}, neither in {NESTED_KEY} nor at the top level",
                expected="a value: no default is right for every drafter",
                fix=f"add {names[0]} as the drafter was trained with it",
            )
        return default if value is None else value

    def _wrong(self, names: tuple[str, ...], value: Any, expected: str) -> Exl3DflashError:
        path = self.entries(*names)[0][0]
        return Exl3DflashError(f"{path} in config.json is {value!r}", expected=expected)
