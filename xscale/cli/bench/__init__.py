"""`xscale bench`: its commands, and those that measure whole runs."""

from xscale.cli.bench.commands import bench_app

__all__ = ["bench_app"]
