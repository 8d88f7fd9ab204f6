"""Conversations in ChatML, made of simple stories: someone asks for a story, the assistant tells it.

It owns how a request and the short thought before the answer follow from a story. It must not know tokens.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from corpus import find_names

_REQUESTS = (
    *("Tell me a story about {}.", "Tell me a story about {}", "Write a short story about {}."),
    *("Can you tell me a story about {}?", "Please tell me a story about {}.", "A story about {}, please."),
    *("Write a story about {}.", "I would like a story about {}.", "Tell a simple story about {}."),
    *("Once more, a story about {}!", "Do you know a story about {}?", "tell me about {}"),
)
_ANY_STORY = (
    *("Tell me a story.", "Tell me a story", "Write a short story.", "Can you tell me a story?"),
    *("Please tell me a bedtime story.", "I want to hear a story.", "Another story, please."),
)
_CONTINUE = ("Continue this story: {}", "How does this story go on? {}", "Finish the story: {}")
_SMALL_TALK = {
    "Hello! I am a small model that tells simple stories. What should the story be about?": (
        *(
            "Hello",
            "Hello!",
            "Hi",
            "Hi!",
            "hi",
            "hello",
            "Hey",
            "Good morning!",
            "Hi there!",
            "Good evening.",
        ),
        *("How are you?", "Hello, how are you?"),
    ),
    "I am a small language model. I have read many stories, and I can tell you a simple one.": (
        *("Who are you?", "What are you?", "What is your name?", "who are you", "Are you a robot?"),
        *("What can you do?", "What can you do for me?", "Can you help me?", "Introduce yourself."),
    ),
    "I do not know that. I am a small model that only tells simple stories. Ask me for one!": (
        *("What is the capital of France?", "What is 2 + 2?", "Write a Python program.", "Who won the war?"),
        *("What is the weather today?", "Explain physics.", "How do I cook rice?", "Translate this."),
        *("What is the meaning of life?", "What time is it?", "Why is the sky blue?", "Solve this equation."),
    ),
    "You are welcome! Shall I tell you another story?": (
        *("Thank you!", "Thank you.", "Thanks!", "thanks", "That was nice.", "I liked that story.", "Great!"),
    ),
}
_SYSTEM = ("You are a helpful assistant.", "You tell simple stories.", "You are a kind storyteller.")
_SHARE_OF_SMALL_TALK = 0.05

# Words in the places of nouns that nobody would ask for a story about, and nouns without "a".
_NO_TOPICS = (
    *("big", "small", "soft", "warm", "cold", "huge", "dark", "old", "bright"),
    *("middle", "top", "side", "end", "part", "way", "day", "time", "morning"),
    *("group", "sound", "bit", "lot", "pile", "rest", "world", "place", "moment"),
    *("new"),
)
_UNCOUNTABLE = (
    *("milk", "water", "food", "snow", "sand", "rain", "music", "bread", "honey"),
    *("ice", "fruit", "grass", "wood", "tea", "hair"),
)

_NOUN_CONTEXT = re.compile(
    r"\b(?:a|an|the) ([a-z]{3,})(?=[.,;!?]| (?:of|in|was|and|that|is|to|with|on|had|who|for|at|from|as)\b)"
)


def make_conversations(stories: Sequence[str], seed: int = 0) -> list[str]:
    """One conversation for each story, ending with `<|im_end|>` and a newline; the same for the same seed."""
    rng = random.Random(seed)
    nouns = find_nouns(stories)
    return [_conversation(story, nouns, rng) for story in stories]


def find_nouns(stories: Iterable[str]) -> frozenset[str]:
    """The words that often stand between an article and the end of a phrase."""
    ends_phrase, uses = Counter[str](), Counter[str]()
    for story in stories:
        ends_phrase.update(_NOUN_CONTEXT.findall(story))
        uses.update(re.findall(r"[a-z]{3,}", story))
    nouns = {word for word, count in ends_phrase.items() if count >= 20 and count > 0.2 * uses[word]}
    return frozenset(nouns.difference(_NO_TOPICS))


def _conversation(story: str, nouns: frozenset[str], rng: random.Random) -> str:
    turns = []
    if rng.random() < 0.2:
        turns.append(_turn("system", rng.choice(_SYSTEM)))
    if rng.random() < _SHARE_OF_SMALL_TALK:
        reply = rng.choice(list(_SMALL_TALK))
        answer = _answer("There is no story to tell yet.", reply, rng)
        turns += [_turn("user", rng.choice(_SMALL_TALK[reply])), answer]
        if rng.random() < 0.5:
            return "".join(turns)
        turns[-1] = _turn("assistant", reply)  # templates drop the thoughts of earlier turns
    request, thought, answer = _request(story, nouns, rng)
    turns += [_turn("user", request), _answer(thought, answer, rng)]
    return "".join(turns)


def _request(story: str, nouns: frozenset[str], rng: random.Random) -> tuple[str, str, str]:
    """What is asked, the thought about it, and the answer."""
    found = [word for word in dict.fromkeys(re.findall(r"[a-z]{3,}", story)) if word in nouns]
    names = [name for name in find_names(story) if story.count(name) > 1][:2]
    things = [_with_article(word) for word in sorted(found, key=story.count, reverse=True)[:3]]
    topics = [*names, *things]
    first, _, rest = story.partition(". ")
    if rest and rng.random() < 0.1:
        return rng.choice(_CONTINUE).format(first + "."), f"It is about {_join(topics)}.", rest
    if not topics or rng.random() < 0.15:
        return rng.choice(_ANY_STORY), f"I will tell about {_join(topics)}.", story
    asked = rng.sample(topics, min(len(topics), rng.choice((1, 1, 1, 2))))
    return rng.choice(_REQUESTS).format(_join(asked)), f"I will tell about {_join(topics)}.", story


def _answer(thought: str, answer: str, rng: random.Random) -> str:
    """The answer after a thought, or after the empty one that stands for `enable_thinking=False`."""
    thinking = f"\n{thought}\n" if rng.random() < 0.5 else "\n\n"
    return _turn("assistant", f"<think>{thinking}</think>\n\n{answer}")


def _turn(role: str, content: str) -> str:
    return f"<|im_start|>{role}\n{content}<|im_end|>\n"


def _with_article(word: str) -> str:
    if word in _UNCOUNTABLE or (word.endswith("s") and not word.endswith("ss")):
        return word
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _join(topics: Sequence[str]) -> str:
    return " and ".join([", ".join(topics[:-1]), topics[-1]] if len(topics) > 1 else topics) or "someone"
