"""The heads of an attention: their projections and their core, of which tensor parallelism gives each rank some."""

from typing import Any, ClassVar

from xscale.nn.attention.core import Core
from xscale.nn.linear import Linear
from xscale.nn.mixer.mixer import Mixer
from xscale.nn.module import Module
from xscale.nn.position.position import Position
from xscale.nn.roles import Role, Seams


class AttentionHeads(Mixer):
    """A mixer of H query heads and G key heads of width K around a core. The heads are sharded with its projections."""

    seams: ClassVar[Seams] = {
        "first_head": Role.FIRST_HEAD,
        "key_projection": Role.KV_PROJECTION,
        "v": Role.KV_PROJECTION,
        "position": Role.HEAD_BIAS,
    }
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

    def draws_by_head(self) -> list[tuple[Module, Any, int]]:
        return [
            (module, core, heads)
            for core, heads in self.core.head_cores(self.heads)
            for module in core.modules()
            if isinstance(module, Module)
        ]
