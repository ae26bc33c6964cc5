"""Recording one tick: a program of tensor operations, with every branch on values as a guard.

The tick runs for real, on tensors of one batch element, under a dispatch mode that sees each operation of torch below
autograd. A tensor is identified by its storage, offset, shape and strides, so that views need no operations of their
own and writes into views reach their base. Whatever depends on constants only is computed once and becomes a constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pcnet.engine.compiled.errors import UntraceableError
from pcnet.numerics.branching import is_guarded
from pcnet.numerics.dispatch import DispatchMode
from pcnet.numerics.tracing import kernel_calls_go_to

CREATION = frozenset(
    f"{prefix}{kind}{suffix}"
    for kind in ("empty", "zeros", "ones", "full", "empty_strided")
    for prefix, suffix in (("", ""), ("", "_like"), ("new_", ""))
) | {"_new_zeros_with_same_feature_meta", "_efficientzerotensor", "scalar_tensor"}
"""Operations whose result does not depend on values of their arguments."""
RESHAPING = frozenset({"squeeze_", "unsqueeze_", "t_", "transpose_", "as_strided_", "detach_", "_unsafe_view"})
"""Operations that give another view, though their schemas do not say so."""
IGNORED = frozenset({"_linalg_check_errors", "_assert_async", "_assert_tensor_metadata"})


class Ref(NamedTuple):
    """A tensor of a trace: where its elements are in a storage."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size(self) -> int:
        found = 1
        for length in self.shape:
            found *= length
        return found


class Operation(NamedTuple):
    """An operation of torch (such as "add.Tensor"), a kernel, or "guard"; tensors among its arguments are `Ref`s."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: tuple[Ref, ...]

    @property
    def multiplications(self) -> int:
        """About how many multiplications it takes: one for each number of its outputs, more for matrices."""
        matrices = [arg for arg in self.args if isinstance(arg, Ref) and len(arg.shape) > 1]
        if "mm" in self.name and len(matrices) > 1:
            return self.outputs[0].size * matrices[-2].shape[-1]
        found = sum(ref.size for ref in self.outputs)
        if matrices and any(name in self.name for name in ("linalg", "cholesky")):
            found = max(found, max(each.size for each in matrices) * max(each.shape[-1] for each in matrices))
        return found


class Storage(NamedTuple):
    """Memory of a trace.

    size: number of elements. source: "input", with the name of its tensor in `name`; "constant"; or "computed". values:
    what it holds at the start, unless it is computed.
    """

    size: int
    dtype: torch.dtype
    source: str
    name: str = ""
    values: Tensor | None = None


COST = 100_000
"""Multiplications that an operation may take on average, for compiled code to be faster than torch's own."""
MOST_CONSTANTS = 250_000
"""Constants, such as weights of a network, that compiled code may hold."""
LARGEST_EXPONENTIAL = 30
"""Size of a matrix exponential up to which its code, which has lines for each element, compiles in seconds."""


class Outside(NamedTuple):
    """A tensor from outside of a trace that counts as constant, such as a weight of a module, as it was."""

    tensor: Tensor
    version: int
    address: int

    @property
    def is_unchanged(self) -> bool:
        return self.tensor._version == self.version and self.tensor.data_ptr() == self.address


class Trace(NamedTuple):
    """A recorded program: its memory, its operations in order, and where its inputs and outputs are, by name."""

    storages: Sequence[Storage]
    operations: Sequence[Operation]
    inputs: Mapping[str, Ref]
    outputs: Mapping[str, Ref]
    results: Mapping[str, Tensor]
    """The values of the outputs in the recorded run."""
    outside: Sequence[Outside] = ()

    @property
    def is_large(self) -> bool:
        """Whether operations are so large that torch's own are faster, or that compiling them takes too long."""
        constants = sum(storage.size for storage in self.storages if storage.source == "constant")
        exponentials = [each.args[0].shape[-1] for each in self.operations if each.name == "exponential_step"]
        size = sum(operation.multiplications for operation in self.operations)
        return (
            size > COST * max(50, len(self.operations))
            or constants > MOST_CONSTANTS
            or max(exponentials, default=0) > LARGEST_EXPONENTIAL
        )


def record(run: Callable[[], Mapping[str, Tensor]], inputs: Mapping[str, Tensor]) -> Trace:
    """Run a function once and record what it does to these inputs.

    Args:
        run: Returns the outputs by name.
        inputs: Tensors by name whose values differ from run to run; all others count as constants.

    Raises:
        UntraceableError: If the function does what cannot be recorded.
    """
    recorder = _Recorder()
    with torch.inference_mode(False), torch.no_grad():
        for name, tensor in inputs.items():
            recorder.add_input(name, tensor)
        with kernel_calls_go_to(recorder.kernel), recorder:
            found = dict(run())
        outputs = {name: recorder.ref(tensor) for name, tensor in found.items()}
    return Trace(
        tuple(recorder.storages), tuple(recorder.operations), recorder.inputs, outputs, found, tuple(recorder.outside)
    )


class _Recorder(DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.storages: list[Storage] = []
        self.operations: list[Operation] = []
        self.inputs: dict[str, Ref] = {}
        self._index: dict[int, int] = {}
        self._varies: list[bool] = []
        self._used: set[int] = set()
        self._made: set[int] = set()
        self.outside: list[Outside] = []
        self._kept: list[Tensor] = []  # a storage that is freed could come back at the same address
        self._paused = False

    # --- memory --------------------------------------------------------------------------------------------------
    def add_input(self, name: str, tensor: Tensor) -> None:
        self._add(tensor, self._constant(tensor)._replace(source="input", name=name), True)
        self.inputs[name] = self.ref(tensor)

    def ref(self, tensor: Tensor) -> Ref:
        if tensor._is_zerotensor():
            tensor = torch.zeros(tensor.shape, dtype=tensor.dtype)
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.is_complex():
            raise UntraceableError(f"a tensor of layout {tensor.layout} and dtype {tensor.dtype}")
        key = tensor.untyped_storage()._cdata
        if key not in self._index:
            self._add(tensor, self._constant(tensor), False)
            if key not in self._made and not tensor.is_inference():
                self.outside.append(Outside(tensor, tensor._version, tensor.data_ptr()))
        place = self._index[key]
        if self.storages[place].dtype != tensor.dtype:
            raise UntraceableError("memory that is seen as another dtype")
        return Ref(place, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def _add(self, tensor: Tensor, storage: Storage, varies: bool) -> None:
        self._index[tensor.untyped_storage()._cdata] = len(self.storages)
        self.storages.append(storage)
        self._varies.append(varies)
        self._kept.append(tensor)

    def _constant(self, tensor: Tensor) -> Storage:
        size = tensor.untyped_storage().nbytes() // tensor.element_size()
        flat = torch.as_strided(tensor.detach(), (size,), (1,), 0).clone()
        return Storage(size, tensor.dtype, "constant", values=flat)

    def _is_used(self, tensor: Tensor) -> bool:
        return self._index.get(tensor.untyped_storage()._cdata) in self._used

    def _is_variable(self, tensor: Tensor) -> bool:
        place = self._index.get(tensor.untyped_storage()._cdata)
        return place is not None and self._varies[place]

    # --- operations ----------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        about = _about(func)
        if about.is_composite:
            with self:
                return func.decompose(*args, **kwargs)
        given = _tensors((*args, *kwargs.values()))
        if any(tensor.is_meta for tensor in given):  # derivatives that are zero: torch asks for their shape only
            return func(*args, **kwargs)
        name, base, is_view = about.name, about.base, about.is_view
        varies = base not in CREATION and any(map(self._is_variable, given))
        if base == "_local_scalar_dense":
            return self._read(func, args[0], varies)
        if base == "equal" and varies:
            raise UntraceableError("torch.equal of values; use holds((a == b).all())")
        if about.is_random:
            raise UntraceableError(f"{name} draws random numbers")
        written = [
            args[i] if i < len(args) else kwargs[key] for i, key in about.written if i < len(args) or key in kwargs
        ]
        if varies and base not in IGNORED and not is_view and not about.has_rule:
            decomposed = self._decomposed(func, args, kwargs)
            if decomposed is not None:
                return decomposed[0]
        if written and not varies and any(map(self._is_used, written)):
            varies = True  # recorded operations have read these constants before they change
        refs = {id(tensor): self.ref(tensor) for tensor in given} if varies else {}
        for tensor in written if varies else ():
            self._become_variable(tensor)
        out = func(*args, **kwargs)
        outputs = _tensors((out,))
        for tensor in () if varies else written:
            self._refresh(tensor)
        if not varies or is_view or base in IGNORED:
            self._kept.extend(outputs)
            if not is_view:
                self._made |= {tensor.untyped_storage()._cdata for tensor in outputs}
            return out
        made = tuple(self._output(tensor) for tensor in outputs)
        arguments, named = _replaced(args, refs, self), _replaced(kwargs, refs, self)
        self._append(Operation(name, arguments, named, made))
        return out

    def _append(self, operation: Operation) -> None:
        self.operations.append(operation)
        self._used.update(_storages((*operation.args, *operation.kwargs.values())))

    def _output(self, tensor: Tensor) -> Ref:
        if tensor.untyped_storage()._cdata not in self._index:
            size = tensor.untyped_storage().nbytes() // max(1, tensor.element_size())
            self._add(tensor, Storage(size, tensor.dtype, "computed"), True)
        self._kept.append(tensor)
        return self.ref(tensor)

    def _become_variable(self, tensor: Tensor) -> None:
        """Memory that so far held constants is written with values that vary."""
        place = self._index[tensor.untyped_storage()._cdata]
        if not self._varies[place]:
            if place not in self._used:
                self.storages[place] = self._constant(tensor)
            self._varies[place] = True

    def _refresh(self, tensor: Tensor) -> None:
        place = self._index.get(tensor.untyped_storage()._cdata)
        if place is not None:
            self.storages[place] = self._constant(tensor)

    def _read(self, func: Any, tensor: Tensor, varies: bool) -> Any:
        value = func(tensor)
        if varies:
            if tensor.dtype is not torch.bool:
                raise UntraceableError("a number is read out of a tensor, by item() or float()")
            if is_guarded(bool(value)):
                self._append(Operation("guard", (self.ref(tensor),), {"outcome": bool(value)}, ()))
        return value

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
        """The outputs of an operation that has no rule of its own, by others that have; None if it cannot be."""
        from torch._decomp import decomposition_table

        made: Any = _variance if func.name() == "prims::var" else decomposition_table.get(func)
        if made is None:
            raise UntraceableError(f"the operation {func.name()} has no rule")
        with self:
            return (made(*args, **kwargs),)

    def kernel(self, name: str, function: Callable[..., Tensor], args: tuple[Any, ...]) -> Tensor:
        """A function that is taken as one operation."""
        self._paused = True
        try:
            out = function(*args)
        finally:
            self._paused = False
        given = [arg for arg in args if isinstance(arg, Tensor)]
        if any(map(self._is_variable, given)):
            refs = {id(tensor): self.ref(tensor) for tensor in given}
            self._append(Operation(name, _replaced(args, refs, self), {}, (self._output(out),)))
        return out


def _variance(values: Tensor, dims: Sequence[int] | None, correction: float = 1.0, **_: Any) -> Tensor:
    """What torch.var is made of."""
    dims = tuple(range(values.dim())) if dims is None else tuple(dims)
    count = math.prod(values.shape[dim] for dim in dims)
    away = values - values.mean(dims, keepdim=True)
    return (away * away).sum(dims) / max(0.0, count - correction)


class _About(NamedTuple):
    """What is known of an operation of torch, whatever its arguments.

    written: places and names of the arguments that it changes.
    """

    name: str
    base: str  # the name without that of its overload
    is_composite: bool  # whether torch itself takes it apart
    is_random: bool
    is_view: bool
    has_rule: bool
    written: tuple[tuple[int, str], ...]


@cache
def _about(func: Any) -> _About:
    from pcnet.engine.compiled.scalar_rules import RULES

    name, schema = func.name().removeprefix("aten::").removeprefix("prims::"), func._schema
    base = name.partition(".")[0]
    views = [each.alias_info is not None and not each.alias_info.is_write for each in schema.returns]
    written = [
        (i, each.name) for i, each in enumerate(schema.arguments) if each.alias_info and each.alias_info.is_write
    ]
    return _About(
        name,
        base,
        torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"),
        torch.Tag.nondeterministic_seeded in func.tags,
        base in RESHAPING or any(views),
        base.rstrip("_") in RULES,
        tuple(written),
    )


def _tensors(parts: Iterable[Any]) -> list[Tensor]:
    """All tensors among arguments, and in lists of them."""
    found: list[Tensor] = []
    for part in parts:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, (tuple, list)):
            found += _tensors(part)
    return found


def _storages(parts: Iterable[Any]) -> Iterable[int]:
    """The storages of all references among arguments, and in tuples of them."""
    for part in parts:
        if isinstance(part, Ref):
            yield part.storage
        elif isinstance(part, tuple):
            yield from _storages(part)


def _replaced(tree: Any, refs: Mapping[int, Ref], recorder: _Recorder) -> Any:
    """The arguments with tensors replaced by references."""
    if isinstance(tree, Tensor):
        found = refs.get(id(tree))
        return recorder.ref(tree) if found is None else found
    if isinstance(tree, dict):
        return {name: _replaced(part, refs, recorder) for name, part in tree.items()}
    if isinstance(tree, (tuple, list)):
        return tuple([_replaced(part, refs, recorder) for part in tree])
    return tree
