"""The text of one answer as it grows: tokens decoded, stop strings found and cut, reasoning told from content.

It must not know requests or sampling. What it gives out never has to be taken back: text is held back while
it may still turn out to be part of a character or of a stop string, and no longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from .reasoning import Answer, ReasoningSplitter
from .tokenizer import StreamDecoder, Tokenizer


class AnswerText:
    """Pieces of text for tokens pushed one by one; see the module's words.

    `stop` is the stop string that was found, or None; nothing may be pushed after it. With `splitter` the
    answer's reasoning is told from its content.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Iterable[str] = (),
        include_stop: bool = False,
        skip_special: bool = True,
        splitter: ReasoningSplitter | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer, skip_special=skip_special)
        stops = tuple(stop)
        self._matcher = StopMatcher(stops) if stops else None
        self._include_stop = include_stop
        self._splitter = splitter
        self.stop: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """The text that is settled by `token_id`; `may_stop` False lets a stop string in it pass."""
        piece = self._decoder.push(token_id)
        if self._splitter is not None:
            self._splitter.push(token_id, piece)
        return piece if self._matcher is None else self._settle(self._matcher, piece, may_stop)

    def flush(self) -> str:
        """Ends the text: what was held back."""
        if self.stop is not None:
            return ""
        piece = self._decoder.flush()
        if self._matcher is None:
            return piece
        piece = self._settle(self._matcher, piece, True)
        return piece if self.stop else piece + self._matcher.release()

    def token_text(self, token_id: int) -> str:
        """One token alone as text, for lists of log-probabilities."""
        return self._tokenizer.token_bytes(token_id).decode("utf-8", "replace")

    def split(self, text: str, start: int) -> Answer:
        """Reasoning and content of `text`, which begins at character `start` of the answer."""
        return Answer(None, text) if self._splitter is None else self._splitter.split(text, start)

    def _settle(self, matcher: StopMatcher, piece: str, may_stop: bool) -> str:
        if not may_stop:
            return matcher.release() + piece
        settled, self.stop = matcher.feed(piece)
        return settled + self.stop if self.stop and self._include_stop else settled


class StopMatcher:
    """Finds the first stop string to be completed, whatever pieces its text comes in.

    Of two that end at the same character the longer one counts. An Aho-Corasick automaton: the state is the
    longest end of the text so far that begins a stop string, which is just what has to be held back
    (Aho and Corasick 1975, doi:10.1145/360825.360855). Time is linear in the text, whatever the number of stops.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._stop: list[str | None] = [None]  # the longest stop string that ends in a state
        self._depth = [0]
        for stop in stops:
            self._insert(stop)
        self._fallback = self._make_fallbacks()
        self._firsts = frozenset(self._next[0])
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text that is settled, the stop string that was completed or None: then the settled text ends before it)."""
        if not self._held and self._firsts.isdisjoint(text):  # nothing begins here: the usual case
            return text, None
        buffer = self._held + text
        for at in range(len(self._held), len(buffer)):
            self._state = self._step(self._state, buffer[at])
            stop = self._stop[self._state]
            if stop is not None:
                return buffer[: at + 1 - len(stop)], stop
        settled = len(buffer) - self._depth[self._state]
        self._held = buffer[settled:]
        return buffer[:settled], None

    def release(self) -> str:
        """What is held back; the search begins anew after it."""
        held, self._held, self._state = self._held, "", 0
        return held

    def _step(self, state: int, char: str) -> int:
        while char not in self._next[state] and state:
            state = self._fallback[state]
        return self._next[state].get(char, 0)

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._stop.append(None)
                self._depth.append(self._depth[state] + 1)
            state = self._next[state][char]
        self._stop[state] = stop

    def _make_fallbacks(self) -> list[int]:
        """For each state the state of the longest proper end of its text that also begins a stop string."""
        self._fallback = fallback = [0] * len(self._next)
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            if self._stop[state] is None:
                self._stop[state] = self._stop[fallback[state]]
            for char, child in self._next[state].items():
                fallback[child] = self._step(fallback[state], char)
                queue.append(child)
        return fallback
