"""Random models on random layouts, noise on: `check` refuses with a fix, or training gives the numbers of one process.

    pytest -m long tests/parallel/test_random_layouts.py --layouts 200 --layout-seed 7000    # seeds 7000 to 7199

A seed is one model on one layout; a failure names its seed, and `--layouts 1 --layout-seed SEED` runs it alone.
"""

from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml

from tests.distributed import Pool, RankError
from tests.families import example, family
from tests.parallel.against_one import asked, compare, trained
from xscale.core.config import decode, encode
from xscale.core.errors import Problem
from xscale.core.registry import Entry
from xscale.parallel.config import PipelineConfig
from xscale.parallel.context import STYLES
from xscale.parallel.pipeline.schedule import schedule_of
from xscale.recipe import Recipe

pytestmark = pytest.mark.long

Section = dict[str, Any]
STEPS = 2
TIMEOUT_SECONDS = 600.0
"""Time limit of one run; its ranks may share their cores with much else."""
MOST_RANKS = 8
FIXED = {"kind", "precision", "implementation", "allow_noncausal_routing"}
"""Options that are not drawn: another precision has other numbers, and kernels have tests of their own."""
SIZES: dict[str, Section] = {
    "block_sparse": {"block": 4},
    "cluster_former": {"clusters": 3, "chunk_length": 8},
    "clustered": {"clusters": 4, "bits": 8, "iterations": 2, "top_k": 4},
    "etc": {"global_tokens": 3, "radius": 3, "max_distance": 2},
    "fmmformer": {"bandwidth": 3},
    "informer": {"factor": 2},
    "linformer": {"projected_length": 8},
    "longt5": {"radius": 3, "block": 4},
    "luna": {"slots": 4},
    "moba": {"block": 4, "top_k": 2},
    "nprf": {"features": 8},
    "nsa": {"compression_block": 4, "compression_stride": 2, "selection_block": 4, "top_blocks": 3, "window": 6},
    "nystrom": {"landmarks": 8},
    "performer": {"features": 16},
    "poolingformer": {"window": 4, "pooled_window": 8, "pool_size": 3, "stride": 2},
    "product_key_memory": {"subkeys": 8, "top_k": 4, "heads": 2, "query_width": 8},
    "reformer": {"buckets": 4, "chunk_length": 8},
    "rfa": {"features": 8},
    "routing_transformer": {"clusters": 4, "window": 8},
    "scatterbrain": {"features": 8, "buckets": 4, "window": 8},
    "core/sinkhorn": {"block": 8},
    "skyformer": {"landmarks": 8},
    "transformer_ls": {"segment": 8, "projection_rank": 4},
    "axial": {"width": 5},
    "band": {"left": 5, "right": 5},
    "ccnet": {"width": 5},
    "image_1d": {"query_length": 8, "memory_length": 8},
    "image_2d": {"width": 6, "query_width": 2, "query_height": 2, "memory_width": 1, "memory_height": 1},
    "local_2d": {"width": 5, "kernel_size": 3},
    "relative": {"buckets": 8, "distance": 12},
}
"""Sizes of parts whose example is made for hundreds of tokens, by kind or by family and kind."""
NOISE: dict[str, Any] = {"jitter": 0.05, "dropout": 0.1, "expert_dropout": 0.1, "redraw": True}
"""Options that draw random numbers: on in three of four parts that have them."""


@dataclass(frozen=True)
class RandomRun:
    """One model on one layout."""

    seed: int
    ranks: int
    model: Section
    parallel: Section
    sections: Section
    """The others."""

    def check(self) -> list[Problem]:
        """Problems that `check` returns for that many ranks."""
        return self.recipe().check(self.ranks)

    def recipe(self) -> Recipe:
        return asked(self.model, self.parallel, **self.sections)

    def __str__(self) -> str:
        sections = {"ranks": self.ranks, "model": self.model, "parallel": self.parallel, **self.sections}
        return yaml.safe_dump(sections, sort_keys=False, default_flow_style=None, width=120)


class Draw:
    """The random choices of one seed."""

    def __init__(self, seed: int | str) -> None:
        self.random = Random(f"layout {seed}")
        self.lenient = self.maybe(0.1)
        """Whether parts are chosen without a look at what they can, so that `check` has something to refuse."""

    def maybe(self, probability: float) -> bool:
        return self.random.random() < probability

    def of(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def run(self, seed: int) -> RandomRun:
        kind = self.of("decoder", "decoder", "decoder", "encoder", "encoder_decoder")
        documents = self.maybe(0.5)
        ranks = self.of(1, 2, 2, 2, 2, 3, 4, 4, 4, 4, 4, 4, 8)
        degrees = self.axes(ranks)
        self.documents, self.degrees = documents, degrees
        pipeline = self.pipeline(degrees["pp"])
        stages = schedule_of(decode(PipelineConfig, pipeline)).stages(decode(PipelineConfig, pipeline), degrees["pp"])
        model = self.model(kind, 1 if self.lenient else stages)
        if pipeline["schedule"] in ("zbv", "dualpipe_v") and degrees["pp"] > 1 and not self.lenient:
            model["tied"] = False
        parallel = self.parallel(pipeline, mixture="experts" in str(model))
        dp = degrees["dp_replicate"] * degrees["dp_shard"]
        batch = 6 if ranks == 3 else self.of(4, 4, 8)
        sizes = [size for size in (1, 1, 2, 4) if self.lenient or batch % (size * dp) == 0] or [1]
        data = {"cross_documents": not documents, "sequence_length": self.of(23, 23, 16, 32)}
        train = {
            "batch_size": batch,
            "micro_batch_size": self.of(*sizes),
            "clip_grad_norm": self.of(0.5, None),
        }
        return RandomRun(seed, ranks + self.maybe(0.02), model, parallel, {"data": data, "train": train})

    def layout(self, *, mixture: bool) -> tuple[int, Section]:
        """Ranks and the section `parallel`, for a model that is given."""
        ranks = self.of(2, 2, 2, 3, 4, 4)
        self.degrees, self.lenient = self.axes(ranks), False
        return ranks, self.parallel(self.pipeline(self.degrees["pp"]), mixture=mixture)

    def axes(self, ranks: int) -> dict[str, int]:
        """Degrees of the axes whose product is `ranks`."""
        degrees = dict.fromkeys(("pp", "dp_replicate", "dp_shard", "cp", "tp"), 1)
        for factor in {1: [], 2: [2], 3: [3], 4: [2, 2], 8: [2, 2, 2]}[ranks]:
            degrees[self.of("pp", "pp", "dp_replicate", "dp_shard", "cp", "cp", "tp", "tp")] *= factor
        return degrees

    def pipeline(self, pp: int) -> Section:
        """Section `parallel.pipeline`."""
        pipeline: Section = {
            "schedule": self.of(*get_args(PipelineConfig.model_fields["schedule"].annotation)),
            "stages_per_rank": self.of(2, 2, 3),
        }
        if pp > 1 and self.maybe(0.1):
            pipeline["blocks_per_stage"] = [self.random.randint(1, 2) for _ in range(pp)]
        return pipeline

    def parallel(self, pipeline: Section, *, mixture: bool) -> Section:
        """Section `parallel`."""
        degrees = self.degrees
        mesh: Section = dict(degrees)
        if mixture:
            folded = degrees["dp_shard"] * degrees["cp"]
            mesh["tp_in_experts"] = self.maybe(0.5)
            most = folded if mesh["tp_in_experts"] else folded * degrees["tp"]
            mesh["ep"] = self.of(1, most, most) if not self.lenient else self.of(1, 2, 4)
        if self.maybe(0.1):
            mesh["dp_shard"] = -1
        if self.maybe(0.2):
            mesh["order"] = self.random.sample(list(degrees), len(degrees))
        sequence = degrees["tp"] > 1 and self.maybe(0.6)
        splits = pipeline["schedule"] in ("zero_bubble", "zbv", "dualpipe_v") and degrees["pp"] > 1
        stage = self.of(0, 1, 2) if splits and not self.lenient else self.of(0, 1, 2, 3)
        period = 0 if splits and not self.lenient else self.of(0, 0, 1, 2)
        recompute: Section = {"every": period}
        if period:
            recompute["granularity"] = self.of("full", "selective")
        recompute["regather_sequence_parallel_input"] = sequence and period != 1 and self.maybe(0.4)
        return {
            "mesh": mesh,
            "zero": {"stage": stage, "prefetch": self.of(0, 0, 1) if stage == 3 or self.lenient else 0},
            "tensor": {"sequence": sequence},
            "context": {"style": self.of(*["auto"] * 12, *STYLES)},
            "pipeline": pipeline,
            "recompute": recompute,
        }

    def model(self, kind: str, stages: int) -> Section:
        """Section `model`, of at least as many blocks as there are stages."""
        causal = kind != "encoder"
        positions = [entry.name for entry in family("position")]
        model: Section = self.options(family("model").get(kind).part.Config()) | {
            "kind": kind,
            "width": self.of(24, 32, 30),
            "dropout": self.of(0.1, 0.1, 0.0),
            "position": self.part("position", positions),
        }
        where = family("position").get(model["position"]["kind"]).traits.where
        self.position_needs = {"bias": {"bias": True}, "scores": {"position_terms": True}}.get(where, {})
        if kind == "encoder_decoder":
            encoder, decoder = self.of(1, 2), self.of(1, 2, 3)
            model["encoder"] = self.stack(encoder, causal=False)
            model["decoder"] = self.stack(max(decoder, stages - encoder), causal=True, cross=True)
            model["decoder"]["block"]["cross"] = self.mixer(causal=False, cross=True)
        else:
            model["stack"] = self.stack(max(stages, self.of(1, 2, 3, 4, 4)), causal=causal)
        if kind == "encoder":
            prefixed = not self.documents and self.degrees["cp"] == 1 and self.maybe(0.5)
            model["global_tokens"] = self.of(1, 3) if prefixed else 0
            model["global_mean"] = prefixed and model["global_mean"]
        return model

    def stack(self, depth: int, *, causal: bool, cross: bool = False) -> Section:
        """A stack whose blocks are of one kind or two."""
        block: Section = {
            "mixer": self.mixer(causal=causal),
            "ffn": self.ffn(),
            "norm": self.norm(between_sublayers=True),
            "residual": self.of("pre", "pre", "post", "sandwich", self.of("rezero", "no_norm", "res_post")),
            "dropout": self.of(0.1, 0.1, 0.0),
        }
        if block["residual"] == "res_post" and block["norm"]["kind"] == "scale":
            # It divides a sublayer's output, small at first, by its length: on one process a change of all weights by
            # 1e-16 moves a weight by 2.6e-9 in two steps, more than the layouts may differ.
            block["residual"] = "pre"
        if self.maybe(0.15):
            ffn, mixers = {"part": "ffn", "factor": 0.5}, [{"part": "mixer"}, *[{"part": "cross"}] * cross]
            block["sublayers"] = self.of([ffn, *mixers, ffn], [mixers[0], *mixers, ffn], [ffn, *mixers])
        has_kind = self.maybe(0.15) and (block["residual"] != "post" or self.lenient)
        if has_kind:
            kind = self.of("reversible", "reversible", "parallel")
            # A placement that others cannot have is refused where the config is read, before any check.
            block["residual"] = kind if block["residual"] == "post" else {"kind": kind, "placement": block["residual"]}
        if self.maybe(0.1) and (not has_kind or self.lenient):
            block["position"] = self.part("position", ["learned", "sinusoidal", "floater"])
        share = self.of("all", "mixer", "ffn") if self.maybe(0.1) else "none"
        rule: Section = {"every": 2, "at": 1}
        if self.maybe(0.5):
            rule["ffn"] = self.ffn()
        if self.maybe(0.5):
            rule["mixer"] = self.mixer(causal=causal)
        rules = [rule] if len(rule) > 2 and (share == "none" or self.lenient) else []
        return {"depth": depth, "block": block, "rules": rules, "share": share}

    def norm(self, *, between_sublayers: bool) -> Section:
        """A norm; what one by the batch computes depends on how many ranks make the batch."""
        norms = [entry for entry in family("norm") if not entry.traits.batch_statistics or between_sublayers]
        alone = self.degrees["dp_replicate"] * self.degrees["dp_shard"] == 1
        return self.part("norm", [entry.name for entry in norms if entry.traits.per_token or alone])

    def mixer(self, *, causal: bool, cross: bool = False) -> Section:
        """Attention around a core, now and then another mixer."""
        tp = self.degrees["tp"]
        if not causal and not cross and self.maybe(0.3 if self.lenient else 0.05 * (tp == 1)):
            return self.part("mixer", ["fourier"])
        heads = self.of(*[heads for heads in (4, 4, 4, 2, 8, 3, 6, 9) if heads % tp == 0 or self.lenient])
        core = self.core(causal=causal, cross=cross)
        mixer = self.options(family("mixer").get("attention").part.Config()) | {
            "kind": "attention",
            "heads": heads,
            "head_width": self.of(8, 8, 6, 5),
            "core": core,
            "qk_norm": self.of(None, None, self.norm(between_sublayers=False)),
        }
        mixer["shared_qk"] &= not cross
        mixer["kv_heads"] = heads if mixer["shared_qk"] else self.of(*[g for g in (1, 2, heads) if heads % g == 0])
        drops = family("core").get(core["kind"]).traits.dropout and (self.degrees["cp"] == 1 or self.maybe(0.2))
        mixer["dropout"] = self.of(0.0, 0.1) if drops or self.lenient else 0.0
        return mixer

    def core(self, *, causal: bool, cross: bool = False) -> Section:
        """A core that can do what the model asks, and what the layout asks."""
        needs = {"cross" if cross else "causal" if causal else "bidirectional": True}
        needs |= {"documents": True} if self.documents else {}
        needs |= {} if cross else self.position_needs
        # The heads of `split_heads` are to be shared between its cores on each rank: see `test_centroids.py`.
        entries = [entry for entry in family("core") if entry.name != "split_heads"]
        able = [entry.name for entry in entries if self.lenient or _has(entry, needs)]
        common = [name for name in ("softmax", "block_sparse", "linear") if name in able]
        core = self.part("core", common if common and self.maybe(0.5) else able)
        if core["kind"] == "block_sparse":
            patterns = [entry.name for entry in family("pattern") if self.lenient or _has(entry, {"causal": causal})]
            core["pattern"] = self.part("pattern", patterns)
        return core

    def ffn(self) -> Section:
        """A dense part, a memory or a mixture."""
        kind = self.of("dense", "gated", "moe", "moe", "moe", "product_key_memory" if self.maybe(0.3) else "moe")
        if kind == "product_key_memory" and self.degrees["tp"] > 1 and not self.lenient:
            kind = "moe"
        ffn = self.part("ffn", [kind])
        if kind in ("dense", "gated"):
            ffn["hidden"] = self.of(48, 48, 36, 30)
        if kind == "moe":
            folded = self.degrees["dp_shard"] * self.degrees["cp"] * self.degrees["tp"]
            ffn |= {
                "experts": self.of(4, 4, 4, 8, 6) if folded <= 2 else self.of(4, 8),
                "capacity_factor": self.of(None, 1.0, 1.5),
                "router": self.part("router"),
                "expert": {"kind": self.of("dense", "gated"), "hidden": self.of(16, 16, 12), "bias": self.maybe(0.5)},
                "shared": self.of(None, {"kind": "gated", "hidden": 16}),
                "allow_noncausal_routing": True,
            }
            if ffn["shared"] is None:
                ffn.pop("shared_combine")
        return ffn

    def part(self, name: str, kinds: list[str] | None = None) -> Section:
        """A part of that family, with small sizes and random options."""
        entry = self.of(*[entry for entry in family(name) if kinds is None or entry.name in kinds])
        config = example(entry)
        sizes = SIZES.get(f"{name}/{entry.name}", SIZES.get(entry.name, {}))
        drawn: Section = encode(config) | {"kind": entry.name} | sizes | self.options(config)
        return drawn

    def options(self, config: Any) -> Section:
        """A value for each option of a config that is one of a few, and for noise."""
        values: Section = {}
        for name, field in type(config).model_fields.items():
            if name in FIXED:
                continue
            if get_origin(field.annotation) is Literal:
                default, choices = getattr(config, name), get_args(field.annotation)
                values[name] = self.of(*choices) if self.maybe(0.3) else default
            if field.annotation is bool or name == "shared_qk":
                values[name] = self.maybe(0.3) != bool(getattr(config, name))
            if name in NOISE:
                values[name] = NOISE[name] if self.maybe(0.75) else type(NOISE[name])(0)
        return values


def _has(entry: Entry[Any], needs: Section) -> bool:
    return all(getattr(entry.traits, name) or not value for name, value in needs.items())


def random_run(seed: int) -> RandomRun:
    """The run of a seed: the same for ever, and unlike those of the seeds beside it."""
    return Draw(seed).run(seed)


def hold(run: RandomRun, pool: Pool) -> str:
    """Return refused or trained; AssertionError with the run and how to repeat it."""
    problems = run.check()
    for problem in problems:
        assert problem.path.split(".")[0].split(" ")[0] in Recipe.model_fields, problem
        assert problem.advice, problem
    if problems or run.ranks > MOST_RANKS:
        return "refused"
    options = {**run.sections, "steps": STEPS, "timeout_seconds": TIMEOUT_SECONDS}
    (expected,) = pool.run(trained, 1, run.model, {}, **options)
    compare(expected, pool.run(trained, run.ranks, run.model, run.parallel, **options))
    return "trained"


OUTCOMES = pytest.StashKey[Counter[str]]()


WITH_THE_LONG_TESTS = 20
"""Seeds that `make test-long` tries; `make test-nightly` tries the others."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "layout_seed" in metafunc.fixturenames:
        count, first = metafunc.config.getoption("--layouts"), metafunc.config.getoption("--layout-seed") or 0
        seeds = [
            pytest.param(first + index, marks=[] if index < WITH_THE_LONG_TESTS else [pytest.mark.nightly])
            for index in range(count)
        ]
        metafunc.parametrize("layout_seed", seeds)


def test_random_layout(layout_seed: int, pool: Pool, request: pytest.FixtureRequest) -> None:
    outcomes = request.config.stash.setdefault(OUTCOMES, Counter())
    run = random_run(layout_seed)
    outcomes["failed"] += 1
    try:
        outcome = hold(run, pool)
    except (AssertionError, RankError) as error:
        message = f"layout seed {layout_seed}; alone: --layouts 1 --layout-seed {layout_seed}\n{run}\n{error}"
        raise AssertionError(message) from None
    outcomes["failed"] -= 1
    outcomes[outcome] += 1


def test_random_layouts_are_of_both_kinds(pytestconfig: pytest.Config, capsys: pytest.CaptureFixture[str]) -> None:
    """Enough of them train, and some are refused; how many is printed."""
    outcomes = pytestconfig.stash.get(OUTCOMES, Counter())
    with capsys.disabled():
        print(f"\nrandom layouts: {dict(outcomes)}")
    total = outcomes.total()
    if total >= 40:
        assert outcomes["trained"] >= total / 3
        assert outcomes["refused"] >= 1
