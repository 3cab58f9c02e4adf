"""A causal language model (Radford et al. 2018): each token is predicted from the earlier ones."""

from functools import partial

from torch import Tensor

from xscale.core.errors import Problem
from xscale.nn.blocks.stack import Stack, StackConfig
from xscale.nn.depth.depth_pass import Prediction, StackUse
from xscale.nn.head.head import Head
from xscale.nn.model.embed import Embed
from xscale.nn.model.model import MODELS, Model, ModelTraits, check_position, model_dims
from xscale.nn.model.multi_token import MtpConfig, MultiToken
from xscale.nn.module import name_modules
from xscale.nn.roles import Role
from xscale.nn.tokens import Tokens


@MODELS.register("decoder", traits=ModelTraits(causal=True, source=False, decode=True))
class Decoder(Model):
    class Config(Model.Config):
        stack: StackConfig = StackConfig()
        """The blocks."""
        mtp: MtpConfig | None = None
        """Multi-token prediction (DeepSeek-V3): modules behind the stack that predict further tokens in training;
        null: none."""

    seams = {
        "embed": Role.STACK_INPUT,
        "head": Role.MODEL_OUTPUT,
        "mtp": Role.ON_LAST_STAGE,
    }

    def __init__(self, config: Config, vocabulary: int, length: int) -> None:
        super().__init__()
        dims = model_dims(config, vocabulary, length, causal=True)
        self.embed = Embed(config, dims)
        make_head = partial(Head, dims, soft_cap=config.logit_soft_cap, fix_norm=config.fix_norm)
        self.stack = Stack(
            config.stack, dims, StackUse(predicts=True, make_head=lambda: make_head(None))
        )
        self.head = make_head(self.embed.table if config.tied else None)
        self.mtp: MultiToken | None = None
        if config.mtp is not None:
            self.mtp = MultiToken(config.mtp, config.stack, dims)
        name_modules(self)

    @classmethod
    def check(cls, config: Config, dims: tuple[int, int], path: str) -> list[Problem]:
        shared = model_dims(config, *dims, causal=True)
        problems = check_position(config, shared, path)
        problems += Stack.check(config.stack, shared, f"{path}.stack", StackUse(predicts=True))
        return problems + MultiToken.check(config.mtp, config.stack, f"{path}.mtp")

    def forward(
        self, tokens: Tokens, targets: Tensor | None = None, source: Tokens | None = None
    ) -> Tensor:
        prediction = Prediction(self.head, targets)
        x = self.stack(self.embed(tokens), tokens, prediction=prediction)
        if self.mtp is not None:
            x = self.mtp.attach_loss(x, tokens, targets, self.embed.table, self.head)
        return self.predict(self.stack, x, tokens, prediction)
