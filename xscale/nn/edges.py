"""Edges between blocks beside the hidden states: attention scores, sums of gates, values of the first layer.

They are inputs and outputs of a block, so that recomputation and the stages of a pipeline see them, and their gradients
pass from block to block as those of the hidden states do.
"""

from collections.abc import Iterable, Mapping

from torch import Tensor

from xscale.nn.attention.ops.mask import ScoreEdge
from xscale.nn.gates import GATES, GateSum
from xscale.nn.mixer.mixer import Mixer, ValueEdge
from xscale.nn.signals import BATCH, TOKENS, Signal, TokenAxes

Edge = ScoreEdge | ValueEdge
VALUES = "values"
"""Key of the values of the first layer among what blocks hand on."""
HandedOn = dict[str, Tensor]
"""Attention scores [B, H, T, S] before mask and softmax by sublayer, the sum of the gates [B, T] (`GATES`), and the
values of the first layer [B, T, D / R] of the local heads (`VALUES`)."""

CONTENT = Signal[Tensor]("edges.content", TokenAxes((BATCH, TOKENS, "width")))
"""[B, T, D] embeddings of the tokens, of which each self-attention of a disentangled decoder makes its keys and values;
None: they are of the hidden states, as the queries are."""


class BlockEdges:
    """Edges of one block: tensors of the block before, and after its forward those that it hands on."""

    def __init__(self, handed_on: HandedOn | None, mixers: Mapping[str, Mixer]) -> None:
        """`handed_on`: by the block before; None: no block hands on anything. `mixers`: of this one, by sublayer."""
        received = handed_on or {}
        self.scores = {name: ScoreEdge(received.get(name)) for name, mixer in mixers.items() if mixer.hands_on_scores}
        self.values = ValueEdge(received.get(VALUES))
        self.value_mixers = {name for name, mixer in mixers.items() if mixer.hands_on_values}
        """Names of the sublayers that read or write values."""
        self.gates = GateSum(received[GATES]) if GATES in received else None

    def of(self, name: str) -> Edge | None:
        """Return the edge of the mixer of a sublayer; None: it hands on nothing."""
        return self.values if name in self.value_mixers else self.scores.get(name)

    def handed_on(self) -> HandedOn:
        """Return what the next block gets."""
        after = {name: edge.scores for name, edge in self.scores.items() if edge.scores is not None}
        if self.values.values is not None:
            after[VALUES] = self.values.values
        if self.gates is not None:
            after[GATES] = self.gates.total
        return after


def read_first_values(mixers: Iterable[Mixer]) -> None:
    """Have all mixers of a stack that hand on values, except the first, mix the first one's values into theirs.

    `mixers` are in their order; those that hand on no values are left alone.
    """
    for mixer in [mixer for mixer in mixers if mixer.hands_on_values][1:]:
        mixer.mix_first_values()
