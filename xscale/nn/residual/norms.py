"""Residual streams that are the hidden states, by where norms stand: `pre`, `post`, `sandwich` and `res_post`."""

from xscale.nn.residual.placement import NORM, SECOND_NORM, Placement
from xscale.nn.residual.residual_stream import RESIDUALS, ResidualStream, ResidualTraits


@RESIDUALS.register("pre", traits=ResidualTraits(hidden_states=True), aliases=("sequential",))
class Pre(ResidualStream):
    """Xiong et al. 2020: x + f(norm(x))."""

    own_placement = Placement(before=NORM)


@RESIDUALS.register("post", traits=ResidualTraits(hidden_states=True))
class Post(ResidualStream):
    """Vaswani et al. 2017: norm(x + f(x))."""

    own_placement = Placement(total=NORM)


@RESIDUALS.register("sandwich", traits=ResidualTraits(hidden_states=True))
class Sandwich(ResidualStream):
    """Ding et al. 2021 (CogView): x + norm(f(norm(x)))."""

    own_placement = Placement(before=NORM, after=SECOND_NORM)


@RESIDUALS.register("res_post", traits=ResidualTraits(hidden_states=True))
class ResPost(ResidualStream):
    """Liu et al. 2022 (Swin v2): x + norm(f(x))."""

    own_placement = Placement(after=NORM)
