"""Tables of distances that positions give to attention which computes their terms a block of queries at a time."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class DistanceTables:
    """Rows of tables for N distances key - query, differentiable in the position's parameters.

    The score of query i and key j, with the distance's rows e, f, b and w and d = 1 / sqrt(K), is

        d ((q_i + content_bias) k_j + (q_i + position_bias) e + k_j f) + b

    and the output is the weights' sum of v_j + w. The queries have the mixer's factor already. Heads that share a table
    have an axis of length 1.
    """

    query_rows: Tensor | None = None
    """e, [H or 1, N, K]."""
    key_rows: Tensor | None = None
    """f, [H or 1, N, K]."""
    bias: Tensor | None = None
    """b, [H or 1, N]."""
    value_rows: Tensor | None = None
    """w, [H or 1, N, K]."""
    content_bias: Tensor | None = None
    """[H or 1, K]."""
    position_bias: Tensor | None = None
    """[H or 1, K]."""
