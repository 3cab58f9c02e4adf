"""Conformance of mixers; a mixer that holds a core is tried with every core that can do what is asked."""

import contextlib
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from torch import Tensor

from tests.conformance.made import WIDTH, close, dims, drawn, noisy, numbered, other_from, ready, slope_fits, tokens
from tests.families import each, example
from xscale.core.config import Config
from xscale.core.errors import ConfigError
from xscale.core.registry import Entry, Family
from xscale.nn.attention.core import CORES
from xscale.nn.dims import Dims
from xscale.nn.forward import Forward
from xscale.nn.mixer.local_mixer import LocalMixer
from xscale.nn.mixer.mixer import MIXERS, Mixer, MixerTraits
from xscale.nn.module import substitute

LENGTH = 150
Case = tuple[Entry[Any], Any]
"""A mixer and its config."""


def cases(trait: str, value: bool = True) -> list[Any]:
    """Mixers whose `trait` has that value, once for each core that has it too."""
    return [
        pytest.param((entry, config), id=name, marks=marks(entry, config))
        for entry in MIXERS
        if getattr(entry.traits, trait) == value
        for name, config in settings(entry, trait, value)
    ]


def marks(entry: Entry[Any], config: Any) -> list[pytest.MarkDecorator]:
    """A mixer that hands queries, keys and values to a core as another does is tried quickly with one of each kind.

    The first mixer that holds a core is tried with all; the others with the first core of those with equal traits, and
    in the long suite with the rest.
    """
    if "core" not in type(config).model_fields:
        return []
    first = next(mixer for mixer in MIXERS if "core" in type(example(mixer)).model_fields)
    alike = [core.name for core in CORES if declared(core) == declared(CORES.of(config.core))]
    return [] if entry.name == first.name or CORES.of(config.core).name == alike[0] else [pytest.mark.long]


def declared(core: Entry[Any]) -> tuple[bool, ...]:
    """Whether the core has each trait that is tried here."""
    return tuple(
        getattr(core.traits, trait, True) for trait in ("causal", "bidirectional", "cross", "documents", "decode")
    )


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
    able = [case[0].traits] + ([CORES.of(case[1].core).traits] if "core" in type(case[1]).model_fields else [])
    return [
        causal
        for causal, trait in ((True, "causal"), (False, "bidirectional"))
        if all(getattr(traits, trait) for traits in able)
    ]


@pytest.mark.parametrize("case", cases("causal"))
def test_the_future_does_not_leak(case: Case) -> None:
    assert case[0].traits.causal
    for training in (False, True):
        part, x = built(case, noise=training), drawn(2, LENGTH, WIDTH)
        whole = mixed(part, x)
        assert whole.shape == x.shape
        for cut in (1, 65) if training else (1, 64, 65, LENGTH - 1):
            changed = mixed(part, other_from(x, cut, 1))
            assert close(changed[:, :cut], whole[:, :cut])
            assert not close(changed[:, cut:], whole[:, cut:])
        leaf = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(mixed(part, leaf)[:, :64].square().sum(), leaf)
        # A convolution by FFT is causal to rounding.
        assert gradient[:, 64:].abs().max() <= 1e-12 * gradient.abs().max()


def mixed(part: Mixer, x: Tensor) -> Tensor:
    """The output, with torch's generator at the same place each time."""
    torch.manual_seed(0)
    out: Tensor = part(x, tokens(LENGTH, rng_seed=1 if part.training else None))
    return out


@pytest.mark.parametrize("case", cases("bidirectional"))
def test_it_looks_both_ways(case: Case) -> None:
    assert case[0].traits.bidirectional
    part, x = built(case, causal=False), drawn(2, LENGTH, WIDTH)
    whole, half = part(x, tokens(LENGTH)), LENGTH // 2
    assert not close(part(other_from(x, half, 1), tokens(LENGTH))[:, :half], whole[:, :half])
    before = other_from(x.flip(1), LENGTH - half, 1).flip(1)
    assert not close(part(before, tokens(LENGTH))[:, half:], whole[:, half:])


@pytest.mark.parametrize("case", cases("causal", False))
def test_what_cannot_hide_the_future_looks_both_ways(case: Case) -> None:
    assert case[0].traits.bidirectional, "neither causal nor bidirectional: nothing could use it"


@pytest.mark.parametrize("case", cases("cross"))
def test_another_sequence_is_read(case: Case) -> None:
    assert case[0].traits.cross
    part = built(case, cross=True)
    x, memory = drawn(2, 31, WIDTH), drawn(2, 77, WIDTH, seed=1)
    whole = part(x, tokens(31), memory, tokens(77))
    assert whole.shape == x.shape
    assert not close(part(x, tokens(31), other_from(memory, 76, 1), tokens(77)), whole)
    alone = part(other_from(x, 5, 1), tokens(31), memory, tokens(77))
    assert close(alone[:, :5], whole[:, :5]), "cross attention moves information between the reader's tokens"


@pytest.mark.parametrize("case", cases("documents"))
def test_packed_documents_stay_apart(case: Case) -> None:
    assert case[0].traits.documents
    numbers = numbered(70, 80)
    for causal in modes(case):
        part, x = built(case, causal=causal), drawn(2, LENGTH, WIDTH)
        packed = part(x, tokens(LENGTH, documents=numbers))
        assert close(part(other_from(x, 70, 1), tokens(LENGTH, documents=numbers))[:, :70], packed[:, :70])
        before = other_from(x.flip(1), 80, 1).flip(1)
        assert close(part(before, tokens(LENGTH, documents=numbers))[:, 70:], packed[:, 70:])


@each(entry for entry in MIXERS if entry.traits.prefix)
def test_a_prefix_is_read_both_ways(entry: Entry[Any]) -> None:
    """With the default core: what a core does with the prefix is the core's conformance."""
    config = example(entry)
    causal, other = (ready(entry.part(config, dims(causal=order))) for order in (True, False))
    documents, prefix = numbered(12, 20), torch.zeros(2, 32, dtype=torch.bool)
    prefix[:, 12:20] = True
    x = drawn(2, 32, WIDTH)
    out, plain = (causal(x, tokens(32, documents=documents, prefix=seen)) for seen in (prefix, None))
    assert close(out[:, 12:20], other(x[:, 12:20], tokens(8)))
    assert close(out[~prefix], plain[~prefix])
    assert not close(out, plain)


@pytest.mark.parametrize("case", cases("decode"))
@pytest.mark.parametrize("chunks", [[1] * 12, [5, 1, 1, 5], [70, 1, 2, 1]], ids=str)
def test_incremental_is_parallel(case: Case, chunks: list[int]) -> None:
    assert case[0].traits.decode
    part, x = built(case), drawn(2, sum(chunks), WIDTH)
    whole = part(x, tokens(sum(chunks)))
    cache: dict[str, Any] = {}
    start, outputs = 0, []
    for size in chunks:
        around = tokens(start + size)
        here = type(around)(
            ids=around.ids[:, start:], positions=around.positions[:, start:], forward=Forward(cache=cache)
        )
        outputs.append(part(x[:, start : start + size], here))
        start += size
    assert close(torch.cat(outputs, 1), whole)


@pytest.mark.parametrize(
    "case", [case for case in cases("documents") if issubclass(case.values[0][0].part, LocalMixer)]
)
def test_a_local_mixer_reads_its_neighbours_alone(case: Case) -> None:
    """A shard of the sequence, with as many neighbours as it says that it reads, is mixed as in the full sequence."""
    numbers = numbered(70, 80)
    for causal in modes(case):
        part, x = built(case, causal=causal), drawn(2, LENGTH, WIDTH)
        assert isinstance(part, LocalMixer)
        whole, full = part(x, tokens(LENGTH, documents=numbers)), part.with_neighbours
        kept = []

        def keep(x: Tensor, around: Any, full: Any = full, kept: list[Any] = kept) -> Any:
            kept.append(full(x, around))
            return kept[-1]

        substitute(part, "with_neighbours", keep)
        part(x, tokens(LENGTH, documents=numbers))
        ((near, documents),) = kept
        assert near.shape == (2, part.left + LENGTH + part.right, part.exchanged_width)
        shard, read = slice(66, 90), slice(66, 90 + part.left + part.right)
        neighbours = near[:, read], documents[:, read]
        substitute(part, "with_neighbours", lambda *_, neighbours=neighbours: neighbours)
        assert close(part(x[:, shard], tokens(24, documents=numbers[:, shard])), whole[:, shard])


@pytest.mark.parametrize("case", cases("causal") + cases("causal", False))
def test_gradients_fit_differences(case: Case) -> None:
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


@each([entry for entry in MIXERS if "core" in type(example(entry)).model_fields])
def test_every_choice_of_a_core_is_refused_or_runs(entry: Entry[Any]) -> None:
    """A choice in a core's config fits the mixer or is refused: by `check`, or by a kernel for the device."""
    for _, config in settings(entry, "bidirectional", True):
        for name, field in type(config.core).model_fields.items():
            for value in choices(field.annotation):
                chosen = config.model_copy(update={"core": config.core.model_copy(update={name: value})})
                around = dims(length=LENGTH, causal=False)
                if entry.part.check(chosen, around, entry.name):
                    continue
                part, x = ready(entry.part(chosen, around)), drawn(2, LENGTH, WIDTH)
                with contextlib.suppress(ConfigError):
                    assert part(x, tokens(LENGTH)).shape == x.shape, (name, value)


class Mean(Mixer):
    """The mean of what a token may see."""

    def __init__(self, config: Any, dims: Dims) -> None:
        super().__init__()
        self.causal = dims.causal and not dims.cross

    def forward(self, x: Tensor, tokens: Any, memory: Tensor | None = None, source: Any = None) -> Tensor:
        if memory is not None:
            return x + memory.mean(1, keepdim=True)
        if not self.causal:
            return x.mean(1, keepdim=True).expand_as(x)
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class Sees(Mean):
    def forward(self, x: Tensor, tokens: Any, memory: Tensor | None = None, source: Any = None) -> Tensor:
        return super().forward(x, tokens, memory) + 1e-6 * x.roll(-1, 1)


class Blind(Mean):
    def forward(self, x: Tensor, tokens: Any, memory: Tensor | None = None, source: Any = None) -> Tensor:
        return super().forward(x, tokens, None if memory is None else memory[:, : x.shape[1]])


def registered(part: type[Mixer]) -> Case:
    family: Family[MixerTraits] = Family("mixer", MixerTraits)
    traits = MixerTraits(causal=True, bidirectional=True, cross=True, documents=True, decode=True)
    family.register("cheat", traits=traits)(type("Cheat", (part,), {}))
    return family.get("cheat"), family.get("cheat").part.Config()


def test_cheats_are_caught() -> None:
    honest = registered(Mean)
    test_the_future_does_not_leak(honest)
    test_it_looks_both_ways(honest)
    test_another_sequence_is_read(honest)
    for part, check in [
        (Sees, test_the_future_does_not_leak),
        (Blind, test_another_sequence_is_read),
        (Mean, test_packed_documents_stay_apart),
    ]:
        with pytest.raises(AssertionError):
            check(registered(part))
    with pytest.raises(AssertionError):
        test_incremental_is_parallel(registered(Mean), [5, 1, 1])
