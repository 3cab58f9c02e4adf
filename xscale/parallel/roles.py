"""Tables from the roles of seams to what a kind of parallelism puts there, and the loop that applies one to a model."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from xscale.nn.module import seams_of, substitute
from xscale.nn.norm.norm import Norm
from xscale.nn.roles import Role

RoleTable = dict[Role, Callable[..., None]]
"""Role -> what is done at a seam with it, called with the module, the seam's name and what the parallelism gives."""


def seams_in(modules: Iterable[nn.Module], *roles: Role) -> Iterator[tuple[Any, str, Role]]:
    """Yield the seams of the modules, as module, name and role; those with one of `roles` if any are given."""
    for module in list(modules):
        for seam, role in seams_of(module).items():
            if not roles or role in roles:
                yield module, seam, role


def norms_between_regions(model: nn.Module) -> list[Norm]:
    """Return the norms that are applied between regions."""
    parts = [
        getattr(module, seam) for module, seam, _ in seams_in(model.modules(), Role.BETWEEN_REGIONS)
    ]
    return [part for part in parts if isinstance(part, Norm)]


def apply_table(table: RoleTable, modules: Iterable[nn.Module], *arguments: Any) -> None:
    """Do at each seam of the modules what the table says of its role; a role that it does not have is left as it is."""
    for module, seam, role in seams_in(modules):
        if role in table:
            table[role](module, seam, *arguments)


def wrap_by(wrapper: Callable[..., Any]) -> Callable[..., None]:
    """Return an entry of a table that substitutes `wrapper(what is there, ...)`, with what the parallelism gives."""

    def wrap(module: nn.Module, seam: str, *arguments: Any) -> None:
        substitute(module, seam, wrapper(getattr(module, seam), *arguments))

    wrap.__doc__ = wrapper.__doc__
    return wrap
