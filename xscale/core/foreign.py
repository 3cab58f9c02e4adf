"""Errors of parsers and other libraries as one sentence: what a file made them raise, without their advice."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from xscale.core.errors import ConfigError, plain

REASON_CHARACTERS = 300
"""Longest reason that is shown."""
REFUSED_GLOBAL = re.compile(r"GLOBAL (\S+)")
REFUSED_OPERATION = re.compile(r"Unsupported operand (\d+)")
ADVICE = re.compile(
    r"weights_only|file an issue|trust_remote_code|you can|please|try |set_int_max_str_digits", re.I
)
"""Advice of libraries, of which some would run code that the file contains."""


def reason(error: BaseException) -> str:
    """Return why a library refused a file, as a clause on one line; of torch's unpickler, which name was refused."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    if name := REFUSED_GLOBAL.search(text):
        return f"it names {plain(name[1], REASON_CHARACTERS)}, which no file of tensors does, and which could run code"
    if operation := REFUSED_OPERATION.search(text):
        return f"it has an operation of pickle (number {operation[1]}) that no file of tensors has"
    if isinstance(error, MemoryError):
        return "it needs more memory than there is"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if "weights_only" in text:
        return "it holds something else than tensors"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if isinstance(error, KeyError):
        return f"it has no key {plain(text, REASON_CHARACTERS)}"
    # A line with a colon at its end is the heading of the next one.
    count = 2 if lines and lines[0].endswith(":") else 1
    sentences = [
        part for line in [" ".join(lines[:count])] for part in re.split(r"(?<=[.!?]) ", line)
    ]
    kept = (
        [sentences[0], *(part for part in sentences[1:] if not ADVICE.search(part))]
        if sentences
        else []
    )
    return plain(" ".join(kept).rstrip("."), REASON_CHARACTERS) or type(error).__name__


def is_panic(error: BaseException) -> bool:
    """Whether this is the panic of a library in Rust, which derives from BaseException to escape `except Exception`."""
    return type(error).__name__ == "PanicException"


@contextmanager
def foreign_errors(path: object, what: str, fix: str = "") -> Iterator[None]:
    """Turn every error that a library raises about the file `path` into a ConfigError `what: reason`.

    A panic counts. ConfigErrors pass, and so does what ends a process (KeyboardInterrupt, SystemExit).
    """
    try:
        yield
    except ConfigError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        raise ConfigError(str(path), f"{what}: {reason(error)}", fix) from None


@contextmanager
def quiet_panics() -> Iterator[None]:
    """Keep a library in Rust from writing of its panic on stderr: the exception says it, in one sentence.

    What is written there otherwise meanwhile appears afterwards.
    """
    sys.stderr.flush()
    panicked = False
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        except BaseException as error:
            panicked = is_panic(error)
            raise
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            if not panicked and (text := written.read()):
                os.write(2, text)
