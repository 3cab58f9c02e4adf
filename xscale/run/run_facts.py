"""Facts of a run, for its observers: model, data, layouts, and what started it."""

import platform
import resource
import shlex
import sys
import time
from pathlib import Path

import numpy
import torch
from torch import nn

from xscale.core.config import encode
from xscale.data.samples.caller_samples import CallerSamples
from xscale.data.samples.loader import Corpus
from xscale.mesh.environment import waiting_policy
from xscale.nn.mixer.attention import Attention
from xscale.nn.model.model import MODELS
from xscale.observe import RunFacts
from xscale.observe.events import source_commit, versions
from xscale.observe.format import quantity
from xscale.optim.optimizer.optimizer import OPTIMIZERS
from xscale.parallel.engine.fsdp import optimizer_weights
from xscale.parallel.shard.sharded import sharded_parameters
from xscale.run.parts import RunParts
from xscale.run.state import State
from xscale.settings.settings import build_on_meta


def run_facts(parts: RunParts, folder: Path, state: State, resumed: int | None) -> RunFacts:
    """Collect the facts of the run before its first step, for the observers."""
    settings, device = parts.settings, parts.mesh.device
    threads = torch.get_num_threads()
    waiting = waiting_policy()
    cpu = f"CPU, {threads} thread{'' if threads == 1 else 's'}{f' ({waiting})' if waiting and threads > 1 else ''}"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    tokens = settings.train.batch_size * settings.sample_tokens
    # The full model: a pipeline rank has only some of its blocks.
    full_model = build_on_meta(settings, parts.corpus.tokenizer.vocabulary)
    every = sharded_parameters(full_model)
    trained = [parameter for parameter in every if parameter.parameter.requires_grad]
    update_notes = OPTIMIZERS.of(settings.optimizer).part.describe(
        settings.optimizer, optimizer_weights(trained)
    )
    return RunFacts(
        folder=folder,
        config=encode(settings),
        resumed_from=resumed,
        first_step=state.step + 1,
        last_step=settings.train.steps,
        parameters=parts.model_size.parameters,
        active_parameters=parts.model_size.active,
        trained_parameters=None
        if len(trained) == len(every)
        else sum(weight.parameter.numel() for weight in trained),
        flops_per_token=parts.flops_per_sample / settings.sample_tokens,
        tokens_per_step=tokens,
        devices=parts.mesh.rank_info.world,
        device=name,
        layouts=attention_layouts(full_model, settings.data.sequence_length),
        notes=(
            f"model {MODELS.of(settings.model).summary}",
            *data_notes(parts),
            *parts.applied,
            *update_notes,
        ),
        versions=versions(),
        command=command_line(),
        host=platform.node(),
        commit=source_commit() if parts.mesh.rank_info.is_rank0 else "",
        started=time.time(),
        repeats=tuple(state.pending),
        data=data_facts(parts.corpus, settings.train.steps * settings.train.batch_size),
    )


def command_line() -> str:
    """Return the command of this process as a shell takes it; `xscale` for the file that its entry point has."""
    program = Path(sys.argv[0]).name
    return shlex.join(["xscale" if program == "__main__.py" else program, *sys.argv[1:]])


def data_facts(corpus: Corpus, samples: int) -> dict[str, str]:
    """Describe tokens and documents of the prepared data, and how often `samples` of training go through it."""
    facts = {}
    for part in ("train", "validation"):
        splits = [split for data in corpus.sets if (split := getattr(data, part)) is not None]
        if splits:
            tokens, documents = (
                sum(len(split.tokens) for split in splits),
                sum(split.documents for split in splits),
            )
            name = "training data" if part == "train" else "validation data"
            facts[name] = f"{quantity(tokens)} tokens in {documents:,} documents"
    if isinstance(corpus.train.data, CallerSamples):
        facts["training data"] = f"{samples:,} samples of the caller"
        return facts
    facts["epochs"] = (
        f"{samples / len(corpus.train.data):.3g}, of {len(corpus.train.data):,} samples each"
    )
    return facts


def peak_memory(device: torch.device) -> int:
    """Return the most bytes allocated on this GPU; on a CPU, those that this process had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else 1024 * used


def data_notes(parts: RunParts) -> list[str]:
    """Describe how many pairs of the training data are truncated, and how many documents have no pair of sentences."""
    data, notes = parts.settings.data, list[str]()
    if not parts.mesh.rank_info.is_rank0:
        return notes
    notes += [
        f"data left out: {dataset.left_out} of {dataset.documents} documents have no two sentences close enough for a "
        "sample, and serve only where one takes the text of another document"
        for dataset in parts.corpus.sentence_datasets
        if dataset.left_out
    ]
    for dataset in parts.corpus.pair_datasets:
        sources, targets = dataset.truncated()
        notes.append(
            f"data {len(dataset)} pairs; truncated: {sources} sources to {data.source_length} tokens "
            f"(data.max_source_length), {targets} targets to {data.target_length} (data.max_target_length)"
        )
    return notes


def attention_layouts(model: nn.Module, length: int) -> dict[str, numpy.ndarray]:
    """Attention layout of each layer by its path: bool [H, Q, K], true for the blocks that are computed."""
    layouts = {}
    for module in model.modules():
        if isinstance(module, Attention) and not module.cross:
            heads = module.query_channels // module.head_width
            layout = module.core.block_layout(length, heads)
            if layout is not None:
                layouts[module.path] = numpy.asarray(layout)
    return layouts
