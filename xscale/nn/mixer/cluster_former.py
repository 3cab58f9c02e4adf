"""Wang et al. 2021 (Cluster-Former): attention in chunks of tokens, sorted by the clusters of their hidden states."""

from torch import Tensor

from xscale.nn.attention.cluster_former import ClusterFormer
from xscale.nn.attention.core import CoreSlot
from xscale.nn.attention.ops.dense import upcast
from xscale.nn.attention.ops.mask import AttentionMask
from xscale.nn.dims import Dims
from xscale.nn.mixer.attention import Attention
from xscale.nn.mixer.mixer import BIDIRECTIONAL, MIXERS
from xscale.nn.mixer.without_padding import without_padding
from xscale.nn.tokens import Tokens


@MIXERS.register(
    "cluster_former",
    traits=BIDIRECTIONAL,
)
class ClusterFormerAttention(Attention):
    class Config(Attention.Config):
        core: CoreSlot = ClusterFormer.Config()
        """The core `cluster_former`, which has the clusters and the chunks."""

    cores = ("cluster_former",)
    shards_sequence = False
    core: ClusterFormer

    def __init__(self, config: Config, dims: Dims) -> None:
        assert isinstance(config.core, ClusterFormer.Config)
        core = config.core.model_copy(update={"points": "input"})
        super().__init__(config.model_copy(update={"core": core}), dims)

    forward = without_padding(Attention.forward)

    def attend_input(
        self, x: Tensor, tokens: Tokens, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask
    ) -> Tensor:
        """Attend within the chunks of tokens that the clusters of x [B, T, D] make, the same in all heads."""
        return self.core.attend(q, k, v, upcast(x)[:, None], mask)
