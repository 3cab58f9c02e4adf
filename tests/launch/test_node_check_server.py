"""The roll-call over loopback: everyone hears the same verdict, and the absent are not waited for longer than said."""

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.ports import free_ports
from xscale_launch.nodes import node_check


def names(words: Sequence[dict[str, Any]]) -> list[str]:
    return sorted(str(word["node"]) for word in words)


def test_all_hear_what_the_head_found() -> None:
    port, heard = free_ports(), {}

    def other(name: str) -> None:
        heard[name] = node_check.send_report("127.0.0.1", port, {"node": name}, 20)

    threads = [threading.Thread(target=other, args=(name,)) for name in ("n2", "n3")]
    for thread in threads:
        thread.start()
    time.sleep(0.3)  # they come before the head listens, and have to try again
    assert node_check.serve(port, {"node": "n1"}, 3, 20, names) == ["n1", "n2", "n3"]
    for thread in threads:
        thread.join(20)
    assert heard == {"n2": ["n1", "n2", "n3"], "n3": ["n1", "n2", "n3"]}


def test_who_does_not_come_is_missing_from_the_words() -> None:
    assert node_check.serve(free_ports(), {"node": "n1"}, 2, 0.5, names) == ["n1"]


def test_clocks_are_compared_at_the_moment_of_sending() -> None:
    port, words = free_ports(), list[dict[str, Any]]()

    def judge(said: Sequence[dict[str, Any]]) -> list[str]:
        words.extend(said)
        return []

    def other() -> None:
        node_check.send_report("127.0.0.1", port, {"node": "n2", "clock": 0.0}, 20)

    thread = threading.Thread(target=other)
    thread.start()
    node_check.serve(port, {"node": "n1"}, 2, 20, judge)
    thread.join(20)
    assert abs(words[1]["heard"] - words[1]["clock"]) < 5


def test_an_unreachable_head_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"head node 127\.0\.0\.1 cannot be reached at port"):
        node_check.send_report("127.0.0.1", free_ports(), {"node": "n2"}, 0.5)


def test_a_stranger_on_the_port_is_ignored() -> None:
    import socket

    port = free_ports()

    def strangers() -> None:
        time.sleep(0.2)
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(b"GET / HTTP/1.1\n")

    thread = threading.Thread(target=strangers)
    thread.start()
    assert node_check.serve(port, {"node": "n1"}, 2, 1.5, names) == ["n1"]
    thread.join(20)
