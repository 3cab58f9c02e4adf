"""Text that a run's model writes after a prompt, or between a prompt and a suffix."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xscale.core.errors import ConfigError
from xscale.data.tokenizer.tokenizer import Tokenizer
from xscale.generate.beam_search import PenaltyForm, beam_search
from xscale.generate.decoders import CacheKind, Decoding
from xscale.generate.exit_policy import exit_policy_of
from xscale.generate.generate import encode_prompt, generate, lay_out_matrices
from xscale.generate.parallel_decoding import decode_in_parallel
from xscale.mesh.consensus import Consensus
from xscale.nn.model.model import MODELS
from xscale.nn.module import carried_tensors
from xscale.nn.signals import Signal
from xscale.objective.disco import Disco
from xscale.objective.fill_in_middle import FillInMiddle
from xscale.objective.objective import OBJECTIVES, Objective
from xscale.parallel.plan import DTYPES
from xscale.parallel.precision import precision
from xscale.run.load_run import LoadedRun, load_run
from xscale.run.route_replay import number_routes, open_replay, replay_file
from xscale.run.run_data import special_tokens_of
from xscale.settings.settings import Settings


def generate_text(
    folder: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    *,
    suffix: str | None = None,
    beams: int = 1,
    length_penalty: float = 0.6,
    penalty_form: PenaltyForm = "wu",
    plugins: bool = False,
    exits: bool = True,
    ema: bool = False,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    cache: CacheKind = "auto",
    compile: bool = False,
    say: Callable[[str], None] = lambda line: None,
    replay_routes: Path | None = None,
) -> str:
    """Return the prompt and what the run's model writes after it; of an encoder-decoder, whose source it is, and before
    a `suffix`, the latter alone. Several beams search for the likeliest text, by all blocks, and sample nothing.
    `exits`: whether tokens leave by the policy of its exits, if it has one. `cache` and `compile` are those of
    `Decoding`. `say` is told the step, and how tokens are computed. `replay_routes`: a file of routes that takes the
    place of the routers; ConfigError at the first token that it does not have."""
    decoding = Decoding(cache, compile, say)
    decoding.check()
    loaded = _load(folder, plugins, ema, say)
    if replay_routes is not None:
        if carried_tensors(loaded.model):
            what = "a model that keeps a state between segments reads the same tokens in several segments"
            raise ConfigError("--replay-routes", what, "Leave it out.")
        if beams > 1:
            what = "beam search reads many texts, and a file has the routes of one"
            raise ConfigError("--replay-routes", what, "Leave out --beams.")
        decoding = replace(decoding, signals=_routes_of(loaded, replay_routes))
    settings, tokenizer = loaded.settings, loaded.tokenizer
    traits = MODELS.of(settings.model).traits
    device = loaded.mesh.device
    window, longest = _lengths(settings, loaded.model, has_source=traits.source)
    objective = _objective(settings, tokenizer)
    prompt_ids = encode_sides(prompt, suffix, tokenizer, objective, longest)
    source = None
    if traits.source:
        source = torch.tensor(objective.source_of(prompt_ids), device=device)
        prompt_ids = [objective.start]
    ids = torch.tensor(prompt_ids, device=device)
    # Nothing trains this model afterwards, so what it caches may be good for inference alone, which costs less.
    with torch.inference_mode(loaded.mesh.rank_info.is_single_process):
        if isinstance(objective, Disco):
            _refuse_beams(beams)
            _refuse_static(decoding, "the model writes all tokens at once, without steps")
            return _written_at_once(loaded, source, objective, tokens)
        shared: dict[str, Any] = {"end": tokenizer.eos, "source": source, "window": window}
        shared["prefix"] = OBJECTIVES.of(settings.objective).traits.prefix
        if beams > 1:
            _refuse_static(decoding, "beam search reads all tokens of its hypotheses at each step")
            shared |= {"length_penalty": length_penalty, "penalty_form": penalty_form}
            best, *_ = beam_search(loaded.model, ids, tokens, beams=beams, **shared)
            written = list(best.ids)
        else:
            sampling: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "seed": seed}
            sampling |= {"top_p": top_p, "repetition_penalty": repetition_penalty}
            sampling["policy"] = exit_policy_of(loaded.model) if exits else None
            sampling["decoding"] = decoding
            written = generate(loaded.model, ids, tokens, **sampling, **shared).tolist()
    text = tokenizer.decode(written)
    return text if traits.source or suffix is not None else prompt + text


def _routes_of(loaded: LoadedRun, file: Path) -> Callable[[Tensor], Mapping[Signal[Any], Tensor]]:
    """Let the mixtures read a file of routes; return from the ids of a text to the routes of its tokens."""
    replay_file(loaded.model, file)
    replay = open_replay(loaded.model, loaded.tokenizer, Consensus(doing="read"))
    if replay is None:
        raise ConfigError("--replay-routes", "the model has no mixtures of experts, so no routes")
    number_routes(loaded.model, replay.layout, replaying=True)
    return replay.signals_of_text


def _load(folder: Path, plugins: bool, ema: bool, say: Callable[[str], None]) -> LoadedRun:
    """The run's model, ready to generate, and its step said."""
    loaded = load_run(folder, plugins=plugins, ema=ema)
    say(f"{folder}: step {loaded.step}")
    _require_decoder(loaded.settings, folder)
    _cast_and_lay_out(loaded.model, loaded.settings)
    return loaded


def _objective(settings: Settings, tokenizer: Tokenizer) -> Objective:
    objective: Objective = OBJECTIVES.build(
        settings.objective,
        special_tokens_of(tokenizer),
        settings.data.source_length,
        settings.run.seed,
    )
    return objective


def _written_at_once(
    loaded: LoadedRun, source: Tensor | None, objective: Disco, tokens: int
) -> str:
    """Write all tokens of the target at once."""
    assert source is not None, "it is for models with a source"
    longest = min(tokens, loaded.settings.data.target_length)
    ids = decode_in_parallel(loaded.model, source, objective, longest)
    return loaded.tokenizer.decode(ids)


def _require_decoder(settings: Settings, folder: Path) -> None:
    predicts_length = OBJECTIVES.of(settings.objective).part.predicts_length
    if not MODELS.of(settings.model).traits.decode and not predicts_length:
        what = f"{settings.model.kind} models cannot generate text"
        raise ConfigError(str(folder), what, "Use a decoder's run.")


def _cast_and_lay_out(model: nn.Module, settings: Settings) -> None:
    """Store the weights in the dtypes and the order of memory in which inference reads them fastest."""
    dtypes = settings.precision
    precision.cast_parameters(model, DTYPES[dtypes.compute], DTYPES[dtypes.master])
    lay_out_matrices(model)


def _lengths(
    settings: Settings, model: nn.Module, *, has_source: bool
) -> tuple[int | None, int | None]:
    """Return the tokens that the model reads at a time, and those of the longest prompt; None: no limit."""
    data = settings.data
    if settings.has_pairs:
        return data.sequence_length, data.source_length - 1
    if carried_tensors(model):
        # Longer prompts are read a segment at a time.
        return data.sequence_length, None
    return (None, None) if has_source else (data.sequence_length, data.sequence_length - 1)


def encode_sides(
    prompt: str, suffix: str | None, tokenizer: Tokenizer, objective: Objective, longest: int | None
) -> list[int]:
    """Encode a prompt as the objective reads it, or the text on both sides of a gap, to at most `longest` ids.

    Either side of a gap may be empty.

    ConfigError where that cannot be.
    """
    if suffix is None:
        room = None if longest is None else longest - len(objective.prompt_of([]))
        return objective.prompt_of(encode_prompt(prompt, tokenizer, room, "--prompt"))
    if not isinstance(objective, FillInMiddle):
        what = f"the objective '{objective.config.kind}' trains no filling in of a middle"
        raise ConfigError(
            "--suffix", what, "Leave it out, or use a run of the objective fill_in_middle."
        )
    before = (
        encode_prompt(prompt, tokenizer, None, "--prompt") if prompt else list(tokenizer.prefix)
    )
    after = encode_prompt(suffix, tokenizer, None, "--suffix", begins=False) if suffix else []
    ids = objective.prompt_for_middle(before, after)
    if longest is not None and len(ids) > longest:
        what = (
            f"prompt and suffix have {len(ids)} tokens with their sentinels, "
            f"and at most {longest} leave room for one"
        )
        raise ConfigError(
            "--suffix", what, "Give shorter ones, or train with a longer data.sequence_length."
        )
    return ids


def _refuse_beams(beams: int) -> None:
    """Refuse a search by a model that writes all tokens at once: ConfigError."""
    if beams > 1:
        fix = "Take 1; objective.length_candidates are its alternatives."
        raise ConfigError("--beams", "the model writes all tokens at once, without a search", fix)


def _refuse_static(decoding: Decoding, why: str) -> None:
    """Refuse a static cache that was asked for where there is no step over it: ConfigError."""
    if decoding.compile:
        raise ConfigError("--compile", why, "Leave it out.")
    if decoding.cache == "static":
        raise ConfigError("--cache", why, "Take auto or growing.")
