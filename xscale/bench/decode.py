"""Greedy decoding beside transformers, with the same weights: `xscale bench decode`.

A model of transformers with random weights is saved and imported, and both sides continue one prompt with a KV cache.
In float32 they must generate the same tokens before anything is timed. Then they generate in turns: on one thread, with
the speed in tokens per second of CPU time; or on a GPU, in tokens per second. xscale's steps over a growing cache, over
a static one (on a GPU as a CUDA graph), and compiled are sides.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from xscale.bench.harness.machine import BenchDevice, describe_machine, one_thread
from xscale.bench.harness.timing import Field, alternate, clock_of
from xscale.convert.hf.compare import build
from xscale.convert.hf.import_model import import_model
from xscale.convert.hf.registry import model_of
from xscale.core.errors import ConfigError, Problem
from xscale.generate.decoders import Decoding, StaticDecoder
from xscale.generate.generate import AUTO, GROWING, generate, lay_out_matrices
from xscale.parallel.precision import precision

CPU = BenchDevice()
INITIAL_STD = 0.1
"""Standard deviation of the random weights: smaller ones would repeat one token."""


@dataclass(frozen=True)
class DecodeSizes:
    """Sizes of the models, and of what they generate."""

    width: int = 512
    hidden: int = 1408
    """Width of the feed-forward layer, or of one expert."""
    depth: int = 8
    heads: int = 8
    kv_heads: int = 4
    experts: int = 8
    top_k: int = 2
    vocabulary: int = 32000
    prompt: int = 8
    """Tokens of the prompt; for an encoder-decoder those of the source."""
    tokens: int = 128
    """Generated tokens."""

    @property
    def length(self) -> int:
        """Positions that the models have."""
        return self.prompt + self.tokens

    def check(self) -> list[Problem]:
        """List the problems of the command line options."""
        problems = []
        for name, value in asdict(self).items():
            if value < (least := {"vocabulary": 8, "tokens": 2}.get(name, 1)):
                problems.append(
                    Problem(f"--{name.replace('_', '-')}", f"must be at least {least}, got {value}")
                )
        for name, value, divisor in (
            ("width", self.width, self.heads),
            ("heads", self.heads, self.kv_heads),
        ):
            if not problems and value % divisor:
                what = f"{value} is not a multiple of {divisor}"
                problems.append(
                    Problem(f"--{name}", what, f"Take {divisor * max(1, value // divisor)}.")
                )
        if not problems and self.top_k > self.experts:
            what = f"top_k={self.top_k} exceeds experts={self.experts}"
            problems.append(Problem("--top-k", what, f"Take 1 to {self.experts}."))
        return problems


def _llama(sizes: DecodeSizes) -> dict[str, Any]:
    return {
        "hidden_size": sizes.width,
        "intermediate_size": sizes.hidden,
        "num_hidden_layers": sizes.depth,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "vocab_size": sizes.vocabulary,
        "max_position_embeddings": sizes.length,
        "initializer_range": INITIAL_STD,
        "tie_word_embeddings": False,
    }


def _mixtral(sizes: DecodeSizes) -> dict[str, Any]:
    experts = {
        "num_local_experts": sizes.experts,
        "num_experts_per_tok": sizes.top_k,
        "sliding_window": None,
    }
    return _llama(sizes) | experts


def _gpt2(sizes: DecodeSizes) -> dict[str, Any]:
    return {
        "n_embd": sizes.width,
        "n_inner": sizes.hidden,
        "n_layer": sizes.depth,
        "n_head": sizes.heads,
        "vocab_size": sizes.vocabulary,
        "n_positions": sizes.length,
        "initializer_range": INITIAL_STD,
        "tie_word_embeddings": False,
    }


def _t5(sizes: DecodeSizes) -> dict[str, Any]:
    return {
        "d_model": sizes.width,
        "d_kv": sizes.width // sizes.heads,
        "d_ff": sizes.hidden,
        "num_layers": sizes.depth,
        "num_heads": sizes.heads,
        "vocab_size": sizes.vocabulary,
        "feed_forward_proj": "gated-gelu",
        "decoder_start_token_id": 0,
        "tie_word_embeddings": False,
    }


MODELS: dict[str, tuple[str, Callable[[DecodeSizes], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "mixtral": ("MixtralForCausalLM", _mixtral),
    "gpt2": ("GPT2LMHeadModel", _gpt2),
    "t5": ("T5ForConditionalGeneration", _t5),
}
"""`model_type` -> the class of transformers, and the keys of its config."""


@dataclass(frozen=True)
class DecodePair:
    """One model twice, as xscale's and as that of transformers, with the same weights."""

    xscale: nn.Module
    transformers: Any
    sizes: DecodeSizes
    encoder_decoder: bool
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def prompt(self) -> Tensor:
        """Return the ids [T] that both continue, or encode."""
        generator = torch.Generator().manual_seed(0)
        return torch.randint(
            2, self.sizes.vocabulary, (self.sizes.prompt,), generator=generator
        ).to(self.device)

    def generate_by_xscale(self, decoding: Decoding = AUTO) -> list[int]:
        """Generate the likeliest tokens."""
        ids, source = self.prompt(), None
        if self.encoder_decoder:
            ids, source = torch.zeros(1, dtype=torch.int64, device=self.device), ids
        # As `xscale generate` does.
        with torch.inference_mode():
            generated: Tensor = generate(
                self.xscale,
                ids,
                self.sizes.tokens,
                end=-1,
                temperature=0,
                source=source,
                decoding=decoding,
            )
        return list(generated.tolist())

    def decodings(self, *, compiled: bool) -> dict[str, Decoding]:
        """Return the ways in which xscale computes the steps, by the names of their sides.

        Steps that are captured or compiled are so before they are timed; an encoder-decoder makes them anew for each
        source. `compiled`: whether one is by torch.compile, for which a CPU needs a minute.
        """
        on_gpu = self.device.type == "cuda"
        captured = "CUDA graph" if on_gpu else "static cache"
        sides = {"xscale, growing cache": GROWING, f"xscale, {captured}": Decoding(cache="static")}
        if compiled:
            sides[f"xscale, {captured}, compiled"] = Decoding(compile=True)
        if not self.encoder_decoder:
            for name, way in list(sides.items())[1:]:
                room = self.sizes.length
                decoder = StaticDecoder(self.xscale, room, compiled=way.compile)
                sides[name] = replace(way, decoder=decoder)
        # The side of this name is what `xscale generate` does by itself.
        default = "xscale, CUDA graph" if on_gpu else "xscale, growing cache"
        return {"xscale": sides.pop(default), **sides}

    def generate_by_transformers(self, **more: Any) -> list[int]:
        """Generate the likeliest tokens; `more` are options of its `generate`."""
        options = {
            "do_sample": False,
            "max_new_tokens": self.sizes.tokens,
            "eos_token_id": None,
            "pad_token_id": 0,
            **more,
        }
        ids = self.transformers.generate(self.prompt()[None], **options)
        return list(ids[0, 1 if self.encoder_decoder else self.sizes.prompt :].tolist())

    def check_same_tokens(self, name: str) -> None:
        """Raise ConfigError if the sides do not generate the same tokens."""
        for decoding in (GROWING, Decoding(cache="static")):
            self._check_same_tokens(name, self.generate_by_xscale(decoding))

    def _check_same_tokens(self, name: str, xscale_tokens: list[int]) -> None:
        hf_tokens = self.generate_by_transformers()
        if xscale_tokens != hf_tokens or len(xscale_tokens) != self.sizes.tokens:
            equal = next(
                (
                    n
                    for n, pair in enumerate(zip(xscale_tokens, hf_tokens, strict=False))
                    if pair[0] != pair[1]
                ),
                "all",
            )
            counts = f"{len(xscale_tokens)} tokens against {len(hf_tokens)} of transformers"
            what = f"{name}: {counts}, of which the first {equal} equal"
            raise ConfigError("bench decode", what)

    def cast(self, dtype: torch.dtype) -> None:
        """Cast both models, and prepare ours as `xscale generate` does; routers keep float32 in xscale."""
        self.transformers.to(dtype)
        precision.cast_parameters(self.xscale, dtype, torch.float32)
        lay_out_matrices(self.xscale)


def build_pair(name: str, sizes: DecodeSizes, device: torch.device = CPU.device) -> DecodePair:
    """Build the model of transformers with random weights, in float32, and import it."""
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loader, keys = MODELS[name]
    kind: Any = getattr(transformers, loader)
    with torch.random.fork_rng(), tempfile.TemporaryDirectory(prefix="xscale-bench-") as folder:
        torch.manual_seed(0)
        hf_model = kind(kind.config_class(**keys(sizes))).eval()
        hf_model.save_pretrained(folder)
        imported = import_model(Path(folder))
    xscale_model = build(model_of(imported.model), imported.sizes, imported.weights)
    encoder_decoder = imported.architecture.kind == "encoder_decoder"
    return DecodePair(xscale_model.to(device), hf_model.to(device), sizes, encoder_decoder, device)


def bench_decode(
    names: Sequence[str],
    sizes: DecodeSizes,
    rounds: int,
    on: BenchDevice = CPU,
    *,
    compiled: bool = False,
) -> dict[str, Any]:
    """Return tokens per second of all sides and the ratio of xscale for each model, as plain values.

    On a CPU they are tokens per second of CPU time. `compiled`: whether a side has steps that torch.compile compiles.
    """
    with nullcontext() if on.on_gpu else one_thread():
        models = [bench_model(name, sizes, rounds, on, compiled=compiled) for name in names]
        machine = describe_machine(on.device)
    dtype = str(on.dtype).removeprefix("torch.")
    return {"models": models, "sizes": asdict(sizes), "dtype": dtype, "rounds": rounds, **machine}


def bench_model(
    name: str, sizes: DecodeSizes, rounds: int, on: BenchDevice, *, compiled: bool
) -> dict[str, Any]:
    """Return the speeds of one model; ConfigError if the sides generate different tokens in float32.

    `compiled`: whether a side has steps that torch.compile has compiled.
    """
    pair = build_pair(name, sizes, on.device)
    pair.check_same_tokens(name)
    pair.cast(on.dtype)
    sides: dict[str, Callable[[], object]] = {"transformers": pair.generate_by_transformers}
    if on.on_gpu and compiled and not pair.encoder_decoder:
        # It compiles the step over a static cache, in the mode reduce-overhead.
        static = partial(pair.generate_by_transformers, cache_implementation="static")
        sides["transformers, static cache, compiled"] = static
    for side, decoding in pair.decodings(compiled=compiled).items():
        sides[side] = partial(pair.generate_by_xscale, decoding)
    timings = alternate(sides, clock_of(on.device), rounds, swap=True)
    field: Field = "seconds" if on.on_gpu else "processor_seconds"
    return {
        "name": name,
        "parameters": sum(parameter.numel() for parameter in pair.xscale.parameters()),
        "tokens_per_second" if on.on_gpu else "tokens_per_processor_second": {
            side: sizes.tokens / timings.median(side, field) for side in sides
        },
        "ratio": timings.ratio("transformers", "xscale", field),
        "ratios": [
            base / seconds
            for seconds, base in zip(
                timings.values("xscale", field), timings.values("transformers", field), strict=True
            )
        ],
    }


def format_table(results: dict[str, Any]) -> str:
    """Format the results as text."""
    sizes = DecodeSizes(**results["sizes"])
    on_gpu = any("tokens_per_second" in model for model in results["models"])
    unit = "tokens per second" if on_gpu else "tokens per CPU second"
    lines = [
        f"{results['device']}; torch {results['torch']}, transformers {results['transformers']}, Python "
        f"{results['python']}, commit {results['commit']}, {results['date']}",
        f"{results['dtype']}, width {sizes.width}, {sizes.depth} blocks of hidden {sizes.hidden}, {sizes.heads} heads "
        f"({sizes.kv_heads} kv), vocabulary {sizes.vocabulary}, {sizes.experts} experts, top-{sizes.top_k}; prompt of "
        f"{sizes.prompt} tokens, {sizes.tokens} generated; medians of {results['rounds']} rounds in turns",
        f"{unit:<24}{'xscale':>10}{'transformers':>15}{'ratio':>8}   least to most",
    ]
    for model in results["models"]:
        speeds = model["tokens_per_second" if on_gpu else "tokens_per_processor_second"]
        lines.append(
            f"{model['name']:<10}{model['parameters'] / 1e6:>10.1f}M   {speeds['xscale']:>10.1f}"
            f"{speeds['transformers']:>15.1f}{model['ratio']:>7.2f}x   "
            f"{min(model['ratios']):.2f} to {max(model['ratios']):.2f}"
        )
        lines += [
            f"  {side:<45}{speed:>10.1f}"
            for side, speed in speeds.items()
            if side not in ("xscale", "transformers")
        ]
    return "\n".join(lines)


def bench(
    names: Sequence[str],
    sizes: DecodeSizes,
    on: BenchDevice,
    rounds: int,
    *,
    compiled: bool,
    as_json: bool,
    record: Path | None,
) -> None:
    """Run the benchmark. ConfigError for unknown names and sizes that do not fit, or if the tokens differ."""
    for name in names:
        if name not in MODELS:
            raise ConfigError(
                "bench decode",
                f"there is no '{name}'",
                f"Take some of {', '.join(MODELS)}; none: all.",
            )
    if rounds < 1:
        raise ConfigError("--rounds", f"must be at least 1, got {rounds}", "Take 1 or more.")
    if problems := sizes.check():
        raise ConfigError(problems)
    if find_spec("transformers") is None:
        raise ConfigError(
            "bench decode",
            "the library transformers is not installed",
            "Run: pip install 'transformers>=5.0'",
        )
    results = bench_decode(names or list(MODELS), sizes, rounds, on, compiled=compiled)
    if record is not None:
        record.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results) if as_json else format_table(results), flush=True)
