"""Lewis et al. 2021, BASE layers: training assigns each expert equally many tokens at the highest total score.

y = sigmoid(w_a . x) E_a(x); a solves the balanced linear assignment exactly in training, and is the argmax in
evaluation. The assignment is computed on the CPU. The paper also shuffles tokens between workers; here the data
loader's shuffle takes its place.
"""

from typing import ClassVar

from torch import Tensor

from xscale.nn.ffn.moe.assignment import balanced_assignment
from xscale.nn.ffn.moe.router.balance import ZLoss
from xscale.nn.ffn.moe.router.router import ROUTERS, Router, RouterDims, RouterTraits
from xscale.nn.ffn.moe.router.select import LinearScore
from xscale.nn.ffn.moe.routing import Routing
from xscale.nn.roles import Role, Seams
from xscale.nn.tokens import Tokens


@ROUTERS.register(
    "base_layer",
    aliases=("base",),
    traits=RouterTraits(
        choice="token", top_k=1, drops=False, scope="batch", causal=False, balance="assignment"
    ),
    deviations=(
        "An expert is the one ffn that the config names; the paper's is a stack of residual ffns.",
        "The loader's shuffle takes the place of the paper's shuffle of tokens between workers.",
    ),
)
class BalancedAssignmentRouter(Router):
    class Config(LinearScore.Config, ZLoss.Config):
        pass

    seams: ClassVar[Seams] = {"assign": Role.ASSIGNMENT}

    def __init__(self, config: Config, dims: RouterDims) -> None:
        super().__init__()
        self.score = LinearScore(self, config, dims)
        self.z_loss = ZLoss(config)

    @classmethod
    def experts_per_token(cls, config: Config, experts: int) -> float:
        return 1.0

    def assign(self, logits: Tensor) -> Tensor:
        """Return the expert of each token [N] in training, by logits [N, E] without a gradient. A seam."""
        return balanced_assignment(logits)

    def forward(self, x: Tensor, tokens: Tokens) -> Routing:
        logits = self.score.logits(x, tokens)  # [N, E]
        selected = self.assign(logits.detach()) if self.training else logits.argmax(1)  # [N]
        selected = self.repeat(selected, tokens)[:, None]  # [N, 1]
        experts = self.replay(selected, tokens)
        weights = logits.gather(1, experts).sigmoid()  # [N, 1]
        loss, stats = self.z_loss.aux_losses(tokens, logits)
        return Routing.from_topk(
            experts, weights, logits.softmax(1), loss=loss, stats=stats, selected=selected
        )
