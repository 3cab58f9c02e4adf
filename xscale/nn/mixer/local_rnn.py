"""Wang et al. 2019, R-Transformer: a recurrent network that each token runs over a short window ending at it.

    h_t = RNN(x_{t-M+1}, ..., x_t), from a zero state                              (section 3.1)

The weights are shared by all windows. All windows advance together: M steps for the sequence, O(T M) in all. Before the
first token there are zeros, which the network reads; in packed documents the tokens of another one are zeros too. A
layer of the R-Transformer has it in front of attention and the feed-forward part, each a sublayer.
"""

from typing import Literal

import torch
from torch import Tensor

from xscale.core.config import PositiveInt
from xscale.nn.dims import Dims
from xscale.nn.linear import Linear
from xscale.nn.mixer.local_mixer import LocalMixer
from xscale.nn.mixer.mixer import CAUSAL, MIXERS, Mixer
from xscale.nn.neighbours import same_document
from xscale.nn.tokens import Tokens


@MIXERS.register(
    "local_rnn",
    traits=CAUSAL,
)
class LocalRnn(LocalMixer):
    class Config(Mixer.Config):
        cell: Literal["gru", "lstm"] = "gru"
        """gru: gated recurrent unit (Cho et al. 2014); lstm: long short-term memory (Hochreiter and Schmidhuber
        1997)."""
        window: PositiveInt = 7
        """M, tokens of a window."""

    uses_position = False

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        self.cell = config.cell
        self.window = config.window
        self.width = dims.width
        self.left = config.window - 1
        gates = 3 if config.cell == "gru" else 4
        # Every gate reads the whole state at every step, so that no axis is sharded over tp.
        self.inputs = Linear.from_width(dims, gates * dims.width, "state", bias=True)
        self.states = Linear.from_width(dims, gates * dims.width, "state", bias=True)

    def forward(
        self, x: Tensor, tokens: Tokens, memory: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        near, documents = self.with_neighbours(x, tokens)
        # Inputs are projected once for all windows that read them; a zero leaves the bias.
        projected = self.inputs(near)  # [B, M - 1 + T, gates * D]
        window = None if documents is None else same_document(documents, self.left, 0)  # [B, T, M]
        empty = self.inputs(torch.zeros_like(x[:1, :1]))
        h, c = torch.zeros_like(x), torch.zeros_like(x)
        for step in range(self.window):
            entered = projected.narrow(1, step, x.shape[1])
            if window is not None:
                entered = torch.where(window[..., step, None], entered, empty)
            h, c = self.advance(entered, h, c)
        return h

    def advance(self, entered: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        """One step of all windows: projected inputs [B, T, gates * D], state h and, of an LSTM, cell c [B, T, D]."""
        recurrent = self.states(h)
        if self.cell == "gru":
            reset, update = (
                (entered + recurrent).narrow(-1, 0, 2 * self.width).sigmoid().chunk(2, -1)
            )
            new = torch.tanh(
                entered.narrow(-1, 2 * self.width, self.width)
                + reset * recurrent.narrow(-1, 2 * self.width, self.width)
            )
            return (1 - update) * new + update * h, c
        enter, forget, new, leave = (entered + recurrent).chunk(4, -1)
        c = forget.sigmoid() * c + enter.sigmoid() * new.tanh()
        return leave.sigmoid() * c.tanh(), c

    @property
    def exchanged_width(self) -> int:
        return self.width

    def multiply_adds(self, queries: int, keys: int) -> float:
        # The recurrent weights are counted once for each token, and multiply it in each step of its window.
        return float(queries * (self.window - 1) * self.states.weight.numel())
