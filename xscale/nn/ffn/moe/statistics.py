"""Routing statistics: load balancing, dropped tokens, entropy; a few numbers per layer."""

import torch
import torch.nn.functional as F
from torch import Tensor

from xscale.nn.ffn.moe.permutation import DispatchPlan
from xscale.nn.ffn.moe.replay import fraction_replaced
from xscale.nn.ffn.moe.routing import Routing
from xscale.nn.forward import HasPath, Stats


def record_stats(
    stats: Stats,
    mixture: HasPath,
    routing: Routing,
    plan: DispatchPlan,
    *,
    drops: bool,
) -> None:
    """Record a mixture's routing under its path. `drops`: whether the experts have a capacity.

    <path>/load [E] (fraction of the assignments), /dropped (fraction of the assignments), /entropy (nats), /confidence
    (mean of each token's highest probability), and the router's own statistics (/aux, /z ...). Where tokens are given
    their experts, /load is that of the experts that the router would have chosen, and /replaced the fraction of tokens
    for which they are others. /rows [E] is the fraction of the rows that each expert computes, recorded where
    it may differ from /load: experts are given, or have a capacity.
    """
    with torch.no_grad():
        total = plan.load.sum().clamp(min=1)
        probabilities = routing.probabilities
        probabilities = probabilities / probabilities.sum(1, keepdim=True)
        load = plan.load
        if routing.selected is not None:
            chosen = routing.selected.flatten()
            counts = F.pad(torch.zeros_like(load), (0, 1))
            load = counts.scatter_add_(0, chosen, torch.ones_like(chosen))[:-1]
            stats.record(mixture, "replaced", fraction_replaced(routing))
        stats.record(mixture, "load", load.double() / load.sum().clamp(min=1))
        if drops or routing.selected is not None:
            rows = plan.tokens_per_expert
            stats.record(mixture, "rows", rows.double() / rows.sum().clamp(min=1))
        stats.record(mixture, "dropped", 1 - plan.tokens_per_expert.sum().double() / total)
        # xlogy computes one number at a time on a CPU, at a fifth of this speed; 0 log 0 is 0 here too.
        log = probabilities.clamp(min=torch.finfo(probabilities.dtype).tiny).log()
        stats.record(mixture, "entropy", -(probabilities * log).sum(1).mean())
        stats.record(mixture, "confidence", probabilities.amax(1).mean())
        for name, value in routing.stats.items():
            stats.record(mixture, name, value)


def copy_to_cpu(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors of one dtype to the CPU in one transfer, for which the host waits once."""
    if not values:
        return {}
    flat = torch.cat([value.flatten() for value in values.values()]).cpu()
    parts = flat.split([value.numel() for value in values.values()])  # type: ignore[no-untyped-call]
    return {
        name: part.view(value.shape)
        for (name, value), part in zip(values.items(), parts, strict=True)
    }


def load_stats(load: Tensor) -> dict[str, float]:
    """Statistics of a load [E], relative to its mean.

    `cv` (standard deviation over mean), `p50`, `p95`, `max`, `min`, and `starved`, the number of experts with less than
    a tenth of the mean.
    """
    relative = load.double() / load.double().mean()
    p50, p95 = relative.quantile(
        torch.tensor([0.5, 0.95], dtype=torch.float64, device=load.device)
    ).tolist()
    return {
        "cv": float(relative.std(correction=0)),
        "p50": p50,
        "p95": p95,
        "max": float(relative.max()),
        "min": float(relative.min()),
        "starved": int((relative < 0.1).sum()),
    }


def load_balance_metrics(means: dict[str, Tensor]) -> dict[str, float]:
    """`<path>/load_cv`, `load_p50`, `load_p95` and `load_max` of each mixture's load among `means`."""
    return {
        f"{name}_{statistic}": value
        for name, load in means.items()
        if name.endswith("/load")
        for statistic, value in load_stats(load).items()
        if statistic in ("cv", "p50", "p95", "max")
    }


def nonfinite(means: dict[str, Tensor]) -> list[str]:
    """Paths of the mixtures whose routing is not finite."""
    ends = ("/confidence", "/entropy", "/aux", "/z")
    return sorted(
        {
            name.rsplit("/", 1)[0]
            for name, value in means.items()
            if name.endswith(ends) and not value.isfinite().all()
        }
    )
