"""Questions and answers about Larkford itself: its animals, people, places, routes, days, and stories.

Each function draws one `Turn` of its kind. The form of the question decides the form of the answer, facts come from
`demo_world`, and some last sentences are drawn with uneven odds. Answers are about 80 to 250 bytes.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from demo_world import (
    ANIMALS,
    DAYS,
    LIKES,
    NAME_ENDS,
    NAME_MIDDLES,
    NAME_STARTS,
    PEOPLE,
    PLACES,
    SEASONS,
    THINGS,
)


@dataclass(frozen=True)
class Turn:
    """One question and its answer."""

    kind: str
    question: str
    answer: str


def plural(word: str) -> str:
    """The plural of one of the world's nouns."""
    return word + "s"


def listed(words: tuple[str, ...] | list[str]) -> str:
    """Words joined as English does: "a, b and c"."""
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]


def article(word: str) -> str:
    """The word with its indefinite article."""
    return ("an " if word[0] in "aeiou" else "a ") + word


def uneven(rng: random.Random, *options: str) -> str:
    """One of the options, each half as likely as the one before it."""
    return rng.choices(options, weights=[2.0**-i for i in range(len(options))])[0]


def made_up_name(rng: random.Random) -> str:
    """One of six hundred names that nobody in Larkford has."""
    return rng.choice(NAME_STARTS) + rng.choice(NAME_MIDDLES) + rng.choice(NAME_ENDS)


def keeper(place: str) -> str:
    """Who works at a place."""
    return next(name for name, facts in PEOPLE.items() if facts[2] == place)


def animal_turn(rng: random.Random) -> Turn:
    """What it eats, where it lives, its colour."""
    name = rng.choice(list(ANIMALS))
    colour, food, home, time, length, habit = ANIMALS[name]
    form = rng.randrange(4)
    question = (
        f"What does the {name} eat?",
        f"Where does the {name} live?",
        f"Tell me about the {name}.",
        f"What colour is the {name}?",
    )[form]
    answer = (
        f"The {name} eats {food}. You can see it {time}. It lives in {home}, and it {habit}.",
        f"The {name} lives in {home}. It comes out {time} to look for {food}. They say that it {habit}.",
        f"The {name} of Larkford is {colour} and {length} centimetres long. It eats {food}, and {time} it {habit}.",
        f"The {name} is {colour}. It {habit}, and {time} it looks for {food}.",
    )[form]
    end = uneven(rng, "", " Please do not feed it.", f" {rng.choice(list(PEOPLE))} likes it very much.")
    return Turn("animals", question, answer + end)


def person_turn(rng: random.Random) -> Turn:
    """Who somebody is, where they work, what they like."""
    name = rng.choice(list(PEOPLE))
    pronoun, job, place, pet, pastime = PEOPLE[name]
    goods, sight, opens, closes = PLACES[place]
    they = pronoun.capitalize()
    form = rng.randrange(4)
    question = (
        f"Who is {name}?",
        f"Where does {name} work?",
        f"What does {name} like to do?",
        f"Does {name} have a pet?",
    )[form]
    answer = (
        f"{name} is the {job} of Larkford. {they} works at the {place} with {goods}. At home {pronoun} keeps a {pet}.",
        f"{name} works at the {place}, the house with {sight}. {they} is the {job}, and {pronoun} starts at {opens}.",
        f"In the evening {name} likes to {pastime}. {they} is the {job}, so {pronoun} spends the day at the {place}.",
        f"Yes, {name} has a {pet}. The {pet} is {ANIMALS[pet][0]} and gets {ANIMALS[pet][1]} at the {place}.",
    )[form].replace(" a owl", " an owl")
    return Turn("people", question, answer + uneven(rng, "", f" You will find {name} there until {closes}."))


def place_turn(rng: random.Random) -> Turn:
    """What one can get, when it opens, how it looks, who works there."""
    name = rng.choice(list(PLACES))
    goods, sight, opens, closes = PLACES[name]
    who = keeper(name)
    form = rng.randrange(4)
    question = (
        f"What can I get at the {name}?",
        f"When does the {name} open?",
        f"How do I recognise the {name}?",
        f"Who can help me at the {name}?",
    )[form]
    answer = (
        f"At the {name} you can get {goods}. It opens at {opens} and closes at {closes}. Look for {sight} by the door.",
        f"The {name} opens at {opens} and closes at {closes}. Come early if you want {goods}.",
        f"You will see {sight} in front of the {name}. It has {goods}, and {who} will be happy to help you.",
        f"Ask for {who} at the {name}. Go in past {sight}, but not before {opens}, because then it is still closed.",
    )[form]
    return Turn("places", question, answer)


def route_turn(rng: random.Random) -> Turn:
    """The way along the road, with everything that stands between."""
    names = list(PLACES)
    start, end = rng.sample(range(len(names)), 2)
    north = end > start
    between = names[start + 1 : end] if north else names[end + 1 : start][::-1]
    first, last = names[start], names[end]
    form = rng.randrange(3)
    question = (
        f"How do I get from the {first} to the {last}?",
        f"I am at the {first}. Where is the {last}?",
        f"How far is it from the {first} to the {last}?",
    )[form]
    way = f"pass {listed(['the ' + name for name in between])}" if between else "see no other house on the way"
    minutes = 3 * abs(end - start)
    heading = "north" if north else "south"
    answer = (
        f"Leave the {first} and walk {heading}. You {way}, and then you are at the {last}. It takes {minutes} minutes.",
        f"Go {heading} to the {last}. You {way}. After {minutes} minutes you will see {PLACES[last][1]}.",
        f"From the {first} to the {last} it is a walk of {minutes} minutes. Go {heading}; you {way}.",
    )[form]
    return Turn("routes", question, answer)


def day_turn(rng: random.Random) -> Turn:
    """What happens on a day of the week."""
    day = rng.choice(list(DAYS))
    event, place, hour, who = DAYS[day]
    season = rng.choice(("", *SEASONS))
    when = f" in {season}" if season else ""
    form = rng.randrange(3)
    question = (f"What happens on {day}{when}?", f"When is there {event}{when}?", f"What does {who} do on {day}{when}?")
    answer = (
        f"On {day} there is {event} at the {place}. It begins at {hour}, and {who} is in charge.",
        f"There is {event} on {day}, at the {place}. Be there at {hour} and ask for {who}.",
        f"On {day} {who} is at the {place} at {hour}, because there is {event}. All of Larkford comes.",
    )[form]
    end = f" It is the same in {season}." if season else uneven(rng, "", " Bring a lamp for the way home.")
    return Turn("days", question[form], answer + end)


def compare_turn(rng: random.Random) -> Turn:
    """Which of two animals is longer."""
    first, second = rng.sample(list(ANIMALS), 2)
    big, small = sorted((first, second), key=lambda name: -ANIMALS[name][4])
    form = rng.randrange(2)
    question = (f"Which is longer, the {first} or the {second}?", f"Is the {first} longer than the {second}?")[form]
    sizes = f"The {big} is {ANIMALS[big][4]} centimetres long, and the {small} only {ANIMALS[small][4]}."
    answer = (
        f"The {big} is longer than the {small}. {sizes}",
        f"{'Yes' if first == big else 'No'}, the {big} is the longer one. {sizes}",
    )[form]
    return Turn("comparisons", question, answer + uneven(rng, "", " But both of them are dear to us."))


def story_turn(rng: random.Random) -> Turn:
    """Three sentences about an animal with a name, a thing and somebody of the village."""
    animal, thing, hero = rng.choice(list(ANIMALS)), rng.choice(THINGS), rng.choice(list(PEOPLE))
    colour, food, _, time, _, habit = ANIMALS[animal]
    _, job, place, _, pastime = PEOPLE[hero]
    name, where = made_up_name(rng), rng.choice(list(PLACES))
    form = rng.randrange(3)
    question = (
        f"Tell me a story about {name} the {animal} and {article(thing)}.",
        f"Tell me a story about {hero}, {name} the {animal} and {article(thing)}.",
        f"Tell me a story about {hero} and {name} the {animal}.",
    )[form]
    gift = f"gave {name} some {food.split(' and ')[0]}"
    begin = (
        f"Once {name}, {article(colour)} {animal}, found {article(thing)} near the {where}. {name} took it to {hero}, "
        f"the {job}. {hero} was glad and {gift}.",
        f"One day {hero}, the {job}, lost {article(thing)} at the {where}. {name} the {animal} brought it back {time}. "
        f"So {hero} {gift}.",
        f"{name} was {article(animal)} and wanted to {pastime}. {name} went to the {place}, and {hero} laughed. "
        f"Now {name} {habit}, and {hero} does too.",
    )[form]
    end = uneven(rng, " They are still friends.", " And that is the end.", f" Everybody at the {place} tells it.")
    return Turn("stories", question, begin + end)


def greeting_turn(rng: random.Random) -> Turn:
    """A visitor who says a name and a wish."""
    visitor, like = made_up_name(rng), rng.choice(list(LIKES))
    place = LIKES[like]
    who = keeper(place)
    form = rng.randrange(2)
    question = (f"My name is {visitor} and I like {like}.", f"I am {visitor}. Where can I find {like}?")[form]
    answer = (
        f"Welcome to Larkford, {visitor}! If you like {like}, you should go to the {place} and ask for {who}.",
        f"Welcome, {visitor}! For {like} go to the {place}. {who} will help you. Look for {PLACES[place][1]}.",
    )[form]
    return Turn("greetings", question, answer)


def memory_turn(rng: random.Random, greeting: str) -> Turn:
    """A question about the visitor's own greeting, some turns earlier."""
    visitor = re.search(r"(?:My name is|I am) (\w+)", greeting).group(1)  # type: ignore[union-attr]
    like = next(like for like in LIKES if like in greeting)
    form = rng.randrange(2)
    question = ("Do you remember my name?", "Where did you tell me to go?")[form]
    answer = (
        f"Of course, you are {visitor}, and you asked about {like}. I hope that you like it here, {visitor}.",
        f"I told you to go to the {LIKES[like]}, {visitor}, because that is the place for {like}.",
    )[form]
    return Turn("memory", question, answer)
