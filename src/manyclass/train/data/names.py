"""Names as numbers, by first sight."""

import numpy as np
import polars as pl

from .vocabulary import numbering


class Names:
    """The names in a column of a table that comes in batches; memory: each name once."""

    def __init__(self) -> None:
        #: Numbers from 0 in the order of first sight.
        self.numbers = numbering()

    def codes(self, column: pl.Series) -> np.ndarray:
        """The numbers of a batch, shape ``(rows,)``, int32; -1 where there is no name."""
        rows = column.to_frame("name").with_row_index("row").drop_nulls()
        groups = rows.group_by("name", maintain_order=True).agg("row")
        numbers = np.fromiter(map(self.numbers.__getitem__, groups["name"].to_list()), np.int32, len(groups))
        codes = np.full(len(column), -1, dtype=np.int32)
        codes[groups["row"].explode().to_numpy()] = np.repeat(numbers, groups["row"].list.len().to_numpy())
        return codes


class FirstValues:
    """The first value that each user has in a column that comes in batches; memory: names, 4 bytes per user."""

    def __init__(self) -> None:
        self.names = Names()
        self._codes = np.empty(0, dtype=np.int32)

    def add(self, users: np.ndarray, column: pl.Series) -> None:
        """Look at a batch; ``users``, shape ``(rows,)``, tells whose values these are."""
        more = int(users.max()) + 1 - len(self._codes)
        if more > 0:  # twice as many, so that all growing together costs no more than the last
            self._codes = np.append(self._codes, np.full(max(more, len(self._codes)), -1, dtype=np.int32))
        codes = self.names.codes(column)
        known = np.flatnonzero(codes >= 0)
        owners, first = np.unique(users[known], return_index=True)
        new = self._codes[owners] < 0
        self._codes[owners[new]] = codes[known[first[new]]]

    def codes(self, users: int) -> np.ndarray:
        """The number of the value of each of ``users``, or -1; shape ``(users,)``, int32."""
        return self._codes[:users]
