"""Calibration text: the project's own prompts, the corpora of the installed exllamav3, and readers of a user's files.

    prompts/*.jsonl    our prompts, one file per kind, and documents/*.txt, the texts that long_context prompts quote
    prompts.py         load_prompts, and the same schema read from a target's own directory
    corpora.py         standard_corpora: files of the exllamav3 package, found without importing it
    files.py           .txt, .jsonl and .safetensors given by the user

Everything here is text and token ids as they stand in files; tokenizers and models come in `exl3_dflash.calibration`.
"""

from calibration_data.corpora import Corpus, standard_corpora
from calibration_data.prompts import KINDS, TARGET_PROMPTS_FILE, Message, Prompt, load_prompts, target_prompts

__all__ = [
    "KINDS",
    "TARGET_PROMPTS_FILE",
    "Corpus",
    "Message",
    "Prompt",
    "load_prompts",
    "standard_corpora",
    "target_prompts",
]
