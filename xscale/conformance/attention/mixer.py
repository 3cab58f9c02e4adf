"""Conformance of mixers; a mixer that holds a core is tried with every core that can do what is asked."""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import torch
from torch import Tensor

from xscale.conformance.check import Subjects, check
from xscale.conformance.small_parts import (
    WIDTH,
    close,
    dims,
    drawn,
    example,
    noisy,
    numbered,
    other_from,
    ready,
    slope_fits,
    tokens,
)
from xscale.core.config import Config
from xscale.core.errors import ConfigError
from xscale.core.registry import Entry
from xscale.nn.attention.core import CORES
from xscale.nn.forward import Forward
from xscale.nn.mixer.kv_cache import CAPACITY
from xscale.nn.mixer.local_mixer import LocalMixer
from xscale.nn.mixer.mixer import Mixer
from xscale.nn.module import substitute

LENGTH = 150
CHUNKS = ([1] * 12, [5, 1, 1, 5], [70, 1, 2, 1])
"""Tokens of the steps in which a sequence is read."""
Case = tuple[Entry[Any], Any]
"""A mixer and its config."""


def cases(trait: str, value: bool = True) -> Subjects:
    """The mixer, if its `trait` has that value, once for each core that has it too."""

    def subjects(entry: Entry[Any]) -> Iterator[tuple[str, Case]]:
        if getattr(entry.traits, trait) == value:
            for name, config in settings(entry, trait, value):
                yield name, (entry, config)

    return subjects


def every_case(entry: Entry[Any]) -> Iterator[tuple[str, Case]]:
    """The mixer, causal or not, with each core of the same kind."""
    yield from cases("causal")(entry)
    yield from cases("causal", False)(entry)


def local_cases(entry: Entry[Any]) -> Iterator[tuple[str, Case]]:
    """The mixer, if it reads its neighbours alone."""
    if issubclass(entry.part, LocalMixer):
        yield from cases("documents")(entry)


def settings(entry: Entry[Any], trait: str, value: bool) -> Iterator[tuple[str, Config]]:
    config = example(entry)
    if "core" not in type(config).model_fields:
        yield entry.name, config
        return
    for core in CORES:
        if entry.part.cores is not None and core.name not in entry.part.cores:
            continue
        if getattr(core.traits, trait, value) == value:
            yield f"{entry.name}-{core.name}", config.model_copy(update={"core": example(core)})


def built(case: Case, noise: bool = False, **changes: Any) -> Mixer:
    """The mixer in evaluation; with `noise` in training, with its noise and its core's on."""
    entry, config = case
    if noise:
        config = with_noise(config)
    around = dims(length=LENGTH, **changes)
    problems = entry.part.check(config, around, entry.name)
    assert problems == [], [str(problem) for problem in problems]
    part: Mixer = ready(entry.part(config, around))
    return part.train(noise)


def with_noise(config: Any) -> Any:
    if "core" not in type(config).model_fields:
        return noisy(config)
    drops = CORES.of(config.core).part.traits_of(config.core).dropout
    changes = {"core": noisy(config.core)} | ({} if drops else {"dropout": 0.0})
    return noisy(config).model_copy(update=changes)


def modes(case: Case) -> list[bool]:
    """The settings of `causal` that mixer and core declare."""
    able = [case[0].traits] + (
        [CORES.of(case[1].core).traits] if "core" in type(case[1]).model_fields else []
    )
    return [
        causal
        for causal, trait in ((True, "causal"), (False, "bidirectional"))
        if all(getattr(traits, trait) for traits in able)
    ]


@check("mixer", subjects=cases("causal"), at_start=True)
def the_future_does_not_leak(case: Case) -> None:
    assert case[0].traits.causal
    for training in (False, True):
        part, x = built(case, noise=training), drawn(2, LENGTH, WIDTH)
        leaf = x.detach().requires_grad_()
        output = mixed(part, leaf)
        full = output.detach()
        assert full.shape == x.shape
        for cut in (1, 65) if training else (1, 64, 65, LENGTH - 1):
            changed = mixed(part, other_from(x, cut, 1))
            assert close(changed[:, :cut], full[:, :cut])
            assert not close(changed[:, cut:], full[:, cut:])
        (gradient,) = torch.autograd.grad(output[:, :64].square().sum(), leaf)
        # A convolution by FFT is causal to rounding.
        assert gradient[:, 64:].abs().max() <= 1e-12 * gradient.abs().max()


def mixed(part: Mixer, x: Tensor) -> Tensor:
    """The output, with torch's generator at the same place each time."""
    torch.manual_seed(0)
    out: Tensor = part(x, tokens(LENGTH, rng_seed=1 if part.training else None))
    return out


@check("mixer", subjects=cases("bidirectional"))
def it_looks_both_ways(case: Case) -> None:
    assert case[0].traits.bidirectional
    part, x = built(case, causal=False), drawn(2, LENGTH, WIDTH)
    full, half = part(x, tokens(LENGTH)), LENGTH // 2
    assert not close(part(other_from(x, half, 1), tokens(LENGTH))[:, :half], full[:, :half])
    before = other_from(x.flip(1), LENGTH - half, 1).flip(1)
    assert not close(part(before, tokens(LENGTH))[:, half:], full[:, half:])


@check("mixer", subjects=cases("causal", False))
def what_cannot_hide_the_future_looks_both_ways(case: Case) -> None:
    assert case[0].traits.bidirectional, "neither causal nor bidirectional: nothing could use it"


@check("mixer", subjects=cases("cross"))
def another_sequence_is_read(case: Case) -> None:
    assert case[0].traits.cross
    part = built(case, cross=True)
    x, memory = drawn(2, 31, WIDTH), drawn(2, 77, WIDTH, seed=1)
    full = part(x, tokens(31), memory, tokens(77))
    assert full.shape == x.shape
    assert not close(part(x, tokens(31), other_from(memory, 76, 1), tokens(77)), full)
    alone = part(other_from(x, 5, 1), tokens(31), memory, tokens(77))
    assert close(alone[:, :5], full[:, :5]), (
        "cross attention moves information between the reader's tokens"
    )


@check("mixer", subjects=cases("documents"), at_start=True)
def packed_documents_stay_apart(case: Case) -> None:
    assert case[0].traits.documents
    numbers = numbered(70, 80)
    for causal in modes(case):
        part, x = built(case, causal=causal), drawn(2, LENGTH, WIDTH)
        packed = part(x, tokens(LENGTH, documents=numbers))
        assert close(
            part(other_from(x, 70, 1), tokens(LENGTH, documents=numbers))[:, :70], packed[:, :70]
        )
        before = other_from(x.flip(1), 80, 1).flip(1)
        assert close(part(before, tokens(LENGTH, documents=numbers))[:, 70:], packed[:, 70:])


@check("mixer", lambda entry: entry.traits.prefix)
def a_prefix_is_read_both_ways(entry: Entry[Any]) -> None:
    """With the default core: what a core does with the prefix is the core's conformance."""
    config = example(entry)
    causal, other = (ready(entry.part(config, dims(causal=order))) for order in (True, False))
    documents, prefix = numbered(12, 20), torch.zeros(2, 32, dtype=torch.bool)
    prefix[:, 12:20] = True
    x = drawn(2, 32, WIDTH)
    out, plain = (
        causal(x, tokens(32, documents=documents, prefix=seen)) for seen in (prefix, None)
    )
    assert close(out[:, 12:20], other(x[:, 12:20], tokens(8)))
    assert close(out[~prefix], plain[~prefix])
    assert not close(out, plain)


@check("mixer", subjects=cases("decode"), values={str(chunks): (chunks,) for chunks in CHUNKS})
def incremental_is_parallel(case: Case, chunks: list[int]) -> None:
    assert case[0].traits.decode
    part, x = built(case), drawn(2, sum(chunks), WIDTH)
    full = part(x, tokens(sum(chunks)))
    cache: dict[str, Any] = {}
    start, outputs = 0, []
    for size in chunks:
        around = tokens(start + size)
        now = type(around)(
            ids=around.ids[:, start:],
            positions=around.positions[:, start:],
            forward=Forward(cache=cache),
        )
        outputs.append(part(x[:, start : start + size], now))
        start += size
    assert close(torch.cat(outputs, 1), full)


@check("mixer", subjects=cases("static_decode"))
def static_is_incremental(case: Case) -> None:
    """Steps over a cache of a fixed capacity compute what those over a cache that grows do, in the same memory."""
    assert case[0].traits.static_decode
    part = built(case)
    length, capacity = 24, 70
    part.path = "mixer"
    x, around = drawn(2, length + 9, WIDTH), tokens(length + 9)
    growing: dict[str, Any] = {}
    static: dict[str, Any] = {CAPACITY: capacity}
    kept: list[tuple[int, int]] = []
    for start, stop in ((0, length), *((n, n + 1) for n in range(length, length + 9))):
        outputs = [
            part(
                x[:, start:stop],
                type(around)(
                    ids=around.ids[:, start:stop],
                    positions=around.positions[:, start:stop],
                    forward=Forward(cache=cache),
                ),
            )
            for cache in (growing, static)
        ]
        assert close(*outputs)
        buffers = static[part.path]
        assert buffers.k.shape[2] == capacity
        kept.append((buffers.k.data_ptr(), buffers.v.data_ptr()))
    assert len(set(kept)) == 1
    assert set(static) == {CAPACITY, part.path}


@check("mixer", subjects=local_cases)
def a_local_mixer_reads_its_neighbours_alone(case: Case) -> None:
    """A shard of the sequence, with as many neighbours as it says that it reads, is mixed as in the full sequence."""
    numbers = numbered(70, 80)
    for causal in modes(case):
        part, x = built(case, causal=causal), drawn(2, LENGTH, WIDTH)
        assert isinstance(part, LocalMixer)
        full, exchange = part(x, tokens(LENGTH, documents=numbers)), part.with_neighbours
        kept: list[Any] = []

        def keep(x: Tensor, around: Any, exchange: Any = exchange, kept: list[Any] = kept) -> Any:
            kept.append(exchange(x, around))
            return kept[-1]

        substitute(part, "with_neighbours", keep)
        part(x, tokens(LENGTH, documents=numbers))
        ((neighbouring, documents),) = kept
        assert neighbouring.shape == (2, part.left + LENGTH + part.right, part.exchanged_width)
        shard, read = slice(66, 90), slice(66, 90 + part.left + part.right)
        neighbours = neighbouring[:, read], documents[:, read]
        substitute(part, "with_neighbours", lambda *_, neighbours=neighbours: neighbours)
        assert close(part(x[:, shard], tokens(24, documents=numbers[:, shard])), full[:, shard])


@check("mixer", subjects=every_case)
def gradients_fit_differences(case: Case) -> None:
    for causal in modes(case):
        part = built(case, causal=causal)
        assert slope_fits(lambda x, part=part: part(x, tokens(LENGTH)), [drawn(2, LENGTH, WIDTH)])


def choices(annotation: Any) -> list[Any]:
    """The values of a field that chooses among a few."""
    if annotation is bool:
        return [False, True]
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [value for inner in get_args(annotation) for value in choices(inner)]


@check("mixer", lambda entry: "core" in type(example(entry)).model_fields)
def every_choice_of_a_core_is_refused_or_runs(entry: Entry[Any]) -> None:
    """A choice in a core's config fits the mixer or is refused: by `check`, or by a kernel for the device."""
    config: Any
    for _, config in settings(entry, "bidirectional", True):
        for name, field in type(config.core).model_fields.items():
            for value in choices(field.annotation):
                chosen = config.model_copy(
                    update={"core": config.core.model_copy(update={name: value})}
                )
                around = dims(length=LENGTH, causal=False)
                if entry.part.check(chosen, around, entry.name):
                    continue
                part, x = ready(entry.part(chosen, around)), drawn(2, LENGTH, WIDTH)
                with contextlib.suppress(ConfigError):
                    assert part(x, tokens(LENGTH)).shape == x.shape, (name, value)
