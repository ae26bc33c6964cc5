"""Tracing of tensor functions into flat lists of operations, with algebraic simplification.

Nested forward-mode derivatives contain many products with zero tangents. Tracing once per input shape and removing
these makes a derivative as cheap as its formula, and detects second derivatives that vanish.
"""

import operator
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from pcnet.errors import GraphError
from pcnet.numerics.dispatch import DispatchMode

PRODUCTS = {"mul", "mm", "bmm", "mv", "dot"}  # operations whose result is zero if any input is zero
COPIES = {"alias", "_to_copy", "expand", "view", "_unsafe_view"}
"""Operations that do nothing if shape, strides, dtype and device of their result are those of their input."""
READING = {"aten::_local_scalar_dense", "aten::equal"}  # operations that a Python program may branch on
MOVES = {"diagonal", "flip", "permute", "roll", "select", "slice", "squeeze", "t", "transpose", "unsqueeze"}
LINEAR = COPIES | MOVES | {"clone", "div", "neg", "sum"}
"""Operations whose result is zero if their first input is zero, as are all operations that end in _backward."""

_LOCK = threading.RLock()
"""Only one thread may trace at a time: torch counts levels of forward-mode differentiation for all threads together."""


class _Recorder(DispatchMode):
    """The operations that are called, as a graph. `make_fx` of torch records the same, in ten times the time."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph, self.root = Graph(), torch.nn.Module()
        self._nodes: dict[int, Node] = {}  # by the identity of a tensor
        self._kept: list[Tensor] = []  # or an identity could be used again
        for i, tensor in enumerate(inputs):
            self._add(tensor, self.graph.placeholder(f"given{i}"))
        self._varies = set(self.graph.nodes)

    def module(self, results: Any) -> GraphModule:
        """The recorded operations as a function whose results, a tensor or a tuple of tensors, are these."""
        found = tuple(map(self._node, results)) if isinstance(results, tuple) else self._node(results)
        self.graph.output(found)
        return GraphModule(self.root, self.graph)

    def _add(self, tensor: Tensor, node: Node) -> None:
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)
        node.meta["val"] = tensor

    def _node(self, value: Any) -> Any:
        """The node that computes a tensor; an attribute if that was made outside, as weights and constants are."""
        if isinstance(value, (list, tuple)):
            return type(value)(map(self._node, value))
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._nodes:
            name = f"captured{len(self._nodes)}"
            self.root.register_buffer(name, value)
            self._add(value, self.graph.get_attr(name))
        return self._nodes[id(value)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        parts = out if isinstance(out, (list, tuple)) else (out,)
        if any(isinstance(part, Tensor) and part.is_meta for part in parts):  # torch asks for the shape of a derivative
            return out
        node = self.graph.call_function(func, self._node(args), {name: self._node(v) for name, v in kwargs.items()})
        varies = any(each in self._varies for each in node.all_input_nodes)
        if func.name() in READING and varies:
            raise RuntimeError(f"{func.name()} reads a value")
        if varies:
            self._varies.add(node)
        if isinstance(out, Tensor):
            self._add(out, node)
        elif any(isinstance(part, Tensor) for part in parts):
            for i, part in enumerate(parts):
                item = self.graph.call_function(operator.getitem, (node, i))
                self._add(part, item)
                if varies:
                    self._varies.add(item)
        else:
            self.graph.erase_node(node)  # a question about shapes
        return out


def trace(body: Callable[..., Any], inputs: Sequence[Tensor], may_vanish: Collection[int] = ()) -> Callable[..., Any]:
    """Trace a function that does not branch on values into a flat list of operations, for inputs like the given ones.

    Outputs at the positions `may_vanish` become None if they are zero for all inputs.

    Raises:
        GraphError: If the body cannot be traced.
    """
    with _LOCK, torch.inference_mode(False), torch.no_grad():
        try:
            given = [v.clone() for v in inputs]
            with _Recorder(given) as recorder:
                module = recorder.module(functionalize(body, remove="mutations")(*given))
        except RuntimeError as error:
            if "in-place" in str(error):
                raise GraphError(
                    "a flow or mapping changes its arguments in place (x *= 2, x[..., 0] = …): write x = 2 * x, or "
                    "torch.stack"
                ) from error
            raise GraphError(
                "a flow or mapping cannot be differentiated: it must be made of torch operations (torch.sin, not "
                f"numpy.sin) that do not branch on values (use torch.where instead of if): {error}"
            ) from error
        _share(module)
        _simplify(module, may_vanish)
        _share(module)
        for node in module.graph.nodes:
            node.meta.clear()  # tensors
        module.recompile()
    traced: Callable[..., Any] = module.forward
    return traced


def _share(module: GraphModule) -> None:
    """Eliminate common subexpressions: compute every value, and fetch every weight, once."""
    first: dict[Any, Node] = {}
    for node in module.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            same = first.setdefault((node.op, node.target, _key(node.args), _key(node.kwargs)), node)
            if same is not node:
                node.replace_all_uses_with(same)
                module.graph.erase_node(node)


def _key(value: Any) -> Any:
    """A hashable form of arguments that tells 2 from 2.0, and 0.0 from -0.0."""
    if isinstance(value, (list, tuple)):
        return tuple(_key(each) for each in value)
    if isinstance(value, dict):
        return tuple((name, _key(each)) for name, each in value.items())
    return value if isinstance(value, Node) else repr(value)


def _simplify(module: GraphModule, may_vanish: Collection[int]) -> None:
    """Fold constants, and remove operations that only copy their input or add zero."""
    constants: dict[Node, Any] = {}
    zeros: set[Node] = set()
    for node in module.graph.nodes:
        if node.op != "call_function" or not callable(node.target):
            continue
        source = _copied(node, zeros)
        if source is not None:
            node.replace_all_uses_with(source)
            continue
        if all(each in constants for each in node.all_input_nodes):
            args, kwargs = map_arg((node.args, node.kwargs), constants.__getitem__)
            constants[node] = node.target(*args, **kwargs)
        elif _vanishes(node, zeros):
            like = node.meta["val"]
            constants[node] = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        value = constants.get(node)
        if isinstance(value, Tensor) and not value.is_meta and not bool(value.any()):
            zeros.add(node)

    (output,) = module.graph.find_nodes(op="output")
    several = isinstance(output.args[0], tuple)
    results: Any = output.args[0] if several else output.args
    kept = tuple(None if i in may_vanish and result in zeros else result for i, result in enumerate(results))
    output.args = (kept,) if several else kept
    for i, (node, value) in enumerate(constants.items()):
        if isinstance(value, Tensor) and any(user not in constants for user in node.users):
            module.register_buffer(f"folded{i}", value)
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.get_attr(f"folded{i}"))
    module.graph.eliminate_dead_code()


def _name(node: Node) -> str:
    return getattr(getattr(node.target, "overloadpacket", None), "__name__", "")


def _vanishes(node: Node, zeros: set[Node]) -> bool:
    """Whether the result of a node, which must be one tensor, is zero because of zero inputs."""
    name, first = _name(node), node.args[0] if node.args else None
    if not isinstance(node.meta.get("val"), Tensor):
        return False
    if name in PRODUCTS:
        return any(source in zeros for source in node.all_input_nodes)
    return name in ("zeros_like", "new_zeros") or ((name in LINEAR or name.endswith("_backward")) and first in zeros)


def _copied(node: Node, zeros: set[Node]) -> Node | None:
    """The input that a node only copies, by adding zero or by a change of shape that changes nothing; else None."""
    name, args = _name(node), node.args
    candidate: Any = None
    if name in COPIES:
        candidate = args[0]
    elif name == "copy":
        candidate = args[1]
    elif name in ("add", "sub") and args[1] in zeros:
        candidate = args[0]
    elif name == "add" and args[0] in zeros and not node.kwargs:
        candidate = args[1]
    if not isinstance(candidate, Node):
        return None
    a, b = candidate.meta.get("val"), node.meta.get("val")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None
    same = a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype and a.device == b.device
    return candidate if same else None
