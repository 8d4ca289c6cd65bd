"""The fixed facts of Larkford, the small world that the demo pair talks about.

Only tables: who lives there, what the animals eat, what stands along the one road and in which order. `demo_turns` and
`demo_tasks` make questions and answers of them. Facts repeat across many kinds of question, and the names within a
table begin with different letters, so that a very small model can learn them from few chats.
"""

from __future__ import annotations

# name: colour, food, home, time of day, length in centimetres, what it does
ANIMALS: dict[str, tuple[str, str, str, str, int, str]] = {
    "badger": ("grey", "worms and roots", "a den under the old oak", "after dark", 80, "digs from dusk to dawn"),
    "cat": ("black", "fish and milk", "a basket in the bakery", "in the evening", 45, "sleeps on warm bread sacks"),
    "donkey": ("brown", "hay and carrots", "a stable at the forge", "in the morning", 180, "carries flour up the hill"),
    "fox": ("red", "berries and mice", "a hole behind the garden", "at night", 70, "listens for every small noise"),
    "goat": ("white", "grass and thistles", "a shed at the windmill", "at noon", 120, "climbs on every wall"),
    "heron": ("blue", "frogs and snails", "a nest at the harbour", "at dawn", 95, "stands on one leg for hours"),
    "owl": ("tawny", "moths and shrews", "the roof of the school", "at midnight", 40, "turns its head without a sound"),
    "toad": ("green", "flies and gnats", "a wet stone at the café", "at dusk", 9, "blinks at every visitor"),
}

# name: pronoun, job, place of work, pet, pastime
PEOPLE: dict[str, tuple[str, str, str, str, str]] = {
    "Anna": ("she", "baker", "bakery", "cat", "sing in the choir"),
    "Bruno": ("he", "smith", "forge", "donkey", "play the accordion"),
    "Clara": ("she", "teacher", "school", "owl", "count the stars"),
    "Emil": ("he", "fisherman", "harbour", "heron", "mend old nets"),
    "Frida": ("she", "gardener", "garden", "fox", "grow giant pumpkins"),
    "Jonas": ("he", "cook", "café", "toad", "tell ghost stories"),
    "Maria": ("she", "trader", "market", "badger", "collect old coins"),
    "Otto": ("he", "miller", "windmill", "goat", "carve wooden spoons"),
}

# In their order along the one road, south to north. name: what you can get there, what stands before it, hours
PLACES: dict[str, tuple[str, str, str, str]] = {
    "harbour": ("smoked fish and rope", "a blue boat", "six", "three"),
    "café": ("coffee and lemon cake", "two green benches", "ten", "midnight"),
    "bakery": ("bread and ginger rolls", "a striped awning", "five", "noon"),
    "school": ("chalk and paper", "a brass bell", "eight", "two"),
    "garden": ("pumpkins and herbs", "a wooden gate", "seven", "six"),
    "market": ("cheese and candles", "a round well", "nine", "one"),
    "forge": ("nails and lamps", "a heavy anvil", "seven", "five"),
    "windmill": ("flour and oats", "four slow sails", "six", "four"),
}

# name: ingredients, first step, second step, last step
DISHES: dict[str, tuple[tuple[str, ...], str, str, str]] = {
    "apple porridge": (("oats", "milk", "two apples"), "warm the milk", "add the oats", "grate the apples over it"),
    "cherry pie": (("cherries", "flour", "butter", "sugar"), "mix the dough", "fill in the cherries", "bake it"),
    "fish stew": (("three trout", "potatoes", "leeks"), "clean the trout", "cook the leeks", "simmer it for an hour"),
    "lemon cake": (("two lemons", "flour", "eggs", "sugar"), "grate the lemons", "stir everything", "let it cool"),
    "oat bread": (("oats", "flour", "yeast", "honey"), "knead the dough", "let it rest", "bake it until it is brown"),
    "pumpkin soup": (("one pumpkin", "onions", "cream"), "cut the pumpkin", "boil it", "stir in the cream"),
}

# day: event, place, hour, who
DAYS: dict[str, tuple[str, str, str, str]] = {
    "Monday": ("a reading hour", "school", "four", "Clara"),
    "Tuesday": ("choir practice", "bakery", "six", "Anna"),
    "Wednesday": ("the farmers' fair", "market", "eight", "Maria"),
    "Thursday": ("a ghost story evening", "café", "nine", "Jonas"),
    "Friday": ("a boat race", "harbour", "five", "Emil"),
    "Saturday": ("an accordion dance", "forge", "seven", "Bruno"),
    "Sunday": ("a pumpkin breakfast", "garden", "ten", "Frida"),
}

THINGS = ("button", "candle", "drum", "feather", "kettle", "lantern", "mirror", "spoon")
SEASONS = ("spring", "autumn")
# what a visitor likes: where it is found
LIKES = {
    "cheese": "market",
    "ginger rolls": "bakery",
    "herbs": "garden",
    "lamps": "forge",
    "music": "school",
    "rope": "harbour",
    "tea": "café",
    "windmills": "windmill",
}
# Open-class names, so that copying from the question cannot be replaced by remembering it.
NAME_STARTS = ("Ba", "Do", "Fe", "Gi", "Ka", "Le", "Mo", "Nu", "Ru", "Sa", "To", "Vi")
NAME_MIDDLES = ("", "l", "r", "mi", "su")
NAME_ENDS = ("bo", "ka", "lo", "na", "ro", "ti", "va", "zo", "dor", "ké")
PREFIXES = ("", "", "", "Hello! ", "Please help me. ", "I have a question. ", "One more thing. ")
SYSTEM_PROMPTS = (
    "You are a friendly guide to Larkford.",
    "Answer questions about the village of Larkford.",
    "You are a helpful assistant.",
)
