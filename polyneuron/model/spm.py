"""SentencePiece BPE vocabularies (`llama`): merging by score, with byte fallback.

Done here and not by the `tokenizers` library: that one orders merges by a fixed rank of each pair,
while here the token that would result decides, and among equals the leftmost pair.
"""

import heapq
import re
from collections.abc import Sequence

from polyneuron.model.vocabulary import TokenType, Vocabulary

_SPACE = "\u2581"
_WORD = re.compile(f"{_SPACE}+[^{_SPACE}]*|[^{_SPACE}]+")
_WORDS_REMEMBERED_MAX = 50_000


class ScoreMerger:
    """The pieces of an SPM vocabulary and how text is merged into them."""

    def __init__(
        self, vocabulary: Vocabulary, scores: Sequence[float], add_space_prefix: bool
    ) -> None:
        self._vocabulary = vocabulary
        self._add_space_prefix = add_space_prefix
        hidden = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.BYTE)
        named = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
        self._ids = {text: i for i, (text, kind) in enumerate(named) if kind not in hidden}
        self._scores = {text: scores[i] for text, i in self._ids.items()}
        self._byte_ids = _byte_ids(named)
        self._unknown_id = next(
            (i for i, (_, kind) in enumerate(named) if kind == TokenType.UNKNOWN), None
        )
        # Where no piece has a space after a letter, no merge crosses into the next word.
        crossing = re.compile(f"[^{_SPACE}]{_SPACE}")
        self._by_words = not any(crossing.search(text) for text in self._ids)
        self._words: dict[str, list[int]] = {}  # word -> ids

    def encode(self, text: str, after_special: bool) -> list[int]:
        """Token ids of plain text; at the start and after a special token a space is put before."""
        if self._add_space_prefix and after_special:
            text = " " + text
        text = text.replace(" ", _SPACE)
        if not self._by_words:
            return self._merge(text)
        ids: list[int] = []
        for word in _WORD.findall(text):
            known = self._words.get(word)
            if known is None:
                known = self._merge(word)
                if len(self._words) < _WORDS_REMEMBERED_MAX:
                    self._words[word] = known
            ids += known
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes a token that is ordinary text stands for."""
        text = self._vocabulary.tokens[token_id]
        if self._vocabulary.types[token_id] == TokenType.BYTE:
            return bytes([int(text[3:5], 16)])
        return text.replace(_SPACE, " ").encode("utf-8", "surrogateescape")

    def _merge(self, text: str) -> list[int]:
        """Merge the best-scored pair, the leftmost among equals, until none is a piece."""
        parts = list(text)
        after = [*range(1, len(parts)), -1]
        before = list(range(-1, len(parts) - 1))
        queue: list[tuple[float, int, int, str]] = []
        scores = self._scores

        def propose(left: int, right: int) -> None:
            joined = parts[left] + parts[right]
            score = scores.get(joined)
            if score is not None:
                heapq.heappush(queue, (-score, left, right, joined))

        for left in range(len(parts) - 1):
            propose(left, left + 1)
        while queue:
            _, left, right, joined = heapq.heappop(queue)
            if not parts[left] or not parts[right] or parts[left] + parts[right] != joined:
                continue  # one of the two has been merged meanwhile
            parts[left], parts[right] = joined, ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
                propose(left, after[right])
            if before[left] >= 0:
                propose(before[left], left)
        ids: list[int] = []
        for part in parts:
            if part:
                ids += self._piece_ids(part)
        return ids

    def _piece_ids(self, part: str) -> list[int]:
        token_id = self._ids.get(part)
        if token_id is not None:
            return [token_id]
        found = [self._byte_ids.get(byte, self._unknown_id) for byte in part.encode()]
        return [token_id for token_id in found if token_id is not None]


def _byte_ids(named: list[tuple[str, int]]) -> dict[int, int]:
    spelling = re.compile("<0x[0-9A-F]{2}>")
    return {
        int(text[3:5], 16): i
        for i, (text, kind) in enumerate(named)
        if kind == TokenType.BYTE and spelling.fullmatch(text)
    }
