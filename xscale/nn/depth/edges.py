"""Edges between blocks beside the hidden states: attention scores, values of the first layer, sums over the depth.

They are inputs and outputs of a block, so that recomputation and the stages of a pipeline see them, and their gradients
pass from block to block as those of the hidden states do.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from xscale.core.choices import Choice
from xscale.core.errors import Problem
from xscale.core.requirements import change, instead, take
from xscale.nn.attention.core import CORES
from xscale.nn.attention.ops.mask import ScoreEdge
from xscale.nn.depth.depth_pass import DepthPass, Edges, SentTensor, StackUse
from xscale.nn.dims import Dims
from xscale.nn.mixer.mixer import MIXERS, Mixer, ValueEdge
from xscale.nn.signals import BATCH, TOKENS, Signal, TokenAxes

Edge = ScoreEdge | ValueEdge
VALUES = "values"
"""Key of the values of the first layer among what blocks hand on."""

CONTENT = Signal[Tensor]("edges.content", TokenAxes((BATCH, TOKENS, "width")))
"""[B, T, D] embeddings of the tokens, of which each self-attention of a disentangled decoder makes its keys and values;
None: they are of the hidden states, as the queries are."""


class BlockEdges:
    """Edges of one block: tensors of the block before, and after its forward those that it hands on."""

    def __init__(self, received: Edges | None, mixers: Mapping[str, Mixer]) -> None:
        """`received`: from the block before; None: no block hands on anything. `mixers`: of this one, by sublayer."""
        received = received or {}
        self.scores = {
            name: ScoreEdge(received.get(name))
            for name, mixer in mixers.items()
            if mixer.hands_on_scores
        }
        self.values = ValueEdge(received.get(VALUES))
        self.value_mixers = {name for name, mixer in mixers.items() if mixer.hands_on_values}
        """Names of the sublayers that read or write values."""
        self.sums = {
            name: x for name, x in received.items() if name not in mixers and name != VALUES
        }
        """Sums over the sublayers of the stack so far, to which those of this block add."""

    def of(self, name: str) -> Edge | None:
        """Return the edge of the mixer of a sublayer; None: it hands on nothing."""
        return self.values if name in self.value_mixers else self.scores.get(name)

    def add(self, name: str, x: Tensor) -> None:
        """Add to the sum of that name, if the stack has one."""
        if name in self.sums:
            self.sums[name] = self.sums[name] + x

    def next(self) -> Edges:
        """Return what the next block gets."""
        after = {name: edge.scores for name, edge in self.scores.items() if edge.scores is not None}
        if self.values.values is not None:
            after[VALUES] = self.values.values
        return after | self.sums


def mixers_of(blocks: Iterable[nn.Module]) -> list[Mixer]:
    """Return the mixers of all blocks, in their order."""
    return [mixer for block in blocks for mixer in block.mixers().values()]  # type: ignore[operator]


class PreviousScores(DepthPass):
    """Attention scores that blocks hand to the next one (He et al. 2021, RealFormer)."""

    key = "previous_scores"
    reads_hidden_states = ""
    has_edges = True

    @classmethod
    def build(
        cls, config: Any, dims: Dims, use: StackUse, blocks: Mapping[str, nn.Module]
    ) -> "PreviousScores | None":
        return cls() if any(mixer.hands_on_scores for mixer in mixers_of(blocks.values())) else None

    @classmethod
    def check(cls, config: Any, dims: Dims, path: str, use: StackUse) -> list[Problem]:
        """Check that each mixer which reads the scores of the previous block gets those of as many heads."""
        previous: dict[str, int | None] = {}
        for layer in range(config.depth):
            block = config.block_config(layer)
            heads: dict[str, int | None] = {}
            for name, sublayer in block.named(cross=use.cross).items():
                if sublayer.part == "ffn":
                    continue
                mixer: Any = block.config_of(sublayer)
                part = MIXERS.of(mixer).part
                heads[name] = part.score_heads(mixer)
                if part.reads_scores(mixer) and (layer > 0 or part.needs_previous_scores):
                    problem = _check_heads(
                        mixer, name, layer, previous.get(name), heads[name], path
                    )
                    if problem is not None:
                        return [problem]
            previous = heads
        return []

    def sends(
        self, before: Sequence[nn.Module], after: Sequence[nn.Module]
    ) -> dict[str, SentTensor]:
        mixers: dict[str, Mixer] = after[0].mixers() if before else {}  # type: ignore[operator]
        heads = {
            name: mixer.previous_score_heads
            for name, mixer in mixers.items()
            if mixer.hands_on_scores
        }
        return {name: SentTensor(score_heads=count) for name, count in heads.items() if count}


def _check_heads(
    mixer: Any, name: str, layer: int, available: int | None, heads: int | None, path: str
) -> Problem | None:
    """Return why the mixer `name` of block `layer` cannot read the scores of the block before."""
    where, before = f"{path} (block {layer})", f"{path} (block {layer - 1})"
    if available is None:
        what = f"'{name}' reads the attention scores of the block before, which hands on none"
        able = (CORES.get(core) for core in CORES.able(previous_scores=True))
        # Not those that hand them on with some of their settings only.
        handing_on = [
            entry.name
            for entry in able
            if entry.part.traits_of(entry.part.Config()).previous_scores
        ]
        choices: tuple[Choice, ...] = ()
        for name in handing_on if layer else ():
            choices += change(
                (f"{before}.mixer.kind", "attention"), (f"{before}.mixer.core.kind", name)
            )
        core = getattr(mixer, "core", None)
        choices += (
            instead("mixer", mixer.kind, ["attention"])
            if core is None
            else instead("core", core.kind, ["softmax"])
        )
        return Problem(where, what, choices=choices)
    if available != heads:
        what = f"'{name}' has {heads} heads and reads the scores of the {available} before it"
        choices = take(available, key=f"{where}.mixer.heads")
        choices += take(heads, key=f"{before}.mixer.heads")
        return Problem(where, what, choices=choices)
    return None


class FirstValues(DepthPass):
    """Values of the first layer that later ones mix into theirs (Peng et al. 2025, RWKV-7)."""

    key = "first_values"
    reads_hidden_states = ""
    has_edges = True

    @classmethod
    def build(
        cls, config: Any, dims: Dims, use: StackUse, blocks: Mapping[str, nn.Module]
    ) -> "FirstValues | None":
        """Have all mixers that hand on values, except the first, mix the first one's values into theirs."""
        mixers = [mixer for mixer in mixers_of(blocks.values()) if mixer.hands_on_values]
        for mixer in mixers[1:]:
            mixer.mix_first_values()
        return cls() if mixers else None

    def sends(
        self, before: Sequence[nn.Module], after: Sequence[nn.Module]
    ) -> dict[str, SentTensor]:
        reads = all(
            any(mixer.hands_on_values for mixer in mixers_of(blocks)) for blocks in (before, after)
        )
        return {VALUES: SentTensor(values=True)} if reads else {}
