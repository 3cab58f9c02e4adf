"""A property that is computed at its first reading and kept, which torch.compile can trace.

`functools.cached_property` takes a lock up to Python 3.11, and a lock breaks the graph: every block of attention under
a mask was cut in two there.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

Value = TypeVar("Value")


class TraceableProperty(Generic[Value]):
    """A `functools.cached_property` without a lock, for objects that one thread reads.

    It is kept in the object's `__dict__`, frozen dataclasses included, which Python reads first from then on.
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self.compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> "TraceableProperty[Value]": ...
    @overload
    def __get__(self, instance: object, owner: type) -> Value: ...

    def __get__(self, instance: object | None, owner: type) -> "TraceableProperty[Value] | Value":
        if instance is None:
            return self
        value = self.compute(instance)
        instance.__dict__[self.name] = value
        return value
