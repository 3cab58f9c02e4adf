"""`xscale bench`: benchmarks, always next to a baseline in the same run."""

from pathlib import Path
from typing import Annotated, Any

import typer

from xscale.cli.bench.runs import (
    bench_checkpoint,
    bench_memory,
    bench_plan,
    bench_start,
    bench_train,
)
from xscale.cli.terminal.complete import one_of
from xscale.cli.terminal.group import Group
from xscale.cli.terminal.options import CommandWithSettings, Json, Record
from xscale.core.errors import ConfigError
from xscale.core.paths import path


class BenchGroup(Group):
    """A command group in which an operator's name is a command too, resolved only if no other command matches."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is None:
            from xscale_kernels.select import operators

            if cmd_name in (*operators(), "ops", "parts"):
                return super().get_command(ctx, "op")
        return command


bench_app = typer.Typer(
    cls=BenchGroup, help="Benchmark against a baseline in the same run.", no_args_is_help=True
)


@bench_app.callback()
def prepare() -> None:
    """Benchmark against a baseline in the same run."""
    from xscale.mesh.environment import use_expandable_segments

    use_expandable_segments()


Device = Annotated[
    str,
    typer.Option(
        help="cpu, with CPU time on one thread, or cuda.", autocompletion=one_of("cpu", "cuda")
    ),
]
Dtype = Annotated[
    str, typer.Option(help="float32 or bfloat16.", autocompletion=one_of("float32", "bfloat16"))
]


@bench_app.command(
    "op",
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": [],
    },
    add_help_option=False,
)
def bench_op(context: typer.Context) -> None:
    """OPERATOR, or ops for all: benchmark a fused operator after its tests. See `xscale bench rmsnorm --help`."""
    from xscale.bench.operators.command import main as bench
    from xscale.mesh.environment import silence_profiler_log

    # On a CPU the peak of the memory is read from torch's profiler.
    silence_profiler_log()
    names = [] if context.info_name == "op" else [context.info_name or ""]
    raise typer.Exit(bench([*names, *context.args]))


def _lengths(text: str) -> list[int]:
    """Read sequence lengths that are separated by commas."""
    numbers = text.split(",")
    if not all(number.strip().isdigit() and int(number) for number in numbers):
        raise ConfigError(
            "--lengths",
            f"must be sequence lengths separated by commas, got {text!r}",
            "Give 4096,8192,16384.",
        )
    return [int(number) for number in numbers]


@bench_app.command("attention")
def bench_attention(
    only: Annotated[
        list[str] | None,
        typer.Argument(
            help="Cores, 'block_sparse PATTERN', 'mixer NAME', or positions; default: all."
        ),
    ] = None,
    lengths: Annotated[
        str, typer.Option(help="Sequence lengths, separated by commas.")
    ] = "4096,8192,16384,32768",
    heads: Annotated[
        int | None,
        typer.Option(help="Heads, of head width 64.", min=1, show_default="1; 8 with --positions"),
    ] = None,
    positions: Annotated[
        bool,
        typer.Option(
            "--positions",
            help="Relative positions: dense against plain attention over 2048 tokens, and block-sparse.",
        ),
    ] = False,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Benchmark attention cores and patterns over sequence lengths, and block-sparse against dense attention."""
    from xscale.mesh.environment import silence_profiler_log

    silence_profiler_log()
    if positions:
        from xscale.bench.positions import bench_positions

        if device != "cpu":
            raise ConfigError("--positions", "is measured on a CPU only", "Leave --device out.")
        bench_positions(only or [], _lengths(lengths), heads or 8, as_json=json)
    else:
        from xscale.bench.attention import bench
        from xscale.bench.harness.machine import BenchDevice

        bench(
            only or [], _lengths(lengths), heads or 1, BenchDevice.of(device, dtype), as_json=json
        )


@bench_app.command("layers")
def bench_layers(
    only: Annotated[
        list[str] | None,
        typer.Argument(help="Positions, or layers that a package has; default: all."),
    ] = None,
    width: Annotated[int, typer.Option(help="Width of the layer.", min=1)] = 512,
    heads: Annotated[int, typer.Option(help="Heads.", min=1)] = 8,
    lengths: Annotated[
        str, typer.Option(help="Sequence lengths, separated by commas.")
    ] = "1024,2048",
    rounds: Annotated[int, typer.Option(help="Timed rounds.", min=1)] = 5,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    json: Json = False,
) -> None:
    """Benchmark relative positions against plain attention, and layers against those of installed packages."""
    from xscale.mesh.environment import silence_profiler_log

    silence_profiler_log()
    from xscale.bench.harness.machine import BenchDevice
    from xscale.bench.layers import bench

    bench(
        only or [],
        width,
        heads,
        _lengths(lengths),
        rounds,
        BenchDevice.of(device, dtype),
        as_json=json,
    )


@bench_app.command("decode")
def bench_decode(
    only: Annotated[
        list[str] | None, typer.Argument(help="llama, mixtral, gpt2, t5; default: all.")
    ] = None,
    width: Annotated[int, typer.Option(help="Model width.")] = 512,
    hidden: Annotated[
        int | None, typer.Option(help="Hidden width; default: 11/4 of the width.")
    ] = None,
    depth: Annotated[int, typer.Option(help="Number of blocks.")] = 8,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key and value heads of llama and mixtral.")] = 4,
    experts: Annotated[int, typer.Option(help="Experts of mixtral.")] = 8,
    top_k: Annotated[int, typer.Option(help="Experts per token of mixtral.")] = 2,
    vocabulary: Annotated[int, typer.Option(help="Size of the vocabulary.")] = 32000,
    prompt: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 8,
    tokens: Annotated[int, typer.Option(help="Generated tokens.")] = 128,
    device: Device = "cpu",
    dtype: Dtype = "float32",
    compile: Annotated[
        bool, typer.Option("--compile", help="Also time steps by torch.compile; a minute on a CPU.")
    ] = False,
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 7,
    json: Json = False,
    record: Record = None,
) -> None:
    """Benchmark greedy decoding against transformers with the same weights, after both generate the same tokens."""
    from xscale.bench.decode import DecodeSizes, bench
    from xscale.bench.harness.machine import BenchDevice

    hidden = hidden or 11 * width // 4
    sizes = DecodeSizes(
        width, hidden, depth, heads, kv_heads, experts, top_k, vocabulary, prompt, tokens
    )
    on = BenchDevice.of(device, dtype)
    bench(only or [], sizes, on, rounds, compiled=compile, as_json=json, record=record)


bench_app.command("checkpoint")(bench_checkpoint)
bench_app.command("memory", cls=CommandWithSettings)(bench_memory)
bench_app.command("start", cls=CommandWithSettings)(bench_start)
bench_app.command("plan")(bench_plan)
bench_app.command("train", cls=CommandWithSettings)(bench_train)


@bench_app.command("moe")
def bench_moe(
    width: Annotated[
        list[int] | None,
        typer.Option(help="Model width; may be given several times. [default: 512]"),
    ] = None,
    hidden: Annotated[
        int | None, typer.Option(help="Hidden width of an expert; default: twice the width.")
    ] = None,
    experts: Annotated[int, typer.Option(help="Number of experts.")] = 8,
    top_k: Annotated[int, typer.Option(help="Experts per token.")] = 2,
    tokens: Annotated[int, typer.Option(help="Tokens per micro-batch.")] = 2048,
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 15,
    processes: Annotated[int, typer.Option(help="Expert-parallel processes.")] = 1,
    json: Json = False,
    record: Record = None,
) -> None:
    """Benchmark an MoE layer against a dense layer of equal active FLOPs, a loop, and transformers; tests first."""
    from xscale.bench.moe.layers import LayerSizes
    from xscale.bench.moe.run import bench

    sizes = LayerSizes(512, hidden, experts, top_k, tokens)
    raise typer.Exit(bench(width or [512], sizes, rounds, processes, as_json=json, record=record))


@bench_app.command("parallel")
def bench_parallel(
    only: Annotated[
        list[str] | None, typer.Argument(help="tp, pp, cp-ring, cp-ulysses, ep; default: all.")
    ] = None,
    width: Annotated[int, typer.Option(help="Model width.")] = 256,
    depth: Annotated[int, typer.Option(help="Number of blocks.")] = 4,
    length: Annotated[int, typer.Option(help="Sequence length.")] = 256,
    sequences: Annotated[int, typer.Option(help="Sequences per step, over both processes.")] = 8,
    rounds: Annotated[int, typer.Option(help="Timed rounds.")] = 15,
    json: Json = False,
    record: Record = None,
) -> None:
    """Benchmark tp, pp, cp and ep on two processes against torch's own implementations; equality is tested first."""
    from xscale.bench.parallel.run import bench
    from xscale.bench.parallel.sizes import ParallelSizes

    sizes = ParallelSizes(width=width, depth=depth, length=length, sequences=sequences)
    raise typer.Exit(bench(only or [], sizes, rounds, as_json=json, record=record))


@bench_app.command("gpu")
def bench_gpu(
    seconds: Annotated[float, typer.Option(help="Time of the whole command.")] = 420.0,
    out: Annotated[
        Path, typer.Option(help="Folder of the results: at most eight files.", parser=path)
    ] = Path("bench-gpu"),
    only: Annotated[
        list[str] | None,
        typer.Option(help="A job, such as J2 or train, several times; default: all, by worth."),
    ] = None,
    no_tests: Annotated[
        bool, typer.Option("--no-tests", help="Leave the tests out: another job ran them.")
    ] = False,
    device: Annotated[str, typer.Option(help="cuda, or cpu with --toy.")] = "cuda",
    toy: Annotated[
        bool, typer.Option("--toy", help="Sizes of a second each, whose figures mean nothing.")
    ] = False,
    list_jobs: Annotated[
        bool, typer.Option("--list", help="Print the jobs and their seconds.")
    ] = False,
) -> None:
    """Measure everything that needs one GPU, the figures that matter most first, within a time limit.

    Each figure is written to OUT/results.json at once. A case that breaks, hangs or runs out of memory costs its row.
    """
    from xscale.bench.gpu.measure import GpuOptions, bench

    options = GpuOptions(seconds, out.resolve(), device, toy, not no_tests)
    raise typer.Exit(bench(only or [], options, list_only=list_jobs))


@bench_app.command("links")
def bench_links(
    out: Annotated[
        Path | None, typer.Option(help="File for the JSON; default: print it.", parser=path)
    ] = None,
    name: Annotated[str, typer.Option(help="Name of this node; default: its host name.")] = "",
    megabytes: Annotated[int, typer.Option(help="Size of the all-reduce.")] = 16,
    seconds: Annotated[float, typer.Option(help="Time limit for starting a new pair.")] = 20.0,
) -> None:
    """Benchmark an all-reduce between each two nodes. Start one process per node, with RANK set or by srun."""
    import json
    import socket

    from xscale.mesh.environment import read_rank_info
    from xscale.mesh.links import measure_links
    from xscale_launch.mpi.mpi_rank import set_rank_env

    set_rank_env()
    rank = read_rank_info()
    if rank.is_single_process:
        raise ConfigError(
            "", "a single process has no links", "Start one per node: srun --ntasks-per-node=1 ..."
        )
    speeds = measure_links(rank, name or socket.gethostname(), megabytes * 2**20, seconds)
    if rank.is_rank0 and out is not None:
        out.write_text(json.dumps(speeds))
    elif rank.is_rank0:
        print(json.dumps(speeds))
