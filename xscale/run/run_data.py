"""The data of a run: its tokenizer, its corpus and the micro-batches of this rank."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from xscale.checkpoint.search import newest_on_this_process
from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.prepare import missing_files, prepare, require_run_tokenizer
from xscale.data.corpus.stored_tokenizer import open_stored_tokenizer, with_tokenizer
from xscale.data.samples.caller_samples import CallerSamples
from xscale.data.samples.loader import Corpus, Loader, open_corpus
from xscale.data.tokenizer.tokenizer import UNUSED, Tokenizer
from xscale.mesh.consensus import Consensus
from xscale.mesh.environment import RankInfo
from xscale.mesh.mesh import Mesh
from xscale.mesh.shared_folder import require_visible
from xscale.nn.blocks.stack import Stack
from xscale.nn.depth.segment_memory.memory import SegmentMemory
from xscale.nn.module import carried_tensors
from xscale.nn.segment_state import SegmentStates
from xscale.objective.objective import OBJECTIVES, Objective, SpecialTokens
from xscale.parallel import context
from xscale.parallel.plan import DTYPES
from xscale.run.init_weights import adopted_tokenizer, data_with_adopted_tokenizer
from xscale.run.run_folder import CHECKPOINTS
from xscale.settings.settings import Settings, labels_problems, records_problem
from xscale.step.batches import MicroBatches


def special_tokens_of(tokenizer: Tokenizer) -> SpecialTokens:
    """The ids that objectives need."""
    pieces = enumerate(tokenizer.token_bytes())
    return SpecialTokens(
        tokenizer.vocabulary,
        tokenizer.pad,
        tokenizer.eos,
        tokenizer.mask,
        tokenizer.sentinels,
        tokenizer.bos,
        frozenset(token for token, piece in pieces if piece.rstrip().endswith(b".")),
        tokenizer.fim,
    )


def padding_note(tokenizer: Tokenizer) -> list[str]:
    """Return the line on ids of an existing tokenizer's model that are no token; empty: there are none."""
    if getattr(tokenizer.config, "file", None) is None:
        return []
    ids = tokenizer.vocabulary - sum(
        tokenizer.piece(token) == UNUSED for token in range(tokenizer.vocabulary)
    )
    padded = tokenizer.vocabulary - ids
    line = f"vocabulary: {tokenizer.vocabulary:,} rows for {ids:,} tokens; no text has the {padded:,} further ones"
    return [line] if padded else []


def data_of_run(settings: Settings) -> tuple[DataConfig, Tokenizer | None]:
    """The data of the run and its own tokenizer; None for a run that has not begun, or that has none. Not collective.

    A run's tokenizer is in its folder, so a tokenizer file that the config names may be gone.
    """
    run = Path(settings.run.dir)
    begun = newest_on_this_process(run / CHECKPOINTS) is not None
    tokenizer = open_stored_tokenizer(run) if begun else adopted_tokenizer(settings)
    if tokenizer is None:
        return settings.data, None
    return data_with_adopted_tokenizer(settings, tokenizer) or with_tokenizer(
        settings.data, tokenizer
    ), tokenizer


def prepare_and_open_data(
    settings: Settings,
    rank_info: RankInfo,
    data: DataConfig | None = None,
    tokenizer: Tokenizer | None = None,
    mesh: Mesh | None = None,
) -> Corpus:
    """Open the tokenised data; rank 0 prepares it first where necessary, while the others wait.

    `data`: instead of the settings'. With `tokenizer`, that of the run, none is trained and data of another is refused.
    With a mesh they wait over its background group, whose timeout is meant for that.
    """
    data = settings.data if data is None else data

    def prepare_data() -> str:
        if problems := missing_files(data):
            raise ConfigError(problems)
        return str(prepare(data, tokenizer=tokenizer).path)

    # Where rank 0 cannot prepare the data, every rank ends with its message.
    ranks = Consensus(
        None if mesh is None else mesh.background,
        "prepared",
        single_process=rank_info.is_single_process,
    )
    path = Path(ranks.on_rank0(Path(data.folder), prepare_data))
    key = (
        "data.blend" if data.blend else "data.folder" if data.prepared is None else "data.prepared"
    )
    require_visible(ranks, path, path, key)
    opened: list[Corpus] = []
    # On all ranks together: one that cannot open it would leave the others waiting.
    streams = settings.train.batch_size if data.order == "streams" else None
    ranks.on_all(
        path, lambda: opened.append(open_corpus(data, seed=settings.run.seed, streams=streams))
    )
    (corpus,) = opened
    name, where = str(settings.objective.kind), f"data in {corpus.sets[0].path}"
    if corpus.records != OBJECTIVES.get(name).traits.records:
        raise ConfigError([records_problem("data", name, where, corpus.records)])
    if corpus.labels is not None and (problems := labels_problems(settings, corpus.labels, where)):
        raise ConfigError(problems)
    if tokenizer is not None:
        require_run_tokenizer(corpus.tokenizer, tokenizer, corpus.sets[0].path)
    return corpus


def with_caller_samples(settings: Settings, corpus: Corpus, samples: Any) -> Corpus:
    """The corpus with `samples` in the place of its training samples. ConfigError where a run on samples has none."""
    if samples is None:
        if settings.data.from_caller:
            what = "the training samples of this run are those that its caller gives, and there is none here"
            raise ConfigError(
                "data.from_caller", what, "Use xscale.train(recipe, data=...), or another run.dir."
            )
        return corpus
    if corpus.records != "text" or settings.data.split_sentences:
        what = f"'{settings.objective.kind}' does not train on packed samples, as the caller's are"
        raise ConfigError(
            "objective.kind", what, "Take causal or another objective on text, or give no data."
        )
    needed = settings.train.steps * settings.train.batch_size
    dataset = CallerSamples(samples, settings.data.sequence_length, needed)
    return replace(corpus, train=Loader(dataset, vocabulary=corpus.tokenizer.vocabulary))


def evaluation_sequences(available: int, wanted: int | None) -> int:
    """How many sequences an evaluation reads."""
    return available if wanted is None else min(available, wanted)


def make_micro_batches(
    settings: Settings,
    loader: Loader,
    objective: Objective,
    mesh: Mesh,
    sharding: context.SequenceSharding | None = None,
    model: nn.Module | None = None,
) -> MicroBatches:
    """The micro-batches of this rank over one set of documents, for a model that may keep states between segments."""
    streams = settings.train.batch_size if settings.data.order == "streams" else None
    carried = {} if model is None or streams is None else carried_tensors(model)
    return MicroBatches(
        loader=loader,
        objective=objective,
        micro_batch=settings.train.micro_batch_size,
        ranks=mesh.degrees.dp,
        rank=mesh.data_rank,
        seed=settings.run.seed,
        separate=not settings.data.cross_documents,
        device=mesh.device,
        sequence_sharding=sharding,
        steps=settings.train.steps,
        streams=streams,
        new_states=partial(
            SegmentStates, carried, dtype=DTYPES[settings.precision.compute], device=mesh.device
        )
        if carried
        else None,
    )


def require_text_of_memory(settings: Settings, model: nn.Module, corpus: Corpus) -> None:
    """Refuse a memory of earlier segments that is longer than the text: ConfigError."""
    stacks = [(path, part) for path, part in model.named_modules() if isinstance(part, Stack)]
    text = len(corpus.train.data) * settings.data.sequence_length
    for path, stack in stacks if settings.data.order == "streams" else ():
        memory = stack.find(SegmentMemory)
        if memory is not None and memory.config.length > text:
            key = f"model.{path}.{SegmentMemory.key}.length"
            what = f"is {memory.config.length} tokens, and the training text has {text}"
            raise ConfigError(key, what, "Use a shorter memory or more text.")


def with_training_states(batches: MicroBatches, batch_size: int) -> MicroBatches:
    """The training micro-batches with the states of this rank's rows between segments, if the model keeps any."""
    if batches.new_states is None:
        return batches
    return replace(batches, states=batches.new_states(batch_size // batches.ranks))
