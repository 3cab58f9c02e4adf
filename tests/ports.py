"""Ports for servers of tests, which neither connections nor other tests are likely to take meanwhile."""

import random
import socket

RANGE = range(10_000, 20_000, 2)
"""Below the ports that Linux gives connections, and those that the launcher derives from job ids."""


def free_ports(count: int = 1) -> int:
    """Return the first, an even one, of `count` consecutive ports on which nothing listens."""
    while True:
        first = random.SystemRandom().choice(RANGE)
        if all(_is_free(port) for port in range(first, first + count)):
            return first


def _is_free(port: int) -> bool:
    with socket.socket() as listener:
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True
