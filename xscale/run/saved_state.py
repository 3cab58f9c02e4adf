"""The state in a checkpoint as a run resumes from it: checked before anything is read, and for this run's config."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from xscale.checkpoint import load as loading
from xscale.core.config import encode
from xscale.core.errors import ConfigError
from xscale.data.corpus.stored_tokenizer import FOLDER, require_fingerprint
from xscale.run.config_changes import CHANGEABLE, differences, lookup, problems_of, with_defaults
from xscale.run.parts import RunParts
from xscale.run.state import State


def state_check(parts: RunParts) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    """Return what checks the state and config of a checkpoint before a run resumes from it.

    It raises ValueError for a state or config that no run writes, ConfigError for those of another run.
    """

    def check(state: dict[str, Any], config: dict[str, Any]) -> None:
        State.check(state, parts.stepper.engine.counters())
        length = lookup(config, "data.sequence_length")
        if type(length) is not int or not 1 <= length < 2**31:
            raise ValueError(f"data.sequence_length is {str(length)[:40]}")
        if changed := differences(with_defaults(config), encode(parts.settings), CHANGEABLE):
            raise ConfigError(problems_of(changed, "a checkpoint in it is of another run"))

    return check


def state_of(loaded: loading.Loaded, parts: RunParts) -> State:
    """The state in a checkpoint, for samples of this run's length; sets the engine's counters."""
    before = loaded.config["data"]["sequence_length"]
    state = State.decode(
        loaded.state, parts.stepper.engine, parts.settings.data.sequence_length, before
    )
    return with_same_tokenizer(state, parts)


def with_same_tokenizer(state: State, parts: RunParts) -> State:
    """`state` with the fingerprint of the run's tokenizer; ConfigError where it was trained with another."""
    tokenizer, run = parts.corpus.tokenizer, Path(parts.settings.run.dir)
    fix = (
        f"Put the tokenizer that the run began with into {run / FOLDER}, or choose another run.dir."
    )
    require_fingerprint(
        tokenizer,
        state.tokenizer_fingerprint,
        parts.corpus.sets[0].path,
        "the run was trained with",
        fix,
    )
    return replace(state, tokenizer_fingerprint=tokenizer.fingerprint)
