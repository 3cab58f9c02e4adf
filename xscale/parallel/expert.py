"""Expert parallelism (Lepikhin et al. 2021): each of R ranks of `ep` has E/R experts, and tokens travel to them.

The path of a micro-batch of N tokens of width D through `Moe.forward`, with M = N * experts_per_token less the dropped
tokens, and M' the rows that the experts of this rank receive from all ranks:

1. Route (`Router.forward`, `Moe.dispatch_plan`): tokens [N, D] -> assignments [M] and tokens_per_expert [E].
2. Permute by expert (`permute`): tokens [N, D] -> rows [M, D], sorted by expert and thereby by rank.
3. Exchange tokens_per_expert (`all_to_all_counts`): [R, E/R] to send -> [R, E/R] to receive.
4. Dispatch (`all_to_all`): rows [M, D] -> rows [M', D], sorted by (rank, expert); a token goes to another rank here.
5. Experts (`grouped_gemm`): rows sorted again by (expert, rank) -> outputs [M', D].
6. All-to-all back (`all_to_all`): outputs [M', D] -> [M, D], in the order of step 2, on the ranks the tokens came from.
7. Unpermute and combine (`unpermute`): outputs [M, D], times the router's weights, summed per token -> [N, D].

Steps 1, 2 and 7 are local (`xscale/nn/ffn/moe/moe.py`); `AllToAll` below does steps 3 to 6, with the experts in 5.
With `parallel.expert.dispatch=deepep` steps 2 to 7 are those of `deepep.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from xscale.core.errors import Problem
from xscale.core.requirements import divisors, kinds, take
from xscale.mesh.collectives import all_to_all_counts
from xscale.mesh.differentiable_collectives import all_to_all
from xscale.mesh.mesh import Mesh
from xscale.nn.module import parameter_axes, substitute
from xscale.nn.roles import Role
from xscale.parallel import deepep
from xscale.parallel.config import ExpertConfig
from xscale.parallel.roles import RoleTable, apply_table


def check(model: nn.Module, ep: int, path: str) -> list[Problem]:
    """Problems where ep does not divide the experts, or there are none."""
    problems = {}
    counts = [
        parameter.shape[axes.index("experts")]
        for (_, axes), (_, parameter) in zip(
            parameter_axes(model).items(), model.named_parameters(), strict=True
        )
        if "experts" in axes
    ]
    if ep > 1 and not counts:
        choices = take(1) + kinds(["moe"], "model.stack.block.ffn")
        return [Problem(f"{path}.ep", f"ep={ep} and the model has no experts", choices=choices)]
    for experts in counts:
        if experts % ep:
            what = f"ep={ep} does not divide experts={experts}"
            problems[what] = Problem(f"{path}.ep", what, choices=divisors(experts))
    return list(problems.values())


def apply(model: nn.Module, mesh: Mesh, config: ExpertConfig) -> None:
    """Substitute an all-to-all at the dispatch of each mixture, whose experts are sharded over ep; and DeepEP for the
    way that dispatch is a part of, if `config` says so."""
    if mesh.degrees.ep == 1 or mesh.experts is None:
        return
    group = mesh.experts["ep"].get_group()
    apply_table(EXPERT, model.modules(), group)
    if config.dispatch == "deepep":
        deepep.apply(model, group)


class SplitRowsOverTp:
    """A dispatch that splits rows which every rank of a tp group has: each rank dispatches a slice of them."""

    def __init__(self, dispatch: Callable[..., Tensor], group: dist.ProcessGroup) -> None:
        self.dispatch = dispatch
        self.group = group

    def __call__(
        self,
        rows: Tensor,
        tokens_per_expert: Tensor,
        experts: Callable[..., Tensor],
        dropout_keys: Tensor | None = None,
    ) -> Tensor:
        """Outputs [M, D] of rows [M, D] sorted by expert: those of this rank's slice, zeros for the others."""
        rank, ranks, total = self.group.rank(), self.group.size(), len(rows)
        first, end = total * rank // ranks, total * (rank + 1) // ranks
        ends = tokens_per_expert.cumsum(0)
        local_tokens_per_expert = ends.clamp(first, end) - (ends - tokens_per_expert).clamp(
            first, end
        )
        keys = None if dropout_keys is None else dropout_keys[first:end]
        outputs = self.dispatch(rows[first:end], local_tokens_per_expert, experts, keys)
        return F.pad(outputs, (0, 0, first, total - end))


class AllToAll:
    """A dispatch over ranks that have E/R experts each: all-to-all to the experts' ranks, and back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(
        self,
        rows: Tensor,
        tokens_per_expert: Tensor,
        experts: Callable[..., Tensor],
        dropout_keys: Tensor | None = None,
    ) -> Tensor:
        """Outputs [M, D] of rows [M, D] sorted by expert; tokens_per_expert [E] counts over all experts."""
        # Step 3: exchange tokens_per_expert.
        send = tokens_per_expert.view(self.group.size(), -1)  # [R, E/R]
        receive = all_to_all_counts(send, self.group)  # [R, E/R]
        send_rows, receive_rows = self.split_sizes(send, receive)
        dropped = len(rows) - sum(send_rows)
        # Step 4: dispatch.
        sent = rows[: len(rows) - dropped] if dropped else rows
        received = all_to_all(
            sent, send_rows, receive_rows, self.group
        )  # [M', D], by (rank, expert)
        by_expert, by_rank = _by_expert(receive, len(received))
        keys = None
        if dropout_keys is not None:
            keys = all_to_all(dropout_keys[: len(sent)], send_rows, receive_rows, self.group)[
                by_expert
            ]  # [M']
        # Step 5: experts.
        outputs = experts(
            reorder(received, by_expert, by_rank), receive.sum(0), keys
        )  # [M', D], by (expert, rank)
        # Step 6: all-to-all back.
        returned = all_to_all(
            reorder(outputs, by_rank, by_expert), receive_rows, send_rows, self.group
        )
        return F.pad(returned, (0, 0, 0, dropped)) if dropped else returned  # [M, D]

    def split_sizes(self, send: Tensor, receive: Tensor) -> tuple[list[int], list[int]]:
        """Rows to each rank and from each, of counts [R, E/R]; the one place where the host waits for the device."""
        send_rows, receive_rows = torch.stack((send.sum(1), receive.sum(1))).tolist()
        return send_rows, receive_rows


def overload_factor(rows: Tensor, ranks: int) -> float:
    """Rows of the busiest of `ranks` expert-parallel ranks over their mean, of the rows [E] of each expert.

    Each rank has E/ranks consecutive experts. 1 is balanced, `ranks` is all rows on one rank; nan where there are none.
    The other ranks wait for the busiest one, so that it sets the time of the layer.
    """
    rows_of_rank = rows.double().view(ranks, -1).sum(1)  # [R]
    return float(rows_of_rank.max() / rows_of_rank.mean())


def rows_of_experts(means: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the fraction of the rows that each expert computes [E], by path of the mixture, of statistics by name.

    It is `<path>/rows` where that was recorded, else `<path>/load`.
    """
    rows = dict[str, Tensor]()
    for statistic in ("load", "rows"):
        for name, value in means.items():
            path, _, last = name.rpartition("/")
            if last == statistic:
                rows[path] = value
    return rows


def _dispatch(mixture: nn.Module, seam: str, group: dist.ProcessGroup) -> None:
    """An all-to-all sends rows to the ranks of their experts, and their outputs back."""
    substitute(mixture, seam, AllToAll(group))


EXPERT: RoleTable = {Role.DISPATCH: _dispatch}
"""Role -> what is done at a seam with it, called as (module, seam, group of ep)."""


class _Reorder(torch.autograd.Function):
    """Rows in another order; backward gathers by the inverse order, where indexing would sort and scatter."""

    @staticmethod
    def forward(context: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        context.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        (inverse,) = context.saved_tensors
        return gradient.index_select(0, inverse), None, None


def reorder(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Row m of the result is row order[m] of `rows` [M, D]; `order` [M] is a permutation and `inverse` its inverse."""
    result: Tensor = _Reorder.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    return result


def _by_expert(counts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Permutations [rows] from the order (rank, expert) to (expert, rank), and back; counts [R, E/R] sum to `rows`."""
    ranks, experts = counts.shape
    label = torch.arange(experts, device=counts.device).repeat(ranks)
    label = label.repeat_interleave(counts.flatten(), output_size=rows)
    order = label.argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return order, inverse
