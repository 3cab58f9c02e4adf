"""Trace of memory, FLOPs and messages, operator by operator, of a program on real or fake tensors.

Live memory is tracked per storage, so views, tensors saved by autograd and storages that a library resizes in place
count once. Operators of xscale_kernels run their implementation, so their temporaries count too.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from xscale.measure.attention_flops import FORMULAS
from xscale.measure.traced_costs import Message, Peak, PhaseCost, TraceSegment
from xscale.mesh.rank_groups import group_of_collective
from xscale.mesh.torch_private import (
    OPDEFS,
    DispatchKey,
    FakeTensor,
    TorchDispatchMode,
    _disable_current_modes,
    tree_leaves,
)

aten = torch.ops.aten
COLLECTIVES = ("c10d", "_c10d_functional")
SCALARS = (aten._local_scalar_dense.default, aten.item.default)
UNTOUCHED = ("aten::new_empty", "aten::empty_like", "aten::new_empty_strided", "aten::_unsafe_view")
"""Operators that neither read their inputs nor write their outputs."""
COPIES_OUT = "fsdp::split_with_sizes_copy"
"""fully_shard's copy of gathered parameters into their own tensors, which it has just allocated."""
UNTRUNCATING = 1 << 40
"""Value of an integer that depends on data: so large that it truncates nothing."""


class NeedsValuesError(Exception):
    """An operator's implementation reads an integer that depends on data."""


class OpTracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that counts the memory, FLOPs and messages of every operator by kind and phase."""

    def __init__(
        self,
        seconds: Callable[[float, float], float] | None = None,
        open_operators: Sequence[str] = ("xscale",),
        copying: Sequence[str] = (),
        workspaces: dict[Hashable, int] | None = None,
    ) -> None:
        """`seconds` is a roofline: (FLOPs, bytes) -> seconds. Operators in the namespaces `open_operators` run their
        implementation, so that its temporaries count, unless it reads data. `copying`: collectives that copy
        their input. `workspaces` has the bytes of the temporaries of each call that was traced, by `_call_key`: an
        equal call is one event. Several tracers may have it in common.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds, self.copying = seconds, copying
        self.open_operators = open_operators
        self.phase, self.kind = "", "activations"
        self.live: dict[str, int] = defaultdict(int)
        self.total = 0
        self._segment = TraceSegment()
        self._segments: dict[Hashable, TraceSegment] = {None: self._segment}
        """By the mark at which each begins; None: the start."""
        self._rising = False
        self.messages: list[Message] = []
        self.costs: dict[str, PhaseCost] = defaultdict(PhaseCost)
        self.gradient_shapes: set[tuple[int, ...]] = set()
        """A tensor of such a shape that is allocated in backward counts as a gradient."""
        self.workspaces: dict[Hashable, int] = {} if workspaces is None else workspaces
        self._storages: dict[int, tuple[int, str, Any]] = {}
        self._depth = 0
        self._most = 0
        """The most live memory since an operator began."""

    @contextmanager
    def labelled(self, *, phase: str | None = None, kind: str | None = None) -> Iterator[None]:
        """Attribute operators inside to the phase, and allocations inside to the kind."""
        before = self.phase, self.kind
        self.phase, self.kind = phase or before[0], kind or before[1]
        try:
            yield
        finally:
            self.phase, self.kind = before

    @property
    def segments(self) -> dict[Hashable, TraceSegment]:
        """Return the segments by the mark at which each begins; None: the start."""
        self._note_peak()
        return self._segments

    @property
    def peak(self) -> Peak:
        """Live memory at its peak, of all segments."""
        return max((part.peak for part in self.segments.values()), key=lambda peak: peak.total)

    def mark(self, mark: Hashable) -> None:
        """Begin a segment."""
        self._note_peak()
        self._segment = TraceSegment([Peak(self.total, self.phase, dict(self.live))])
        self._segments[mark] = self._segment

    def _note_peak(self) -> None:
        """Note the live memory, which rose until now."""
        if not self._rising or self._depth:
            return
        self._rising, peaks = False, self._segment.peaks
        if len(self._segments) > 1 or not peaks or self.total > peaks[0].total:
            peak = Peak(self.total, self.phase, dict(self.live))
            if len(self._segments) == 1:
                peaks.clear()
            peaks.append(peak)

    @contextmanager
    def watching_resizes(self, kind: str) -> Iterator[None]:
        """Track storages that are resized in place, as fully_shard's gathered parameters."""
        resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, size: int) -> Any:
            done = resize(storage, size)
            self._resized(storage, kind)
            return done

        torch.UntypedStorage.resize_ = watched  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        named = dict(kwargs or {})
        if func.namespace == "prim":
            return func(*args, **named)
        if func in SCALARS:
            if self._depth and not args[0].dtype.is_floating_point and args[0].dtype != torch.bool:
                raise NeedsValuesError
            return _scalar(args[0])
        if func is aten.index.Tensor and _is_boolean_index(args[1]):
            out = _index_with_true_mask(args[0], args[1][0])
        elif func.namespace in self.open_operators:
            out = self._inside(func, _with_counts(func, args), named)
        elif self._depth and func.namespace == "aten" and _composite(func):
            # Inside an operator composite operators are not decomposed before dispatch.
            with self:
                out = func.decompose(*args, **named)
        else:
            out = func(*args, **named)
        self._count(func, args, named, out)
        return out

    def _inside(self, func: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
        """Run the operator: its implementation the first time, later its fake and the temporaries that it had."""
        key = _call_key(func, args, named)
        # An input that nothing else has shown yet counts before, and not among the temporaries.
        self._track_tensors((args, named))
        if key in self.workspaces:
            out = func(*args, **named)
            self._track_tensors(out)
            self._add_temporaries(self.workspaces[key])
            return out
        before = self.total
        outer, rising = self._most, self._rising
        self._most = self.total
        out = self._run_implementation(func, args, named)
        self._track_tensors(out)
        outputs = self.total - before
        self.workspaces[key] = self._most - before - outputs
        self._most = max(outer, self._most)
        self._rising = rising or outputs > 0
        self._add_temporaries(self.workspaces[key])
        return out

    def _add_temporaries(self, size: int) -> None:
        """Count temporaries that are there beside the outputs of an operator, and no longer."""
        self._add(self.kind, size)
        self._add(self.kind, -size)

    def _run_implementation(self, func: Any, args: Sequence[Any], named: dict[str, Any]) -> Any:
        """Run the implementation; if it reads data or raw memory, run its fake, which allocates only the outputs."""
        implementation = OPDEFS[func._schema.name]._init_fn
        self._depth += 1
        try:
            with self:
                return implementation(*args, **named)
        except (NeedsValuesError, RuntimeError):
            # Handled below, after the exception has released the tensors of its frames.
            pass
        finally:
            self._depth -= 1
        return func(*args, **named)

    def _track_tensors(self, values: Any) -> list[Tensor]:
        """Count the storages of the tensors among the values; return the tensors, of DTensors their local shards."""
        tensors = [_local(leaf) for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
        for tensor in tensors:
            if tensor.device.type != "meta":
                gradient = self.phase == "backward" and tuple(tensor.shape) in self.gradient_shapes
                self._track(tensor, "gradients" if gradient else self.kind)
        return tensors

    def _count(self, func: Any, args: Sequence[Any], named: dict[str, Any], out: Any) -> None:
        outputs = self._track_tensors(out)
        if func._schema.name == COPIES_OUT:
            for tensor in named["out"]:
                self.name(tensor, "gathered_parameters")
        if func.namespace in COLLECTIVES:
            self._send(func, args)
        elif not self._depth:
            self._work(func, args, named, out, outputs)

    def _track(self, tensor: Tensor, kind: str) -> None:
        # The same Python object while the storage is alive.
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._storages:
            size = storage.nbytes()
            self._storages[key] = size, kind, weakref.ref(storage, lambda _: self._released(key))
            self._add(kind, size)

    def _resized(self, storage: torch.UntypedStorage, kind: str) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._storages:
            before, was, reference = self._storages[key]
            self._storages[key] = size, kind, reference
            self._add(was, -before)
            self._add(kind, size)

    def _released(self, key: int) -> None:
        size, kind, _ = self._storages.pop(key)
        self._add(kind, -size)

    def _add(self, kind: str, change: int) -> None:
        if change < 0:
            self._note_peak()
        self.live[kind] += change
        self.total += change
        self._rising = self._rising or change > 0
        self._most = max(self._most, self.total)

    def name(self, tensor: Tensor, kind: str) -> None:
        """Change the kind of a tensor's storage."""
        key = id(_local(tensor).untyped_storage())
        if key in self._storages:
            size, before, reference = self._storages[key]
            self.live[before] -= size
            self.live[kind] += size
            self._storages[key] = size, kind, reference

    def _send(self, func: Any, args: Sequence[Any]) -> None:
        operator = func._schema.name.split("::")[1].strip("_")
        if operator in ("wait_tensor", "recv", "barrier"):
            return
        group, ranks = group_of_collective(args)
        share = (ranks - 1) / ranks
        tensors = [leaf for leaf in tree_leaves(list(args)) if isinstance(leaf, Tensor)]
        bytes_of = max(tensor.numel() * tensor.itemsize for tensor in tensors)
        if operator == "allgather_base":
            self.name(tensors[0], "communication")
        elif operator == "reduce_scatter_base":
            self.name(tensors[1], "communication")
            self.name(tensors[0], "gradients")
        if operator == "all_gather_into_tensor":
            bytes_of *= ranks
        if operator in self.copying:
            self._add("communication", bytes_of)
            self._add("communication", -bytes_of)
        times = {"all_reduce": 2 * share, "allreduce": 2 * share, "send": 1.0}.get(operator, share)
        self.messages.append(Message(operator, group, round(bytes_of * times), self.phase))

    def _work(
        self,
        func: Any,
        args: Sequence[Any],
        named: dict[str, Any],
        out: Any,
        outputs: Sequence[Tensor],
    ) -> None:
        formula: Any = FORMULAS.get(func.overloadpacket) or flop_registry.get(func.overloadpacket)
        flops = 0.0 if formula is None else float(formula(*args, **named, out_val=out))
        read = [leaf for leaf in tree_leaves((list(args), named)) if isinstance(leaf, Tensor)]
        if not read or func.is_view or func._schema.name in UNTOUCHED:
            return
        moved = float(sum(tensor.numel() * tensor.itemsize for tensor in (*read, *outputs)))
        cost = self.costs[self.phase]
        cost.flops += flops
        cost.moved += moved
        self._segment.flops += flops
        self._segment.moved += moved
        if self.seconds is not None:
            cost.seconds += self.seconds(flops, moved)


def _call_key(func: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Hashable:
    """Return what the temporaries of a call depend on: forms of tensors, numbers that are known, and options."""
    with _disable_current_modes():
        return func, tuple(_argument_key(leaf) for leaf in tree_leaves((list(args), dict(named))))


def _argument_key(value: Any) -> Hashable:
    if not isinstance(value, Tensor):
        return type(value), value
    form = value.dtype, tuple(value.shape), value.stride()
    if isinstance(value, FakeTensor) or value.is_floating_point() or value.device.type != "cpu":
        return form
    # Indices, such as the layout of a pattern or the counts of groups: an implementation may read them.
    return *form, value.numpy().tobytes()


def _scalar(tensor: Tensor) -> bool | float | int:
    """Value of a data-dependent scalar: true, one, or an integer too large to truncate anything."""
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.dtype.is_floating_point else UNTRUNCATING


def _local(tensor: Tensor) -> Tensor:
    """Local shard of a DTensor; other tensors as they are."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def _is_boolean_index(indices: Sequence[Any]) -> bool:
    return len(indices) == 1 and indices[0] is not None and indices[0].dtype == torch.bool


def _index_with_true_mask(x: Tensor, mask: Tensor) -> Tensor:
    """x[mask] for a mask that is true everywhere."""
    return x.new_empty((mask.numel(), *x.shape[mask.dim() :]))


def _with_counts(func: Any, args: Sequence[Any]) -> Sequence[Any]:
    """Replace data-dependent row counts of a grouped operator by real ones.

    One group gets all rows, which maximises the operator's temporaries.
    """
    names = [argument.name for argument in func._schema.arguments]
    if "counts" not in names:
        return args
    at = names.index("counts")
    with _disable_current_modes():
        counts = torch.tensor([args[0].shape[0], *[0] * (args[at].shape[0] - 1)])
    return (*args[:at], counts, *args[at + 1 :])


def _composite(func: Any) -> bool:
    return bool(func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd))
