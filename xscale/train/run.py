"""A run from start to end: set up, go on from the newest checkpoint, loop, and what is said at the end."""

import time
from pathlib import Path

import torch

from xscale.checkpoint import loading
from xscale.checkpoint.background import Background
from xscale.checkpoint.lock import Lock
from xscale.core.config import encode
from xscale.core.errors import EXIT_DONE, EXIT_REQUEUE
from xscale.mesh.collectives import barrier
from xscale.mesh.environment import Place, place
from xscale.mesh.mesh import leave
from xscale.nn.model import MODELS
from xscale.train.finish import baseline, layouts, write_samples
from xscale.train.folder import open_folder, write_config
from xscale.train.loop import Loop
from xscale.train.observe import Audience, EndReport, Observer, RunFacts, observers
from xscale.train.observe.versions import versions
from xscale.train.settings import Settings
from xscale.train.setup import Parts, set_up
from xscale.train.state import State, tensors
from xscale.train.stop import Stop


def train(settings: Settings) -> int:
    """Train as `settings` say; the exit status: 0 done, 75 stopped on purpose and can go on. Collective."""
    began = time.perf_counter()
    here = place()
    with Stop() as stop:
        try:
            return _train(settings, here, stop, began)
        finally:
            leave()


def _train(settings: Settings, here: Place, stop: Stop, began: float) -> int:
    folder = open_folder(settings)
    parts = set_up(settings, here)
    with Lock(folder), saves_of(parts, folder) as saves:
        return _run(parts, folder, saves, stop, began)


def saves_of(parts: Parts, folder: Path) -> Background:
    """The run's saves."""
    config = parts.settings.checkpoint
    return Background(
        folder / "checkpoints",
        group=parts.mesh.background,
        busy=config.busy,
        keep_last=config.keep_last,
        keep_every=config.keep_every,
        failure_limit=config.failure_limit,
    )


def _run(parts: Parts, folder: Path, saves: Background, stop: Stop, began: float) -> int:
    settings, here = parts.settings, parts.mesh.place
    restored = loading.restore(
        folder / "checkpoints", tensors(parts.rests, parts.optimizer), verify=settings.checkpoint.verify
    )
    state, resumed = State(), None
    if restored.loaded is not None:
        state = State.decode(restored.loaded.state, parts.optimizer)
        resumed = state.step
    # What another rank finds wrong must be known before anything is written.
    barrier()
    if here.first:
        write_config(settings, folder)
    watching: Observer = Audience(observers(settings.observe, folder)) if here.first else Observer()
    watching.start(facts(parts, folder, state, resumed))
    for sentence in restored.reasons:
        watching.message(sentence)
    loop = Loop(parts, state, watching, stop, began, saves)
    reason, message = "failed", ""
    compared = None
    try:
        cause = loop.run()
        reason, message = ("done", "") if cause is None else ("stopped", f"stopped by {cause}; run it again to go on")
        if cause is None:
            compared = baseline(parts) if here.first else None
            write_samples(parts, watching, state.step)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        raise
    finally:
        best, at = state.best_bits_per_byte, state.best_step
        watching.finish(EndReport(state.step, reason, message, compared, best, at))  # type: ignore[arg-type]
    return EXIT_DONE if reason == "done" else EXIT_REQUEUE


def facts(parts: Parts, folder: Path, state: State, resumed: int | None) -> RunFacts:
    """What observers are told before the first step."""
    settings, device = parts.settings, parts.mesh.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    tokens = settings.train.batch_size * settings.data.sequence_length
    return RunFacts(
        folder=folder,
        config=encode(settings),
        resumed_from=resumed,
        first_step=state.step + 1,
        last_step=settings.train.steps,
        parameters=parts.size.parameters,
        active_parameters=parts.size.active,
        flops_per_token=parts.flops_per_sample / settings.data.sequence_length,
        tokens_per_step=tokens,
        devices=parts.mesh.place.world,
        device=name,
        layouts=layouts(parts.model, settings.data.sequence_length),
        notes=(f"model {MODELS.of(settings.model).summary}",),
        versions=versions(),
    )
