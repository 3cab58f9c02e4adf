"""Per-token inputs of every module besides hidden states: ids, positions, documents, and the forward of them all.

A part is called as `part(x, tokens)`. `Tokens` have what is per token; `Tokens.forward` has what is of the whole pass
(`xscale.nn.forward`): its seed, weights of losses, statistics, cache. It is an attribute, so that parts keep their
signature. What one part alone reads is a `Signal` (`xscale.nn.signals`), declared beside the part and read by `get`:
a tensor with axes is carried here, anything else in the forward.

Every tensor declares its axes, a field in its metadata and a signal in its declaration. `map_fields` alone walks over
them: what copies tokens to a device, shards them over cp or sequence parallelism, pools them, puts global tokens before
them or cuts samples says what it does to an axis, and names no field. A new field or signal needs no other line.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from xscale.nn.forward import Forward
from xscale.nn.forward import Stats as Stats
from xscale.nn.signals import BATCH, KEYS, TARGETS, TOKENS, Signal, T, TokenAxes, axes, former_field
from xscale_kernels.packed_attention import DocumentSpans, find_document_spans


class SharedValues:
    """Values that all blocks share in a forward of one micro-batch, such as the rotations of RoPE: each computed once.

    A value depends on the tokens alone and has no gradient. The pipeline stages of a rank share it, and so do a block
    and its recomputation, and each of them runs a backward of its own: a graph in a value would be freed by the first.
    """

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}

    def get_or_compute(self, key: str, compute: Callable[[], Any]) -> Any:
        """Return the value of `key`, computed by the first caller.

        AssertionError if it requires grad, where gradients are computed at all.
        """
        if key not in self._values:
            value = compute()
            # Not all versions of torch trace the search; without compilation it sees the same values.
            if torch.is_grad_enabled() and not torch.compiler.is_compiling():
                requires_grad = any(tensor.requires_grad for tensor in _tensors_of(value))
                assert not requires_grad, (
                    f"the shared value {key} requires grad, and the rank's pipeline stages would share its graph"
                )
            self._values[key] = value
        return self._values[key]

    def get(self, key: str) -> Any:
        """Return the value of `key`; None if nobody has computed it."""
        return self._values.get(key)

    def copy(self) -> dict[str, Any]:
        """Return the values by key, as they are now."""
        return dict(self._values)

    def reset(self, values: dict[str, Any]) -> None:
        """Set the values to those of an earlier `copy`."""
        self._values = dict(values)


def _tensors_of(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value: in tuples, lists, dicts and the fields of dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for member in value.values():
            yield from _tensors_of(member)
    elif isinstance(value, list | tuple):
        for member in value:
            yield from _tensors_of(member)
    elif is_dataclass(value):
        for attribute in fields(value):
            yield from _tensors_of(getattr(value, attribute.name))


PACKED_PADDING = Signal[Tensor]("tokens.packed_padding", TokenAxes((BATCH, TOKENS), fill=True))
"""[B, T], whether each token is of the padding behind packed documents, a document of its own, which attention hides as
any other document; means over the text leave it out. None: none is."""
FORWARD_FIELDS = frozenset(attribute.name for attribute in fields(Forward))


@dataclass(frozen=True)
class Tokens:
    """One micro-batch of tokens."""

    ids: Tensor = field(metadata=axes(BATCH, TOKENS))
    """[B, T] token ids."""
    positions: Tensor = field(metadata=axes(BATCH, TOKENS))
    """[B, T] position of each token, counted from its document's start if documents are masked from each other."""
    documents: Tensor | None = field(default=None, metadata=axes(BATCH, TOKENS, fill=-1))
    """[B, T] index of each token's document; attention stays within a document. None: one document per row."""
    padding: Tensor | None = field(default=None, metadata=axes(BATCH, TOKENS, fill=True))
    """[B, T], whether each token is of the padding behind a sample, a document of its own; None: none is, or it is
    among packed documents (`PACKED_PADDING`)."""
    types: Tensor | None = field(default=None, metadata=axes(BATCH, TOKENS))
    """[B, T] type of each token (its segment, Devlin et al. 2019); None: every token has the first type."""
    prefix: Tensor | None = field(default=None, metadata=axes(BATCH, TOKENS))
    """[B, T], whether each token is of its document's prefix, which all tokens of the document see (a prefix language
    model); None: there is no prefix, and the model's order decides."""
    global_tokens: int = 0
    """Tokens before the text that have no ids (global tokens); a shard has those of its sequence."""
    pooled_from: int | None = None
    """Tokens of the sequence of which these are windows, in a stack that has shortened it: a difference of indices is
    no distance. None: these are the tokens."""
    memory_tokens: int = 0
    """Tokens of earlier segments that stand before the text where others attend to it; queries are those behind."""
    carried: Mapping[str, tuple[TokenAxes, Tensor]] = field(default_factory=dict, hash=False)
    """Axes and tensor of each signal of a part, by its key; read them with `get`, and set them with `with_signals`."""
    forward: Forward = field(default_factory=Forward)
    """The forward in which they are read, as a whole: its seed, weights of losses, statistics and cache."""
    shared_values: SharedValues = field(default_factory=SharedValues, compare=False, repr=False)
    """Values that all blocks share."""

    def real(self) -> Tensor | None:
        """Whether each token [B, T] is one of the text; None: all are. A shard of a sequence may end in padding."""
        padding = self.any_padding()
        return None if padding is None else ~padding

    def any_padding(self) -> Tensor | None:
        """Whether each token [B, T] is padding, of one sample or behind packed documents; None: none is."""
        return self.get(PACKED_PADDING) if self.padding is None else self.padding

    def text_of_shard(self) -> Tensor | None:
        """Whether each token [B, P] of a shard of a sequence is of the text, and no global token or padding; None: this
        is no shard."""
        return None

    def documents_of_sequence(self) -> Tensor | None:
        """Return the documents [B, T] of all tokens of the sequences, of which these may be a shard."""
        return self.documents

    def further_loss_weight(self) -> float:
        """Return the factor of the losses of heads beside the model's own, which belong to the objective's loss: 1; in
        distillation that of the objective's loss."""
        states = self.forward.states
        return 1.0 if states is None else states.further_loss_weight(self)

    def fraction(self) -> float:
        """Part of the micro-batch that these tokens stand for: 1; the shards of n ranks: 1 / n each."""
        return 1.0

    def count(self) -> float:
        """Tokens of the micro-batch, without padding, times `fraction`."""
        if self.any_padding() is None:
            return float(self.ids.numel())
        return float(sum(self.sample_lengths()))

    def sample_lengths(self) -> list[int]:
        """Return the tokens of each sample without its padding, read once for all blocks."""
        padding = self.any_padding()
        assert padding is not None
        lengths: list[int] = self.shared_values.get_or_compute(
            "sample_lengths", lambda: (~padding).sum(1).tolist()
        )
        return lengths

    def without_padding(self, samples: Tensor, length: int) -> "Tokens":
        """Return the first `length` tokens of some samples [N], which have no padding."""

        def cut(value: Tensor, about: TokenAxes) -> Tensor:
            value = about.select(value, (TOKENS, KEYS, TARGETS), slice(length))
            return about.select(value, (BATCH,), samples)

        changes: dict[str, Any] = {
            "padding": None,
            "documents": None,
            "shared_values": SharedValues(),
        }
        return self.map_fields(cut, **changes)

    @staticmethod
    def from_ids(
        ids: Tensor,
        documents: Tensor | None = None,
        *,
        signals: Mapping[Signal[Any], Any] | None = None,
        **more_fields: Any,
    ) -> "Tokens":
        """Tokens [B, T] at positions 0, 1, 2 ... from the start of each document. `more_fields` are those of `Tokens`,
        or of its `Forward`, which are put there; `signals` the values of signals of parts."""
        for name in more_fields:
            if sentence := former_field(name):
                raise TypeError(f"{sentence}; here it is in `signals`")
        of_forward = {name: more_fields.pop(name) for name in FORWARD_FIELDS if name in more_fields}
        if of_forward:
            more_fields["forward"] = replace(more_fields.get("forward", Forward()), **of_forward)
        count = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)  # [B, T]
        if documents is not None:
            fresh = torch.ones_like(documents, dtype=torch.bool)
            fresh[:, 1:] = documents[:, 1:] != documents[:, :-1]
            starts = torch.where(fresh, count, 0).cummax(dim=1).values
            count = count - starts
        tokens = Tokens(ids=ids, positions=count, documents=documents, **more_fields)
        return tokens.with_signals(signals) if signals else tokens

    def with_forward(self, **changes: Any) -> Self:
        """Return a copy with changes to the fields of its `forward`."""
        return replace(self, forward=replace(self.forward, **changes))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            # Parts outside this repository read a field of the forward off the tokens, as it once was.
            if name in FORWARD_FIELDS:
                return getattr(self.forward, name)
            raise AttributeError(former_field(name) or f"tokens have no '{name}'")

    def with_global_tokens(self, count: int) -> "Tokens":
        """Prepend `count` positions without token ids (global tokens); they count from 0, and the text after them."""
        if not count:
            return self
        assert self.documents is None or self.padding is not None, (
            "a global token belongs to no document"
        )
        places = torch.arange(count, device=self.ids.device).expand(len(self.ids), -1)
        return self.map_fields(
            lambda value, about: about.prepend(value, (TOKENS, KEYS), count),
            positions=torch.cat((places, self.positions + count), 1),
            global_tokens=count,
            shared_values=SharedValues(),
        )

    def found_document_spans(self) -> DocumentSpans | None:
        """Return the spans of the documents if they were found on the CPU; they are where the tokens are."""
        spans: DocumentSpans | None = self.shared_values.get("document_spans")
        return spans

    def to(self, device: torch.device) -> "Tokens":
        """Copy to a device. The spans of documents that go to a GPU are found before, or the host would wait there."""
        documents = self.documents
        if (
            documents is not None
            and documents.is_cpu
            and device.type == "cuda"
            and documents.numel()
        ):
            self.shared_values.get_or_compute(
                "document_spans", lambda: find_document_spans(documents).to(device)
            )
        padding = self.any_padding()
        if padding is not None and padding.is_cpu:
            self.sample_lengths()
        return self.map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def get(self, signal: Signal[T]) -> T | None:
        """Return the value of a part's signal; None: nobody has set it."""
        if signal.axes is None:
            of_forward: T | None = self.forward.signals.get(signal.key)
            return of_forward
        carried: Any = self.carried.get(signal.key)
        value: T | None = None if carried is None else carried[1]
        return value

    def with_signals(self, values: Mapping[Signal[Any], Any]) -> Self:
        """Return a copy with these values of signals of parts; None: it has none of that signal."""
        carried, of_forward = dict(self.carried), dict(self.forward.signals)
        for signal, value in values.items():
            if signal.axes is None:
                of_forward[signal.key] = value
            elif value is None:
                carried.pop(signal.key, None)
            else:
                carried[signal.key] = (signal.axes, value)
        return replace(self, carried=carried, forward=replace(self.forward, signals=of_forward))

    def map_fields(self, function: Callable[[Tensor, TokenAxes], Tensor], **changes: Any) -> Self:
        """Apply a function of tensor and axes to each field and signal that has them, and make `changes` to fields.

        Whatever maps, shards, pools or cuts the tokens goes through here, so that nothing is forgotten.
        """
        for attribute in fields(self):
            value = getattr(self, attribute.name)
            if "axes" in attribute.metadata and value is not None and attribute.name not in changes:
                changes[attribute.name] = function(value, attribute.metadata["axes"])
        carried = {
            key: (about, function(value, about)) for key, (about, value) in self.carried.items()
        }
        return replace(self, carried=carried, **changes)

    def map_tensors(self, function: Callable[[Tensor], Tensor], **changes: Any) -> Self:
        """Apply a function to the tensor of each field that has one, whatever its axes."""
        return self.map_fields(lambda value, _: function(value), **changes)
