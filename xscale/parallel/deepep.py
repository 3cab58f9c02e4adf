"""Dispatch of tokens to experts over ranks by DeepEP's kernels for NVLink and RDMA (DeepSeek-AI 2024, section 3.2.2).

The all-to-all of `expert.py` sends a row for each expert of a token. DeepEP sends a token once to each rank that has
any of its experts, over RDMA once to each node; there its rows are permuted, and their outputs weighted and summed,
before one sum of each rank travels back and the sums are added. So a token of k experts on r ranks travels r times.

The path of N tokens of width D with k experts each, with E/R experts on each of R ranks:

1. Choices (`expert_choices`): the plan's rows -> experts [N, k], -1 for a dropped assignment, and weights [N, k].
2. Dispatch (`Buffer.dispatch`): tokens [N, D], weights -> the P tokens that this rank gets [P, D], their local experts
   [P, k], -1 for those of other ranks, and weights [P, k]. The host waits for P.
3. Experts on rows permuted by expert, weighted and summed for each token of this rank: [P, D].
4. Combine (`Buffer.combine`): the sums of all ranks, added -> [N, D]. Sums travel in bfloat16.

Backward takes the dual calls: a combine for the dispatch, a dispatch with the same handle for the combine.
"""

import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from xscale.core.choices import Choice
from xscale.core.errors import Problem
from xscale.core.requirements import in_parts, instead, take
from xscale.nn.ffn.moe.permutation import DispatchPlan, experts_of_rows
from xscale.nn.ffn.moe.router.router import ROUTERS
from xscale.nn.module import substitute
from xscale.nn.roles import Role
from xscale.parallel.config import ParallelConfig, PrecisionConfig
from xscale.parallel.roles import seams_in
from xscale_kernels.permute.op import permute, unpermute

RANKS = (2, 4, 8, 16, 24, 32, 64, 128, 144, 160)
"""Numbers of ranks for which DeepEP has settings."""
MULTIPLE = 8
"""Divides the width: a token is copied 16 bytes at a time."""
CAPABILITY = (9, 0)
"""Minimal compute capability."""


def check(
    model: nn.Module, parallel: ParallelConfig, precision: PrecisionConfig, path: str
) -> list[Problem]:
    """List what DeepEP cannot do; `path` is that of section `parallel`."""
    if parallel.expert.dispatch != "deepep":
        return []
    mesh, key, problems = parallel.mesh, f"{path}.expert.dispatch", []

    def refuse(what: str, choices: tuple[Choice, ...] = (), fix: str = "") -> None:
        problems.append(Problem(key, what, fix, choices=choices + take("all_to_all")))

    if mesh.ep not in RANKS:
        refuse(f"DeepEP has no settings for ep={mesh.ep}", take(*RANKS, key=f"{path}.mesh.ep"))
    if precision.compute != "bfloat16":
        choices = take("bfloat16", key="precision.compute")
        refuse(f"DeepEP sends bfloat16, and compute is {precision.compute}", choices)
    if mesh.tp > 1 and not mesh.tp_in_experts:
        what = f"the tp={mesh.tp} ranks have the same tokens and split the rows of experts, and DeepEP sends tokens"
        refuse(what, take(True, key=f"{path}.mesh.tp_in_experts"))
    for moe in mixtures(model):
        width = moe.experts.up.shape[-1]
        if width % MULTIPLE:
            what = f"DeepEP sends tokens of a multiple of {MULTIPLE} channels, and the width is {width}"
            refuse(what, fix="Or change the width.")
        if moe.config.expert_dropout:
            what = "expert_dropout draws by keys that travel with the rows, and DeepEP sends none"
            refuse(what, in_parts("ffn", "moe", "expert_dropout", 0.0))
        router = str(moe.config.router.kind)
        if ROUTERS.of(moe.config.router).traits.choice != "token":
            what = (
                f"DeepEP takes the same number of experts for each token, and '{router}' does not"
            )
            refuse(what, instead("router", router, ROUTERS.able(choice="token")))
    return list(dict.fromkeys(problems))


def unsupported_device(parallel: ParallelConfig, device: torch.device) -> Problem | None:
    """Return why DeepEP does not run on this device; None if it does, or is not asked for."""
    if parallel.expert.dispatch != "deepep":
        return None
    key, gpu = "parallel.expert.dispatch", "{}.{}".format(*CAPABILITY)
    if device.type != "cuda":
        what = f"DeepEP needs GPUs, and the device is a {device.type}"
        return Problem(key, what, choices=take("all_to_all"))
    if torch.cuda.get_device_capability(device) < CAPABILITY:
        what = f"DeepEP needs GPUs of compute capability {gpu} or newer"
        return Problem(key, what, choices=take("all_to_all"))
    if importlib.util.find_spec("deep_ep") is None:
        fix = "Or build deep_ep from its source."
        return Problem(key, "DeepEP is not installed", fix, choices=take("all_to_all"))
    return None


def apply(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Substitute DeepEP for the way of the tokens through the experts of each mixture."""
    layers = mixtures(model)
    buffer = SharedBuffer(group, max((moe.experts.up.shape[-1] for moe in layers), default=0))
    for moe in layers:
        substitute(moe, "apply_experts", ExpertsByDeepEp(moe, moe.apply_experts, buffer))


def mixtures(model: nn.Module) -> list[Any]:
    """Return the mixtures of the model."""
    return [mixture for mixture, *_ in seams_in(model.modules(), Role.EXPERT_CALLS)]


class SharedBuffer:
    """DeepEP's communication buffer of the ranks of `group`, for all mixtures of a model of this width."""

    def __init__(self, group: dist.ProcessGroup, width: int) -> None:
        self.group, self.width = group, width
        self._buffer: Any = None

    def get(self) -> Any:
        """Return the `deep_ep.Buffer`, created at the first call, which is collective over the group."""
        if self._buffer is None:
            from deep_ep import Buffer

            ranks, token_bytes = self.group.size(), 2 * self.width
            settings = (Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks))
            nvlink_bytes = max(
                setting.get_nvl_buffer_size_hint(token_bytes, ranks) for setting in settings
            )
            rdma_bytes = max(
                setting.get_rdma_buffer_size_hint(token_bytes, ranks) for setting in settings
            )
            self._buffer = Buffer(self.group, nvlink_bytes, rdma_bytes)
        return self._buffer


class ExpertsByDeepEp:
    """Substitute for `Moe.apply_experts`: tokens travel to the ranks of their experts, and sums of outputs back."""

    def __init__(
        self, moe: Any, inner: Callable[[Tensor, DispatchPlan], Tensor], buffer: SharedBuffer
    ) -> None:
        self.moe, self.inner, self.buffer = moe, inner, buffer

    def __call__(self, flat: Tensor, plan: DispatchPlan) -> Tensor:
        """Outputs [N, D] of tokens [N, D] by the plan of this rank; collective over ep."""
        buffer, count = self.buffer.get(), len(plan.tokens_per_expert)
        experts, weights = expert_choices(plan, len(flat), math.ceil(self.moe.experts_per_token()))
        received, local_weights, local_experts, row_counts, handle = _Dispatch.apply(  # type: ignore[no-untyped-call]
            flat, weights.float(), experts, count, buffer
        )
        outputs = self._local(
            received,
            local_experts,
            local_weights,
            sum(row_counts),
            count // self.buffer.group.size(),
        )
        combined: Tensor = _Combine.apply(outputs, buffer, handle)  # type: ignore[no-untyped-call]
        return combined

    def _local(
        self, received: Tensor, experts: Tensor, weights: Tensor, rows: int, count: int
    ) -> Tensor:
        """Weighted sums [P, D] of the outputs of this rank's `count` experts for the tokens received [P, D].

        `experts` [P, k] are this rank's own, -1 for others, with weights [P, k]; `rows` of them are not -1.
        """
        kernel = self.moe.kernel_choices.get("permute")
        by_expert = torch.where(experts < 0, count, experts.long()).flatten()
        order = by_expert.argsort(stable=True)[:rows]
        tokens = order // experts.shape[1]
        numbers = torch.arange(count, device=experts.device)
        tokens_per_expert = (by_expert == numbers[:, None]).sum(1)
        outputs = self.moe.experts(
            permute(received, tokens, implementation=kernel), tokens_per_expert, None
        )
        return unpermute(
            outputs, tokens, weights.flatten()[order], len(received), implementation=kernel
        )


def expert_choices(plan: DispatchPlan, tokens: int, k: int) -> tuple[Tensor, Tensor]:
    """Return experts [N, k] int64 and weights [N, k] of N tokens; -1 and 0 where a token has fewer than k.

    IndexError where a token has more. All ranks must have the same k, so that it is not counted.
    """
    rows = len(plan.tokens)
    row = torch.arange(rows, device=plan.tokens.device)
    # Rows that no expert counts are of dropped assignments.
    experts = experts_of_rows(plan.tokens_per_expert, rows).where(
        row < plan.tokens_per_expert.sum(), -1
    )
    token_rows = plan.token_rows
    if token_rows is None:
        order = plan.tokens.argsort(stable=True)
        by_token = plan.tokens[order]
        counts = row.new_zeros(tokens).index_add(0, by_token, torch.ones_like(by_token))
        index = row - (counts.cumsum(0) - counts)[by_token]
        token_rows = row.new_full((tokens, k), rows)
        token_rows[by_token, index] = order
    return F.pad(experts, (0, 1), value=-1)[token_rows], F.pad(plan.weights, (0, 1))[token_rows]


class _Dispatch(torch.autograd.Function):
    """Tokens [N, D] and weights [N, k] to the ranks of experts [N, k]; backward combines their gradients."""

    @staticmethod
    def forward(
        context: Any, tokens: Tensor, weights: Tensor, experts: Tensor, count: int, buffer: Any
    ) -> Any:
        experts = experts.contiguous()
        per_rank, per_node, per_expert, is_sent, _ = buffer.get_dispatch_layout(experts, count)
        received, local_experts, local_weights, row_counts, handle, _ = buffer.dispatch(
            tokens.contiguous(),
            topk_idx=experts,
            topk_weights=weights.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_sent,
            num_tokens_per_expert=per_expert,
        )
        context.deepep_buffer, context.handle = buffer, handle
        context.mark_non_differentiable(local_experts)
        return received, local_weights, local_experts, row_counts, handle

    @staticmethod
    def backward(context: Any, to_received: Tensor, to_weights: Tensor, *_: Any) -> Any:
        to_tokens, to_all_weights, _ = context.deepep_buffer.combine(
            to_received.contiguous(), context.handle, topk_weights=to_weights.contiguous()
        )
        return to_tokens, to_all_weights, None, None, None


class _Combine(torch.autograd.Function):
    """Sums over the ranks [N, D] of what each has for the tokens it got [P, D]; backward dispatches the gradient."""

    @staticmethod
    def forward(context: Any, outputs: Tensor, buffer: Any, handle: Any) -> Tensor:
        context.deepep_buffer, context.handle = buffer, handle
        combined: Tensor = buffer.combine(outputs.contiguous(), handle)[0]
        return combined

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return (
            context.deepep_buffer.dispatch(gradient.contiguous(), handle=context.handle)[0],
            None,
            None,
        )
