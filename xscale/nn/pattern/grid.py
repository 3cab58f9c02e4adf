"""The blocks of a sequence as a pattern sees them: rows of query blocks over columns of key blocks."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Index = npt.NDArray[np.int64]
TokenRule = Callable[[Any, Any], Any]
"""(places of queries, places of keys) -> bool, elementwise on tensors that broadcast: which token sees which."""


@dataclass(frozen=True)
class Periodic:
    """A token rule that shows the same when query and key both move on by `period` tokens, so few blocks are asked."""

    rule: TokenRule
    period: int

    def __call__(self, i: Any, j: Any) -> Any:
        return self.rule(i, j)


@dataclass(frozen=True)
class Grid:
    """A row for each query block, a column for each key block; both count from the start of the sequence."""

    blocks: int
    """N, key blocks: the whole sequence, of which the rows may be a part."""
    heads: int = 1
    """H."""
    causal: bool = True
    block: int = 64
    """Tokens in a block, for the patterns whose sizes are in tokens."""
    layer: int = 0
    """Index of the block in its stack: some patterns change with depth."""
    first_row: int = 0
    """Query block of the first row: while decoding, the rows before it are done."""
    first_head: int = 0
    """Index in the model of the first head, where the heads are spread over ranks."""
    row_count: int | None = None
    """Rows; None: all from the first on."""

    @property
    def rows(self) -> int:
        return self.blocks - self.first_row if self.row_count is None else self.row_count

    @cached_property
    def row(self) -> Index:
        """[rows, 1]."""
        return np.arange(self.first_row, self.first_row + self.rows, dtype=np.int64)[:, None]

    @cached_property
    def column(self) -> Index:
        """[1, N]."""
        return np.arange(self.blocks, dtype=np.int64)[None, :]

    @cached_property
    def head(self) -> Index:
        """[H, 1, 1]."""
        return np.arange(self.first_head, self.first_head + self.heads, dtype=np.int64)[:, None, None]
