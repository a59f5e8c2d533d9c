# SPDX-License-Identifier: Apache-2.0
"""What the ranks compare: how many collectives a graph issues on which group, and a fingerprint of its program.

Theory. Two ranks may run one executable around a collective only if they run the same program. So every node
of a graph is written in a *canonical text*: its op, target, arguments and the metadata of its result, with all that is
known to reach the compiled program and nothing that differs between processes that run the same one. A node is
named by its position; a symbolic size by its order of first appearance, with the range it was given; a process group
by its ranks ("exact") or by what it is to its members ("role"); a device by its type; a function by its qualified name,
a local one by its code; the body of a nested graph and the value of a tensor constant by their digests. What has no
such text (an object of an unknown class, whose repr would hold an address) makes the graph unhashable: it is given
a fingerprint that equals no other, so that it takes part in the vote and splits it.

Inputs of the graph count by metadata, not by value: ranks hold different shards of the same weights. That goes for
`torch.nn.Parameter` attributes of a graph too. Every other tensor attribute (`_tensor_constant0`, a buffer that was
not lifted) is baked into the program and counts by value.

Left out on purpose: names of nodes, source lines, module stacks, storage offsets (not guarded on by Dynamo; where
they matter they are arguments of `as_strided`), hints of symbolic sizes (a dynamic program is one whatever size
it was traced with), the index of a device.

Role names. Ranks with equal fingerprints must mean the same group by the same role wherever they share one, or two
ranks could meet in one collective and take it for different ones. Each rank has only its own groups to tell from,
so a role is one of these, each of which leaves a rank no choice of group:
- the description, if this rank is in one group of that description and size only, as with the dimension of a mesh;
- the size, stride and phase of a regular group (rows, columns, planes of a mesh of any number of dimensions, on all
  ranks or on a block of them). Groups of one size, stride and phase don't overlap, so a rank is in one of them at most;
- else the ranks themselves.
(That a rank did not know a group yet when it made its fingerprint does no harm: then its graph doesn't use it, and the
spans of the two votes differ.)
A peer in point-to-point communication is named by its distance on the ring of its group.
"""

import enum
import hashlib
import itertools
import logging
import operator
import os
import re
import secrets
import struct
import sys
import types
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

if __package__:
    from ._vocabulary import HandshakeConfigError, HandshakeError, ProcessGroupId, format_ranks
else:
    from _vocabulary import HandshakeConfigError, HandshakeError, ProcessGroupId, format_ranks

_logger = logging.getLogger("torch_tpu.handshake")

GROUP_NAMINGS = ("exact", "role")

# Namespaces of torch.ops in which an op with an argument of one of the names below is a collective. Waiting for one,
# or wrapping its result, takes no group, and so is none.
_COLLECTIVE_NAMESPACES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem", "tpu"}
)
_GROUP_ARGUMENTS = ("group_name", "group", "process_group")
# The legacy functional collectives take (tag, ranks, group_size) instead.
_LEGACY_GROUP_ARGUMENTS = frozenset({"ranks", "group_size"})
# Point-to-point ops, and the argument that names the peer, or the list of peers.
_PEER_ARGUMENTS = {
    "isend": "dst",
    "send": "dst",
    "irecv": "src",
    "recv_": "src",
    "recv_any_source_": "",
    "batch_p2p_ops": "peer_list",
}

# How many elements of a tensor constant, and characters of its text, `graph_text` shows.
MAX_CONSTANT_VALUES_SHOWN = 16

_IN_PLACE_OPERATORS = frozenset(
    {
        operator.iadd, operator.iand, operator.iconcat, operator.ifloordiv, operator.ilshift, operator.imod,
        operator.imul, operator.imatmul, operator.ior, operator.ipow, operator.irshift, operator.isub,
        operator.itruediv, operator.ixor, operator.setitem, operator.delitem,
    }
)  # fmt: skip

_DEVICE_TEXT = re.compile(r"[a-z]+:\d+")
_STACK_FRAME = re.compile(
    r'^\s*File "(?P<file>[^\n]+)", line (?P<line>\d+)[^\n]*(?:\n(?!\s*File ")\s*(?P<code>[^\n]*))?', re.MULTILINE
)


class SourceLine(NamedTuple):
    """A line of the user's program."""

    file: str
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f": {self.code}" if self.code else "")


class CanonicalNode(NamedTuple):
    """A node of a graph as ranks compare it.

    Attributes:
        name: the fx node's name, for messages.
        op: placeholder, get_attr, call_function, call_method, call_module or output.
        target: canonical text of what is called; for a get_attr, of the value.
        equality: 16 bytes, a digest of the whole content; other nodes by their positions.
        alignment: 8 bytes, a digest of the node's own content; other nodes by their targets only.
        inputs: positions of the nodes that it reads: arguments in order, then keyword arguments by name.
        group: the group of a collective, else None. For point-to-point ops this rank and its peers.
        has_effect: it must be neither moved past another such node, nor run twice, nor dropped: a collective, a wait,
            a mutation, a random op, a switch of global state.
    """

    name: str
    op: str
    target: str
    equality: bytes
    alignment: bytes
    inputs: tuple[int, ...]
    group: ProcessGroupId | None
    has_effect: bool


def count_collectives(graph_module: Any) -> dict[ProcessGroupId, int]:
    """How many collectives one run of the graph issues on each process group.

    A coalesced collective counts once. A point-to-point op counts on the line of the pair {this rank, peer}, and a
    batch of them once for each of its ops, so that both ends count alike however they batch. Nested graphs count
    wherever they are called, as often as they are called: of the branches of a `cond`, the largest count of each
    group; of a loop, one iteration. (How often a loop runs is not known here. A line needs only that all its members
    count it alike.) What a called module that is no graph issues is not counted: a
    warning names its class, once, unless it is one of torch's own without collectives.

    Args:
        graph_module: an FX graph module, AOTAutograd's or Dynamo's.

    Returns:
        Group to number, groups in order of first use, none with 0.

    Raises:
        HandshakeConfigError: a collective's group can't be resolved; the message names the node and its source line.
    """
    counts: dict[ProcessGroupId, int] = {}
    for node in graph_module.graph.nodes:
        for group, number in node_collectives(node).items():
            counts[group] = counts.get(group, 0) + number
    return counts


def graph_fingerprint(graph_module: Any, groups: str = "exact") -> str:
    """A digest of the program: equal on two ranks exactly when their programs are. See the module's theory.

    Args:
        graph_module: an FX graph module, AOTAutograd's or Dynamo's.
        groups: "exact" names a process group by its ranks, "role" by what it is to its members, so that the rows of a
            mesh can share one fingerprint.

    Returns:
        32 lowercase hex digits; or, for a graph that can't be hashed, ``unhashable-`` and 32 random ones, which equal
        no other rank's; the reason is logged as a warning.

    Raises:
        HandshakeConfigError: `groups` is neither.
    """
    _check_naming(groups)
    try:
        return _Tables(groups).body(graph_module)[0]
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        _logger.warning("this graph can't be compared with other ranks' and will be split: %s", error)
        return f"unhashable-{secrets.token_hex(16)}"


def executable_fingerprint(data: bytes | str) -> str:
    """A digest of an executable, or of any text that stands for one: 32 lowercase hex digits."""
    content = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def canonical_nodes(graph_module: Any, groups: str = "exact") -> list[CanonicalNode]:
    """The nodes of the top-level graph, in order, as ranks compare them.

    Nested bodies and values of tensor constants are in the digests of the get_attr nodes that name them, and of the
    nodes that read those.

    Raises:
        HandshakeConfigError: `groups` is neither "exact" nor "role", or a collective's group can't be resolved.
        HandshakeError: the graph can't be hashed; the message says which node and why.
    """
    _check_naming(groups)
    return _Tables(groups).nodes(graph_module)


def register_collective(qualified_op_name: str, group_argument: str = "group_name") -> None:
    """Makes an op count as a collective, such as ``register_collective("mylib::ring_reduce", "group")``.

    Args:
        qualified_op_name: namespace and name, without an overload.
        group_argument: the argument of its schema that holds the group: a name, or a process group.

    Raises:
        HandshakeConfigError: the name is not of the form ``namespace::name``.
    """
    if not re.fullmatch(r"\w+::\w+", qualified_op_name):
        raise HandshakeConfigError(f"{qualified_op_name!r} is no qualified op name, such as 'mylib::ring_reduce'")
    _registered_collectives[qualified_op_name] = group_argument
    _signatures.clear()


def is_collective(node: Any) -> bool:
    """Whether the node itself issues a collective or a point-to-point op. (A call of a nested graph does not.)"""
    return _collective_call(node) is not None


def collective_group(node: Any) -> ProcessGroupId:
    """The process group of a collective; of a point-to-point op this rank and its peers.

    Raises:
        HandshakeConfigError: the node is no collective, or its group can't be resolved.
    """
    call = _collective_call(node)
    if call is None:
        raise HandshakeConfigError(f"node {node.name} is no collective{_where(node)}")
    group = _group_of(node, call)
    if call.signature.peer_argument is None:
        return group.id
    return ProcessGroupId(sorted({_own_rank(node), *_peers(node, call, group)}))


def source_line(node: Any) -> SourceLine | None:
    """The line of the user's program that the node comes from: the innermost frame outside torch; None if unknown."""
    for frame in reversed(list(_STACK_FRAME.finditer(node.meta.get("stack_trace") or ""))):
        if not _is_library_file(frame["file"]):
            return SourceLine(frame["file"], int(frame["line"]), (frame["code"] or "").strip())
    return None


def graph_text(graph_module: Any) -> str:
    """The graph as people read it: torch's `print_readable` with strides and devices, then what that leaves out.

    Those facts are comment lines ``# handshake: SUBJECT = VALUE``:
    - ``rank = 1``: who printed it, if `torch.distributed` is initialised;
    - ``group 3 = ranks 0-1; size 2; description mesh_tp``: a process group by its name;
    - ``constant BODY._tensor_constant0 = float32 (2,) blake2b:0123… [1.0, 2.0]``: a tensor constant by dtype, shape,
      digest and first `MAX_CONSTANT_VALUES_SHOWN` values, row-major;
    - ``mutated arg0_1 = copy_``: an input that the graph changes, and the op (or output) that does;
    - ``source BODY.all_reduce = /path/model.py:24: x = all_reduce(y)``: the user's own line, for nodes whose
      innermost frame lies inside torch, which is the one that `print_readable` shows.
    BODY is the dotted name of the nested graph that holds it, absent at the top. What can't be had is left out.
    """
    text = graph_module.print_readable(print_output=False, include_stride=True, include_device=True)
    return "\n".join([text.rstrip("\n"), *(f"# handshake: {fact}" for fact in _facts(graph_module))]) + "\n"


# --- Collectives and their groups ---


class _Signature(NamedTuple):
    """What a collective's schema says. `peer_argument` is None but for point-to-point ops."""

    arguments: tuple[Any, ...]
    group_argument: str
    peer_argument: str | None


class _CollectiveCall(NamedTuple):
    """A collective that a node calls, directly or through a higher-order op that takes the op and its arguments.

    `offset` is how many of the node's own arguments stand before the collective's.
    """

    signature: _Signature
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    offset: int

    def argument(self, name: str) -> Any:
        if name in self.kwargs:
            return self.kwargs[name]
        for index, argument in enumerate(self.signature.arguments):
            if argument.name == name:
                return self.args[index] if index < len(self.args) else argument.default_value
        return None


class _Group(NamedTuple):
    """A resolved group: its members in the group's own order, and the process group object if there is one."""

    ranks: tuple[int, ...]
    id: ProcessGroupId
    process_group: Any


_registered_collectives: dict[str, str] = {}
# By op; ops live as long as the process.
_signatures: dict[Any, _Signature | None] = {}
# By process group. A graph has hundreds of collectives, and a group thousands of ranks.
_known_ranks: weakref.WeakKeyDictionary[Any, tuple[tuple[int, ...], ProcessGroupId]] = weakref.WeakKeyDictionary()


def _collective_call(node: Any) -> _CollectiveCall | None:
    from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

    if node.op != "call_function":
        return None
    target, args, offset = node.target, node.args, 0
    if isinstance(target, HigherOrderOperator):
        # with_effects(token, op, …), auto_functionalized(op, …) and their like.
        place = next((i for i, argument in enumerate(args) if isinstance(argument, OpOverload)), None)
        if place is None:
            return None
        target, offset = args[place], place + 1
        args = args[offset:]
    elif not isinstance(target, (OpOverload, OpOverloadPacket)):
        return None
    try:
        signature = _signatures[target]
    except KeyError:
        signature = _signatures[target] = _signature(target)
    return None if signature is None else _CollectiveCall(signature, args, node.kwargs, offset)


def _signature(target: Any) -> _Signature | None:
    schema = _any_overload(target)._schema
    namespace, _, name = schema.name.partition("::")
    names = {argument.name for argument in schema.arguments}
    group_argument = _registered_collectives.get(schema.name)
    if group_argument is not None:
        if group_argument not in names:
            raise HandshakeConfigError(
                f"{schema.name} was registered with its group in {group_argument!r}, which it doesn't take: {schema}"
            )
    elif namespace in _COLLECTIVE_NAMESPACES:
        legacy = ["ranks"] if names >= _LEGACY_GROUP_ARGUMENTS else []
        group_argument = next((wanted for wanted in [*_GROUP_ARGUMENTS, *legacy] if wanted in names), None)
    if group_argument is None:
        return None
    peer_argument = _PEER_ARGUMENTS.get(name) if namespace in _COLLECTIVE_NAMESPACES else None
    return _Signature(tuple(schema.arguments), group_argument, peer_argument)


def _any_overload(target: Any) -> Any:
    """`target`, or of a packet its first overload that has no `out`: what matters here is the same in all of those."""
    overloads = getattr(target, "overloads", None)
    if overloads is None:
        return target
    names = overloads()
    return getattr(target, next((name for name in names if "out" not in name), names[0]))


def _group_of(node: Any, call: _CollectiveCall) -> _Group:
    try:
        return _resolve_group(node, call)
    except Exception as error:
        reason = f"{error}" or type(error).__name__
        raise HandshakeConfigError(
            f"the process group of node {node.name} ({node.target}) can't be resolved{_where(node)}: {reason}"
        ) from error


def _resolve_group(node: Any, call: _CollectiveCall) -> _Group:
    dist = _torch().distributed
    name = call.signature.group_argument
    value = _object(call.argument(name))
    if name == "ranks":
        ranks = tuple(value)
        size = _object(call.argument("group_size"))
        if size < len(ranks):  # several groups of that size, of which this rank is in one
            start = ranks.index(_own_rank(node)) // size * size
            ranks = ranks[start : start + size]
        return _Group(ranks, ProcessGroupId(sorted(ranks)), None)
    if isinstance(value, str):
        value = dist.distributed_c10d._resolve_process_group(value)
    if not isinstance(value, dist.ProcessGroup):
        raise TypeError(f"its argument {name} is {_class_name(type(value))}, no process group and no name of one")
    return _group_of_object(value)


def _group_of_object(process_group: Any) -> _Group:
    known = _known_ranks.get(process_group)
    if known is None:
        ranks = tuple(_torch().distributed.get_process_group_ranks(process_group))
        known = _known_ranks[process_group] = ranks, ProcessGroupId(sorted(ranks))
    return _Group(*known, process_group)


def _object(value: Any) -> Any:
    """The object that an argument stands for, where it is one that a graph passes around: a group, a mesh, a name."""
    from torch._library.fake_class_registry import maybe_unwrap_fake_script_object
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    torch = _torch()
    dist = torch.distributed
    if not isinstance(value, torch.fx.Node):
        pass
    elif value.op == "get_attr":
        value = _attribute(value.graph.owning_module, value.target)
    elif (known := _result(value)) is not None:
        value = known
    elif value.op in ("call_function", "call_method"):
        # A group out of a mesh, or a mesh out of a larger one. Nothing is communicated.
        args = [_object(argument) for argument in value.args]
        if args and isinstance(args[0], dist.device_mesh.DeviceMesh):
            with unset_fake_temporarily():
                if value.op == "call_method":
                    value = getattr(args[0], value.target)(*args[1:])
                else:
                    value = value.target(*args)
    value = maybe_unwrap_fake_script_object(value)
    kind = value._type().qualified_name() if isinstance(value, torch.ScriptObject) else ""
    if kind.endswith(".c10d.ProcessGroup"):
        return dist.ProcessGroup.unbox(value)
    if kind.endswith(".c10d.ReduceOp"):
        reduction = dist.ReduceOp.RedOpType(value.op())
        # That has a factor, which can't be read.
        return value if reduction == dist.ReduceOp.PREMUL_SUM else reduction
    return value


def _torch() -> Any:
    """The torch package, for all that its stubs don't say."""
    import torch

    return torch


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _result(node: Any) -> Any:
    """The (fake) value of a node, as AOTAutograd or Dynamo recorded it; None if neither did."""
    value = node.meta.get("val")
    return node.meta.get("example_value") if value is None else value


def _own_rank(node: Any) -> int:
    import torch.distributed as dist

    if not dist.is_initialized():
        raise HandshakeConfigError(
            f"node {node.name} ({node.target}) needs to know this process's rank{_where(node)}: "
            "initialise torch.distributed first"
        )
    return dist.get_rank()


def _peers(node: Any, call: _CollectiveCall, group: _Group) -> list[int]:
    """The global ranks that a point-to-point op meets, one for each op of a batch.

    The op takes a rank within the group, but Dynamo gives it a global one (torch 2.13). So a number is read as what
    runs, a rank within the group; where that names no other member, as the global rank that was meant.
    """
    own = _own_rank(node)
    numbers = call.argument(call.signature.peer_argument or "")
    peers = []
    for number in numbers if isinstance(numbers, (list, tuple)) else [numbers]:
        if type(number) is not int:
            raise HandshakeConfigError(
                f"node {node.name} ({node.target}) has a peer that is not known before it runs{_where(node)}"
            )
        if number < len(group.ranks) and group.ranks[number] != own:
            peers.append(group.ranks[number])
        elif number in group.id:
            peers.append(number)
        else:
            raise HandshakeConfigError(
                f"node {node.name} ({node.target}) communicates with rank {number}, which is not in its group of "
                f"{format_ranks(group.ranks)}{_where(node)}",
                group=group.id.ranks,
            )
    return peers


def node_collectives(node: Any) -> dict[ProcessGroupId, int]:
    """The collectives that one node issues, by group, its nested bodies included: see `count_collectives`."""
    call = _collective_call(node)
    if call is not None:
        group = _group_of(node, call)
        if call.signature.peer_argument is None:
            return {group.id: 1}
        own = _own_rank(node)
        counts: dict[ProcessGroupId, int] = {}
        for peer in _peers(node, call, group):
            pair = ProcessGroupId(sorted({own, peer}))
            counts[pair] = counts.get(pair, 0) + 1
        return counts
    bodies = [count_collectives(body) for body in _bodies(node)]
    if not bodies:
        return {}
    if getattr(node.target, "_name", None) == "cond":
        return {group: max(body.get(group, 0) for body in bodies) for body in bodies for group in body}
    totals: dict[ProcessGroupId, int] = {}
    for body in bodies:
        for one, number in body.items():
            totals[one] = totals.get(one, 0) + number
    return totals


def _bodies(node: Any) -> list[Any]:
    """The nested graphs that a run of the node runs, in the order of its arguments."""
    import torch

    if node.op == "call_module":
        called = _attribute(node.graph.owning_module, node.target)
        if isinstance(called, torch.fx.GraphModule):
            return [called]
        unseen = _opaque_classes(called) - _warned_of
        if unseen:
            _warned_of.update(unseen)
            _logger.warning(
                "node %s (%s) calls a module of class %s%s: if it issues collectives, they are not counted; trace into "
                "it, as AOTAutograd does",
                *(node.name, node.target, ", ".join(sorted(unseen)), _where(node)),
            )
        return []
    if node.op not in ("call_function", "call_method"):
        return []
    attributes = [_attribute(n.graph.owning_module, n.target) for n in node.all_input_nodes if n.op == "get_attr"]
    bodies = [value for value in attributes if isinstance(value, torch.fx.GraphModule)]
    # Its second body is the backward, which Dynamo's graph holds but does not run.
    return bodies[:1] if getattr(node.target, "_name", None) == "autograd_function_apply" else bodies


# Classes of `_opaque_classes` that a warning was given of.
_warned_of: set[str] = set()


def _opaque_classes(module: Any) -> set[str]:
    """The classes of a module and those in it that may do anything: all but torch's own without collectives, of which
    class and settings say what they do."""
    sync = _torch().nn.SyncBatchNorm
    kinds = {type(part) for part in module.modules()}
    return {_class_name(kind) for kind in kinds if not kind.__module__.startswith("torch.nn.modules.") or kind is sync}


# --- Source lines ---


def _where(node: Any) -> str:
    line = source_line(node)
    return " (no source line is recorded)" if line is None else f" ({line})"


def _is_library_file(file: str) -> bool:
    """Whether a file belongs to torch or torch_tpu, of this installation or of the one that recorded the trace."""
    import torch

    if file.startswith("<"):
        return True
    parts = file.replace("\\", "/").split("/")
    if any(
        folder in ("site-packages", "dist-packages") and package in ("torch", "torch_tpu")
        for folder, package in itertools.pairwise(parts)
    ):
        return True
    return file.startswith(os.path.dirname(torch.__file__) + os.sep)


# --- Canonical text ---


class _UnhashableError(HandshakeError):
    """Something in a graph has no canonical text."""


def _check_naming(groups: str) -> None:
    if groups not in GROUP_NAMINGS:
        raise HandshakeConfigError(f"groups={groups!r} is no way to name groups; use one of {', '.join(GROUP_NAMINGS)}")


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class _Tables:
    """What one walk over a graph and its nested bodies shares: the numbers given to symbols, and texts made so far."""

    def __init__(self, naming: str) -> None:
        self.naming = naming
        self._symbols: dict[Any, Any] = {}
        self._expressions: dict[Any, str] = {}
        self._nested_integers: dict[int, int] = {}
        self._groups: dict[tuple[tuple[int, ...], int], str] = {}
        self._bodies: dict[int, tuple[str, bool]] = {}
        self._callables: dict[Any, str] = {}

    def nodes(self, graph_module: Any) -> list[CanonicalNode]:
        return _GraphWalk(self, graph_module).nodes()

    def body(self, graph_module: Any) -> tuple[str, bool]:
        """The digest of a graph, and whether a run of it has an effect."""
        known = self._bodies.get(id(graph_module))
        if known is None:
            digest = hashlib.blake2b(digest_size=16)
            has_effect = False
            for node in self.nodes(graph_module):
                digest.update(node.equality)
                has_effect = has_effect or node.has_effect
            known = self._bodies[id(graph_module)] = digest.hexdigest(), has_effect
        return known

    def group(self, group: _Group) -> str:
        key = (group.ranks, id(group.process_group))
        known = self._groups.get(key)
        if known is None:
            known = self._groups[key] = self._group_text(group)
        return known

    def _group_text(self, group: _Group) -> str:
        ranks = f"ranks {_digest(repr(group.ranks))}"
        if group.process_group is None:
            return f"group({self._layout(group.ranks) if self.naming == 'role' else ranks})"
        size = len(group.ranks)
        alike = [known for known, members in _registered_groups().items() if len(members) == size]
        twins = [known for known in alike if _group_of_object(known).ranks == group.ranks]
        if self.naming == "exact":
            return f"group({ranks} #{_position(group.process_group, twins)})"
        description = _description(group.process_group)
        named = [known for known in alike if _description(known) == description]
        if description != "undefined" and len(named) == 1:
            role = "only one"
        else:
            role = f"{self._layout(group.ranks)} #{_position(group.process_group, [t for t in twins if t in named])}"
        return f"group({description!r} of {size}, {role})"

    @staticmethod
    def _layout(ranks: tuple[int, ...]) -> str:
        """Size, stride and phase in each dimension of a regular group; the ranks of any other.

        Where every stride is a multiple of the extent of the dimensions inside it, groups of one layout are disjoint:
        of a rank and the phases, the coordinates within the group follow, innermost first, and so its first rank.
        """
        dimensions = []
        first, starts, extent = ranks[0], ranks, 1
        while len(starts) > 1:
            stride = starts[1] - starts[0]
            size = 2
            while size < len(starts) and starts[size] == starts[0] + size * stride:
                size += 1
            regular = (
                stride > 0
                and stride % extent == 0
                and len(starts) % size == 0
                and all(starts[i] == starts[i - i % size] + i % size * stride for i in range(len(starts)))
            )
            if not regular:
                return f"ranks {_digest(repr(ranks))}"
            dimensions.append(f"{size} by {stride} from {first // stride % size}")
            starts, extent = starts[::size], stride * size
        return ", ".join(dimensions)

    def mesh(self, mesh: Any) -> str:
        """A device mesh: in roles, by its dimensions' names, sizes and groups; else by its ranks."""
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        with unset_fake_temporarily():
            ranks = mesh.mesh.tolist()
        names = mesh.mesh_dim_names
        if self.naming == "role" and mesh.get_coordinate() is not None:
            groups = [self.group(_group_of_object(mesh.get_group(dim))) for dim in range(mesh.ndim)]
            return f"mesh({mesh.device_type} {names!r} {','.join(groups)})"
        return f"mesh({mesh.device_type} {names!r} {_digest(repr(ranks))})"

    def symbolic(self, value: Any) -> str:
        """A symbolic number: its expression, with symbols numbered in order of first appearance."""
        node = value.node
        if node.is_nested_int():
            number = self._nested_integers.setdefault(node.nested_int(), len(self._nested_integers))
            return f"j{number}*{node.nested_int_coeff()}"
        expression = node.expr
        known = self._expressions.get(expression)
        if known is None:
            # A symbol that appears inside a compound first is rare; of several, the names decide.
            for symbol in sorted(expression.free_symbols, key=str):
                if symbol not in self._symbols:
                    self._symbols[symbol] = self._symbol(symbol, node.shape_env)
            renamed = expression.xreplace({symbol: self._symbols[symbol] for symbol in expression.free_symbols})
            known = self._expressions[expression] = f"<{renamed}>"
        return known

    def _symbol(self, symbol: Any, shape_env: Any) -> Any:
        import sympy  # type: ignore[import-untyped]

        bounds = shape_env.var_to_range.get(symbol)
        limits = "" if bounds is None else f"[{bounds.lower}..{bounds.upper}]"
        kind = str(symbol).rstrip("0123456789")
        return sympy.Symbol(f"{kind}{len(self._symbols)}{limits}", **symbol.assumptions0)

    def callable(self, target: Any) -> str:
        try:
            known = self._callables.get(target)
        except TypeError:  # not hashable
            return self._callable_text(target)
        if known is None:
            known = self._callables[target] = self._callable_text(target)
        return known

    def _callable_text(self, target: Any) -> str:
        from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

        if isinstance(target, OpOverload):
            return str(target)
        if isinstance(target, OpOverloadPacket):
            return target._qualified_op_name.replace("::", ".")
        if isinstance(target, HigherOrderOperator):
            return f"{target.namespace}.{target._name}"
        if isinstance(target, type):
            return _class_name(target)
        if isinstance(target, types.FunctionType):
            name = f"{target.__module__}.{target.__qualname__}"
            if "<" not in target.__qualname__:
                return name
            cells = [cell.cell_contents for cell in target.__closure__ or ()]
            parts = [target.__code__, target.__defaults__, target.__kwdefaults__, cells]
            return f"code({','.join(map(self.constant, parts))})"
        if isinstance(target, types.MethodType):
            return f"method({self.callable(target.__func__)} of {self.constant(target.__self__)})"
        if isinstance(target, types.BuiltinFunctionType):
            owner = target.__self__
            if owner is None or isinstance(owner, (type, types.ModuleType)):
                return f"{target.__module__ or getattr(owner, '__name__', '')}.{target.__qualname__}"
            return f"method({target.__name__} of {self.constant(owner)})"
        if isinstance(target, (types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType)):
            return f"{_class_name(target.__objclass__)}.{target.__name__}"
        raise _UnhashableError(f"{_class_name(type(target))} has no name that is the same on every rank")

    def constant(self, value: Any) -> str:
        """A value that holds no node."""
        return _GraphWalk(self, None).value(value)


def _registered_groups() -> dict[Any, Collection[int]]:
    """This rank's process groups, in order of creation, with their ranks."""
    world = _torch().distributed.distributed_c10d._world
    return {known: world.pg_group_ranks[known] for known in world.pg_names if known in world.pg_group_ranks}


def _position(process_group: Any, among: list[Any]) -> int:
    return next((i for i, known in enumerate(among) if known is process_group), 0)


def _description(process_group: Any) -> str:
    return process_group.group_desc or "undefined"


class _GraphWalk:
    """One pass over one graph.

    `value` writes an argument as text. Where it meets a node it notes the position in `_inputs` and writes a mark, so
    that one text serves for both digests.
    """

    def __init__(self, tables: _Tables, graph_module: Any) -> None:
        from torch._subclasses.fake_tensor import FakeTensor

        torch = _torch()
        self._tables = tables
        self._graph_module = graph_module
        self._torch = torch
        self._fake_tensor = FakeTensor
        self._positions: dict[Any, int] = {}
        self._marks: list[str] = []
        self._targets: list[str] = []
        self._inputs: list[int] = []
        self._storages: dict[int, int] = {}
        self._descriptors: dict[Any, int] = {}
        self._effectful_bodies: set[int] = set()
        self._writers: dict[type, Callable[[Any], str]] = {
            torch.fx.Node: self._reference,
            type(None): lambda value: "None",
            bool: str,
            int: str,
            float: lambda value: struct.pack(">d", value).hex() + "f",
            complex: lambda value: struct.pack(">dd", value.real, value.imag).hex() + "c",
            str: self._string,
            bytes: lambda value: f"bytes({value.hex()})",
            list: self._list,
            torch.fx.immutable_collections.immutable_list: self._list,
            tuple: self._tuple,
            torch.Size: self._tuple,
            dict: self._dict,
            torch.fx.immutable_collections.immutable_dict: self._dict,
            set: self._set,
            frozenset: self._set,
            slice: lambda value: f"slice({self._items((value.start, value.stop, value.step))})",
            range: str,
            type(...): str,
            torch.dtype: str,
            torch.layout: str,
            torch.memory_format: str,
            torch.device: lambda value: f"device({value.type})",
            torch.SymInt: tables.symbolic,
            torch.SymFloat: tables.symbolic,
            torch.SymBool: tables.symbolic,
            types.CodeType: self._code,
        }

    def nodes(self) -> list[CanonicalNode]:
        nodes = []
        for position, node in enumerate(self._graph_module.graph.nodes):
            try:
                nodes.append(self._node(node, position))
            except HandshakeConfigError:
                raise
            except Exception as error:
                reason = f"{error}" or type(error).__name__
                message = f"node {node.name} ({node.target}) can't be hashed{_where(node)}: {reason}"
                raise _UnhashableError(message) from error
        return nodes

    def _node(self, node: Any, position: int) -> CanonicalNode:
        op = node.op
        self._inputs = []
        group = None
        call = None
        is_source = op in ("placeholder", "get_attr")
        if op == "placeholder":
            target = ""
        elif op == "get_attr":
            attribute = _attribute(self._graph_module, node.target)
            target = self._attribute_text(attribute)
            if isinstance(attribute, self._torch.fx.GraphModule) and self._tables.body(attribute)[1]:
                self._effectful_bodies.add(position)
        elif op == "call_function":
            target = self._tables.callable(node.target)
            call = _collective_call(node)
            if target.startswith("higher_order.triton_kernel"):
                raise _UnhashableError("a Triton kernel is named by its number in this process")
        elif op == "call_module":
            target = self._module_text(_attribute(self._graph_module, node.target))
        else:
            target = str(node.target)
        replaced: dict[Any, str] = {}
        if call is not None:
            group, replaced = self._collective(node, call)
        elif target == "higher_order.invoke_subgraph":
            replaced = {1: "", "identifier": ""}  # a number in this process; the body says all
        arguments = self._arguments(node, replaced)
        metadata = self._metadata(_result(node), position if is_source else None)
        if op == "placeholder" and "desc" in node.meta:
            self._descriptors.setdefault(_of_whole_tensor(node.meta["desc"]), position)
        elif op == "output":
            metadata = self._written_back(node.meta.get("desc"))
        content = f"{op} {target}({arguments}){metadata}"
        inputs = tuple(self._inputs)
        encoded = content.encode("utf-8", "surrogatepass")
        equality = hashlib.blake2b(encoded, digest_size=16)
        equality.update(repr(inputs).encode())
        alignment = hashlib.blake2b(encoded, digest_size=8)
        alignment.update("\0".join([self._targets[i] for i in inputs]).encode("utf-8", "surrogatepass"))
        self._positions[node] = position
        self._marks.append(f"%({target})" if op == "get_attr" else "%")
        self._targets.append(target or op)
        return CanonicalNode(
            node.name, op, target or op, equality.digest(), alignment.digest(), inputs, group,
            call is not None or self._has_effect(node, inputs),
        )  # fmt: skip

    def _arguments(self, node: Any, replaced: dict[Any, str]) -> str:
        value = self.value
        texts = [
            value(argument) if index not in replaced else self._replace(argument, replaced[index])
            for index, argument in enumerate(node.args)
        ]
        kwargs = node.kwargs
        for name in sorted(kwargs):
            text = value(kwargs[name]) if name not in replaced else self._replace(kwargs[name], replaced[name])
            texts.append(f"{name}={text}")
        return ",".join(texts)

    def _replace(self, argument: Any, text: str) -> str:
        self.value(argument)  # for its inputs
        return text

    def _collective(self, node: Any, call: _CollectiveCall) -> tuple[ProcessGroupId, dict[Any, str]]:
        """The group of a collective, and the texts of the arguments that name it or a peer in it."""
        group = _group_of(node, call)
        signature = call.signature
        texts = {signature.group_argument: self._tables.group(group)}
        identity = group.id
        if signature.peer_argument is not None:
            own = _own_rank(node)
            peers = _peers(node, call, group)
            identity = ProcessGroupId(sorted({own, *peers}))
            if self._tables.naming == "role":
                places = {rank: place for place, rank in enumerate(group.ranks)}
                steps = [(places[peer] - places[own]) % len(group.ranks) for peer in peers]
                texts[signature.peer_argument] = f"peers {steps} ahead"
        replaced: dict[Any, str] = {}
        for index, argument in enumerate(signature.arguments):
            if argument.name in texts:
                replaced[argument.name] = replaced[index + call.offset] = texts[argument.name]
        return identity, replaced

    # Arguments.

    def value(self, value: Any) -> str:
        writer = self._writers.get(type(value))
        return writer(value) if writer is not None else self._other(value)

    def _items(self, values: Iterable[Any]) -> str:
        return ",".join([self.value(value) for value in values])

    def _reference(self, node: Any) -> str:
        position = self._positions[node]
        self._inputs.append(position)
        return self._marks[position]

    def _string(self, value: str) -> str:
        if _DEVICE_TEXT.fullmatch(value):
            try:
                return f"device({self._torch.device(value).type})"
            except RuntimeError:
                pass  # some other text of that form
        return repr(value)

    def _list(self, values: Any) -> str:
        return f"[{self._items(values)}]"

    def _tuple(self, values: Any) -> str:
        return f"({self._items(values)})"

    def _dict(self, values: Any) -> str:
        # By the keys' texts. Keys hold no nodes, so the order in which inputs are met follows.
        pairs = sorted(((self.value(key), key) for key in values), key=operator.itemgetter(0))
        return "{" + ",".join(f"{text}:{self.value(values[key])}" for text, key in pairs) + "}"

    def _set(self, values: Any) -> str:
        return "set(" + ",".join(sorted(self.value(value) for value in values)) + ")"

    def _code(self, code: types.CodeType) -> str:
        constants = self._items(code.co_consts)
        return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} {code.co_flags} {constants}"

    def _other(self, value: Any) -> str:
        import dataclasses
        import functools

        torch = self._torch
        kind = type(value)
        name = _class_name(kind)
        if isinstance(value, enum.Enum) or hasattr(kind, "__members__"):  # Python's, or of a C++ extension
            return f"{name}.{value.name}"
        if isinstance(value, torch.Tensor):
            return self._tensor_value(value)
        if isinstance(value, torch.fx.GraphModule):
            return f"graph {self._tables.body(value)[0]}"
        if isinstance(value, functools.partial):
            return f"partial({self._items((value.func, value.args, value.keywords))})"
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{name}({self._items(value)})"
        base: Any
        for base in (list, tuple, dict, set, frozenset, int, float, complex, str, bytes):
            if isinstance(value, base):
                return f"{name} {self._writers[base](base(value))}"
        meant = _object(value)
        if type(meant) is not kind:
            return self.value(meant)
        distributed = torch.distributed
        if distributed.is_available():
            if isinstance(value, distributed.ProcessGroup):
                return self._tables.group(_group_of_object(value))
            if isinstance(value, distributed.device_mesh.DeviceMesh):
                return self._tables.mesh(value)
        placements = sys.modules.get("torch.distributed.tensor.placement_types")
        if placements is not None and isinstance(value, placements.Placement):
            return f"{name} {value!r}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.compare}
            return f"{name} {self._dict(fields)}"
        if isinstance(value, (torch.finfo, torch.iinfo)):
            return f"{name}({value.dtype})"
        if callable(value) and not isinstance(value, torch.nn.Module):
            return self._tables.callable(value)
        raise _UnhashableError(f"it holds an object of class {name}, which has no text that is the same on every rank")

    # Attributes of the graph module.

    def _attribute_text(self, value: Any) -> str:
        torch = self._torch
        if isinstance(value, torch.nn.Parameter):
            return f"parameter {self._metadata(value, None)} requires_grad={value.requires_grad}"
        if isinstance(value, torch.nn.Module) and not isinstance(value, torch.fx.GraphModule):
            return self._module_text(value)
        return self.value(value)

    def _module_text(self, module: Any) -> str:
        torch = self._torch
        if isinstance(module, torch.fx.GraphModule):
            return f"graph {self._tables.body(module)[0]}"
        name = _class_name(type(module))
        description = repr(module)
        if _opaque_classes(module) or " at 0x" in description:
            raise _UnhashableError(f"it calls a module of class {name}, whose program is not in the graph")
        state = {
            key: self._metadata(tensor, None) for key, tensor in (*module.named_parameters(), *module.named_buffers())
        }
        return f"{name} {description!r} training={module.training} {self._dict(state)}"

    def _tensor_value(self, tensor: Any) -> str:
        """A tensor constant: its metadata and the digest of its elements."""
        from torch._subclasses.fake_tensor import unset_fake_temporarily
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        metadata = self._metadata(tensor, None)
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            inner = ",".join(f"{name}={self.value(getattr(tensor, name))}" for name in names)
            return f"{metadata} {self.value(context)} {inner}"
        if isinstance(tensor, self._fake_tensor):
            if tensor.constant is None:
                return f"valueless {metadata}"
            tensor = tensor.constant
        if tensor.device.type == "meta":
            return f"valueless {metadata}"
        with unset_fake_temporarily():
            return f"{metadata} requires_grad={tensor.requires_grad} {_elements_digest(tensor)}"

    # Metadata.

    def _metadata(self, value: Any, source: int | None) -> str:
        """What is known of a node's result. `source` is the position of a placeholder or get_attr, else None."""
        torch = self._torch
        if value is None:
            return ""
        if isinstance(value, torch.Tensor):
            return self._tensor_metadata(value, source)
        if isinstance(value, (list, tuple)):
            return f"[{','.join([self._metadata(item, source) for item in value])}]"
        writer = self._writers.get(type(value))
        if writer is not None:
            return writer(value)
        if source is None:
            return _class_name(type(value))  # what it holds follows from op and arguments
        value = _object(value)
        distributed = torch.distributed
        if distributed.is_available() and isinstance(
            value, (distributed.ProcessGroup, distributed.device_mesh.DeviceMesh)
        ):
            return self.value(value)
        return _class_name(type(value))

    def _tensor_metadata(self, tensor: Any, source: int | None) -> str:
        from torch.utils._python_dispatch import is_traceable_wrapper_subclass

        torch = self._torch
        layout = tensor.layout
        strided = layout is torch.strided
        strides = self._sizes(tensor.stride()) if strided else layout
        text = f"{tensor.dtype}{self._sizes(tensor.shape)}{strides}{tensor.device.type}"
        if tensor.dtype.is_complex and tensor.is_conj():
            text += " conj"
        if is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            inner = ",".join([self._metadata(getattr(tensor, name), source) for name in names])
            text += f" {_class_name(type(tensor))} {self.value(context)} {inner}"
        elif source is not None and strided:
            # Inputs that share memory: named by the first of them.
            first = self._storages.setdefault(tensor.untyped_storage()._cdata, source)
            if first != source:
                text += f" aliases {first}"
        if source is not None and tensor.requires_grad:
            text += " requires_grad"
        return text

    def _sizes(self, sizes: Any) -> str:
        return f"({','.join([str(size) if type(size) is int else self._tables.symbolic(size) for size in sizes])})"

    def _written_back(self, descriptors: Any) -> str:
        """Which outputs are new values of which inputs: AOTAutograd writes those back after the graph has run."""
        texts = []
        for index, descriptor in enumerate(descriptors or ()):
            descriptor = _of_whole_tensor(descriptor)
            kind = type(descriptor).__name__
            if kind == "InputMutationAOTOutput":
                texts.append(f"{index} to {self._descriptors.get(descriptor.mutated_input)}")
            elif kind == "MetadataMutationAOTOutput":
                texts.append(f"{index} sets metadata of {descriptor.idx}")
        return ",".join(texts)

    def _has_effect(self, node: Any, inputs: tuple[int, ...]) -> bool:
        op = node.op
        if self._effectful_bodies and not self._effectful_bodies.isdisjoint(inputs):
            return True
        if op == "call_function":
            return _function_has_effect(node)
        if op == "call_method":
            return _is_in_place(node.target) or _is_random(node.target)
        if op == "call_module":
            called = _attribute(self._graph_module, node.target)
            return not isinstance(called, self._torch.fx.GraphModule) or self._tables.body(called)[1]
        return False


def _of_whole_tensor(descriptor: Any) -> Any:
    """AOTAutograd's descriptor of an input or output; of a part of a tensor subclass, that of the whole."""
    while type(descriptor).__name__.startswith("Subclass"):
        descriptor = descriptor.base
    return descriptor


def _elements_digest(tensor: Any) -> str:
    """A digest of a tensor's elements in row-major order, whatever its strides."""
    import ctypes

    import torch

    if tensor.layout is not torch.strided:
        raise _UnhashableError(f"a constant of layout {tensor.layout}")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    count = plain.numel() * plain.element_size()
    elements = (ctypes.c_char * count).from_address(plain.data_ptr()) if count else b""
    return hashlib.blake2b(elements, digest_size=16).hexdigest()


def _function_has_effect(node: Any) -> bool:
    import torch
    from torch._ops import OpOverload, OpOverloadPacket

    target = node.target
    if isinstance(target, (OpOverload, OpOverloadPacket)):
        overload = _any_overload(target)
        schema = overload._schema
        return (
            schema.is_mutable
            or schema.name.endswith("::wait_tensor")
            or torch.Tag.nondeterministic_seeded in overload.tags
        )
    if target in _IN_PLACE_OPERATORS or "out" in node.kwargs or node.kwargs.get("inplace") is True:
        return True
    name = getattr(target, "__name__", "")
    module = getattr(target, "__module__", None) or ""
    if module in ("_operator", "builtins", "math"):
        return False
    if module == "torch.nn.functional" and any(argument is True for argument in node.args):
        return True  # `inplace`, perhaps
    # What Dynamo records no value for switches a state (grad mode, autocast, …).
    return name == "wait_tensor" or _is_in_place(name) or _is_random(name) or _result(node) is None


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__delitem__")


def _is_random(name: str) -> bool:
    """Whether the aten op of that name draws random numbers."""
    import torch

    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    return packet is not None and torch.Tag.nondeterministic_seeded in _any_overload(packet).tags


# --- Facts beside a graph's text ---


def _facts(graph_module: Any, path: str = "") -> list[str]:
    import torch
    import torch.distributed as dist

    facts = []
    if not path and dist.is_available() and dist.is_initialized():
        facts.append(f"rank = {dist.get_rank()}")
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            value = _attribute(graph_module, node.target)
            if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
                facts.append(f"constant {path}{node.target} = {_constant_fact(value)}")
        call = _collective_call(node)
        if call is not None:
            fact = _group_fact(node, call)
            if fact and fact not in facts:
                facts.append(fact)
        facts.extend(f"mutated {path}{name} = {how}" for name, how in _mutations(node))
        frames = list(_STACK_FRAME.finditer(node.meta.get("stack_trace") or ""))
        if frames and _is_library_file(frames[-1]["file"]):
            line = source_line(node)
            if line is not None:
                facts.append(f"source {path}{node.name} = {line}")
    for name, body in graph_module.named_children():
        if isinstance(body, torch.fx.GraphModule):
            facts.extend(_facts(body, f"{path}{name}."))
    return facts


def _constant_fact(tensor: Any) -> str:
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    text = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    try:
        with unset_fake_temporarily():
            first = tensor.detach().flatten()[:MAX_CONSTANT_VALUES_SHOWN].tolist()
            more = ", …" if tensor.numel() > MAX_CONSTANT_VALUES_SHOWN else ""
            return f"{text} blake2b:{_elements_digest(tensor)} [{', '.join(map(repr, first))}{more}]"
    except Exception:  # a fake tensor, or a subclass without elements: what is known is said
        return text


def _group_fact(node: Any, call: _CollectiveCall) -> str | None:
    try:
        group = _resolve_group(node, call)
    except Exception:  # the text is made to explain a failure; it must not add one
        return None
    name = getattr(group.process_group, "group_name", None)
    if name is None:
        return None
    description = _description(group.process_group)
    size = len(group.ranks)
    return f"group {name} = {format_ranks(group.ranks, size)}; size {size}; description {description}"


def _mutations(node: Any) -> list[tuple[str, str]]:
    """Inputs of the graph that a node changes: their names, and by what."""
    if node.op == "output":
        inputs = {n.meta["desc"]: n.name for n in node.graph.nodes if n.op == "placeholder" and "desc" in n.meta}
        mutated = [getattr(descriptor, "mutated_input", None) for descriptor in node.meta.get("desc") or ()]
        return [(inputs[descriptor], "output") for descriptor in mutated if descriptor in inputs]
    if node.op == "call_method" and _is_in_place(node.target):
        return [(n.name, node.target) for n in node.args[:1] if getattr(n, "op", None) == "placeholder"]
    schema = getattr(node.target, "_schema", None) if node.op == "call_function" else None
    if schema is None or not schema.is_mutable:
        return []
    changed: list[tuple[str, str]] = []
    for index, argument in enumerate(schema.arguments):
        value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            values = value if isinstance(value, (list, tuple)) else [value]
            changed.extend((n.name, str(node.target)) for n in values if getattr(n, "op", None) == "placeholder")
    return changed
