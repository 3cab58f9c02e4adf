"""Router replay in a run: routes of a file are checked against model and data, and given to each micro-batch."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from xscale.core.errors import ConfigError, Problem
from xscale.data.routes.header import RouteLayout
from xscale.data.routes.read import RouteFile, pieces_of
from xscale.data.tokenizer.tokenizer import Tokenizer
from xscale.mesh.consensus import Consensus
from xscale.nn.ffn.moe.moe import Moe
from xscale.nn.ffn.moe.replay import ROUTE_WEIGHTS, ROUTES, Replay
from xscale.nn.ffn.moe.router.router import ROUTERS
from xscale.nn.signals import Signal
from xscale.objective.objective import Batch, Objective
from xscale.objective.wrapped import WrappedObjective
from xscale.run.parts import RunParts
from xscale.step.batches import MicroBatches

FILE = "moe.replay.file"


def mixtures_of(model: nn.Module) -> dict[str, Moe]:
    """Return the mixtures of a model, or of a stage of it, by their paths in the model, in the order of its blocks."""
    return {module.path: module for module in model.modules() if isinstance(module, Moe)}


def route_layout(model: nn.Module, tokenizer: str | None, key: str) -> RouteLayout:
    """Return the layout of the routes of a model, unsharded or on `meta`, by its tokenizer's fingerprint.

    ConfigError at `key` for a model whose tokens have no routes: without mixtures, with experts that choose tokens,
    with blocks that share a mixture, or with a source beside the text.
    """
    mixtures = mixtures_of(model)
    if not mixtures:
        raise ConfigError(key, "the model has no mixtures of experts, so no routes")
    for path, mixture in mixtures.items():
        entry = ROUTERS.of(mixture.config.router)
        if entry.traits.choice != "token":
            what = f"the experts of router '{entry.name}' ({path}) choose tokens, so no token has routes"
            raise ConfigError(key, what)
    names = [
        path
        for path, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Moe)
    ]
    if len(names) > len(mixtures):
        shared = next(path for path in names if path not in mixtures)
        raise ConfigError(
            key, f"blocks share a mixture ({shared}), which then has several routes for a token"
        )
    if hasattr(model, "encoder"):
        raise ConfigError(
            key,
            "the routes of a model that reads a source depend on it, and a file has the text alone",
        )
    return RouteLayout(
        tuple(mixtures),
        tuple(mixture.config.experts for mixture in mixtures.values()),
        tuple(int(mixture.experts_per_token()) for mixture in mixtures.values()),
        model_fingerprint(model),
        tokenizer,
    )


def model_fingerprint(model: nn.Module) -> str:
    """Return a fingerprint of the names and full shapes of the parameters: of the model, and not of its weights."""
    shapes = [f"{name} {tuple(weight.shape)}" for name, weight in sorted(model.named_parameters())]
    return hashlib.blake2b("\n".join(shapes).encode(), digest_size=8).hexdigest()


def number_routes(model: nn.Module, layout: RouteLayout, *, replaying: bool) -> None:
    """Tell the mixtures on this rank, which may have a stage of the model, their numbers in a file of routes.

    `replaying`: those alone whose config replays.
    """
    for path, mixture in mixtures_of(model).items():
        if not replaying or mixture.config.replay is not None:
            mixture.number_routes(layout.layers.index(path))


class ReplayedObjective(WrappedObjective):
    """An objective whose batches have the routes of a file."""

    def __init__(self, objective: Objective, routes: RouteFile, *, weights: bool) -> None:
        """`weights`: whether the recorded weights are given too."""
        super().__init__(objective)
        self.routes = routes
        self.weights = weights

    def batch(
        self, tokens: Tensor, documents: Tensor | None, index: Tensor, **fields: Any
    ) -> Batch:
        batch = self.objective.batch(tokens, documents, index, **fields)
        layout = self.routes.header.layout
        shape = (*batch.tokens.ids.shape, len(layout.layers), layout.width)
        routes = np.zeros(shape, np.uint8 if max(layout.experts) < 256 else np.int32)
        weights = np.zeros(shape, self.routes.header.weights or "float64") if self.weights else None
        for row, start, end, ids in text_pieces(batch):
            sequence = self.routes.find(ids)
            if sequence is None:
                raise missing_routes(self.routes, int(index[row]), start, end)
            routes[row, start:end] = sequence[0]
            if weights is not None:
                weights[row, start:end] = sequence[1]
        signals: dict[Any, Any] = {ROUTES: torch.from_numpy(routes)}
        if weights is not None:
            signals[ROUTE_WEIGHTS] = torch.from_numpy(weights)
        return replace(batch, tokens=batch.tokens.with_signals(signals))


def text_pieces(batch: Batch) -> Iterable[tuple[int, int, int, Any]]:
    """Yield (row, start, end, ids) of each document of each sample of a batch on the CPU, without padding."""
    tokens = batch.tokens
    ids = tokens.ids.cpu().numpy()
    documents = None if tokens.documents is None else tokens.documents.cpu().numpy()
    padding = tokens.any_padding()
    is_padding = None if padding is None else padding.cpu().numpy()
    for row, sample in enumerate(ids):
        of_row = None if documents is None else documents[row]
        length = len(sample)
        if is_padding is not None and of_row is None:
            length -= int(is_padding[row].sum())
        for start, end in pieces_of(of_row, length):
            if is_padding is None or not is_padding[row, start]:
                yield row, start, end, sample[start:end]


def missing_routes(routes: RouteFile, sample: int, start: int, end: int) -> ConfigError:
    """Return the refusal of a text that the file does not have."""
    where = f"sample {sample}, tokens {start} to {end - 1}, a text of {end - start} tokens"
    what = f"{routes.path} has no routes for {where}"
    fix = "Record the routes of this data, with the same data.sequence_length and data.cross_documents."
    return ConfigError(FILE, what, fix)


def replays_of(model: nn.Module) -> dict[str, Replay]:
    """Return what the mixtures replay, by their paths."""
    return {
        path: mixture.config.replay
        for path, mixture in mixtures_of(model).items()
        if mixture.config.replay is not None
    }


def replay_file(model: nn.Module, file: Path) -> None:
    """Let all mixtures of a model replay a file of routes, whatever their config replays, with recomputed weights."""
    for mixture in mixtures_of(model).values():
        replay = Replay(file=str(file))
        mixture.config = mixture.config.model_copy(update={"replay": replay})


@dataclass(frozen=True)
class RouteReplay:
    """The routes that a model replays."""

    routes: RouteFile
    layout: RouteLayout
    """That of the model."""
    weights: bool
    """Whether a mixture uses the recorded weights."""

    def signals_of_text(self, ids: Tensor) -> dict[Signal[Any], Tensor]:
        """Return the routes of the tokens of one text [T], which is the beginning of one in the file.

        ConfigError with the first token that the file does not have behind those before it.
        """
        text = ids.cpu().numpy()
        sequence = self.routes.find(text)
        if sequence is None:
            known = next(
                (end for end in reversed(range(1, len(text))) if self.routes.find(text[:end])), 0
            )
            what = (
                f"{self.routes.path} has no routes for token {known} of the text, id {text[known]}"
            )
            fix = "Record the routes of this text, or leave out --replay-routes."
            raise ConfigError("--replay-routes", what, fix)
        routes = torch.from_numpy(sequence[0].astype(np.int32))[None].to(ids.device)
        return {ROUTES: routes}

    def apply(self, model: nn.Module, objective: Objective) -> Objective:
        """Let the mixtures of this rank read their routes; return the objective whose batches have them."""
        number_routes(model, self.layout, replaying=True)
        return ReplayedObjective(objective, self.routes, weights=self.weights)

    def __str__(self) -> str:
        header = self.routes.header
        kind = "recorded" if self.weights else "recomputed"
        count = f"{header.tokens:,} tokens in {header.sequences:,} texts"
        return f"router replay: {count} of {self.routes.path}, {kind} weights"


def open_replay(model: nn.Module, tokenizer: Tokenizer, ranks: Consensus) -> RouteReplay | None:
    """Open the routes that the model, unsharded or on `meta`, replays; None: it replays none.

    Collective where it does. ConfigError, on all ranks, for a file of another model or tokenizer, or one that is cut
    short.
    """
    replays = replays_of(model)
    if not replays:
        return None
    files = sorted({replay.file for replay in replays.values()})
    if len(files) > 1:
        what = f"the mixtures replay several files: {', '.join(files)}"
        raise ConfigError(FILE, what, "Give one for all: moe.replay.file=FILE.")
    layout = route_layout(model, tokenizer.fingerprint, FILE)
    weights = any(replay.weights == "recorded" for replay in replays.values())

    def look() -> None:
        opened.append(RouteFile(Path(files[0]), FILE))
        if problems := mismatches(opened[0], layout):
            raise ConfigError(problems)
        if weights and opened[0].header.weights is None:
            what = f"{files[0]} has no weights"
            raise ConfigError("moe.replay.weights", what, "Take recomputed, or record them.")

    opened: list[RouteFile] = []
    ranks.on_all(Path(files[0]), look)
    return RouteReplay(opened[0], layout, weights)


def mismatches(routes: RouteFile, model: RouteLayout) -> list[Problem]:
    """List in what a file of routes differs from what a model needs, the first place of each."""
    stored = routes.header.layout
    fix = "Give routes that were recorded with this model."
    if stored.layers != model.layers:
        pairs = zip(stored.layers, model.layers, strict=False)
        other = next(
            ((stored_path, path) for stored_path, path in pairs if stored_path != path), None
        )
        what = f"{routes.path} has {len(stored.layers)} layers, and the model {len(model.layers)} mixtures"
        if other is not None:
            what = f"{routes.path} has routes of {other[0]} where the model has {other[1]}"
        return [Problem(FILE, what, fix)]
    for name, of_file, of_model in (
        ("experts", stored.experts, model.experts),
        ("experts of a token (top_k)", stored.top_k, model.top_k),
    ):
        for layer, stored_count, count in zip(model.layers, of_file, of_model, strict=True):
            if stored_count != count:
                return [
                    Problem(
                        FILE,
                        f"{routes.path} has {stored_count} {name} in {layer}, and the model {count}",
                        fix,
                    )
                ]
    if stored.model not in (None, model.model):
        what = f"{routes.path} is of another model: names or shapes of its parameters differ"
        return [Problem(FILE, what, fix)]
    if stored.tokenizer not in (None, model.tokenizer):
        what = f"{routes.path} was recorded with another tokenizer"
        return [Problem(FILE, what, "Use the tokenizer of the run that it was recorded with.")]
    return []


def with_routes(
    replay: RouteReplay | None, model: nn.Module, objective: Objective
) -> tuple[Objective, list[str]]:
    """Return the objective whose batches have the routes that are replayed, and a line for the log; None: there are
    none."""
    return (objective, []) if replay is None else (replay.apply(model, objective), [str(replay)])


def replays(objective: Objective) -> bool:
    """Whether the batches of an objective have routes, which is the same on all ranks."""
    while isinstance(objective, WrappedObjective):
        if isinstance(objective, ReplayedObjective):
            return True
        objective = objective.objective
    return False


def require_all_routes(parts: RunParts) -> None:
    """Raise ConfigError on all ranks where a run replays, and lacks the routes of a text that it will read.

    Collective. The samples of the steps that are done are looked up too: the file is the same.
    """
    train, ranks = parts.settings.train, Consensus(parts.mesh.background, "read")
    require_routes(parts.training, train.steps * train.batch_size, ranks)
    if parts.validation is not None and train.eval_every:
        require_routes(parts.validation, parts.eval_sequences, ranks)


def require_routes(batches: MicroBatches, samples: int, ranks: Consensus) -> None:
    """Raise ConfigError on all ranks, with the first text without routes, if the file lacks one of a rank's samples.

    `samples`: the first so many are read. Does nothing where nothing is replayed; collective where something is.
    """
    if not replays(batches.objective):
        return
    micro = batches.micro_batch

    def find_routes() -> None:
        for first in range(batches.rank * micro, samples, batches.ranks * micro):
            read = batches.loader.samples(first, min(micro, samples - first))
            documents = read.documents if batches.separate else None
            labels = {} if read.labels is None else {"labels": read.labels}
            batches.objective.batch(read.tokens, documents, read.index, **labels)

    ranks.on_all(Path(FILE), find_routes)
