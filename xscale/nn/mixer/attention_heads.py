"""The heads of an attention: their projections and their core, of which tensor parallelism gives each rank some."""

from typing import Any, ClassVar

from xscale.core.choices import Choice
from xscale.core.errors import Problem
from xscale.core.requirements import divisors, divisors_of, in_parts, instead, take
from xscale.nn.attention.core import Core
from xscale.nn.linear import Linear
from xscale.nn.mixer.mixer import Mixer
from xscale.nn.module import Module
from xscale.nn.position.position import Position
from xscale.nn.roles import Role


class AttentionHeads(Mixer):
    """A mixer of H query heads and G key heads of width K around a core. The heads are sharded with its projections."""

    seams = {
        "first_head": Role.FIRST_HEAD,
        "key_projection": Role.KV_PROJECTION,
        "v": Role.KV_PROJECTION,
        "position": Role.HEAD_BIAS,
    }
    mixes_heads: ClassVar[bool] = False
    """Whether a projection needs all heads of a token at once, so that tensor parallelism cannot shard them."""
    qk_norm_over: str = "head"
    """Channels over which queries and keys are normalised: of a `head`, or of all `heads`."""
    chooses_observed: bool = False
    """Whether each token observes others of its own choice (`OBSERVED`): set by a model in which they do."""
    head_width: int
    q: Linear
    k: Linear | None
    v: Linear
    core: Core
    position: Position | None

    @property
    def heads(self) -> int:
        """H, of all ranks."""
        return self.query_channels // self.head_width

    @property
    def kv_heads(self) -> int:
        """G, of all ranks."""
        return self.key_channels // self.head_width

    @property
    def query_channels(self) -> int:
        """H * K, of all ranks."""
        return self.q.weight.shape[0]

    @property
    def key_channels(self) -> int:
        """G * K, of all ranks."""
        return self.key_projection.weight.shape[0]

    @property
    def key_projection(self) -> Linear:
        """The projection of the keys."""
        return self.q if self.k is None else self.k

    @property
    def first_head(self) -> int:
        """Index in the model of the first local head: that of the core."""
        return self.core.first_head

    @first_head.setter
    def first_head(self, first: int) -> None:
        self.core.first_head = first

    def tp_problems(self, tp: int, path: str) -> list[Problem]:
        """List why it cannot be sharded, besides a degree that does not divide the heads: the engine checks that."""
        heads, kv_heads = self.heads, self.kv_heads
        problems = []
        if heads % tp == 0 and kv_heads % tp and tp % kv_heads:
            what = f"tp={tp} neither divides nor is divided by kv_heads={kv_heads}"
            problems.append(Problem(path, what, choices=divisors(heads) + self._kv_heads(tp)))
        if self.qk_norm_over == "heads" and kv_heads % tp:
            what = f"tp={tp} does not divide kv_heads={kv_heads}, over all of which the keys are normalised"
            choices = divisors(kv_heads) + self._kv_heads(tp)
            choices += in_parts("mixer", str(self.Config.kind), "qk_norm_over", "head")
            problems.append(Problem(path, what, choices=choices))
        period = self.core.head_period
        if heads % tp == 0 and heads // tp % period:
            what = f"tp={tp} gives a rank {heads // tp} heads, and the core's cores take turns every {period}"
            problems.append(Problem(path, what, choices=divisors(heads // period)))
        if self.mixes_heads:
            kind = str(self.Config.kind)
            what = f"mixer '{kind}' mixes the heads of a token, so tp cannot shard them"
            problems.append(
                Problem(path, what, choices=take(1) + instead("mixer", kind, ["attention"]))
            )
        return problems

    def _kv_heads(self, tp: int) -> tuple[Choice, ...]:
        """Return the choices of kv_heads that tp shards or replicates."""
        fitting = [count for count in divisors_of(self.heads) if count % tp == 0 or tp % count == 0]
        return in_parts("mixer", str(self.Config.kind), "kv_heads", *reversed(fitting))

    def draws_by_head(self) -> list[tuple[Module, Any, int]]:
        return [
            (module, core, heads)
            for core, heads in self.core.head_cores(self.heads)
            for module in core.modules()
            if isinstance(module, Module)
        ]
