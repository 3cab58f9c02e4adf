"""Open the datasets of a blend, which must have one tokenizer and one kind of documents."""

from pathlib import Path

from xscale.core.errors import ConfigError
from xscale.data.config import DataConfig
from xscale.data.corpus.prepared import PreparedData, open_prepared_at


def open_blend(config: DataConfig) -> list[tuple[PreparedData, float]]:
    """Open the datasets of `config.blend` with their weights; ConfigError when their tokenizers differ."""
    sets = []
    for item in config.blend:
        single = config.model_copy(update={"prepared": item.prepared, "blend": ()})
        sets.append((open_prepared_at(single, Path(item.prepared)), item.weight))
    first = sets[0][0]
    for other, _ in sets[1:]:
        if other.tokenizer.fingerprint != first.tokenizer.fingerprint:
            what = (
                f"the datasets {first.path} and {other.path} were written with different tokenizers"
            )
            fix = "Prepare them with the same one: data.tokenizer.file names an existing model."
            raise ConfigError("data.blend", what, fix)
        if other.labels is not None or first.labels is not None:
            what = "labelled examples are not blended: each dataset may number its classes in its own way"
            raise ConfigError(
                "data.blend", what, "Put the examples into the files of one data.source."
            )
        if other.pairs != first.pairs:
            pairs, texts = (first, other) if first.pairs else (other, first)
            what = f"the documents of {pairs.path} are pairs of a source and a target, those of {texts.path} are not"
            raise ConfigError("data.blend", what, "Blend datasets of one kind.")
    return sets
