"""The `data:` section of a config: the source of text, the tokenizer and the length of samples."""

from typing import Annotated, Any, Literal

import pydantic

from xscale.core.config import Config, FractionBelowOne, PositiveFloat, PositiveInt, Slot
from xscale.core.paths import PathText
from xscale.data.source.source import SOURCES, Source
from xscale.data.source.stdlib import Stdlib
from xscale.data.tokenizer.sentencepiece import SentencePiece
from xscale.data.tokenizer.tokenizer import TOKENIZERS, Tokenizer


class BlendItem(Config):
    """One prepared dataset of a blend."""

    prepared: PathText
    """Folder written by `xscale data prepare`, or path of an existing .bin/.idx pair without its ending."""
    weight: PositiveFloat = 1.0
    """Weight of the dataset, relative to the other weights."""


Order = Literal["shuffled", "text", "streams"]
"""Orders of the samples."""


def fold_shuffle(shuffle: Any, order: Any) -> Any:
    """Return the value of `order` for the old key `shuffle` and that of `order`; None: they contradict."""
    folded = "text" if shuffle is False else "shuffled"
    return folded if order in (None, folded) else None


class DataConfig(Config):
    """Data for training and validation."""

    folded = {"shuffle": ("order", fold_shuffle)}

    source: Annotated[Source.Config, Slot(SOURCES)] = Stdlib.Config()
    """Source of the documents."""
    tokenizer: Annotated[Tokenizer.Config, Slot(TOKENIZERS)] = SentencePiece.Config()
    """Tokenizer."""
    folder: PathText = "work/data"
    """Folder of tokenizers and tokenised data; each choice of source and tokenizer has its own subfolder."""
    prepared: PathText | None = None
    """Existing tokenised data to use instead of `source`: a folder written by `xscale data prepare`, or the path of a
    Megatron .bin/.idx pair without its ending (its last documents are the validation split)."""
    blend: tuple[BlendItem, ...] = ()
    """Several prepared datasets to use instead of `source`, mixed by weight."""
    blend_rates: Literal["weights", "samples"] = "weights"
    """Rates at which the datasets of a blend are read: their weights, or their weights times their samples, which are
    pairs or packed texts (examples-proportional mixing, Raffel et al. 2020)."""
    blend_limit: PositiveInt | None = None
    """K, the most samples that a dataset counts as in rates by samples; null: no limit."""
    blend_temperature: PositiveFloat = 1.0
    """T of temperature-scaled mixing (Raffel et al. 2020): rates are raised to the power of 1 / T, so that a high T
    makes them equal."""
    sequence_length: PositiveInt = 512
    """Tokens in a sample (context length)."""
    max_source_length: int | None = pydantic.Field(default=None, ge=2)
    """Tokens of the source in a sample of pairs, with the end-of-document token: shorter ones are padded, longer ones
    truncated before that token; null: `sequence_length`."""
    max_target_length: PositiveInt | None = None
    """Tokens of the target in a sample of pairs, with the end-of-document token: shorter ones are padded, longer ones
    truncated, so that the model is not trained to end there; null: `sequence_length`."""
    validation: FractionBelowOne = 0.02
    """Fraction of the documents held out for validation, chosen by a hash of each document's text
    (or of `data.source.group_field` of labelled examples)."""
    split_sentences: bool = False
    """Whether the prepared data has a sequence for each sentence of a document, for objectives on pairs of sentences;
    a sentence ends at the end of a line or at punctuation. Existing prepared data must have been written so."""
    cross_documents: bool = False
    """Whether attention may cross document boundaries within a packed sample."""
    from_caller: bool = False
    """Whether the training samples are those of `xscale.train(recipe, data=...)`, which sets it; the tokenizer and the
    validation set are those of the source."""
    dupe_factor: PositiveInt | None = None
    """Versions of each text, in which the random choices of objective and sample (masks, spans, pairs of sentences) are
    made once, and which its epochs go through in turn: static masking, with 10 in BERT; null: each epoch has choices of
    its own (dynamic masking)."""
    order: Order = "shuffled"
    """Order of the training samples. shuffled: at random, differently in each epoch. text: as they stand in the text.
    streams: row r of every batch reads consecutive segments of `sequence_length` tokens of a stream of its own, the
    text from r / batch_size of it on, for models with memory of the segment before."""
    workers: PositiveInt | None = None
    """Processes for tokenising; null: one per core."""

    @property
    def source_length(self) -> int:
        """Tokens of the source in a sample of pairs."""
        return self.sequence_length if self.max_source_length is None else self.max_source_length

    @property
    def target_length(self) -> int:
        """Tokens of the target in a sample of pairs."""
        return self.sequence_length if self.max_target_length is None else self.max_target_length

    @pydantic.model_validator(mode="after")
    def _one_origin(self) -> "DataConfig":
        if self.prepared is not None and self.blend:
            raise ValueError(
                "`prepared` and `blend` exclude each other; for one dataset give `prepared`"
            )
        mixed = (
            self.blend_rates == "samples"
            or self.blend_temperature != 1
            or self.blend_limit is not None
        )
        if mixed and not self.blend:
            raise ValueError(
                "`blend_rates`, `blend_limit` and `blend_temperature` are of a blend; name its datasets"
            )
        if self.blend_limit is not None and self.blend_rates == "weights":
            raise ValueError("`blend_limit` limits rates by samples; give `blend_rates: samples`")
        needs_end = self.split_sentences or SOURCES.of(self.source).traits.records != "text"
        if needs_end and not self.tokenizer.add_eos:
            raise ValueError(
                "pairs, labelled examples and sentences end with `eos`: leave out `tokenizer.add_eos`"
            )
        return self
