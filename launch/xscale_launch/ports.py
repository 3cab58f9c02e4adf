"""Ports on this machine: a free one, or whether the one that the user wants is taken."""

import socket

from xscale_launch.errors import LaunchError


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now. Somebody could take it before it is used; nobody usually does."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        port: int = listener.getsockname()[1]
        return port


def require_free(port: int, host: str = "") -> int:
    """`port` itself; raises `LaunchError` when a process listens on it already, or it is no port."""
    if not 1 <= port <= 65535:
        raise LaunchError(
            f"{port} is no port: choose one from 1024 to 65535, or leave --port out to have a free one chosen"
        )
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise LaunchError(
                f"port {port} cannot be used on this machine ({error.strerror}): perhaps another run listens on it. "
                f"Leave --port out to have a free one chosen; {free_port()} is free now"
            ) from None
    return port
