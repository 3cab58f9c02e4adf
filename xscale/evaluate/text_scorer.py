"""Log-likelihoods and continuations of token ids by a causal model, on any layout of ranks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from xscale.core.errors import ConfigError
from xscale.generate.generate import generate
from xscale.mesh.collectives import all_gather_object
from xscale.mesh.mesh import Mesh
from xscale.nn.tokens import Tokens
from xscale.parallel.shard.sharded import StagedModel
from xscale.settings.hidden_tokens import parts_that_count_padding


@dataclass(frozen=True)
class ScoreRequest:
    """A continuation to score after a context, both with one token or more."""

    context: list[int]
    continuation: list[int]


@dataclass(frozen=True)
class Score:
    """The score of a continuation."""

    log_likelihood: float
    """Sum over its tokens, in nats, each given the context and the tokens before it."""
    greedy: bool
    """Whether each of its tokens is the likeliest one."""


@dataclass(frozen=True)
class TextRequest:
    """A text to write after a context."""

    context: list[int]
    tokens: int
    """Most tokens."""
    stops: tuple[str, ...]
    """Texts at the first of which it ends, without them."""
    temperature: float
    """Divisor of the logits; 0 takes the likeliest token."""
    top_k: int | None
    seed: int


def batches_of_one_length(
    model: nn.Module, lengths: Sequence[int], rows: int
) -> Iterator[list[int]]:
    """Yield the numbers of the rows of each forward, at most `rows` of one length [number of rows], the longest first.

    So there is no padding: a model may route, sort or average the tokens of a row. Where tokens of a micro-batch
    compete or are averaged, a forward has one row, so that no result depends on other rows.
    """
    size = 1 if parts_that_count_padding(model) else rows
    by_length: dict[int, list[int]] = {}
    for index, length in enumerate(lengths):
        by_length.setdefault(length, []).append(index)
    for length in sorted(by_length, reverse=True):
        group = by_length[length]
        yield from (group[first : first + size] for first in range(0, len(group), size))


@dataclass(frozen=True)
class TextScorer:
    """Scores and writes text. All ranks of the model call it with the same requests."""

    model: nn.Module
    mesh: Mesh
    window: int
    """Tokens that the model reads at most."""
    micro_batch: int
    """Rows of a forward."""
    decode: Callable[[list[int]], str]
    end: int
    """Id of the end-of-document token, at which writing stops."""
    on_forward: Callable[[], None] = field(default=lambda: None)
    """Called before each forward, such as for a heartbeat."""

    @torch.no_grad()
    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Score each request. A context is truncated on its left where the model cannot read all of it.

        ConfigError where a continuation is empty, or longer than the model reads.
        """
        self.model.eval()
        rows = [self._row(request) for request in requests]
        batches = list(self._batches(rows))
        ranks, rank = self.mesh.degrees.dp, self.mesh.data_rank
        local: list[tuple[int, Score]] = []
        # Sharded weights are gathered in each forward, so that every rank takes as many of them.
        for round_ in range(-(-len(batches) // ranks)):
            number = round_ * ranks + rank
            batch = batches[number if number < len(batches) else 0]
            scores = self._forward(
                [(rows[index], len(requests[index].continuation)) for index in batch]
            )
            if number < len(batches):
                local += zip(batch, scores, strict=True)
        if isinstance(self.model, StagedModel):
            self.model.wait_sends()
        by_request = dict(pair for pairs in all_gather_object(local) for pair in pairs)
        return [by_request[index] for index in range(len(requests))]

    def _row(self, request: ScoreRequest) -> list[int]:
        """Return the ids [T + 1] of which the model reads the first T."""
        size = len(request.continuation)
        if not size or not request.context:
            what = f"the {'context' if size else 'continuation'} of a request has no tokens"
            raise ConfigError(
                "tasks",
                what,
                "Separate context and continuation where a token ends, as at a space.",
            )
        if size > self.window:
            what = f"a continuation of {size} tokens is longer than the {self.window} that the model reads"
            raise ConfigError(
                "tasks", what, "Omit the task, or use the run of a larger data.sequence_length."
            )
        return [*request.context, *request.continuation][-(self.window + 1) :]

    def _batches(self, rows: Sequence[list[int]]) -> Iterator[list[int]]:
        """Yield the numbers of the rows of each forward: rows of one length, the longest first."""
        return batches_of_one_length(self.model, list(map(len, rows)), self.micro_batch)

    def _forward(self, rows: Sequence[tuple[list[int], int]]) -> list[Score]:
        """Score the last tokens of rows of one length: the ids of each, and how many of them count."""
        self.on_forward()
        ids = torch.tensor([row for row, _ in rows], device=self.mesh.device)  # [B, T + 1]
        logits: Tensor = self.model(Tokens.from_ids(ids[:, :-1]), None, None)  # [B, T, V]
        scores = []
        for row, targets, (_, count) in zip(logits, ids[:, 1:], rows, strict=True):
            last, wanted = row[-count:], targets[-count:]  # [C, V], [C]
            logs = torch.log_softmax(last.to(torch.promote_types(last.dtype, torch.float32)), -1)
            total = logs.gather(-1, wanted[:, None]).double().sum()
            scores.append(Score(float(total), bool((last.argmax(-1) == wanted).all())))
        return scores

    @torch.no_grad()
    def write(self, requests: Sequence[TextRequest]) -> list[str]:
        """Write a text after each context, which is truncated on its left to leave room for it.

        ConfigError where the model reads no more tokens than it is to write.
        """
        texts = []
        for request in requests:
            if request.tokens >= self.window:
                what = f"{request.tokens} tokens to write leave no room for a prompt in the {self.window} that it reads"
                raise ConfigError(
                    "tasks", what, "Lower max_gen_toks of the task, or train with longer sequences."
                )
            prompt = torch.tensor(
                request.context[-(self.window - request.tokens) :], device=self.mesh.device
            )
            options: dict[str, Any] = {"end": self.end, "window": self.window, "seed": request.seed}
            options |= {"temperature": request.temperature, "top_k": request.top_k}

            def stops(ids: list[int], texts_to_stop_at: tuple[str, ...] = request.stops) -> bool:
                self.on_forward()
                text = self.decode(ids)
                return any(stop in text for stop in texts_to_stop_at)

            text = self.decode(
                generate(self.model, prompt, request.tokens, stops=stops, **options).tolist()
            )
            ends = [text.index(stop) for stop in request.stops if stop in text]
            texts.append(text[: min(ends)] if ends else text)
        return texts
