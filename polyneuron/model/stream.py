"""Text of tokens as they come: whole characters only, and an end at a stop string."""

import codecs
from collections.abc import Sequence

from polyneuron.errors import ConfigError
from polyneuron.model.tokenizer import Tokenizer


class StreamDecoder:
    """Turns tokens into text one by one, holding back the bytes of an unfinished character."""

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that is certain after this token; often that of the token, sometimes none."""
        if self._skip_special and self._tokenizer.is_control(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """What was held back at the end, as replacement characters."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Looks for stop strings in a stream and holds back what may yet become one.

    The stop string that is complete first wins, so the result does not depend on how the text is
    cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ConfigError("--stop: a stop string is empty; leave it out")
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None  # the stop string that was found

    @property
    def has_stops(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._stops)

    def push(self, text: str) -> str:
        """Text that is certain to come before any stop string; nothing after one was found."""
        if self.matched is not None:
            return ""
        held = self._held + text
        found = [(held.find(stop), stop) for stop in self._stops]
        ends = [(at + len(stop), at, stop) for at, stop in found if at >= 0]
        if ends:
            _, at, self.matched = min(ends)
            self._held = ""
            return held[:at]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """What was held back and did not become a stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
