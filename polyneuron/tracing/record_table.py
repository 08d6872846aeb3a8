"""Many records of one kind as columns of whole numbers, 8 bytes a number."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RecordTable:
    """Records by row; `names` are those of the columns, the first of which is the time."""

    names: tuple[str, ...]
    rows: NDArray[np.int64]
    """(records, columns)."""

    def __len__(self) -> int:
        return len(self.rows)

    def column(self, name: str) -> Column:
        """One number of every record, (records,)."""
        column: Column = self.rows[:, self.names.index(name)]
        return column

    def where(self, chosen: NDArray[Any]) -> RecordTable:
        """The records that a mask or a list of indices chooses."""
        return RecordTable(self.names, self.rows[chosen])


class RecordColumns:
    """Takes records one by one and makes a table of them."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self._numbers = array("q")

    def append(self, record: Iterable[int]) -> None:
        """Take one record, as many numbers as there are names."""
        self._numbers.extend(record)

    def table(self) -> RecordTable:
        """All records in order of time; those of one time as they came."""
        rows = np.array(self._numbers, dtype=np.int64).reshape(-1, len(self.names))
        return RecordTable(self.names, rows[np.argsort(rows[:, 0], kind="stable")])


class Words:
    """Numbers words in the order in which they are first met."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, word: str) -> int:
        """The word's number, from 0."""
        return self._numbers.setdefault(word, len(self._numbers))

    def all(self) -> list[str]:
        """Every word at its number."""
        return list(self._numbers)
