"""A mixture of experts in the place of the ffn (Shazeer et al. 2017): each token uses only a few of the experts.

The router makes assignments of tokens to experts; tokens are permuted by expert, dispatched to the experts, and their
outputs unpermuted and combined. A dropped assignment contributes 0. A shared expert, if any, sees every token.
"""

import math
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from xscale.core.config import Slot
from xscale.core.errors import Problem
from xscale.core.requirements import kinds, must_divide, take
from xscale.nn.auxiliary import attach
from xscale.nn.dims import Dims
from xscale.nn.ffn.ffn import FFNS, Ffn, FfnTraits, Gated
from xscale.nn.ffn.moe.experts import Experts
from xscale.nn.ffn.moe.permutation import (
    Dispatch,
    DispatchPlan,
    DropPolicy,
    LocalDispatch,
    experts_of_rows,
    plan_dispatch,
)
from xscale.nn.ffn.moe.replay import Replay, record_routes, with_recorded_weights
from xscale.nn.ffn.moe.router.router import ROUTERS, Router, RouterDims
from xscale.nn.ffn.moe.router.topk import TopKRouter
from xscale.nn.ffn.moe.segments import Segments, sequences_of
from xscale.nn.ffn.moe.statistics import record_stats
from xscale.nn.ffn.moe.text_tokens import text_of
from xscale.nn.linear import Linear
from xscale.nn.module import Module
from xscale.nn.random import hash63
from xscale.nn.roles import Role, Seams
from xscale.nn.tokens import Tokens
from xscale_kernels.permute.op import permute, unpermute
from xscale_kernels.torch_private import calls_directly


@FFNS.register("moe", traits=FfnTraits(per_token=False, sparse=True))
class Moe(Ffn):
    class Config(Ffn.Config):
        renamed = {
            "drop": "drop_policy",
            "groups": "capacity_groups",
            "mix": "shared_combine",
            "allow_leak": "allow_noncausal_routing",
        }

        experts: int = Field(default=8, ge=1)
        """E, number of experts."""
        router: Annotated[Router.Config, Slot(ROUTERS)] = TopKRouter.Config()
        """The router, which assigns tokens to experts."""
        expert: Annotated[Ffn.Config, Slot(FFNS)] = Gated.Config()
        """The ffn that each expert is: dense or gated."""
        capacity_factor: float | None = Field(default=None, gt=0)
        """An expert takes at most this times the mean number of a group's assignments per expert; the rest is dropped
        and passes through the residual. Null: no tokens are dropped."""
        eval_capacity_factor: float | None = Field(default=None, gt=0, allow_inf_nan=True)
        """Capacity factor in evaluation, where each sequence has a capacity of its own, so that no result depends on
        the other sequences of a micro-batch; null: evaluation drops no tokens, as generation never does."""
        drop_policy: DropPolicy = "position"
        """Tokens that an overfull expert keeps. position: the earliest; choice: first choices, then second ones, each
        by position (Lepikhin et al. 2020); probability: the highest weights; priority: first choices, then second
        ones, each by the token's best probability (Riquelme et al. 2021)."""
        capacity_groups: int = Field(default=1, ge=1)
        """Groups of consecutive tokens of the micro-batch, each with its own capacity (Lepikhin et al. 2020)."""
        shared: Annotated[Ffn.Config, Slot(FFNS)] | None = None
        """The shared expert: an ffn for every token in addition to the routed experts (Dai et al. 2024, DeepSeekMoE);
        null: none."""
        shared_combine: Literal["sum", "gate", "softmax"] = "sum"
        """How the output of `shared` is added. sum; gate: times a learned sigmoid of the token (Qwen2-MoE); softmax:
        both times learned coefficients that sum to 1 (Rajbhandari et al. 2022, residual MoE)."""
        expert_dropout: float = Field(default=0.0, ge=0, lt=1)
        """Dropout probability of the experts' hidden layer (Fedus et al. 2021: 0.4 in fine-tuning)."""
        allow_noncausal_routing: bool = False
        """Let later tokens decide how a causal model's token is routed or whether it is dropped."""
        replay: Replay | None = None
        """Router replay: the experts of each token come from a file of routes; null: the router chooses them."""

    averages_text = True
    averages_packed_text = True
    seams: ClassVar[Seams] = {
        "dispatch": Role.DISPATCH,
        "dispatch_plan": Role.ROUTING,
        "apply_experts": Role.EXPERT_CALLS,
    }

    def __init__(self, config: Config, dims: Dims) -> None:
        super().__init__()
        self.config = config
        traits = ROUTERS.of(config.router).traits
        self.averages_tokens = (
            config.capacity_factor is not None
            or traits.balance != "none"
            or traits.scope == "batch"
        )
        self.router: Router = ROUTERS.build(config.router, router_dims(config, dims))
        self.experts = Experts(config.expert, dims, config.experts, config.expert_dropout)
        self.route_layer: int | None = None
        """Number of this mixture in a file of routes; None: none is written or read."""
        self.dispatch: Dispatch = LocalDispatch()
        """A seam: expert parallelism substitutes an all-to-all."""
        self.shared: Ffn | None = None if config.shared is None else FFNS.build(config.shared, dims)
        self.mix: Linear | None = None
        if config.shared is not None and config.shared_combine != "sum":
            outputs = 1 if config.shared_combine == "gate" else 2
            self.mix = Linear(dims.width, outputs, ("state", "width"), dims.init)

    @classmethod
    def check(cls, config: Config, dims: Dims, path: str) -> list[Problem]:
        problems = _check_capacity(config, path) + _check_causal(config, dims, path)
        problems += must_divide(
            path, "capacity_groups", config.capacity_groups, "sequence_length", dims.length
        )
        if config.expert.kind not in ("dense", "gated"):
            what = f"an expert cannot be '{config.expert.kind}'"
            problems.append(
                Problem(f"{path}.expert", what, choices=kinds(["dense", "gated"], f"{path}.expert"))
            )
        if config.shared is not None:
            problems += FFNS.of(config.shared).part.check(config.shared, dims, f"{path}.shared")
        elif config.shared_combine != "sum":
            what = f"shared_combine={config.shared_combine} without a shared expert"
            problems.append(
                Problem(f"{path}.shared_combine", what, "Or give `shared`.", choices=take("sum"))
            )
        problems += _check_replay(config, path)
        router = ROUTERS.of(config.router).part
        return problems + list(
            router.check(config.router, router_dims(config, dims), f"{path}.router")
        )

    def capacity_factor(self, tokens: Tokens) -> float | None:
        """Return the capacity factor of this forward; None: an expert takes all that it is given."""
        # Generation sees other micro-batches than training did, so a capacity would drop other tokens.
        if tokens.forward.cache is not None:
            return None
        factor = self.config.capacity_factor if self.training else self.config.eval_capacity_factor
        return None if factor is None or math.isinf(factor) else factor

    def capacity_segments(self, count: int, tokens: Tokens) -> Segments:
        """Return the segments of `count` tokens that each have a capacity: groups in training, else sequences."""
        return (
            Segments.even(count, self.config.capacity_groups)
            if self.training
            else sequences_of(tokens)
        )

    def capacity(self, factor: float, tokens: int) -> int:
        """Return the tokens that an expert takes at most from a segment of N tokens."""
        return math.ceil(factor * self.experts_per_token() * tokens / self.config.experts)

    @property
    def summed_parts(self) -> list[Module]:
        return [] if self.shared is None else [self.shared]

    def experts_per_token(self) -> float:
        """Mean number of experts a token uses if no tokens are dropped."""
        part: type[Router] = ROUTERS.of(self.config.router).part
        return part.experts_per_token(self.config.router, self.config.experts)

    def active_fraction(self) -> float:
        """Fraction of the experts' parameters that a token uses."""
        return self.experts_per_token() / self.config.experts

    def active_fractions(self) -> dict[str, float]:
        return {
            f"experts.{name}": self.active_fraction() for name, _ in self.experts.named_parameters()
        }

    def forward(self, x: Tensor, tokens: Tokens) -> Tensor:
        flat = x.flatten(0, 1)  # [N, D]
        if self._has_shortcut(flat, tokens):
            y = self._of_one_token(flat, tokens).view(x.shape)
            return y if self.shared is None else self._add_shared(x, y, self.shared(x, tokens))
        plan, aux_loss = self.dispatch_plan(x, tokens)
        y = self.apply_experts(flat, plan).view(x.shape)  # [B, T, D]
        if aux_loss is not None:
            y = attach(y, aux_loss, tokens.forward.aux_loss_weight)
        return y if self.shared is None else self._add_shared(x, y, self.shared(x, tokens))

    def apply_experts(self, flat: Tensor, plan: DispatchPlan) -> Tensor:
        """Sums [N, D] of the outputs of each token's experts, times their weights, for tokens [N, D].

        A seam: DeepEP sends tokens to other ranks, where `dispatch` sends a row for each expert of a token.
        """
        kernel = self.kernel_choices.get("permute")
        rows = permute(
            flat, plan.tokens, token_rows=plan.token_rows, implementation=kernel
        )  # [M, D]
        rows = self.dispatch(rows, plan.tokens_per_expert, self.experts, plan.dropout_keys)
        return unpermute(
            rows,
            plan.tokens,
            plan.weights,
            len(flat),
            token_rows=plan.token_rows,
            implementation=kernel,
        )

    def _has_shortcut(self, flat: Tensor, tokens: Tokens) -> bool:
        """Whether `flat` is the one token of a step of generation, and nothing else acts on the path to the experts."""
        return (
            len(flat) == 1
            and tokens.forward.cache is not None
            and tokens.forward.stats is None
            and self.route_layer is None
            and type(self.dispatch) is LocalDispatch
            and "dispatch_plan" not in vars(self)
            and not self.kernel_choices
            and calls_directly(flat)
        )

    def _of_one_token(self, x: Tensor, tokens: Tokens) -> Tensor:
        """Output [1, D] for one token x [1, D]: there is nothing to sort and nothing to drop for lack of capacity."""
        routing = self.router(x, tokens)
        experts, weights = routing.expert, routing.weight
        if routing.kept is not None:
            experts, weights = experts[routing.kept], weights[routing.kept]
        if not len(experts):
            return torch.zeros_like(x)
        outputs = self.experts.of_token(x, experts.tolist())  # [k, D]
        compute = torch.promote_types(x.dtype, torch.float32)
        y: Tensor = weights.to(compute)[None] @ outputs.to(compute)
        return y.to(x.dtype)

    def dispatch_plan(self, x: Tensor, tokens: Tokens) -> tuple[DispatchPlan, Tensor | None]:
        """Route x [B, T, D]: which of its flattened rows go to which experts, and the auxiliary loss.

        Padding goes to no expert. A seam: context parallelism routes over the sharded sequence.
        """
        flat, text = x.flatten(0, 1), text_of(tokens)
        if text is None:
            return self._plan_of(flat, tokens)
        rows, text_tokens = text
        plan, aux_loss = self._plan_of(flat[rows], text_tokens)
        return replace(plan, tokens=rows[plan.tokens], token_rows=None), aux_loss

    def _plan_of(self, flat: Tensor, tokens: Tokens) -> tuple[DispatchPlan, Tensor | None]:
        """Route x [N, D], all of it text: the plan of its rows, and the auxiliary loss."""
        config = self.config
        routing = self.router(flat, tokens)
        if self.route_layer is not None:
            record_routes(routing, tokens, self.route_layer)
            if config.replay is not None and config.replay.weights == "recorded":
                routing = with_recorded_weights(routing, tokens, self.route_layer)
        segments, factor = self.capacity_segments(len(flat), tokens), self.capacity_factor(tokens)
        capacity: int | list[int] | None = None
        if factor is not None and segments.lengths is None:
            capacity = self.capacity(factor, segments.length)
        elif factor is not None and segments.lengths is not None:
            capacity = [self.capacity(factor, length) for length in segments.lengths]
        plan = plan_dispatch(
            *(routing, config.experts, capacity, config.drop_policy, segments),
            fixed_shapes=self.fixed_shapes(flat),
            choices=tokens.forward.choices,
        )
        if tokens.forward.stats is not None:
            drops = capacity is not None
            record_stats(tokens.forward.stats, self, routing, plan, drops=drops)
        if self.training and tokens.forward.rng_seed is not None and config.expert_dropout:
            plan = replace(plan, dropout_keys=self._dropout_keys(plan))
        return plan, routing.loss

    def number_routes(self, layer: int) -> None:
        """Let the mixture write and read the routes of layer number `layer` of a file of routes."""
        self.route_layer = self.router.route_layer = layer

    def fixed_shapes(self, flat: Tensor) -> bool:
        """Whether dropped assignments keep their rows, so that the host need not wait for their number: on a GPU, and
        under torch.compile, which would compile anew for each number.

        On a CPU, where the host waits for nothing, they would only cost time.
        """
        return flat.is_cuda or torch.compiler.is_compiling()

    def _dropout_keys(self, plan: DispatchPlan) -> Tensor:
        """Seeds [M] of the rows' dropout, by token and expert: the same in whatever order rows reach the experts."""
        device = plan.tokens.device
        experts = experts_of_rows(plan.tokens_per_expert, len(plan.tokens))
        return hash63(self.random.integer(1 << 62, device), plan.tokens, experts)

    def _add_shared(self, x: Tensor, routed: Tensor, shared: Tensor) -> Tensor:
        """Add the shared expert's output to the routed experts' one, both [B, T, D]."""
        if self.mix is None:
            return routed + shared
        if self.config.shared_combine == "gate":
            gate: Tensor = self.mix(x).sigmoid()  # [B, T, 1]
            return routed + gate * shared
        coefficients: Tensor = self.mix(x).softmax(-1)  # [B, T, 2]
        return coefficients[..., :1] * routed + coefficients[..., 1:] * shared


def router_dims(config: Moe.Config, dims: Dims) -> RouterDims:
    """The sizes that the mixture's router is built for."""
    return RouterDims(
        dims.width, config.experts, dims.vocabulary, config.capacity_groups, dims.init
    )


def _check_replay(config: Moe.Config, path: str) -> list[Problem]:
    entry = ROUTERS.of(config.router)
    if config.replay is None or entry.traits.choice == "token":
        return []
    what = f"the experts of '{entry.name}' choose their tokens, so no token has routes to replay"
    routers = kinds(ROUTERS.able(choice="token"), f"{path}.router")
    return [Problem(f"{path}.replay", what, choices=take(None) + routers)]


def _check_capacity(config: Moe.Config, path: str) -> list[Problem]:
    problems = []
    for name in ("capacity_factor", "eval_capacity_factor"):
        factor = getattr(config, name)
        if factor is not None and not factor >= 0.5:
            what = f"{name}={factor} drops more than half of the assignments even under a balanced load"
            problems.append(
                Problem(
                    f"{path}.{name}",
                    what,
                    "With null none is dropped.",
                    choices=take(1.0, 2.0, None),
                )
            )
    if config.capacity_factor is None and config.eval_capacity_factor is not None:
        what = "eval_capacity_factor without capacity_factor"
        problems.append(
            Problem(
                f"{path}.eval_capacity_factor",
                what,
                choices=take(None)
                + take(config.eval_capacity_factor, key=f"{path}.capacity_factor"),
            )
        )
    return problems


def _check_causal(config: Moe.Config, dims: Dims, path: str) -> list[Problem]:
    """Routers and drop policies that would leak later tokens into a causal model."""
    if not dims.causal or config.allow_noncausal_routing:
        return []
    return noncausal_routing(config, path)


def noncausal_routing(config: Moe.Config, path: str) -> list[Problem]:
    """List the router and the drop policy of a mixture by which a token's output depends on later tokens."""
    problems = []
    allowed = take(True, key=f"{path}.allow_noncausal_routing")
    entry = ROUTERS.of(config.router)
    if not entry.traits.causal:
        what = f"the router '{entry.name}' routes a token by later tokens, and this model is causal"
        routers = kinds(ROUTERS.able(causal=True), f"{path}.router")
        problems.append(Problem(f"{path}.router", what, choices=routers + allowed))
    several = entry.part.experts_per_token(config.router, config.experts) > 1
    policy = config.drop_policy
    if (
        config.capacity_factor is not None
        and policy != "position"
        and (several or policy != "choice")
    ):
        what = (
            f"drop_policy={policy} drops a token in favour of a later one, and this model is causal"
        )
        problems.append(Problem(f"{path}.drop_policy", what, choices=take("position") + allowed))
    return problems
