"""The text of a padded micro-batch, token by token: what a mixture routes, so that padding takes no expert's place."""

from dataclasses import dataclass, replace

from torch import Tensor

from xscale.nn.ffn.moe.replay import ROUTE_WEIGHTS, ROUTES
from xscale.nn.tokens import Tokens


@dataclass(frozen=True)
class TextTokens(Tokens):
    """The N tokens of the text of a micro-batch, one sequence behind the other: ids and positions [1, N]."""

    lengths: tuple[int, ...] = ()
    """Tokens of each sequence."""


def text_of(tokens: Tokens) -> tuple[Tensor, TextTokens] | None:
    """Return the indices [N] of the tokens that are no padding among all [B T], and these tokens; None: all are.

    They are found once for all blocks. The host knows the lengths of the sequences, so it does not wait for a device.
    A micro-batch of padding alone is routed as it is: no loss reads it.
    """
    padding = tokens.any_padding()
    if padding is None or not any(tokens.sample_lengths()):
        return None
    rows, text = tokens.shared_values.get_or_compute("text_tokens", lambda: _find(tokens, padding))
    return rows, replace(text, forward=tokens.forward)


def _find(tokens: Tokens, padding: Tensor) -> tuple[Tensor, TextTokens]:
    lengths = tuple(tokens.sample_lengths())
    rows = padding.flatten().argsort(stable=True)[: sum(lengths)]
    ids, positions = (field.flatten()[rows][None] for field in (tokens.ids, tokens.positions))
    carried = {
        key: (about, value.flatten(0, 1)[rows][None])
        for key, (about, value) in tokens.carried.items()
        if key in (ROUTES.key, ROUTE_WEIGHTS.key)
    }
    return rows, TextTokens(ids=ids, positions=positions, carried=carried, lengths=lengths)
