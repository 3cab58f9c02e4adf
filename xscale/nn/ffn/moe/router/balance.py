"""Balance: auxiliary losses on the load and the logits, and a bias that follows the load.

The auxiliary loss is that of Shazeer et al. 2017, Lepikhin et al. 2020 and Fedus et al. 2021; the z-loss that of Zoph
et al. 2022; the bias update, loss-free load balancing, that of Wang et al. 2024.
"""

from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from xscale.nn.ffn.moe.router.router import Router, RouterDims
from xscale.nn.ffn.moe.segments import Segments, sequences_of
from xscale.nn.init import ZEROS
from xscale.nn.post_step import PostStepState, WeightWriter
from xscale.nn.tokens import Tokens


def load_fractions(token: Tensor, expert: Tensor, like: Tensor, segments: Segments) -> Tensor:
    """Fraction of each segment's assignments that each expert gets, [segments, E], rows summing to 1.

    `token` and `expert` are [M]; the segments are of the N tokens of `like` [N, E].
    """
    experts, count = like.shape[1], segments.count
    bins = expert if segments.is_one else segments.of(token) * experts + expert
    counts = torch.zeros(
        count * experts, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device
    )
    counts = counts.scatter_add_(0, bins, torch.ones_like(counts[:1]).expand(len(bins))).view(
        count, experts
    )
    return counts / counts.sum(1, keepdim=True)


def load_balancing_loss(
    probabilities: Tensor,
    token: Tensor,
    expert: Tensor,
    segments: Segments | None = None,
) -> Tensor:
    """E sum_e f_e P_e (Fedus et al. 2021, equation 4), mean over segments.

    f are the fractions of the assignments [M], P is the mean of `probabilities` [N, E]. With k choices f still sums to
    1, so an even load gives 1 for every k. `segments` None: all tokens are one.
    """
    tokens, experts = probabilities.shape
    segments = segments or Segments.even(tokens, 1)
    fraction = load_fractions(token, expert, probabilities, segments)
    if segments.is_one:
        mean = probabilities.mean(0, keepdim=True)
    elif segments.divides(tokens):
        mean = probabilities.view(segments.count, -1, experts).mean(1)
    else:
        chunks = torch.split(probabilities, segments.sizes())
        fraction = fraction[: len(chunks)]
        mean = torch.stack([chunk.mean(0) for chunk in chunks])  # [segments, E]
    return experts * (fraction.to(mean.dtype) * mean).sum(1).mean()


def load_balancing_loss_with(probabilities: Tensor, fraction: Tensor) -> Tensor:
    """E sum_e f_e P_e with given fractions f [E], of more than a micro-batch (Qiu et al. 2025)."""
    return probabilities.shape[1] * (fraction.to(probabilities.dtype) * probabilities.mean(0)).sum()


def z_loss(logits: Tensor) -> Tensor:
    """Mean over tokens of (log sum_e exp logits)^2 (Zoph et al. 2022, equation 5). Logits [N, E]."""
    return logits.logsumexp(1).square().mean()


def cv_squared(values: Tensor) -> Tensor:
    """Squared coefficient of variation of `values` [E]: variance over squared mean (Shazeer et al. 2017, section 4)."""
    return values.var(correction=0) / values.mean().square()


Losses = tuple[Tensor | None, dict[str, Tensor]]
"""The weighted loss, and the unweighted parts by name."""
ROUNDING = 1e-6
"""Load fractions that differ by less are equal."""


class ZLoss:
    """The z-loss of a router's logits."""

    class Config(Router.Config):
        renamed = {"z": "z_loss_weight"}

        z_loss_weight: float = Field(default=0.0, ge=0)
        """Weight of the z-loss, which keeps logits small (Zoph et al. 2022: 0.001); 0: none."""

    def __init__(self, config: Config) -> None:
        self.weight = config.z_loss_weight

    def aux_losses(self, tokens: Tokens, logits: Tensor) -> Losses:
        """Logits [N, E]; no loss if it has no weight, or nothing in this forward uses it."""
        if not self.weight or (
            tokens.forward.aux_loss_weight is None and tokens.forward.stats is None
        ):
            return None, {}
        z = z_loss(logits)
        return self.weight * z, {"z": z}


class AuxLoss(PostStepState):
    """The load-balancing loss and the z-loss; declares `load` [E] on its router if it balances the global batch."""

    class Config(ZLoss.Config):
        renamed = {**ZLoss.Config.renamed, "balance": "aux_loss_weight", "scope": "balance_over"}

        aux_loss_weight: float = Field(default=0.01, ge=0)
        """Weight of the load-balancing loss; 0: none."""
        balance_over: Literal["micro_batch", "sequence", "global_batch"] = "micro_batch"
        """Tokens over which the load is balanced: each capacity group of a micro-batch, each sequence (DeepSeek-AI
        2024), or the global batch of all ranks and micro-batches (Qiu et al. 2025). The global batch's load is that of
        the previous step, so that no rank waits for another inside a layer; the first step has none."""

    def __init__(self, router: Router, config: Config, dims: RouterDims) -> None:
        self.router: Any = router
        self.config = config
        self.groups = dims.groups
        self.z_loss = ZLoss(config)
        if config.balance_over == "global_batch":
            _declare_state(router, "load", dims.experts)
            router.post_step.append(self)
        else:
            router.register_parameter("load", None)

    def aux_losses(
        self, tokens: Tokens, logits: Tensor, probabilities: Tensor, experts: Tensor
    ) -> Losses:
        """The z-loss of logits [N, E] plus the load-balancing loss of probabilities [N, E] and experts [N, k].

        The load-balancing loss is measured even if its weight is 0.
        """
        total, stats = self.z_loss.aux_losses(tokens, logits)
        weight = self.config.aux_loss_weight
        if tokens.forward.stats is None and (tokens.forward.aux_loss_weight is None or not weight):
            return total, stats
        token = torch.arange(len(experts), device=experts.device).repeat_interleave(
            experts.shape[1]
        )
        load = self.router.load
        if load is not None:
            stats["aux"] = load_balancing_loss_with(probabilities, self.router.use(load))
            # `update_state` gives it to the next step, once it is averaged over the whole batch.
            micro_batch = Segments.even(len(experts), 1)
            stats["share"] = load_fractions(
                token, experts.reshape(-1), probabilities.double(), micro_batch
            )[0]
        else:
            by_sequence = self.config.balance_over == "sequence"
            segments = (
                sequences_of(tokens) if by_sequence else Segments.even(len(experts), self.groups)
            )
            stats["aux"] = load_balancing_loss(probabilities, token, experts.reshape(-1), segments)
        if weight:
            total = weight * stats["aux"] + (0 if total is None else total)
        return total, stats

    def update_state(self, means: dict[str, Tensor], weights: WeightWriter) -> None:
        """Store this step's load of the global batch for the next step's loss."""
        weights.write(self.router.load, means[f"{_mixture_path(self.router)}/share"])


class BiasUpdate(PostStepState):
    """Loss-free load balancing (Wang et al. 2024); declares `bias` [E] on its router if there is an update rate."""

    class Config(Router.Config):
        renamed = {"bias_rate": "bias_update_rate"}

        bias_update_rate: float = Field(default=0.0, ge=0)
        """Step of a bias that is added to the gates for the selection only: after each optimizer step it goes up for an
        expert with less than the mean load and down for one with more (Wang et al. 2024: 0.001); 0: no bias."""

    def __init__(self, router: Router, config: Config, dims: RouterDims) -> None:
        self.router: Any = router
        self.rate = config.bias_update_rate
        if self.rate:
            _declare_state(router, "bias", dims.experts)
            router.post_step.append(self)
        else:
            router.register_parameter("bias", None)

    def bias(self) -> Tensor | None:
        """The bias [E] that the selection adds to the gates."""
        bias = self.router.bias
        return None if bias is None else self.router.use(bias)

    def update_state(self, means: dict[str, Tensor], weights: WeightWriter) -> None:
        """Move the bias by the rate: up where an expert's load was below the mean, down where it was above."""
        load = means[f"{_mixture_path(self.router)}/load"]
        missing = load.mean() - load
        # An expert that got just its fraction must not be moved by how the layout rounded the mean.
        step = self.rate * missing.sign() * (missing.abs() > ROUNDING)
        weights.update(self.router.bias, torch.add, step)


def _declare_state(router: Any, name: str, experts: int) -> None:
    """Declare a parameter [E], so that it is built, sharded and saved as others are; no gradient moves it."""
    router.declare(name, (experts,), ("state",), ZEROS, decays=False)
    getattr(router, name).requires_grad_(False)


def _mixture_path(router: Router) -> str:
    """Path of the mixture the router is in, under which the load is recorded."""
    return router.path.rpartition(".")[0]
