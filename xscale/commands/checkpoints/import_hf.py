"""`xscale checkpoint import --from hf`: create a run from a model of transformers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from xscale.convert.hf.compare import TOLERANCE
from xscale.convert.hf.import_model import ImportedModel, import_model, resolve_snapshot
from xscale.convert.hf.registry import model_of
from xscale.convert.hf.special_ids import keep_special_ids
from xscale.convert.hf.tokenizer import import_tokenizer, restore_tokenizer
from xscale.core.config import decode, encode
from xscale.core.errors import EXIT_DONE, EXIT_FAULT, ConfigError
from xscale.data.corpus.prepared import open_tokenizer
from xscale.data.tokenizer.tokenizer import Tokenizer
from xscale.objective.objective import OBJECTIVES
from xscale.recipe import Recipe, read
from xscale.run.init_run import create_run, model_from_weights, removed_on_failure, require_no_run
from xscale.settings.settings import Settings

OBJECTIVE = {"decoder": "causal", "encoder": "masked", "encoder_decoder": "span"}
"""Model kind -> objective of the run if no config is given."""


def import_run(
    source: Path,
    run: Path,
    config: Path | None,
    overrides: list[str],
    *,
    tolerance: float = TOLERANCE,
    say: Callable[[str], None] = print,
) -> int:
    """Create `run`, a run folder at step 0, from the folder `source` that transformers wrote; the exit status.

    Everything but the model comes from `config` and the overrides; a classifier of pairs of sentences is kept where the
    objective has classes of them. The run is written only if the logits of both
    implementations differ by at most `tolerance`. ConfigError when something does not map, or the run exists.
    """
    require_no_run(run)
    source = resolve_snapshot(source)
    base = Recipe() if config is None else read(config, overrides)[0]
    has_classes = OBJECTIVES.of(base.objective).part.classes(base.objective) is not None
    converted = import_model(source, sentence_head=has_classes)
    if has_classes and "sentence_head" not in converted.model:
        what = f"it has no head for the classes of sequences that objective '{base.objective.kind}' has"
        raise ConfigError(
            str(source),
            what,
            "Take objective=masked, or init.from, with which the head may be new.",
        )
    compared = converted.comparison
    for name in converted.ignored_tensors:
        say(f"ignored: {name}")
    for note in converted.architecture.notes:
        say(note)
    say(f"{converted.architecture.name}: {compared.sentence(tolerance)}")
    for fault in compared.loading_errors:
        say(f"transformers: {fault}")
    if not compared.within(tolerance):
        say(f"{run}: not written, because the logits of the two implementations differ")
        return EXIT_FAULT
    with removed_on_failure(run):
        settings, tokenizer = _settings(converted, source, run, config, base, say)
        rows = converted.sizes.vocabulary
        # An export leaves out the rows of padding that the run's tokenizer has.
        padded = rows if tokenizer is None else max(rows, tokenizer.vocabulary)
        model = model_from_weights(settings, padded, converted.weights)
        keep_special_ids(source, converted.config, tokenizer, run)
        unpadded = rows if padded > rows else None
        path = create_run(settings, model, run, tokenizer=tokenizer, unpadded_vocabulary=unpadded)
    say(f"{path}: written; `xscale train {run}/config.yaml` resumes from it")
    return EXIT_DONE


def _settings(
    converted: ImportedModel,
    source: Path,
    run: Path,
    config: Path | None,
    base: Recipe,
    say: Callable[[str], None],
) -> tuple[Settings, Tokenizer | None]:
    """The settings of the run, and the tokenizer that was imported into its folder."""
    model = model_of(converted.model)
    changes: dict[str, Any] = {"model": model, "run": base.run.model_copy(update={"dir": str(run)})}
    data: dict[str, Any] = {}
    if config is None:
        data["sequence_length"] = converted.sizes.length
    elif base.data.sequence_length > converted.sizes.length:
        what = f"{base.data.sequence_length} exceeds the model's maximum of {converted.sizes.length} tokens"
        raise ConfigError(
            "data.sequence_length", what, f"Set it to at most {converted.sizes.length}."
        )
    tokenizer = restore_tokenizer(source, run)
    if tokenizer is None:
        tokenizer, message = import_tokenizer(source, run, converted.sizes.vocabulary)
        say(message)
    settings = encode(base) | {"model": encode(model), "run": encode(changes["run"])}
    settings["data"] = settings["data"] | data | ({"tokenizer": tokenizer} if tokenizer else {})
    if config is None:
        settings["objective"] = {
            "kind": converted.architecture.objective or OBJECTIVE[str(model.kind)]
        }
    decoded = decode(Recipe, settings)
    return decoded, open_tokenizer(decoded.data) if tokenizer else None
