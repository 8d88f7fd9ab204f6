"""The stories that the demo model learns from: read, split and sorted by how tidy they are.

It owns what a story file looks like and which stories are held out. It must not know tokens or models.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

END_OF_TEXT = "<|endoftext|>"
_ONE_IN_HELD_OUT = 50
_MIN_DISTINCT_TRIGRAMS = 0.93

_TALKS_ABOUT_ITSELF = re.compile(
    r"\b(story|stories|tales?|moral|symbol\w*|reminder|title|narrator|characters?|readers?|represent\w*"
    r"|metaphor|I|my|we|our|you|your)\b"
)


def read_stories(path: Path) -> list[str]:
    """The stories of a UTF-8 file in which `<|endoftext|>` stands between them."""
    stories = (story.strip() for story in path.read_text(encoding="utf-8").split(END_OF_TEXT))
    return [story for story in stories if story]


def is_held_out(story: str) -> bool:
    """Whether the story is kept from training: about one in 50, chosen by the hash of its text."""
    digest = hashlib.sha256(story.encode()).digest()
    return int.from_bytes(digest[:4], "little") % _ONE_IN_HELD_OUT == 0


def find_names(story: str) -> list[str]:
    """The capitalised words within sentences, outside speech, in order of their first use."""
    return list(dict.fromkeys(re.findall(r"(?<=[a-z,] )([A-Z][a-z]+)\b", _without_speech(story))))


def is_tidy(story: str) -> bool:
    """Whether a simple story stays in its scene, does not repeat itself and keeps to its people."""
    narration = _without_speech(story)
    if _TALKS_ABOUT_ITSELF.search(narration) or story.count('"') % 2:
        return False
    words = re.findall(r"[a-z']+", story.lower())
    trigrams = list(zip(words, words[1:], words[2:], strict=False))
    if len(set(trigrams)) < _MIN_DISTINCT_TRIGRAMS * len(trigrams):
        return False
    names = find_names(story)
    is_he = re.search(r"\b(he|his|him)\b", narration, re.IGNORECASE)
    is_she = re.search(r"\b(she|hers?)\b", narration, re.IGNORECASE)
    return len(names) <= 3 and not (is_he and is_she and len(names) < 2)


def _without_speech(story: str) -> str:
    return re.sub(r'"[^"]*"', "", story)
