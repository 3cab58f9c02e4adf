"""The token shift of RWKV (Peng et al. 2023, section 3.1.1): what a layer reads of the token before each token."""

from torch import Tensor

from xscale.nn.mixer.local_mixer import NeighbourReader, same_document
from xscale.nn.tokens import Tokens


class TokenShift(NeighbourReader):
    """The token before each token, [B, T, D]; zeros before the first one of a document."""

    left = 1
    sharded_over_tp = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        near, documents = self.with_neighbours(x, tokens)  # [B, 1 + T, D]
        before = near.narrow(1, 0, x.shape[1])
        return before if documents is None else before * same_document(documents, 1, 0)[..., :1]

    @property
    def exchanged_width(self) -> int:
        return self.width
