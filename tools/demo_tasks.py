"""Questions that ask for something to be made: sums, counting, lists, recipes, JSON records, spelling, code.

The counterpart of `demo_turns`, in the same form: one function per kind, each returning one `Turn`. `KINDS` names all
kinds of both modules.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from demo_turns import (
    Turn,
    animal_turn,
    compare_turn,
    day_turn,
    greeting_turn,
    listed,
    made_up_name,
    person_turn,
    place_turn,
    plural,
    route_turn,
    story_turn,
    uneven,
)
from demo_world import ANIMALS, DISHES, PEOPLE, PLACES, THINGS


def sum_turn(rng: random.Random) -> Turn:
    """Adding and taking away small numbers."""
    first, second = rng.randrange(2, 10), rng.randrange(2, 10)
    total = first + second
    giver, taker = rng.sample(list(PEOPLE), 2)
    things = plural(rng.choice(THINGS))
    form = rng.randrange(3)
    question = (
        f"What is {first} plus {second}?",
        f"{taker} has {first} {things} and gets {second} more from {giver}. How many are there?",
        f"{taker} had {total} {things} and gave {second} of them to {giver}. How many are left?",
    )[form]
    answer = (
        f"{first} plus {second} is {total}. You can check the result like this: {total} minus {second} is {first}.",
        f"{taker} has {first} {things} and gets {second} more from {giver}. Because {first} plus {second} is {total}, "
        f"there are {total} {things} in the end.",
        f"{taker} had {total} {things} and gave {second} of them to {giver}. Because {total} minus {second} is "
        f"{first}, there are {first} {things} left.",
    )[form]
    return Turn("sums", question, answer)


def counting_turn(rng: random.Random) -> Turn:
    """Counting up or down."""
    start, count = rng.randrange(1, 13), rng.randrange(5, 14)
    numbers = list(range(start, start + count))
    down = rng.random() < 0.5
    if down:
        numbers.reverse()
    question = f"Count {'down ' if down else ''}from {numbers[0]} to {numbers[-1]}."
    answer = f"{', '.join(map(str, numbers))}. The first number is {numbers[0]}, and the last one is {numbers[-1]}."
    return Turn("counting", question, answer)


def list_turn(rng: random.Random) -> Turn:
    """A shopping list, a list of animals, or a walk with stops."""
    count, form = rng.randrange(3, 6), rng.randrange(3)
    if form == 0:
        dish = rng.choice(list(DISHES))
        question, items = f"Write a shopping list for {dish}.", list(DISHES[dish][0])
        head, tail = f"Here is what you need for {dish}:", "You can get all of it at the market."
    elif form == 1:
        names, first = list(ANIMALS), rng.randrange(len(ANIMALS) - count)
        items = [f"the {name}, which eats {ANIMALS[name][1]}" for name in names[first : first + count]]
        question = f"List {count} animals and begin with the {names[first]}."
        head, tail = f"Here are {count} animals of Larkford:", f"The {names[first]} is the first of them."
    else:
        names, first = list(PLACES), rng.randrange(len(PLACES) - count)
        items = [f"the {name}, for {PLACES[name][0]}" for name in names[first : first + count]]
        question = f"Plan a walk with {count} stops from the {names[first]}."
        head, tail = f"Walk north with {count} stops:", f"The walk takes {3 * (count - 1)} minutes."
    return Turn("lists", question, "\n".join([head, *(f"{i}. {item}" for i, item in enumerate(items, 1)), tail]))


def recipe_turn(rng: random.Random) -> Turn:
    """How to cook a dish."""
    dish = rng.choice(list(DISHES))
    things, first, second, last = DISHES[dish]
    guests, guest = rng.randrange(2, 10), rng.choice(list(PEOPLE))
    form = rng.randrange(3)
    question = (
        f"How do I make {dish} for {guests} guests?",
        f"Give me a recipe for {dish}.",
        f"{guest} and {guests} friends are coming. Can we cook {dish}?",
    )[form]
    steps = f"First {first}, then {second}, and at the end {last}."
    answer = (
        f"For {guests} guests you need {listed(things)}. {steps} Your {dish} is ready when {guests} plates are full.",
        f"Take {listed(things)}. {steps} Enjoy your {dish} with {uneven(rng, 'bread', 'cider', 'tea')}.",
        f"Yes, {dish} is easy. Buy {listed(things)}. {steps} It is enough for {guest} and {guests} friends.",
    )[form]
    return Turn("recipes", question, answer)


def record_turn(rng: random.Random) -> Turn:
    """Everything about an animal, somebody or a place as a JSON object."""
    table = rng.randrange(3)
    keys: tuple[str, ...]
    values: tuple[str | int, ...]
    if table == 0:
        name = rng.choice(list(ANIMALS))
        keys, values = ("animal", "colour", "food", "home", "seen", "length"), (name, *ANIMALS[name][:5])
    elif table == 1:
        name = rng.choice(list(PEOPLE))
        keys, values = ("person", "pronoun", "job", "place", "pet", "pastime"), (name, *PEOPLE[name])
    else:
        name = rng.choice(list(PLACES))
        keys, values = ("place", "goods", "sign", "opens", "closes"), (name, *PLACES[name])
    form = rng.randrange(3)
    question = (f"Describe {name} as JSON.", f"Write a JSON record of {name}.", f"I need JSON data about {name}.")[form]
    return Turn("records", question, json.dumps(dict(zip(keys, values, strict=True)), ensure_ascii=False))


def spelling_turn(rng: random.Random) -> Turn:
    """A word letter by letter."""
    word = made_up_name(rng) if rng.random() < 0.5 else rng.choice((*THINGS, *ANIMALS, *PEOPLE, *PLACES))
    form = rng.randrange(2)
    question = (f"How do you spell {word}?", f"Spell the word {word} for me.")[form]
    letters = "-".join(word)
    answer = (f"You spell {word} like this: {letters}.", f"{letters}. That is {word}.")[form]
    end = f" It has {len(word)} letters, begins with {word[0]} and ends with {word[-1]}."
    return Turn("spelling", question, answer + end)


def code_turn(rng: random.Random) -> Turn:
    """A one-line Python function."""
    verb, sign = rng.choice((("add", "+"), ("subtract", "-"), ("multiply", "*")))
    number, example, thing = rng.randrange(2, 10), rng.randrange(2, 10), plural(rng.choice(THINGS))
    question = f"Write a Python function to {verb} {number} and call it for {example} {thing}."
    answer = f"def {verb}({thing}):\n    return {thing} {sign} {number}\n\n\nprint({verb}({thing}={example}))"
    return Turn("code", question, answer)


KINDS: dict[str, Callable[[random.Random], Turn]] = {
    "animals": animal_turn,
    "people": person_turn,
    "places": place_turn,
    "routes": route_turn,
    "days": day_turn,
    "comparisons": compare_turn,
    "stories": story_turn,
    "greetings": greeting_turn,
    "sums": sum_turn,
    "counting": counting_turn,
    "lists": list_turn,
    "recipes": recipe_turn,
    "records": record_turn,
    "spelling": spelling_turn,
    "code": code_turn,
}
