"""Liu et al. 2020 (FLOATER), section 3: position encodings that follow a learned ordinary differential equation.

    p(t) = p(0) + integral from 0 to t of h(tau, p(tau)) dtau,  t = interval * position
    h(tau, p) = W_2 [ReLU(W_1 [p; tau] + b_1); tau] + b_2

p(0) [D] and h are learned. Where the encodings are added to the input of each block (`block.position`), each has a p(0)
of its own, and all blocks of a stack have one h (section 3.2). The equation is solved along the positions one after
the other, once for a micro-batch in each block, whatever the number of samples.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from xscale.core.config import PositiveFloat, PositiveInt
from xscale.nn.compiling.eager import eager
from xscale.nn.dims import Dims
from xscale.nn.init import ZEROS, Init
from xscale.nn.module import Module
from xscale.nn.position.position import POSITIONS, Position, PositionTraits
from xscale.nn.tokens import Tokens

Derivative = Callable[[float, Tensor], Tensor]
"""(time, value) -> dvalue/dtime, of the value's shape."""


class Dynamics(Module):
    """The network h(tau, p) of the differential equation."""

    # Its errors add up along the positions.
    keeps_precision = True
    up: Parameter
    up_bias: Parameter
    down: Parameter
    down_bias: Parameter

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        start = Init(std=(2 / (width + 1 + hidden)) ** 0.5)
        self.declare("up", (hidden, width + 1), ("state", "state"), start)
        self.declare("up_bias", (hidden,), ("state",), ZEROS, decays=False)
        self.declare("down", (width, hidden + 1), ("state", "state"), start)
        self.declare("down_bias", (width,), ("state",), ZEROS, decays=False)

    def derivative(self) -> Derivative:
        """Return h, with the parameters as they are now."""
        (up, up_time), (down, down_time) = (
            (weight[:, :-1], weight[:, -1]) for weight in (self.use(self.up), self.use(self.down))
        )
        up_bias, down_bias = self.use(self.up_bias), self.use(self.down_bias)

        def h(time: float, p: Tensor) -> Tensor:
            hidden = F.relu(torch.addmv(up_bias + time * up_time, up, p))
            return torch.addmv(down_bias + time * down_time, down, hidden)

        return h


@POSITIONS.register(
    "floater",
    traits=PositionTraits(where="input", relative=False, extrapolates=True, cost="8*T*D*D"),
    deviations=(
        "Gradients are those of the solver's steps, by backpropagation; the paper solves an adjoint equation.",
        "The solver is the Runge-Kutta method of order 4 with fixed steps, one between two tokens by default; the "
        "authors' code takes five.",
        "At a block, p is added to the block's input, which the residual connection passes on; the authors' code adds "
        "three solutions to queries, keys and values, and sinusoids to the embeddings.",
        "The encodings are solved for in each micro-batch; the authors' code keeps them for hundreds of steps.",
        "Encodings start from drawn weights; the paper can also start them from sinusoids, on top of a trained model.",
    ),
)
class Floater(Position):
    keeps_precision = True
    initial: Parameter

    class Config(Position.Config):
        interval: PositiveFloat = 0.01
        """Time between two tokens."""
        steps: PositiveInt = 1
        """Steps of the solver between two tokens."""
        hidden: PositiveInt | None = None
        """Hidden width of h; null: the model's width."""

    def __init__(self, config: Config, dims: Dims, heads: int = 0, head_width: int = 0) -> None:
        super().__init__()
        self.interval = config.interval
        self.steps = config.steps
        self.length = dims.length
        self.declare("initial", (dims.width,), ("width",), dims.init)
        self.layer_tables = Dynamics(dims.width, config.hidden or dims.width)

    def embed(self, x: Tensor, tokens: Tokens) -> Tensor:
        return x + F.embedding(tokens.positions, self.encodings(tokens)).to(x.dtype)

    @eager
    def why_not_static(self) -> str | None:
        return "position 'floater' solves its equation up to the number of tokens so far"

    def encodings(self, tokens: Tokens) -> Tensor:
        """Return p of the positions 0, 1, 2 ... up to the tokens' last one, or farther: [N, D]."""

        def last() -> int:
            return int(tokens.positions.max())

        # A sequence, also one of which a rank of cp has a shard, ends there; reading it would wait for the device.
        count = max(self.length, tokens.positions.shape[1])
        if not self.training:
            count = max(count, tokens.shared_values.get_or_compute("floater/last", last) + 1)
        if tokens.forward.cache is None:
            return self._solve(self.use(self.initial), 0, count)
        encodings: Tensor | None = tokens.forward.cache.get(self.path)
        if encodings is None:
            encodings = self._solve(self.use(self.initial), 0, count)
        elif len(encodings) < count:
            following = self._solve(encodings[-1], len(encodings) - 1, count - len(encodings) + 1)
            encodings = torch.cat((encodings, following[1:]))
        tokens.forward.cache[self.path] = encodings
        return encodings

    def _solve(self, value: Tensor, first: int, count: int) -> Tensor:
        """Return p of `count` positions from `first` on, where it is `value`."""
        derivative = self.layer_tables.derivative()
        return runge_kutta(
            derivative, value, first * self.interval, self.interval, count, self.steps
        )


def runge_kutta(
    derivative: Derivative, value: Tensor, start: float, interval: float, count: int, steps: int = 1
) -> Tensor:
    """Solve dp/dt = derivative(t, p) by the classical Runge-Kutta method of order 4 (Kutta 1901).

    `value` is p(start). The result has p at `count` times from `start` on, `interval` apart: [count, *value.shape].
    Between two of them there are `steps` steps.
    """
    values, size = [value], interval / steps
    for number in range((count - 1) * steps):
        # Not by adding up, which would add up the rounding too.
        time = start + number * size
        first = derivative(time, value)
        second = derivative(time + size / 2, value + size / 2 * first)
        third = derivative(time + size / 2, value + size / 2 * second)
        fourth = derivative(time + size, value + size * third)
        value = value + size / 6 * (first + 2 * (second + third) + fourth)
        if (number + 1) % steps == 0:
            values.append(value)
    return torch.stack(values)
