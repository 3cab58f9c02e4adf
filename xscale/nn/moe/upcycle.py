"""Komatsuzaki et al. 2023, sparse upcycling: the weights of a dense model become those of a mixture of experts."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from xscale.core.errors import ConfigError
from xscale.nn.ffn.moe import Moe
from xscale.nn.init import draw
from xscale.nn.module import parameter_inits
from xscale.nn.moe.router.topk import TopK


def upcycle(model: nn.Module, dense: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Weights by name for `model` (its mixtures may be on meta) from those of the dense model it grows out of.

    Each expert is a copy of the dense ffn; routers are drawn from `seed`. Where experts have 1/g of the dense hidden
    width, g experts in turn hold its g pieces and share one router row, so that a token which chooses one of them
    chooses all (He et al. 2024, virtual groups), and their output maps are scaled to make up for weights that sum to
    one. Shared ffns start as the dense model has them if it has them; else their last map is zero.

    The loss continues where the dense model's stood if nothing is dropped, the router is `topk` with `normalise`, and
    top_k is a multiple of g (`continues`). ConfigError if a weight is missing or does not fit.
    """
    weights: dict[str, Tensor] = {}
    mixtures = {path: module for path, module in model.named_modules() if isinstance(module, Moe)}
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
        path = next((one for one in mixtures if name.startswith(f"{one}.")), None)
        if path is None:
            raise ConfigError(name, "the dense checkpoint has no such weight", "Only ffns may differ from it.")
        rest = name[len(path) + 1 :]
        drawn = draw(init, tuple(parameter.shape), seed, name)
        if rest in ("router.weight", "router.noise"):
            pieces = _pieces(path, mixtures[path], dense)
            drawn = drawn[::pieces].repeat_interleave(pieces, dim=0)
        elif rest.startswith("shared.down."):
            drawn = torch.zeros_like(drawn)
        weights[name] = drawn.to(next(iter(dense.values())).dtype)
    return weights


def continues(moe: Moe, dense_hidden: int) -> bool:
    """Whether `upcycle` leaves the output of this mixture what the dense ffn's of that hidden width was."""
    config, hidden = moe.config, moe.experts.up.shape[1]
    router = config.router
    return (
        isinstance(router, TopK.Config)
        and router.normalise
        and router.scale == 1
        and dense_hidden % hidden == 0
        and router.top_k % (dense_hidden // hidden) == 0
        and config.capacity_factor is None
        and config.mix != "softmax"
    )


def _pieces(path: str, moe: Moe, dense: Mapping[str, Tensor]) -> int:
    """g: experts that together hold one dense ffn."""
    up = dense.get(f"{path}.up.weight")
    if up is None:
        raise ConfigError(
            f"{path}.up.weight", "the dense checkpoint has no such weight", "Upcycle dense or gated ffns."
        )
    experts, hidden, width = moe.experts.up.shape
    pieces = up.shape[0] // hidden
    if up.shape[1] != width or up.shape[0] % hidden or experts % max(pieces, 1):
        fix = f"Take experts of hidden {up.shape[0]}, or a part of it of which the experts are a multiple."
        what = f"{experts} experts of hidden {hidden} cannot be made of a dense ffn {[*up.shape]}"
        raise ConfigError(path, what, fix)
    return pieces


def _experts(path: str, moe: Moe, dense: Mapping[str, Tensor]) -> dict[str, Tensor]:
    pieces = _pieces(path, moe, dense)
    weights: dict[str, Tensor] = {}
    for name, parameter in moe.experts.named_parameters():
        kind = name.removesuffix("_bias")
        source = f"{path}.{kind}.{'bias' if name.endswith('_bias') else 'weight'}"
        if source not in dense:
            raise ConfigError(
                source, "the dense checkpoint has no such weight", "The experts must be of its ffn's kind."
            )
        value = dense[source]
        if name == "down":
            stacked = torch.stack(value.chunk(pieces, dim=1)) * pieces  # [g, D, F / g]
        elif name == "down_bias":
            # Each of the g pieces adds it once, with weights that sum to one.
            stacked = value.expand(pieces, -1)
        else:
            stacked = torch.stack(value.chunk(pieces, dim=0))
        full = stacked.repeat(len(parameter) // pieces, *[1] * (stacked.dim() - 1))
        if full.shape != parameter.shape:
            raise _misfit(source, value, tuple(parameter.shape))
        weights[f"{path}.experts.{name}"] = full.contiguous()
    return weights


def _misfit(name: str, value: Tensor, shape: tuple[int, ...]) -> ConfigError:
    return ConfigError(name, f"the dense weight is {[*value.shape]}, which does not make {[*shape]}")
