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
        f"The {name} eats {food}. If you want to see it, you should come {time}, because that is when it {habit}.",
        f"The {name} lives in {home}. It leaves its home {time} to look for {food}. People say that it {habit}.",
        f"The {name} of Larkford is {colour} and about {length} centimetres long. It likes to eat {food}. You can see "
        f"it {time}, when it {habit}.",
        f"The colour of the {name} is {colour}. You can see it best {time}, when it {habit} and looks for {food}.",
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
        f"{name} is the {job} of Larkford. {they} works at the {place}, where you can get {goods}. When the day is "
        f"over, {pronoun} likes to {pastime}.",
        f"{name} works at the {place}. That is the house with {sight}. {they} is the {job} of Larkford, and {pronoun} "
        f"starts to work at {opens} in the morning.",
        f"In the evening {name} likes to {pastime}. During the day there is no time for that, because {pronoun} is the "
        f"{job} and works at the {place}.",
        f"Yes, {name} has a {pet}. You can often see the {pet} in front of the {place}. Please give it only "
        f"{ANIMALS[pet][1]}, because it eats nothing else.",
    )[form].replace(" a owl", " an owl")
    return Turn("people", question, answer + uneven(rng, "", f" You will find {name} there until {closes} o'clock."))


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
        f"At the {name} you can get {goods}. The door opens at {opens} and closes again at {closes}. You will find it "
        f"easily, because there is {sight} in front of it.",
        f"The {name} opens at {opens} and closes again at {closes}. Please come early if you want to have {goods}.",
        f"You will see {sight} in front of the {name}. Inside you can get {goods}, and {who} will be happy to help "
        f"you.",
        f"Please ask for {who} at the {name}. You can go in past {sight}, but not before {opens}, because before that "
        f"the door is still closed.",
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
        f"Leave the {first} and walk {heading} along the road. You {way}, and then you are at the {last}. The whole "
        f"way takes you {minutes} minutes.",
        f"Follow the road {heading} to the {last}. On the way you {way}. After {minutes} minutes you will see "
        f"{PLACES[last][1]}, and you are there.",
        f"From the {first} to the {last} it is a walk of {minutes} minutes. Follow the road {heading}. On the way you "
        f"{way}.",
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
        f"On {day} there is {event} at the {place}. It begins at {hour} in the evening, and {who} is in charge of it.",
        f"There is {event} on {day}, at the {place}. You should be there at {hour} and ask for {who}.",
        f"On {day} {who} goes to the {place} at {hour}, because there is {event}. All of Larkford will be there.",
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
    food, time = ANIMALS[animal][1], ANIMALS[animal][3]
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
        f"Once upon a time {name} the {animal} found {article(thing)} near the {where}. Nobody knew whose it was. In "
        f"the end it belonged to {hero}, the {job}, who was very glad and {gift}.",
        f"One day {hero}, the {job}, lost {article(thing)} near the {where}. {hero} looked for it everywhere. Then "
        f"{name} the {animal} came {time} and brought it back. So {hero} {gift}.",
        f"Once upon a time {name} the {animal} wanted to learn how to {pastime}. So {name} went to the {place} and "
        f"asked {hero} for help. Now they do it together every evening.",
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
        f"Welcome to Larkford, {visitor}! You can find {like} at the {place}. {who} will be happy to help you there.",
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
