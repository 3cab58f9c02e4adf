"""What a pipeline would be: the blocks of its stages, what they cost, and how long ranks wait."""

from torch import nn

from xscale.parallel.config import PipelineConfig
from xscale.parallel.pipeline.draw import text
from xscale.parallel.pipeline.schedule import schedule_of
from xscale.parallel.pipeline.simulate import Played, play
from xscale.parallel.pipeline.split import blocks_of, costs, split


def played(model: nn.Module, config: PipelineConfig, pp: int, micros: int, length: int) -> Played:
    """The schedule of a step in time, with stages of their own cost; `model` is whole, on meta."""
    return play(schedule_of(config).table(config, pp, micros), _costs(model, config, pp, length))


def estimate(model: nn.Module, config: PipelineConfig, pp: int, micros: int, length: int) -> dict[str, object]:
    """Plain values: blocks and share of the cost of each stage, the bubble, micro-batches kept, and a drawing."""
    time = played(model, config, pp, micros, length)
    count = schedule_of(config).stages(config, pp)
    each = _costs(model, config, pp, length)
    return {
        "schedule": config.schedule,
        "blocks": [len(part) for part in split(model, config, count, length)],
        "cost_shares": [cost / sum(each) for cost in each],
        "bubble": time.bubble,
        "micro_batches_kept": [time.kept(rank) for rank in range(pp)],
        "drawing": text(time),
    }


def _costs(model: nn.Module, config: PipelineConfig, pp: int, length: int) -> list[float]:
    of_blocks, head = costs(model, length)
    by_path = dict(zip(blocks_of(model), of_blocks, strict=True))
    parts = split(model, config, schedule_of(config).stages(config, pp), length)
    each = [sum(by_path[path] for path in part) for part in parts]
    each[-1] += head
    return each
