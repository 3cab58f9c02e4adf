"""The forward of a micro-batch as a whole: its seed, weights of losses, statistics, cache and observed states.

It travels as `Tokens.forward`, one object for the tokens of a model and of its source.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from xscale.nn.compiling.eager import eager


class HasPath(Protocol):
    """A module that knows its path in the model."""

    path: str


class Stats:
    """Running means of statistics from inside the model.

    A recomputed forward adds nothing (`xscale.parallel.recompute.activation_checkpointing`): where only some of the
    blocks that share a part are recomputed, its means would count them twice.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._recorded: list[tuple[HasPath, str, Tensor]] = []

    def add(self, name: str, value: Tensor) -> None:
        """Add one observation of `name`: a fraction or a mean over the tokens of this forward."""
        # In double precision sums are exactly the same for any assignment of micro-batches to ranks.
        value = value.detach().double()
        self._sums[name] = self._sums[name] + value if name in self._sums else value
        self._counts[name] = self._counts.get(name, 0) + 1

    def record(self, part: HasPath, name: str, value: Tensor) -> None:
        """Add one observation of `name` of a part of a block, when the block is done.

        A compiled block takes names and numbers of observations for constants: had it to read them, each block would
        be compiled for itself, and anew for each micro-batch. So it reads neither, nor what is recorded before it.
        """
        self._recorded.append((part, name, value.detach()))

    def add_recorded(self) -> None:
        """Add what is recorded, each under `<path of the part>/<name>`."""
        recorded, self._recorded = self._recorded, []
        for part, name, value in recorded:
            self.add(f"{part.path}/{name}", value)

    def means(self) -> dict[str, Tensor]:
        """Name -> mean over its observations."""
        self.add_recorded()
        return {name: total / self._counts[name] for name, total in self._sums.items()}

    def copy(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """Return the sums and the numbers of observations by name, as they are now."""
        self.add_recorded()
        return dict(self._sums), dict(self._counts)

    def reset(self, state: tuple[dict[str, Tensor], dict[str, int]]) -> None:
        """Set the observations to those of an earlier `copy`."""
        self._sums, self._counts, self._recorded = dict(state[0]), dict(state[1]), []


class Choices:
    """Discrete choices of a part of a forward, such as experts of tokens, which its recomputation repeats.

    A recomputation rounds as its forward did only on the same kernels in the same order. Where two experts score
    equally to the last digits, it would choose another one, and gradients would be those of another forward.
    """

    def __init__(self) -> None:
        self._made: list[Tensor] = []
        self._next: int | None = None

    def begin_recomputation(self) -> None:
        """Let the calls of `make_or_repeat` that follow return what those of the forward got, in their order."""
        self._next = 0

    # A graph break: the compiled code before and after it is the same in a forward and in its recomputation, which
    # have to save the same tensors.
    @eager
    def make_or_repeat(self, choice: Tensor) -> Tensor:
        """Return `choice` in a forward; in its recomputation, the choice that the forward made at this call."""
        if self._next is None:
            self._made.append(choice)
            return choice
        made = self._made[self._next]
        self._next += 1
        return made


class InnerStates(Protocol):
    """Gets the states of a model in its forward and returns them, with losses attached if it likes (`distillation`)."""

    def hidden(self, layer: int, x: Tensor, tokens: Any) -> Tensor:
        """Get x [B, T, D], the output of block `layer`, or for -1 the input of the first."""
        ...

    def attention(
        self, layer: int, q: Tensor, k: Tensor, mask: Any, o: Tensor, tokens: Any
    ) -> Tensor:
        """Get q [B, H, T, K] and k [B, G, S, K] of block `layer`; return o [B, H, T, K], its heads' outputs."""
        ...

    def output(self, x: Tensor, tokens: Any) -> Tensor:
        """Get x [B, T, D], the output of the stack."""
        ...

    def skips(self, layer: int) -> bool:
        """Whether block `layer` is not computed, and its output is its input."""
        ...

    def further_loss_weight(self, tokens: Any) -> float:
        """Return the factor of the losses of heads beside the model's own."""
        ...


@dataclass(frozen=True)
class Forward:
    """Values that belong to no token, but to the whole forward of a micro-batch."""

    rng_seed: int | None = None
    """Seed of this micro-batch's random numbers (dropout, router noise). None: no random numbers, as in evaluation.
    Blocks draw from generators that their stack has seeded, and find 0 here."""
    aux_loss_weight: float | None = None
    """Weight of auxiliary losses in this micro-batch's backward. None: no auxiliary loss."""
    target_weight: float | None = None
    """Weight of each target's loss in backward, 1 / (targets of the whole step), for the losses of exits. None: exits
    have no loss."""
    progress: float | None = None
    """Fraction of the run's optimizer steps that are done. None: there is no run, as at the end of one."""
    label_smoothing: float = 0.0
    """Label smoothing of the loss of this micro-batch; 0 in evaluation."""
    z_loss_weight: float = 0.0
    """Weight of the z-loss of the logits in the loss of this micro-batch; 0 in evaluation."""
    stats: Stats | None = None
    """Collects the statistics of the parts; None: not collected."""
    cache: dict[str, Any] | None = None
    """State of each mixer by its path during generation (KV cache); None otherwise."""
    choices: Choices | None = None
    """Keeps the choices of the parts for a recomputation of this forward; None: it is not recomputed."""
    states: InnerStates | None = None
    """Gets the states of the model as they arise, for distillation; None: nothing does."""
    signals: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Value of each signal of a part that belongs to no token, by its key (`xscale.nn.signals`)."""
