"""Crash dumps: each rank's report, stacks and flight record, written into the run folder when a run fails or hangs."""

import faulthandler
import json
import linecache
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from io import BufferedWriter, TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Literal

from xscale.core.files.atomic_write import write_atomically
from xscale.core.files.file_safety import decode_json
from xscale.core.files.run_files import make_run_folder, open_run_file, read_run_file
from xscale.mesh.flight_recorder import CollectiveRecord, collective_records, dump
from xscale.watchdog.diagnosis import Collective, RankReport, diagnose

RECORDS_LISTED = 20
"""How many collectives the text of a rank lists."""
POLL_SECONDS, LONGEST_POLL_SECONDS = 0.05, 1.0
"""A rank looks for the others' reports again after this time, each time twice as long: thousands may do so at once."""
VERDICT_SECONDS = 2.0
"""How much longer than the judges the other ranks wait for the verdict."""
WAITING_FILES = ("/torch/distributed/", "/torch/cuda/", "/mesh/collectives.py")
"""Files of frames in which a rank waits for others: under NCCL, where it reads what they have summed."""
DEVICE_READS = ("tolist(", ".item(", "float(", "int(", "bool(", ".cpu(", "nonzero(", "synchronize(")
"""Calls in which the host waits for the device."""


class CrashDumps:
    """The folder `faults/<attempt>` of a run, made by the first rank that writes into it.

    The ranks communicate by files, because these need nothing from a rank that hangs and outlive one that dies.
    """

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.folder = folder
        self.rank = rank
        self.world = world
        self.pending_message: object | None = None
        """The message between two ranks that this rank waits for: under gloo torch records collectives only."""

    def begun(self) -> bool:
        """Whether any rank has written or is writing."""
        return self.folder.is_dir()

    def write(
        self,
        kind: Literal["hangs", "asked", "lost", "failed"],
        step: int,
        phase: str,
        seconds: float,
        frame: FrameType | None,
        text: str = "",
    ) -> None:
        """Write this rank's stacks and collectives, then its report. `frame`: the innermost of the training thread.

        The first report stays: a connection may break later only because another rank has reported and exited.
        """
        make_run_folder(self.folder.parents[1], *self.folder.parts[-2:])
        if self._file(self.rank).exists():
            return
        records = collective_records()
        collectives_only = [record for record in records if not record.is_message]
        # A collective that failed because a rank was lost counts as completed; it is the last record.
        pending = [record for record in collectives_only if not record.completed]
        pending = pending or (collectives_only[-1:] if kind == "lost" else [])
        collectives = tuple(
            Collective(record.name, record.group, record.ranks, record.number) for record in pending
        )
        reached = {record.group: record.number for record in collectives_only}
        where, in_wait = innermost_frame(frame)
        message = self._message(records, in_wait or _reads_device(frame))
        report = RankReport(
            self.rank,
            kind,
            step,
            phase,
            seconds,
            where,
            in_wait,
            collectives,
            reached,
            text,
            message,
        )
        text_file = open_run_file(self.folder / f"rank-{self.rank:05d}.txt", "wb")
        with TextIOWrapper(BufferedWriter(text_file), encoding="utf-8") as file:
            file.write(
                f"rank {self.rank} at {report.position}; last heartbeat {seconds:.1f} s ago. {text}\n\nStacks:\n"
            )
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            if message:
                file.write(f"\nWaits for the {message}\n")
            file.write("\nLast collectives, the newest last:\n")
            for record in records[-RECORDS_LISTED:]:
                state = "completed" if record.completed else "NOT COMPLETED"
                file.write(
                    f"{record.name} number {record.number} of group {record.group} {record.ranks}, {state}, "
                )
                file.write(f"started {record.seconds:.1f} s ago at {record.call_site}\n")
        if flight_record := dump():
            write_atomically(self.folder / f"flight-{self.rank}", flight_record)
        write_atomically(self._file(self.rank), json.dumps(asdict(report)))

    def _message(self, records: list[CollectiveRecord], waits: bool) -> str:
        """Name the message that this rank waits for; under NCCL the first that has not completed, if the host waits."""
        if self.pending_message is not None:
            return str(self.pending_message)
        message = next(
            (record for record in records if record.is_message and not record.completed), None
        )
        return f"{message.name} (number {message.number})" if waits and message is not None else ""

    def conclude(self, patience_seconds: float) -> str:
        """Diagnose once every rank has reported or `patience_seconds` are over; all return the first sentence.

        Rank 0 and the first rank to come here, since either may be lost, list the folder for it. The others wait for
        their verdict, and judge if there is none.
        """
        file = self.folder / "verdict.txt"
        is_judge = self._claims() or self.rank == 0
        has_verdict = not is_judge and _wait(file.exists, patience_seconds + VERDICT_SECONDS)
        if has_verdict and (verdict := read_run_file(file).decode().strip()):
            return verdict
        _wait(lambda: len(self._reported()) >= self.world, patience_seconds if is_judge else 0.0)
        sentence = (
            f"{diagnose(self.reports(), self.world)}. Stacks and flight records: {self.folder}"
        )
        try:
            with open_run_file(file, "xb") as new:
                new.write(f"{sentence}\n".encode())
        except FileExistsError:
            return read_run_file(file).decode().strip() or sentence
        return sentence

    def _claims(self) -> bool:
        """Whether this rank is the first that is about to diagnose."""
        try:
            open_run_file(self.folder / "judge", "xb").close()
        except FileExistsError:
            return False
        return True

    def reports(self) -> dict[int, RankReport]:
        """The reports written so far, by rank."""
        return {rank: _read(self._file(rank)) for rank in self._reported()}

    def _reported(self) -> list[int]:
        """The ranks whose reports are in the folder, in order; one listing."""
        matches = (re.fullmatch(r"rank-(\d{5,})\.json", name) for name in os.listdir(self.folder))
        return sorted(int(match[1]) for match in matches if match is not None)

    def _file(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.json"


def _read(file: Path) -> RankReport:
    data = decode_json(read_run_file(file))
    pending = data.pop("collectives")
    collectives = tuple(Collective(**{**item, "ranks": tuple(item["ranks"])}) for item in pending)
    return RankReport(collectives=collectives, **data)


def innermost_frame(frame: FrameType | None) -> tuple[str, bool]:
    """'FILE:LINE in FUNCTION' of a frame, and whether it waits for another rank."""
    if frame is None:
        return "an unknown frame", False
    name, line = frame.f_code.co_filename, frame.f_lineno
    in_wait = any(part in name for part in WAITING_FILES) or "wait" in linecache.getline(name, line)
    return f"{name}:{line} in {frame.f_code.co_name}", in_wait


def _reads_device(frame: FrameType | None) -> bool:
    """Whether a frame is at a call that waits for the device."""
    line = "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    return any(call in line for call in DEVICE_READS)


def _wait(is_over: Callable[[], bool], seconds: float) -> bool:
    """Wait until `is_over` or until the seconds are over; return which."""
    end, pause = time.monotonic() + seconds, POLL_SECONDS
    while not (over := is_over()) and (seconds_left := end - time.monotonic()) > 0:
        time.sleep(min(pause, seconds_left))
        pause = min(2 * pause, LONGEST_POLL_SECONDS)
    return over


def frame_of_thread(thread: int | None) -> FrameType | None:
    """The innermost frame of a thread."""
    return sys._current_frames().get(thread or 0)
