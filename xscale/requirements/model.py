"""Requirements of a model on its own config, and on the kernels."""

from xscale.core.errors import Problem
from xscale.core.requirements import take, with_paths
from xscale.data.config import DataConfig
from xscale.nn.model.model import MODELS, Model
from xscale.nn.module import CHOOSABLE_KERNELS
from xscale.nn.norm.batch_statistics import check_places
from xscale.parallel.config import ParallelConfig
from xscale_kernels.packed_attention.op import COMPILED
from xscale_kernels.packed_attention.op import LIBRARIES as PACKED_LIBRARIES
from xscale_kernels.select import implementations, unknown


def model_fits_itself(model: Model.Config, data: DataConfig) -> list[Problem]:
    """The parts of the model's config go together, at the sequence length of the data."""
    problems: list[Problem] = MODELS.of(model).part.check(
        model, (64, data.sequence_length), "model"
    )
    return [with_paths(problem, model, "model") for problem in problems] + check_places(
        model, "model"
    )


def kernels_can_be_chosen(kernels: dict[str, str], parallel: ParallelConfig) -> list[Problem]:
    """Each operator and its implementation are there, and may be chosen."""
    faults = unknown(kernels)
    for operator in kernels.keys() - faults.keys() - set(CHOOSABLE_KERNELS):
        what = f"the implementation of '{operator}' cannot be chosen here"
        faults[operator] = (what, f"These can: {', '.join(CHOOSABLE_KERNELS)}.")
    problems = []
    for operator, (what, fix) in faults.items():
        able = implementations(operator) if operator in CHOOSABLE_KERNELS else ()
        choices = take(*[implementation.name for implementation in able])
        problems.append(
            Problem(f"kernels.{operator}", what, "" if choices else fix, choices=choices)
        )
    named = kernels.get("packed_attention")
    if named in PACKED_LIBRARIES and named != COMPILED and parallel.compile:
        what = f"torch.compile cannot keep '{named}' in its graphs"
        fix, choices = "Or leave it out.", take(COMPILED) + take(False, key="parallel.compile")
        problems.append(Problem("kernels.packed_attention", what, fix, choices=choices))
    return problems


def graphs_read_whole_sequences(data: DataConfig, parallel: ParallelConfig) -> list[Problem]:
    """A CUDA graph of a micro-batch has the same shapes for each."""
    if not parallel.cuda_graphs or data.cross_documents:
        return []
    what = "packed documents are masked from each other, and another number of them at each micro-batch"
    choices = take(False) + take(True, key="data.cross_documents")
    return [Problem("parallel.cuda_graphs", what, choices=choices)]


REQUIREMENTS = (model_fits_itself, kernels_can_be_chosen, graphs_read_whole_sequences)
