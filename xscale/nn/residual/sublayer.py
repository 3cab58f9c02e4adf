"""A mixer or feed-forward part on the residual stream: the base class of the sublayers of all residual streams."""

from typing import Any

from torch import Tensor

from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import Ffn
from xscale.nn.mixer.mixer import Mixer
from xscale.nn.module import Module
from xscale.nn.norm.norm import Norm
from xscale.nn.residual.placement import Around, Placement
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


class Sublayer(Module):
    """Reads x of the stream, and writes the output of its part for x to it: here the stream is x, and x + f(x) follows.

    A residual stream of another kind has a subclass, which overrides `read` and `write`, or `forward`, and may have
    parameters of its own. What stands around the part, such as norms, is in `placement`.
    """

    seams = {
        "random": Role.DRAWS_BETWEEN_REGIONS,
        "norm": Role.BETWEEN_REGIONS,
        "after": Role.BETWEEN_REGIONS,
        "part": Role.REGION,
        "mix": Role.SEQUENCE_MIXING,
    }
    norm: Norm | None
    after: Norm | None

    def __init__(
        self,
        config: Any,
        placement: Placement,
        dims: Dims,
        part: Mixer | Ffn,
        factor: float = 1.0,
        number: int = 0,
    ) -> None:
        """`config` is that of the block, `number` that of the sublayer in its stack, from 0."""
        super().__init__()
        self.width = dims.width
        self.factor = factor
        self.placement = placement
        self.dropout = config.dropout
        self.norm = self.after = None
        for around in placement.parts:
            setattr(self, around.name, around.make(config.norm, dims.width))
        self.add_parts(config, dims, number)
        output_parts = config.output_parts(dims)
        self.output_parts = tuple(output_parts)
        """Names of the parts that change the output: (y, x, tokens, edges) -> y, all [B, T, D]."""
        for name, changes in output_parts.items():
            setattr(self, name, changes)
        self.part = part

    def add_parts(self, config: Any, dims: Dims, number: int) -> None:
        """Build what a residual stream of this kind needs in the sublayer; `config` is that of the block."""

    def forward(
        self,
        stream: Any,
        tokens: Tokens,
        memory: Tensor | None = None,
        source: Tokens | None = None,
        residual: Any = None,
        edge: Any = None,
        edges: Any = None,
    ) -> Any:
        """Return the stream with the output for `stream` written to `residual`, a later state of it; None: to `stream`.

        `memory` [B, S, D], with its tokens `source`, is what a mixer makes keys and values of; None: of what it reads.
        `edge` is that of the mixer among the block's `edges`.
        """
        x = self.read(stream)
        y = self.output(x, tokens, memory, source, edge, edges)
        return self.write(y, stream if residual is None else residual, tokens)

    def read(self, stream: Any) -> Tensor:
        """Return what the sublayer reads of the stream, [B, T, D], before any norm."""
        x: Tensor = stream
        return x

    def write(self, y: Tensor, stream: Any, tokens: Tokens) -> Any:
        """Return the stream after the output y [B, T, D] is written to it."""
        kernel = self.kernel_choices.get("bias_dropout_residual")
        x = self.random.dropout_add(
            y, self.keep(stream), self.drop_probability(tokens), tokens, kernel
        )
        return self.around(self.placement.total, x, tokens)

    def keep(self, x: Tensor) -> Tensor:
        """Return what the stream keeps of x [B, T, D] when an output is added to it."""
        return x

    def output(
        self,
        x: Tensor,
        tokens: Tokens,
        memory: Tensor | None = None,
        source: Tokens | None = None,
        edge: Any = None,
        edges: Any = None,
    ) -> Tensor:
        """Return the part's output for x as it is written, before dropout, [B, T, D] -> [B, T, D]."""
        read, is_mixer = self.normalised_input(x, tokens), isinstance(self.part, Mixer)
        y: Tensor = (
            self.mix(read, tokens, memory, source, edge=edge)
            if is_mixer
            else self.part(read, tokens)
        )
        y = self.around(self.placement.after, y, tokens)
        y = y if self.factor == 1 else self.factor * y
        for name in self.output_parts:
            y = getattr(self, name)(y, x, tokens, edges)
        return y

    def branch(self, x: Tensor, tokens: Tokens, *inputs: Any) -> Tensor:
        """Return the part's output for x in compute dtype, with dropout, [B, T, D] -> [B, T, D]."""
        return self.drop(self.output(self.use(x), tokens, *inputs), tokens)

    def drop(self, y: Tensor, tokens: Tokens) -> Tensor:
        """Return the output y [B, T, D] with dropout."""
        return self.random.dropout(
            y, self.drop_probability(tokens), ("batch", "tokens", "width"), tokens
        )

    def normalised_input(self, x: Tensor, tokens: Tokens | None) -> Tensor:
        """Return what the part reads of x [B, T, D]: its norm, if one stands before the part."""
        return self.around(self.placement.before, x, tokens)

    def around(self, around: Around | None, x: Tensor, tokens: Tokens | None) -> Tensor:
        """Return x [B, T, D] mapped by that submodule; None: x itself."""
        mapped: Tensor = x if around is None else getattr(self, around.name)(x, tokens)
        return mapped

    def drop_probability(self, tokens: Tokens) -> float:
        """Return the dropout probability of the output in this forward."""
        return self.dropout if self.training and tokens.forward.rng_seed is not None else 0.0

    def mix(self, x: Tensor, tokens: Tokens, *memory_and_source: Any, edge: Any) -> Tensor:
        """Run the mixer, [B, T, D] -> [B, T, D]. A seam: context parallelism gathers the sequence."""
        edges = {} if edge is None else {"edge": edge}
        return self.part(x, tokens, *memory_and_source, **edges)  # type: ignore[no-any-return]
