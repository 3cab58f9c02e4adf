"""Komatsuzaki et al. 2023, sparse upcycling: the weights of a dense model become those of a mixture of experts."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from xscale.core.errors import ConfigError
from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.ffn.moe.router.select import TopKConfig
from xscale.nn.init import draw
from xscale.nn.module import parameter_inits


def upcycle(model: nn.Module, dense: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Initial weights by name for `model` (its mixtures may be on meta) from the weights of a dense model.

    Each expert is a copy of the dense ffn; routers are drawn from `seed`. If experts have 1/g of the dense hidden
    width, g consecutive experts get its g slices and the same router row, so that a token which chooses one of them
    chooses all (He et al. 2024, virtual groups), and their down projections are scaled by g because the weights sum to
    one. A shared expert has the dense model's weights if the dense model has one; else its down projection is zero.

    The loss equals the dense model's if no tokens are dropped, the router is `topk` with `normalise`, and top_k is a
    multiple of g (`why_output_changes`). Raises ConfigError if a weight is missing or does not fit.
    """
    weights: dict[str, Tensor] = {}
    # A mixture that the dense model already has keeps its weights.
    mixtures = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, Moe) and f"{path}.experts.up" not in dense
    }
    for path, moe in mixtures.items():
        weights |= _experts(path, moe, dense)
    for name, parameter, init in parameter_inits(model):
        if name in weights:
            continue
        if name in dense:
            if dense[name].shape != parameter.shape:
                raise _misfit(name, dense[name], tuple(parameter.shape))
            weights[name] = dense[name].clone()
            continue
        path = next((path for path in mixtures if name.startswith(f"{path}.")), None)
        if path is None:
            raise ConfigError(
                name,
                "the dense checkpoint has no such weight",
                "Only ffns may differ from the dense model.",
            )
        suffix = name[len(path) + 1 :]
        drawn = draw(init, tuple(parameter.shape), seed, name)
        if suffix in ("router.weight", "router.noise"):
            slices = _slices_per_ffn(path, mixtures[path], dense)
            drawn = drawn[::slices].repeat_interleave(slices, dim=0)
        elif suffix.startswith("shared.down."):
            drawn = torch.zeros_like(drawn)
        weights[name] = drawn.to(next(iter(dense.values())).dtype)
    _check_all_used(dense, model, mixtures)
    return weights


def _check_all_used(
    dense: Mapping[str, Tensor], model: nn.Module, mixtures: Mapping[str, Moe]
) -> None:
    """Raise ConfigError for an unused dense weight: the experts would lack a gate or a bias, the model a block."""
    # A tied weight has two names.
    used = set(model.state_dict())
    for path, moe in mixtures.items():
        for name, _ in moe.experts.named_parameters():
            used.add(
                f"{path}.{name.removesuffix('_bias')}.{'bias' if name.endswith('_bias') else 'weight'}"
            )
    for name in dense:
        if name not in used:
            raise ConfigError(
                name,
                "the mixture does not use this dense weight",
                "Only ffns may differ from the dense model.",
            )


def why_output_changes(moe: Moe, dense_hidden: int) -> list[str]:
    """Reasons why the output of an upcycled mixture differs from that of a dense ffn with that hidden width."""
    config, slices = moe.config, dense_hidden // moe.experts.up.shape[1]
    router = config.router
    reasons = []
    if not isinstance(router, TopKConfig):
        reasons.append(f"the router {router.kind} does not normalise a token's weights; topk does")
    else:
        if not router.normalise or router.scale != 1:
            reasons.append("the weights do not sum to 1 without normalise: true and scale: 1")
        if router.top_k % slices:
            reasons.append(
                f"top_k={router.top_k} is not a multiple of the {slices} experts that make up one dense ffn"
            )
        per_group = moe.config.experts // getattr(router, "expert_groups", 1)
        if per_group % slices:
            reasons.append(
                f"the {slices} experts that make up one dense ffn are not in one group of {per_group}"
            )
    if config.capacity_factor is not None:
        reasons.append("capacity_factor drops tokens")
    if config.shared_combine == "softmax":
        reasons.append("shared_combine: softmax scales the experts' output down")
    return reasons


def _slices_per_ffn(path: str, moe: Moe, dense: Mapping[str, Tensor]) -> int:
    """g, the number of experts that together have the weights of one dense ffn."""
    up = dense.get(f"{path}.up.weight")
    if up is None:
        raise ConfigError(
            f"{path}.up.weight",
            "the dense checkpoint has no such weight",
            "Upcycle dense or gated ffns.",
        )
    experts, hidden, width = moe.experts.up.shape
    slices = up.shape[0] // hidden
    if up.shape[1] != width or up.shape[0] % hidden or experts % max(slices, 1):
        fix = f"Take hidden={up.shape[0]}, or hidden={up.shape[0]}/g with experts a multiple of g."
        what = f"experts={experts} with hidden={hidden} cannot be made of a dense ffn {[*up.shape]}"
        raise ConfigError(path, what, fix)
    return slices


def _experts(path: str, moe: Moe, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
    slices = _slices_per_ffn(path, moe, dense)
    weights: dict[str, Tensor] = {}
    for name, parameter in moe.experts.named_parameters():
        kind = name.removesuffix("_bias")
        source = f"{path}.{kind}.{'bias' if name.endswith('_bias') else 'weight'}"
        if source not in dense:
            raise ConfigError(
                source,
                "the dense checkpoint has no such weight",
                "The experts must be of the dense ffn's kind.",
            )
        value = dense[source]
        if name == "down":
            stacked = torch.stack(value.chunk(slices, dim=1)) * slices  # [g, D, F / g]
        elif name == "down_bias":
            # Each of the g slices adds it once, with weights that sum to one.
            stacked = value.expand(slices, -1)
        else:
            stacked = torch.stack(value.chunk(slices, dim=0))
        full = stacked.repeat(len(parameter) // slices, *[1] * (stacked.dim() - 1))
        if full.shape != parameter.shape:
            raise _misfit(source, value, tuple(parameter.shape))
        weights[f"{path}.experts.{name}"] = full.contiguous()
    return weights


def _misfit(name: str, value: Tensor, shape: tuple[int, ...]) -> ConfigError:
    return ConfigError(name, f"the dense weight {[*value.shape]} does not fit {[*shape]}")
