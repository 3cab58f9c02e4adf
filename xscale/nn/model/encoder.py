"""A bidirectional encoder (Devlin et al. 2019): each token sees all others; trained to fill in what was hidden."""

from typing import Annotated

from torch import Tensor

from xscale.core.config import Slot
from xscale.core.errors import Problem
from xscale.nn.ffn import Activation
from xscale.nn.head import Head
from xscale.nn.model import MODELS, Model, ModelTraits, dims_of
from xscale.nn.model.check import check_model
from xscale.nn.model.embed import Embed
from xscale.nn.module import name_modules
from xscale.nn.norm import NORMS, Norm
from xscale.nn.stack import Stack, StackConfig
from xscale.nn.tokens import Tokens
from xscale.nn.transform import Transform


@MODELS.register("encoder", traits=ModelTraits(causal=False, source=False, decode=False))
class Encoder(Model):
    class Config(Model.Config):
        stack: StackConfig = StackConfig()
        """The blocks."""
        embedding_norm: Annotated[Norm.Config, Slot(NORMS)] | None = None
        """Norm of the embeddings, before their dropout (BERT's, Devlin et al. 2019); null: none."""
        transform: Activation | None = None
        """A dense layer with this activation, then the blocks' norm, before the head (as in BERT); null: none."""
        head_bias: bool = False
        """Whether each word has a bias in the logits (as in BERT)."""

    def __init__(self, config: Config, vocabulary: int, length: int) -> None:
        super().__init__()
        dims = dims_of(config, vocabulary, length, causal=False)
        self.embed = Embed(config, dims, norm=config.embedding_norm)
        self.stack = Stack(config.stack, dims)
        transform = None if config.transform is None else Transform(config.transform, config.stack.block.norm, dims)
        tied = self.embed.table if config.tied else None
        self.head = Head(dims, tied, bias=config.head_bias, transform=transform)
        name_modules(self)

    @classmethod
    def check(cls, config: Config, dims: tuple[int, int], path: str) -> list[Problem]:
        shared = dims_of(config, *dims, causal=False)
        return check_model(config, shared, path) + Stack.check(config.stack, shared, f"{path}.stack")

    def forward(self, tokens: Tokens, targets: Tensor | None = None, source: Tokens | None = None) -> Tensor:
        out: Tensor = self.head(self.stack(self.embed(tokens), tokens), targets, tokens)
        return out
