"""Wang et al. 2024, loss-free balancing: the biases of routers follow the load, between optimizer steps."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from xscale.nn.moe.router.topk import TopK


@torch.no_grad()
def settle(
    model: nn.Module, means: dict[str, Tensor], lay: Callable[[Tensor, Tensor], Tensor] = lambda step, bias: step
) -> None:
    """Move the bias of every router that has one by its `bias_rate`: up where its expert got less than the mean.

    `means` are the tally's over the whole optimizer step and all ranks; `<mixture>/load` [E] is read. Call it after
    the step, with the same `means` on every rank. `lay(step, bias)` gives the whole step [E] the layout of the bias,
    where that is not whole.
    """
    for module in model.modules():
        if isinstance(module, TopK) and module.bias is not None:
            load = means[f"{module.path.rpartition('.')[0]}/load"]
            step = module.config.bias_rate * (load.mean() - load).sign()
            module.bias.add_(lay(step.to(module.bias.device, module.bias.dtype), module.bias))


def settles(model: nn.Module) -> bool:
    """Whether any router of the model has a bias that follows the load."""
    return any(isinstance(module, TopK) and module.bias is not None for module in model.modules())
