"""The process that runs cases of `xscale bench gpu`: python -m xscale.bench.gpu.worker DESCRIPTOR CONTEXT

It reads one command a line from standard input and writes events, JSON objects of one line, to the file descriptor. A
case that breaks costs its own rows; one that leaves the GPU unusable, or memory behind, ends the process.
"""

import importlib
import os
import sys
import traceback
from json import dumps
from pathlib import Path
from typing import Any

from xscale.core.files.file_safety import decode_json
from xscale.mesh.environment import silence_profiler_log, use_expandable_segments

LEFT_BYTES = 2**30
"""Memory that a case may leave allocated on the GPU before the next one gets a new process."""


def main() -> int:
    """Run until standard input ends."""
    # torch reads the variable when it is first imported.
    use_expandable_segments()
    silence_profiler_log()
    descriptor, options = int(sys.argv[1]), decode_json(sys.argv[2])

    def send(event: dict[str, Any]) -> None:
        line = (dumps(event, default=str) + "\n").encode()
        while line:
            line = line[os.write(descriptor, line) :]

    from xscale.bench.gpu.case import GpuContext

    work, out = (Path(options.pop(name)) for name in ("work", "out"))
    context = GpuContext(**options, work=work, out=out)
    send({"ready": True})
    for line in sys.stdin:
        message = decode_json(line)
        try:
            usable = _run(message, context, send)
        except Exception as error:
            traceback.print_exc()
            usable = _report(message, error, send)
        send({"done": True, "usable": usable})
        if not usable:
            return 1
    return 0


def _run(message: dict[str, Any], context: Any, send: Any) -> bool:
    """Do what the message asks for; return whether the process can run another case."""
    from xscale.bench.gpu.case import CaseReporter, free_memory

    if "machine" in message:
        send({"machine": describe(context)})
        return True
    cases = importlib.import_module(message["module"]).cases(context)
    if "case" not in message:
        send({"cases": [[case.name, case.seconds] for case in cases]})
        return True
    (case,) = (case for case in cases if case.name == message["case"])
    print(f"--- {case.name}", flush=True)
    case.run(CaseReporter(send, message.get("skip", ())))
    reset_compiler()
    free_memory()
    return case.shares_process and left_bytes() < LEFT_BYTES


def _report(message: dict[str, Any], error: Exception, send: Any) -> bool:
    from xscale.bench.gpu.case import CaseReporter

    CaseReporter(send).failure("", error)
    try:
        reset_compiler()
        return left_bytes() < LEFT_BYTES and "case" in message
    except Exception:
        # An error within a kernel: each later call of the GPU fails.
        return False


def reset_compiler() -> None:
    """Forget what torch.compile compiled, so that a case starts without the recompilations of those before it."""
    import torch

    from xscale.mesh import torch_private

    # Without anything compiled this would import the compiler, for seconds.
    if torch_private.is_compiler_imported():
        torch.compiler.reset()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()


def left_bytes() -> int:
    """Bytes that are allocated on the GPU."""
    import torch

    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.memory_allocated() if initialized else 0


def describe(context: Any) -> dict[str, Any]:
    """Device, versions, commit and date."""
    import numpy
    import torch

    from xscale.bench.harness.machine import describe_machine, version

    return {
        **describe_machine(context.torch_device),
        "cuda": torch.version.cuda,
        "triton": version("triton"),
        "numpy": numpy.__version__,
        "toy": context.toy,
    }


if __name__ == "__main__":
    sys.exit(main())
