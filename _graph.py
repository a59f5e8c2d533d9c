# SPDX-License-Identifier: Apache-2.0
"""What the ranks compare: how many collectives a graph issues on which group, and a fingerprint of its program.

Theory. Two ranks may run one executable around a collective only if they run the same program. So every node
of a graph is written in a *canonical text*: its op, target, arguments and the metadata of its result, with all that is
known to reach the compiled program and nothing that differs between processes that run the same one. A node is
named by its position; a symbolic size by its order of first appearance, with the range it was given; a process group
by its ranks ("exact") or by what it is to its members ("role"); a device by its type; a function by its qualified name,
a local one by its code; the body of a nested graph and the value of a tensor constant by their digests. What has no
such text (an object of an unknown class, a tensor constant whose value can't be read) makes the graph unhashable: it
gets a fingerprint that equals no other, so that it takes part in the vote and splits it.

Inputs of the graph count by metadata, not by value: ranks hold different shards of the same weights. That goes for
`torch.nn.Parameter` attributes of a graph too. Every other tensor attribute (`_tensor_constant0`, a buffer that was
not lifted) is baked into the program and counts by value.

Left out on purpose: names of nodes, source lines, module stacks, storage offsets (not guarded on by Dynamo; where
they matter they are arguments of `as_strided`), hints of symbolic sizes, the index of a device.

Role names. Ranks with equal fingerprints must mean the same group by the same role wherever they share one, or two
ranks could meet in one collective and take it for different ones. Each rank has only its own groups to tell from,
so a role is one of these, each of which leaves a rank no choice of group:
- the description, if this rank is in one group of that description and size only, as with the dimension of a mesh;
- the size, stride and phase of a regular group (rows, columns, planes of a mesh of any number of dimensions, on all
  ranks or on a block of them). Groups of one size, stride and phase don't overlap, so a rank is in one of them at most;
- else the ranks themselves.
(That a rank did not know a group yet when it made its fingerprint does no harm: then its graph doesn't use it, and the
spans of the two votes differ.) The peer of a point-to-point op is named by its distance on the ring of its group.

Everywhere `graph_module` is an FX graph module, AOTAutograd's or Dynamo's; `groups` is "exact" or "role", as above, or
None: as the handshake is set, "role" by default. Reports on a split compare graphs node by node: `graph_record` writes
the nodes as JSON; `graph_text` is what torch prints, with what that leaves out taken from the record.
"""

import contextlib
import ctypes
import dataclasses
import enum
import functools
import hashlib
import importlib
import itertools
import json
import logging
import operator
import os
import re
import secrets
import struct
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

if __package__:
    from ._protocol import runs
    from ._vocabulary import HandshakeConfigError, HandshakeError, ProcessGroupId, format_ranks, group_naming
else:
    from _protocol import runs
    from _vocabulary import HandshakeConfigError, HandshakeError, ProcessGroupId, format_ranks, group_naming

_logger = logging.getLogger("torch_tpu.handshake")


class _LazyTorch:
    """Stands for the torch package until something of it is first asked for."""

    def __getattr__(self, name: str) -> Any:
        global torch
        torch = importlib.import_module("torch")
        return getattr(torch, name)


torch: Any = _LazyTorch()

# An op is a collective if it takes a process group: an argument of that class, or of one of the names below, which in
# other namespaces of torch.ops than these must also have a type that a group or its name has. An op that waits for a
# collective, or wraps its result, takes none and is not counted.
_COLLECTIVE_NAMESPACES = frozenset(
    {"_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "c10d", "_dtensor", "symm_mem", "tpu"}
)
# The legacy functional collectives take (tag, ranks, group_size) instead of a group.
_GROUP_ARGUMENTS = ("group_name", "group", "process_group", "ranks")
_GROUP_TYPES = ("str", "Optional[str]", "Any", "PyObject")
# In these an op that changes no argument has an effect only if it says so. In others nothing is known of it.
_NAMESPACES_WITHOUT_EFFECTS = frozenset(
    {"aten", "prims", "prim", "inductor", "mkl", "mkldnn", "onednn", "quantized", "_quantized", "quantized_decomposed"}
    | _COLLECTIVE_NAMESPACES - {"c10d", "symm_mem"}
)
# The same ops by their names, where there is no schema to ask. The namespace tpu also holds ops of one device.
_COLLECTIVE_NAME = re.compile(
    r"tpu::\w*?(all_?gather|all_?reduce|reduce_?scatter|all_?to_?all)\w*"
    r"|(?!tpu::)\w+::(\w*(gather|reduce|scatter|all_?to_?all|broadcast|send|recv|p2p)\w*"
    r"|barrier|monitored_barrier_|_rendezvous|get_remote_tensors|memcpy_to_multicast_)"
)
# Point-to-point ops, and the argument that names the peer, or the list of peers.
_PEER_ARGUMENTS = {
    "isend": "dst", "send": "dst", "irecv": "src", "recv_": "src", "recv_any_source_": "", "batch_p2p_ops": "peer_list",
}  # fmt: skip

# Of what `Collectives.sequences` says. The first is what ops that communicate alike differ by in their names.
_FORM_OF_OP = re.compile(r"^_+|_(into_tensor|tensor|single|coalesced|out)(?=_|$)|_+$")
_OF_ONE_SIZE = re.compile(r"(?!.*fused).*(gather|reduce|scatter|all_to_all|alltoall_base|dim_alltoall|broadcast)")
_REDUCTION_ARGUMENTS = ("reduce_op", "reduceOp", "red_op", "op")
_ROOT_ARGUMENTS = ("src", "root", "root_rank")
_SPLITS_ARGUMENT = re.compile("splits|sizes|counts")
MAX_TENSORS_TEXT = 100  # characters about the tensors of one collective; a digest stands for the rest
MAX_CONSTANT_VALUES_SHOWN = 16  # elements of a tensor constant, in texts and records
_MAX_CACHED_TRACES = 4096  # stack traces kept parsed: the nodes of one source line share theirs
# Classes whose `repr` says all, and no two of which have one in common.
_PLAIN_CLASSES = frozenset({type(None), bool, int, str, bytes, range, type(...)})
# Of XLA's programs as text: the module's name, the tables of files, functions and frames, what an instruction is from.
_NO_PART_OF_PROGRAM = re.compile(
    rb"(?m)(?<=^HloModule )[^,\s]*|^(FileNames|FunctionNames|FileLocations|StackFrames)\n(\d.*\n)*"
    rb'|, metadata=\{([^{}"]|"(\\.|[^"\\])*"|\{[^{}]*\})*\}'
)
_REPLICA_GROUPS = re.compile(rb"(?<=replica_groups=)\{\{[\d,{}]*\}\}")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")
_STACK_FRAME = re.compile(
    r'^\s*File "(?P<file>[^\n]+)", line (?P<line>\d+)(?:, in (?P<function>[^\n]+))?[^\n]*'
    r'(?:\n(?!\s*File ")\s*(?P<code>[^\n]*))?',
    re.MULTILINE,
)
_NO_PATH = re.compile(r"^L\['\w+'\]\.?|_modules\['|'\]")  # what is not the path in `L['self'].model.embed_tokens`
_LIBRARY_FILE = re.compile(r"<|.*[/\\](site|dist)-packages[/\\]torch(_tpu)?[/\\]")
_INSTALLED_FILE = re.compile(r"<|.*[/\\](site|dist)-packages[/\\]")


class SourceLine(NamedTuple):
    """A line of the user's program."""

    file: str
    line: int
    function: str
    code: str
    caller: str = ""  # where it was called from, outside installed libraries

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" + (f": {self.code}" if self.code else "")


class Collectives(dict[ProcessGroupId, int]):
    """How many collectives a graph issues on each process group. `sequences` says what they are, in the order
    of the graph, as far as all members must agree: ``all_reduce sum float32 1024``, ``all_gather bfloat16 4096`` (what
    each gives), ``broadcast float32 8 root 0``, ``send_recv int64 8`` (by either end). A symbolic size is ``?``, which
    equals any; one in which members may differ, as in an uneven all-to-all, is left out. Ranks with one fingerprint
    have the same sequences, for their groups in order of first use, unless two of these are one to some of them."""

    def __init__(self, issued: Iterable[tuple[ProcessGroupId, str]]) -> None:
        self.sequences: dict[ProcessGroupId, list[str]] = {}
        for group, text in issued:
            self.sequences.setdefault(group, []).append(text)
        super().__init__({group: len(texts) for group, texts in self.sequences.items()})


class CanonicalNode(NamedTuple):
    """A node of a graph as ranks compare it."""

    name: str  # the fx node's, for messages
    op: str  # placeholder, get_attr, call_function, call_method, call_module or output
    target: str  # canonical text of what is called; for a get_attr, of the value
    equality: bytes  # 16, a digest of the whole content; other nodes by their positions
    alignment: bytes  # 8, a digest of its own content, and of the form of the values it reads, whatever made these
    inputs: tuple[int, ...]  # positions of the nodes it reads: arguments in order, then keywords by name
    symbols: tuple[int, ...]  # in all of that, by first appearance: as numbers, by which nodes of one graph share them
    group: ProcessGroupId | None  # of a collective; for a point-to-point op this rank and its peers
    # Not to be moved past its like, repeated or dropped: a collective, wait, mutation, random op, switch of state.
    has_effect: bool


def count_collectives(graph_module: Any) -> Collectives:
    """How many collectives one run of the graph issues on each process group, in order of first use; none with 0.
    A coalesced collective counts once. A point-to-point op counts on the line of the pair {this rank, peer}, and a
    batch of them once for each of its ops, so that both ends count alike however they batch. Nested graphs count
    as often as they are called: of the branches of a `cond`, the largest count of each group; of a loop, one
    iteration. What a called module that is not a graph issues is not counted: a warning names its class, once. Raises
    HandshakeConfigError, with the node and its source line, if a collective's group can't be resolved. (With an op that
    nobody registered a warning says so, it counts on this rank's own line, and its graph is unhashable.)"""
    return Collectives(issued for node in graph_module.graph.nodes for issued in _issued(node))


def node_collectives(node: Any) -> Collectives:
    """The collectives that one node issues, its nested bodies included: see `count_collectives`."""
    return Collectives(_issued(node))


def graph_fingerprint(graph_module: Any, groups: str | None = None) -> str:
    """A digest of the program, equal on two ranks exactly when their programs are: 32 lowercase hex digits; or, for a
    graph that can't be hashed, ``unhashable-`` and 32 random ones, which equal no other rank's, with the reason logged
    as a warning. Raises HandshakeConfigError if `groups` is neither "exact" nor "role"."""
    shared = _Shared(group_naming(groups))
    try:
        return shared.body(graph_module)[0]
    except Exception as error:  # whatever it is, the other ranks must not wait for this one
        _logger.warning("this graph can't be compared with other ranks' and will be split: %s", error)
        return f"unhashable-{secrets.token_hex(16)}"


def executable_fingerprint(data: bytes | str, groups: str | None = None) -> str:
    """A digest of an executable, or of any text that stands for one: 32 lowercase hex digits. Of a program that XLA
    has printed (``HloModule …``) it leaves out what is no part of it: the module's name, files, lines, metadata; and
    with groups by role, replica groups that all lie alike, as the rows of a mesh do, count by how they lie."""
    content = data.encode("utf-8", "surrogatepass") if isinstance(data, str) else data
    if content.startswith(b"HloModule "):
        content = _NO_PART_OF_PROGRAM.sub(b"", content)
        if group_naming(groups) == "role":
            content = _REPLICA_GROUPS.sub(_replica_role, content)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def canonical_nodes(graph_module: Any, groups: str | None = None) -> list[CanonicalNode]:
    """The nodes of the top-level graph, in order, as ranks compare them. Nested bodies and values of tensor constants
    are in the digests of the get_attr nodes that name them, and of the nodes that read those. Raises
    HandshakeConfigError if `groups` is neither "exact" nor "role", or a collective's group can't be resolved;
    HandshakeError, with the node and why, if the graph can't be hashed."""
    return _GraphWalk(_Shared(group_naming(groups)), graph_module).nodes()


def register_collective(
    qualified_op_name: str, group_argument: str = "group_name", resolve: Callable[[Any], Any] | None = None
) -> None:
    """Makes an op, named without an overload, count as a collective: ``register_collective("mylib::reduce", "ring")``.
    That argument of its schema holds a process group or its name, or what `resolve` makes one of (None, where there is
    no such argument). An op that takes a process group, or names one in an argument `group_name`, `group` or
    `process_group`, needs none of this. Raises HandshakeConfigError if the name is not ``namespace::name``."""
    if not re.fullmatch(r"\w+::\w+", qualified_op_name):
        raise HandshakeConfigError(f"{qualified_op_name!r} is not a qualified op name, such as 'mylib::ring_reduce'")
    _registered_collectives[qualified_op_name] = group_argument, resolve
    _signature.cache_clear()


def is_collective(node: Any) -> bool:
    """Whether the node itself issues a collective or a point-to-point op. (A call of a nested graph does not.)"""
    return _collective_call(node) is not None


def is_collective_name(qualified_op_name: str) -> bool:
    """The same by the op's name alone, ``namespace::name`` without an overload: needs no graph and no torch."""
    is_in_namespace = qualified_op_name.partition("::")[0] in _COLLECTIVE_NAMESPACES
    is_known = is_in_namespace and _COLLECTIVE_NAME.fullmatch(qualified_op_name) is not None
    return is_known or qualified_op_name in _registered_collectives


def collective_group(node: Any) -> ProcessGroupId:
    """The process group of a collective; of a point-to-point op this rank and its peers. Raises HandshakeConfigError
    if the node is not a collective, or its group can't be resolved."""
    call = _collective_call(node)
    if call is None:
        raise HandshakeConfigError(f"node {node.name} is not a collective{_where(node)}")
    return _resolve(node, call).members


def source_line(node: Any) -> SourceLine | None:
    """The line of the user's program that the node comes from: the innermost frame outside torch; None if unknown."""
    return _frames(node.meta.get("stack_trace") or "")[1]


def graph_text(graph_module: Any) -> str:
    """The graph as people read it: torch's `print_readable` with strides and devices, then what that leaves out.

    Those facts are comment lines ``# handshake: SUBJECT = VALUE``; BODY is the dotted name of a nested graph:
    - ``rank = 1``: who printed it, if `torch.distributed` is initialised;
    - ``group 3 = ranks 0-1; size 2; description mesh_tp``: a process group by its name;
    - ``constant BODY._tensor_constant0 = float32 (2,) blake2b:0123… [1.0, 2.0]``: a tensor constant by dtype, shape,
      digest and first `MAX_CONSTANT_VALUES_SHOWN` values, row-major;
    - ``mutated arg0_1 = copy_``: an input that the graph changes, and the op (or output) that does;
    - ``shares arg1_1 = arg0_1``: an input, and the first one that it shares memory with;
    - ``source BODY.all_reduce = /path/model.py:24: x = all_reduce(y)``: the user's own line, where it is not the
      innermost, which `print_readable` shows."""
    text = graph_module.print_readable(print_output=False, include_stride=True, include_device=True)
    record = _record(graph_module)
    facts = [] if record["rank"] is None else [f"rank = {record['rank']}"]
    for name, group in record["groups"].items():
        ranks = [first + step * k for first, count, step in group["ranks"] for k in range(count)]
        members = f"{format_ranks(ranks, len(ranks))}; size {len(ranks)}"
        facts.append(f"group {name} = {members}; description {group['description']}")
    facts += _fact_lines(record["body"])
    return "\n".join([text.rstrip("\n"), *[f"# handshake: {fact}" for fact in facts]]) + "\n"


def graph_record(graph_module: Any, fingerprint: str = "") -> str:
    """The graph as reports compare it: the JSON text that `_graph_diff.read_record` reads. It says of each node what it
    calls, its arguments leaf by leaf, the form of its result, its source lines, and what `graph_text` adds as facts.
    What can't be had is left out; nothing that is strange about a graph is an error. The fingerprint is in it if the
    caller has it. (An unhashable graph gets another one each time.)"""
    return json.dumps(_record(graph_module, fingerprint), separators=(",", ":"))


# --- Collectives and their groups ---


class _CollectiveCall(NamedTuple):
    """A collective that a node calls, directly or through a higher-order op that takes the op and its arguments."""

    op: str  # for people: without c10d's namespaces, and alike for ops that communicate alike
    arguments: dict[str, Any]  # by name, in the order of the schema, with its defaults
    group_argument: str
    resolve: Callable[[Any], Any] | None = None  # makes a group of that argument, or a name that c10d knows
    peer_argument: str | None = None  # of a point-to-point op
    is_guess: bool = False  # of an op of somebody's own that nobody registered
    offset: int = 0  # how many arguments of the node's own stand before these


class _Group(NamedTuple):
    """A resolved group, as one call uses it."""

    ranks: tuple[int, ...]  # in the group's own order
    process_group: Any
    members: ProcessGroupId  # who takes part: all of it; in a point-to-point op this rank and its peers
    lines: tuple[ProcessGroupId, ...]  # on whose lines the call counts: this one's, or the pair's with each peer
    steps: tuple[int, ...] = ()  # how far ahead of this rank each peer is on the ring of the group


_registered_collectives: dict[str, tuple[str, Callable[[Any], Any] | None]] = {}
_warned_of: set[str] = set()  # classes of called modules, and ops
# By process group. A graph has hundreds of collectives, and a group thousands of ranks.
_known_ranks: weakref.WeakKeyDictionary[Any, tuple[tuple[int, ...], ProcessGroupId]] = weakref.WeakKeyDictionary()


def _collective_call(node: Any) -> _CollectiveCall | None:
    ops, target, offset = torch._ops, node.target, 0
    if isinstance(target, ops.HigherOrderOperator):
        # with_effects(token, op, …), auto_functionalized(op, …) and their like: the op's own arguments follow it.
        offset = next((i for i, arg in enumerate(node.args, 1) if isinstance(arg, ops.OpOverload)), 0)
        target = node.args[offset - 1] if offset else None
    call = _signature(target) if isinstance(target, (ops.OpOverload, ops.OpOverloadPacket)) else None
    if call is None:
        return None
    given = dict(zip(call.arguments, node.args[offset:], strict=False)) | node.kwargs
    return call._replace(arguments=call.arguments | given, offset=offset)


@functools.cache  # ops live as long as the process
def _signature(target: Any) -> _CollectiveCall | None:
    """What the schema of an op says of all its calls; None: it is not a collective."""
    schema = _any_overload(target)._schema
    namespace, _, name = schema.name.partition("::")
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    op = _FORM_OF_OP.sub("", name) if "c10d" in namespace else f"{namespace}::{_FORM_OF_OP.sub('', name)}"
    if schema.name in _registered_collectives:
        return _CollectiveCall(op, defaults, *_registered_collectives[schema.name])
    is_guess, peer = namespace not in _COLLECTIVE_NAMESPACES, _PEER_ARGUMENTS.get(name)
    for argument in schema.arguments:
        kind = str(argument.type)
        is_named_so = argument.name in _GROUP_ARGUMENTS and (not is_guess or kind in _GROUP_TYPES)
        if is_named_so or kind.endswith(".c10d.ProcessGroup"):
            peer = peer if peer == "" or peer in defaults else None
            return _CollectiveCall(op, defaults, argument.name, None, peer, is_guess)
    return None


def _issued(node: Any) -> list[tuple[ProcessGroupId, str]]:
    """The collectives of a node, in order: on whose line, and what it is (`Collectives.sequences`)."""
    call = _collective_call(node)
    if call is not None:
        try:
            return _issued_by_call(call, _resolve(node, call).lines)
        except HandshakeConfigError as error:
            if not call.is_guess:
                raise
            if call.op not in _warned_of:
                _warned_of.add(call.op)
                _logger.warning("%s. Graphs with this op can't be compared, and are split", error)
            own = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
            return _issued_by_call(call, (ProcessGroupId([own]),))
    bodies = [[issued for inner in body.graph.nodes for issued in _issued(inner)] for body in _bodies(node)]
    if getattr(node.target, "_name", None) == "cond":
        branches = [Collectives(body).sequences for body in bodies]
        groups = dict.fromkeys(itertools.chain(*branches))
        longest = {group: max((branch.get(group, []) for branch in branches), key=len) for group in groups}
        return [(group, text) for group, texts in longest.items() for text in texts]
    return list(itertools.chain(*bodies))


def _issued_by_call(call: _CollectiveCall, lines: tuple[ProcessGroupId, ...]) -> list[tuple[ProcessGroupId, str]]:
    op, is_even, is_pairwise = call.op, True, call.peer_argument is not None
    reduction = root = ""
    sent: list[Any] = []
    # What a rank gives is in the first argument with tensors, inputs first; in a scatter most ranks have outputs only.
    for name in sorted(call.arguments, key=lambda name: ("input" in name) == (op == "scatter")):
        value = call.arguments[name]
        if name in _REDUCTION_ARGUMENTS:
            value = _object(value)
            reduction = value if isinstance(value, str) else getattr(value, "name", "premul_sum").lower()
        elif name in _ROOT_ARGUMENTS and not is_pairwise:
            root = f"root {value}"
        elif _SPLITS_ARGUMENT.search(name):
            is_even &= value is None or (isinstance(value, (list, tuple)) and len(set(map(str, value))) < 2)
        elif not sent:
            nodes = [leaf for *_, leaf in _leaves(value) if isinstance(leaf, torch.fx.Node)]
            values = [_attribute(leaf) if leaf.op == "get_attr" else _result(leaf) for leaf in nodes]
            sent = [value for value in values if isinstance(value, torch.Tensor)]
    has_size = is_pairwise or (is_even and _OF_ONE_SIZE.match(op))
    tensors = []
    for tensor in sent:
        size = re.sub(r".*\D.*", "?", str(tensor.numel())) if has_size else ""
        tensors.append(f"{str(tensor.dtype).removeprefix('torch.')} {size}".strip())
    if len(tensors) != len(lines):
        text = " + ".join(tensors)
        if len(text) > MAX_TENSORS_TEXT:
            text = f"{text[:MAX_TENSORS_TEXT]}… {executable_fingerprint(text)[:8]}"
        tensors = [text] * len(lines)
    texts = [" ".join(filter(None, ("send_recv" if is_pairwise else op, reduction, text, root))) for text in tensors]
    # The two ends of a pair may have a batch's ops in different orders.
    return sorted(zip(lines, texts, strict=True), key=operator.itemgetter(1))


def _any_overload(target: Any) -> Any:
    """`target`, or of a packet its first overload that has no `out`: what matters here is the same in all of those."""
    if isinstance(target, torch._ops.OpOverload):
        return target
    names = target.overloads()
    return getattr(target, next((name for name in names if "out" not in name), names[0]))


def _resolve(node: Any, call: _CollectiveCall) -> _Group:
    """The group of a collective. Raises HandshakeConfigError if it, or a peer in it, can't be resolved."""
    try:
        dist = torch.distributed
        name = call.group_argument
        value = _object(call.arguments.get(name))
        value = value if call.resolve is None else call.resolve(value)
        if name == "ranks" and isinstance(value, (list, tuple)):
            # Of several groups of that size, this rank's.
            size = _object(call.arguments["group_size"])
            start = value.index(dist.get_rank()) // size * size if size < len(value) else 0
            ranks = tuple(value[start : start + size])
            members = ProcessGroupId(ranks)
            group = _Group(ranks, None, members, (members,))
        else:
            if isinstance(value, str):
                value = dist.distributed_c10d._resolve_process_group(value)
            if not isinstance(value, dist.ProcessGroup):
                raise TypeError(f"its argument {name!r} is {type(value)}, not a process group or the name of one")
            group = _group_of_object(value)
        return group if call.peer_argument is None else _with_peers(call, group)
    except Exception as error:
        what = f"the process group of node {node.name} ({node.target}) can't be resolved{_where(node)}"
        hint = ". Say what its group is with _graph.register_collective" if call.is_guess else ""
        raise HandshakeConfigError(f"{what}: {str(error) or type(error).__name__}{hint}") from error


def _group_of_object(process_group: Any) -> _Group:
    known = _known_ranks.get(process_group)
    if known is None:
        ranks = tuple(torch.distributed.get_process_group_ranks(process_group))
        known = _known_ranks[process_group] = ranks, ProcessGroupId(ranks)
    return _Group(known[0], process_group, known[1], (known[1],))


def _with_peers(call: _CollectiveCall, group: _Group) -> _Group:
    """The group as a point-to-point op uses it. The op takes a rank within the group, but Dynamo gives it a global one
    (torch 2.13). So a number is read as what runs, a rank within the group; where that names no other member, as the
    global rank that was meant."""
    own, ranks = torch.distributed.get_rank(), group.ranks
    numbers = call.arguments.get(call.peer_argument or "")
    peers = []
    for number in numbers if isinstance(numbers, (list, tuple)) else [numbers]:
        if type(number) is not int:
            raise TypeError("its peer is not known before it runs")
        peer = ranks[number] if 0 <= number < len(ranks) and ranks[number] != own else number
        if peer not in ranks:
            raise ValueError(f"its peer is rank {peer}, which is not in its group of {format_ranks(ranks)}")
        peers.append(peer)
    lines = tuple(ProcessGroupId({own, peer}) for peer in peers)
    steps = tuple((ranks.index(peer) - ranks.index(own)) % len(ranks) for peer in peers)
    return group._replace(members=ProcessGroupId({own, *peers}), lines=lines, steps=steps)


def _object(value: Any) -> Any:
    """The object that an argument stands for, where it is one that a graph passes around: a group, a mesh, a name."""
    dist = torch.distributed
    op = value.op if isinstance(value, torch.fx.Node) else ""
    if op == "get_attr":
        value = _attribute(value)
    elif op and (known := _result(value)) is not None:
        value = known
    elif op in ("call_function", "call_method"):
        # A group out of a mesh, or a mesh out of a larger one. Nothing is communicated.
        args = [_object(argument) for argument in value.args]
        if args and isinstance(args[0], dist.device_mesh.DeviceMesh):
            with torch._subclasses.fake_tensor.unset_fake_temporarily():
                function = value.target if op == "call_function" else getattr(type(args[0]), value.target)
                value = function(*args)
    if isinstance(value, torch._library.fake_class_registry.FakeScriptObject):
        value = value.real_obj
    kind = value._type().qualified_name() if isinstance(value, torch.ScriptObject) else ""
    if kind.endswith(".c10d.ProcessGroup"):
        return dist.ProcessGroup.unbox(value)
    if kind.endswith(".c10d.ReduceOp"):
        reduction = dist.ReduceOp.RedOpType(value.op())
        # That has a factor, which can't be read.
        return value if reduction == dist.ReduceOp.PREMUL_SUM else reduction
    return value


def _attribute(node: Any, owner: Any = None) -> Any:
    """What a get_attr or call_module names."""
    return operator.attrgetter(node.target)(node.graph.owning_module if owner is None else owner)


def _result(node: Any) -> Any:
    """The (fake) value of a node, as AOTAutograd or Dynamo recorded it; None if neither did."""
    value = node.meta.get("val")
    return node.meta.get("example_value") if value is None else value


def _bodies(node: Any) -> list[Any]:
    """The nested graphs that a run of the node runs, in the order of its arguments."""
    if node.op == "call_module":
        called = _attribute(node)
        if isinstance(called, torch.fx.GraphModule):
            return [called]
        kinds = {type(part) for part in called.modules()}
        sync = torch.nn.SyncBatchNorm  # the one of torch's own that issues collectives
        names = {_class_name(k) for k in kinds if k is sync or not k.__module__.startswith("torch.nn.modules.")}
        if unseen := names - _warned_of:
            _warned_of.update(unseen)
            _logger.warning(
                "node %s (%s) calls a module of class %s%s: if it issues collectives, they are not counted; trace into "
                "it, as AOTAutograd does",
                *(node.name, node.target, ", ".join(sorted(unseen)), _where(node)),
            )
        return []
    if node.op not in ("call_function", "call_method"):
        return []
    values = [_attribute(argument) for argument in node.all_input_nodes if argument.op == "get_attr"]
    bodies = [value for value in values if isinstance(value, torch.fx.GraphModule)]
    # Its second body is the backward, which Dynamo's graph holds but does not run.
    return bodies[:1] if getattr(node.target, "_name", None) == "autograd_function_apply" else bodies


@functools.lru_cache(maxsize=_MAX_CACHED_TRACES)
def _frames(stack_trace: str) -> tuple[SourceLine | None, SourceLine | None]:
    """The innermost frame of a stack trace, and the innermost outside torch and torch_tpu, of this installation or of
    the one that recorded the trace."""
    here = os.path.dirname(torch.__file__) + os.sep
    innermost = users = None
    for frame in reversed(list(_STACK_FRAME.finditer(stack_trace))):
        function, code = (frame["function"] or "").strip(), (frame["code"] or "").strip()
        line = SourceLine(frame["file"], int(frame["line"]), function, code)
        innermost = innermost or line
        is_torch = line.file.startswith(here) or _LIBRARY_FILE.match(line.file)
        if users is None:
            users = None if is_torch else line
        elif not is_torch and not _INSTALLED_FILE.match(line.file):
            place = f"{line.file}:{line.line}"
            return innermost, users._replace(caller=f"{place} in {function}" if function else place)
    return innermost, users


def _where(node: Any) -> str:
    line = source_line(node)
    return " (no source line is recorded)" if line is None else f" ({line})"


# --- Canonical text ---


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _leaves(value: Any, path: str = "", key_text: Callable[[Any], str] = repr) -> Iterator[tuple[str, str, Any]]:
    """The leaves of an argument, each after its path (``[0]`` in a list, ``(0)`` in a tuple, ``{'key'}`` in a mapping,
    keys sorted, ``.start`` in a slice) and "". For an empty container its path, ``[]``, ``()`` or ``{}``, and None."""
    kind, fx = type(value), torch.fx.immutable_collections
    if kind in (list, fx.immutable_list):
        empty, parts = "[]", [(f"[{index}]", part) for index, part in enumerate(value)]
    elif kind in (tuple, torch.Size):
        empty, parts = "()", [(f"({index})", part) for index, part in enumerate(value)]
    elif kind in (dict, fx.immutable_dict):
        pairs = [(f"{{{key_text(key)}}}", part) for key, part in value.items()]
        empty, parts = "{}", sorted(pairs, key=operator.itemgetter(0))
    elif kind is slice:
        empty, parts = "", [(f".{name}", getattr(value, name)) for name in ("start", "stop", "step")]
    else:
        yield path, "", value
        return
    if not parts:
        yield path, empty, None
    for step, part in parts:
        yield from _leaves(part, path + step, key_text)


def _as_device(node: Any, key: int | str, argument: Any) -> Any:
    """An argument; a text such as "cuda:0" as a device, if it stands where a device does."""
    if type(argument) is str and (key == "device" or (key == 1 and node.target == "to")):
        with contextlib.suppress(RuntimeError):  # some other text
            return torch.device(argument)
    return argument


def group_layout(ranks: tuple[int, ...]) -> str | None:
    """Size, stride and phase in each dimension of a regular group; None for any other. Where every stride is a multiple
    of the extent of the dimensions inside it, groups of one layout are disjoint: of a rank and the phases, the
    coordinates within the group follow, innermost first, and so its first rank."""
    dimensions = []
    starts, extent = list(ranks), 1
    while len(starts) > 1:
        _, size, stride = runs(starts)[0]
        regular = [start + n * stride for start in starts[::size] for n in range(size)]
        if stride <= 0 or stride % extent or starts != regular:
            return None
        dimensions.append(f"{size} by {stride} from {ranks[0] // stride % size}")
        starts, extent = starts[::size], stride * size
    return ", ".join(dimensions)


def _replica_role(groups: re.Match[bytes]) -> bytes:
    layouts = {group_layout(tuple(map(int, ranks.split(b",")))) for ranks in re.findall(rb"\d[\d,]*", groups[0])}
    return groups[0] if None in layouts or len(layouts) > 1 else str(*layouts).encode()


def _description(process_group: Any) -> str:
    return process_group.group_desc or "undefined"


class _Shared:
    """What the walks over a graph and its nested bodies share: the numbers given to symbols, and texts made so far."""

    def __init__(self, naming: str) -> None:
        self.naming = naming
        self.symbols: dict[Any, list[tuple[Any, str]]] = {}  # of an expression, with the range that each was given
        self.expressions: dict[tuple[Any, ...], str] = {}
        self.groups: dict[tuple[tuple[int, ...], int], str] = {}
        self.bodies: dict[int, tuple[str, bool, list[Any]]] = {}
        self.attributes: dict[int, int] = {}  # tensors by identity: a mutation can tell two alike apart

    def body(self, graph_module: Any) -> tuple[str, bool, list[Any]]:
        """The digest of a graph, whether a run of it has an effect, and its symbols by first appearance."""
        known = self.bodies.get(id(graph_module))
        if known is None:
            walk = _GraphWalk(self, graph_module)
            nodes = walk.nodes()
            digest = executable_fingerprint(b"".join([node.equality for node in nodes]))
            known = digest, any(node.has_effect for node in nodes), list(walk.symbols)
            self.bodies[id(graph_module)] = known
        return known

    def group(self, group: _Group) -> str:
        """A group by its ranks, and its number among this rank's groups of the same ranks; or by its role."""
        ranks, process_group = group.ranks, group.process_group
        key = (ranks, id(process_group))
        if key in self.groups:
            return self.groups[key]
        layout = group_layout(ranks) if self.naming == "role" else None
        text = f"ranks {executable_fingerprint(repr(ranks))}" if layout is None else layout
        if process_group is not None:
            world = torch.distributed.distributed_c10d._world
            # This rank's groups of that size, in order of creation.
            alike = [known for known in world.pg_names if len(world.pg_group_ranks.get(known, ())) == len(ranks)]
            if self.naming == "role":
                description = _description(process_group)
                alike = [known for known in alike if _description(known) == description]
                is_only = description != "undefined" and len(alike) == 1
                text = f"{description!r} of {len(ranks)}, {'only one' if is_only else text}"
            twins = [known for known in alike if _group_of_object(known).ranks == ranks]
            text += f" #{next((i for i, known in enumerate(twins) if known is process_group), 0)}"
        self.groups[key] = f"group({text})"
        return self.groups[key]

    def symbolic(self, value: Any, place: Callable[[Any], int]) -> str:
        """A symbolic number: its expression, each symbol by its place among those of the node."""
        node = value.node
        expression = getattr(node, "expr", None)
        if expression is None:  # the ragged size of a nested tensor, outside of a trace
            return f"j{place(('nested', node.nested_int()))}*{node.nested_int_coeff()}"
        if expression not in self.symbols:
            # A symbol that appears inside a compound first is rare; of several, the names decide.
            ordered = sorted(expression.free_symbols, key=str)
            bounds = [node.shape_env.var_to_range.get(symbol) for symbol in ordered]
            limits = ["" if bound is None else f"[{bound.lower}..{bound.upper}]" for bound in bounds]
            self.symbols[expression] = list(zip(ordered, limits, strict=True))
        renamed = {}
        for symbol, limit in self.symbols[expression]:
            name = f"{str(symbol).rstrip('0123456789')}{place(symbol)}{limit}"
            renamed[symbol] = type(symbol)(name, **symbol.assumptions0)
        key = (expression, *renamed.values())
        if key not in self.expressions:
            self.expressions[key] = f"<{expression.xreplace(renamed)}>"
        return self.expressions[key]


class _GraphWalk:
    """One pass over one graph. `value` writes an argument as text: where it meets a node it notes the position in
    `_inputs` and writes a mark, and for a symbol its place among those of the node, of which `_places` are the numbers
    in the graph; so that one text serves for both digests."""

    def __init__(self, shared: _Shared, graph_module: Any) -> None:
        self._shared = shared
        self._graph_module = graph_module
        self._nodes: list[CanonicalNode] = []
        self._positions: dict[Any, int] = {}
        self._inputs: list[int] = []
        self.symbols: dict[Any, int] = {}
        self._places: dict[int, int] = {}
        self._forms: list[tuple[str, tuple[int, ...]]] = []  # of each node so far: its value's, with the symbols there
        self._storages: dict[int, int] = {}
        self._descriptors: dict[Any, int] = {}
        self._plain_classes = (torch.dtype, torch.layout, torch.memory_format, torch.finfo, torch.iinfo)

    def nodes(self) -> list[CanonicalNode]:
        for position, node in enumerate(self._graph_module.graph.nodes):
            try:
                self._nodes.append(self._node(node, position))
            except HandshakeConfigError:
                raise
            except Exception as error:
                what = f"node {node.name} ({node.target}) can't be hashed{_where(node)}"
                raise HandshakeError(f"{what}: {str(error) or type(error).__name__}") from error
            self._positions[node] = position
        return self._nodes

    def _node(self, node: Any, position: int) -> CanonicalNode:
        op, target, same = node.op, "", ""
        self._inputs, self._places = [], {}
        form = metadata = self._metadata(_result(node), None)
        symbols = tuple(self._places)
        members, has_effect = None, _has_effect(node)
        replaced: dict[Any, str] = {}
        if op in ("get_attr", "call_module"):
            held = _attribute(node, self._graph_module)
            if isinstance(held, torch.Tensor):
                same = f" tensor {self._shared.attributes.setdefault(id(held), len(self._shared.attributes))}"
            if isinstance(held, torch.nn.Parameter):
                target = f"parameter {self._tensor(held, None)} requires_grad={held.requires_grad}"
            else:
                target = self.value(held)
            has_effect = isinstance(held, torch.fx.GraphModule) and self._shared.body(held)[1]
        elif op == "call_function":
            target = self._callable(node.target)
            if (call := _collective_call(node)) is not None:
                group = _resolve(node, call)
                members, has_effect = group.members, True
                replaced = self._group_arguments(call, group)
            elif target == "higher_order.invoke_subgraph":
                replaced = {1: "", "identifier": ""}  # a number in this process; the body says all
            elif target.startswith("higher_order.triton_kernel"):
                raise HandshakeError("a Triton kernel is named by its number in this process")
        elif op != "placeholder":
            target = str(node.target)
        arguments = []
        for key, argument in (*enumerate(node.args), *sorted(node.kwargs.items())):
            written = self.value(_as_device(node, key, argument))  # in any case, for its inputs
            arguments.append(f"{key}={replaced.get(key, written)}")
        arguments += replaced.values()  # also where they are not given
        if op in ("placeholder", "get_attr"):
            metadata = self._metadata(_result(node), position)
            symbols = tuple(self._places)  # an attribute's own text is in those of its readers
        if op == "placeholder" and "desc" in node.meta:
            self._descriptors.setdefault(_of_whole_tensor(node.meta["desc"]), position)
        elif op == "output":
            metadata = self._written_back(node.meta.get("desc"))
        encoded = f"{op} {target}({','.join(arguments)}){metadata}".encode("utf-8", "surrogatepass")
        inputs = tuple(self._inputs)
        reads = [self._nodes[i] for i in inputs]
        equality = hashlib.blake2b(encoded, digest_size=16)
        equality.update(f"{inputs}{(*self._places,)}{same}".encode())
        alignment = hashlib.blake2b(encoded, digest_size=8)
        for text, numbers in [self._forms[i] for i in inputs]:
            places = [self._places.setdefault(number, len(self._places)) for number in numbers]
            alignment.update(f"\0{text}{places}".encode("utf-8", "surrogatepass"))
        self._forms.append((form, symbols))
        has_effect = has_effect or any(read.op == "get_attr" and read.has_effect for read in reads)
        digests = equality.digest(), alignment.digest()
        return CanonicalNode(node.name, op, target or op, *digests, inputs, tuple(self._places), members, has_effect)

    def _place(self, symbol: Any) -> int:
        number = self.symbols.setdefault(symbol, len(self.symbols))
        return self._places.setdefault(number, len(self._places))

    def _group_arguments(self, call: _CollectiveCall, group: _Group) -> dict[Any, str]:
        """The texts of the arguments that name a collective's group, or a peer in it, by their places and names."""
        texts = {call.group_argument: self._shared.group(group)}
        if call.peer_argument is not None and self._shared.naming == "role":
            texts[call.peer_argument] = f"peers {group.steps} ahead"
        places = {name: index for index, name in enumerate(call.arguments, call.offset)}
        return texts | {places[name]: text for name, text in texts.items() if name in places}

    def value(self, value: Any) -> str:
        leaves = _leaves(value, key_text=self.value)
        return ",".join([f"{path}{empty}:{self._leaf(leaf)}" for path, empty, leaf in leaves])

    def _leaf(self, value: Any) -> str:
        kind = type(value)
        if kind is torch.fx.Node:
            position = self._positions[value]
            self._inputs.append(position)
            return f"%({self._nodes[position].target})" if value.op == "get_attr" else "%"
        if kind in _PLAIN_CLASSES or isinstance(value, self._plain_classes):
            return repr(value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._shared.symbolic(value, self._place)
        if isinstance(value, enum.Enum) or hasattr(kind, "__members__"):  # Python's, or of a C++ extension
            return f"{_class_name(kind)}.{value.name}"
        if kind in (float, complex):
            return f"{kind.__name__} {struct.pack('>dd', value.real, value.imag).hex()}"
        if isinstance(value, torch.device):
            return f"device({value.type})"
        if kind in (set, frozenset):
            return f"set({','.join(sorted(map(self.value, value)))})"
        base: Any
        for base in (int, float, complex, str, bytes, list, tuple, dict, set, frozenset):
            if isinstance(value, base):  # of a class of somebody's own
                return f"{_class_name(kind)}({self.value(base(value))})"
        meant = _object(value)
        if meant is not value:
            return self.value(meant)
        return f"{_class_name(kind)}({self._content(value)})"

    def _content(self, value: Any) -> str:
        """What is in an object of a known class."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, None, by_value=True)
        if isinstance(value, torch.fx.GraphModule):
            digest, _, symbols = self._shared.body(value)  # which of this graph's symbols the body's are
            return f"{digest}{[self._place(symbol) for symbol in symbols]}"
        if isinstance(value, types.CodeType):
            parts = [value.co_code, value.co_exceptiontable, value.co_names, value.co_varnames, value.co_freevars]
            return self.value([*parts, value.co_flags, value.co_consts])
        if torch.distributed.is_available():
            if isinstance(value, torch.distributed.ProcessGroup):
                return self._shared.group(_group_of_object(value))
            if isinstance(value, torch.distributed.device_mesh.DeviceMesh):
                return self._mesh(value)
        placements = sys.modules.get("torch.distributed.tensor.placement_types")
        if placements is not None and isinstance(value, placements.Placement):
            return repr(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value) if field.compare]
            return self.value({name: getattr(value, name) for name in names})
        return self._callable(value)

    def _mesh(self, mesh: Any) -> str:
        """A device mesh: in roles, by its dimensions' names, sizes and groups; else by its ranks."""
        if self._shared.naming == "role" and mesh.get_coordinate() is not None:
            content = ",".join(self._shared.group(_group_of_object(mesh.get_group(dim))) for dim in range(mesh.ndim))
        else:
            with torch._subclasses.fake_tensor.unset_fake_temporarily():
                content = executable_fingerprint(repr(mesh.mesh.tolist()))
        return f"{mesh.device_type} {mesh.mesh_dim_names!r} {content}"

    def _callable(self, target: Any) -> str:
        if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return str(target)  # aten.add.Tensor, aten.add
        if isinstance(target, torch._ops.HigherOrderOperator):
            return f"{target.namespace}.{target._name}"
        name = getattr(target, "__qualname__", "<")
        if isinstance(target, (type, types.FunctionType)):
            found = sys.modules.get(target.__module__)
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is target:  # two that one function made share their name
                return f"{target.__module__}.{name}"
        if isinstance(target, types.FunctionType):
            cells = [cell.cell_contents for cell in target.__closure__ or ()]
            return f"code({self.value([target.__code__, target.__defaults__, target.__kwdefaults__, cells])})"
        if isinstance(target, functools.partial):
            return f"partial({self.value([target.func, target.args, target.keywords])})"
        if isinstance(target, types.MethodType):
            return f"method({self._callable(target.__func__)} of {self.value(target.__self__)})"
        if isinstance(target, types.BuiltinFunctionType):
            owner = target.__self__
            if owner is None or isinstance(owner, (type, types.ModuleType)):
                return f"{target.__module__ or getattr(owner, '__name__', '')}.{name}"
            return f"method({name} of {self.value(owner)})"
        if isinstance(target, (types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType)):
            return f"{_class_name(target.__objclass__)}.{target.__name__}"
        kind = _class_name(type(target))
        raise HandshakeError(f"it holds an object of class {kind}, which has no text that is the same on every rank")

    def _metadata(self, value: Any, source: int | None) -> str:
        """What is known of a node's result. `source` is the position of a placeholder or get_attr, else None."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, source)
        if isinstance(value, (list, tuple)):
            return f"[{','.join([self._metadata(item, source) for item in value])}]"
        symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
        if value is None or isinstance(value, (bool, int, float, complex, str, *symbolic)):
            return self.value(value)
        if source is not None and torch.distributed.is_available():
            meant = _object(value)
            if isinstance(meant, (torch.distributed.ProcessGroup, torch.distributed.device_mesh.DeviceMesh)):
                return self.value(meant)
        return _class_name(type(value))  # what it holds follows from op and arguments

    def _tensor(self, tensor: Any, source: int | None, by_value: bool = False) -> str:
        """A tensor by its metadata; a constant `by_value` too: by the digest of its elements."""
        is_strided = tensor.layout is torch.strided
        strides = self._sizes(tensor.stride()) if is_strided else tensor.layout
        text = f"{tensor.dtype}{self._sizes(tensor.shape)}{strides}{tensor.device.type}"
        if tensor.dtype.is_complex and tensor.is_conj():
            text += " conj"
        if torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor):
            names, context = tensor.__tensor_flatten__()
            parts = {name: getattr(tensor, name) for name in names}
            inner = self.value(parts) if by_value else self._metadata([*parts.values()], source)
            text += f" {_class_name(type(tensor))} {self.value(context)} {inner}"
        elif by_value:
            text += f" {_elements(tensor)[1]}"
        elif source is not None and is_strided:
            first = self._storages.setdefault(tensor.untyped_storage()._cdata, source)
            text += "" if first == source else f" aliases {first}"  # inputs that share memory
        if tensor.requires_grad and (by_value or source is not None):
            text += " requires_grad"
        return text

    def _sizes(self, sizes: Any) -> str:
        return f"({','.join([str(size) if type(size) is int else self.value(size) for size in sizes])})"

    def _written_back(self, descriptors: Any) -> str:
        """Which outputs are new values of which inputs: AOTAutograd writes those back after the graph has run."""
        texts = []
        for descriptor in map(_of_whole_tensor, descriptors or ()):
            kind = type(descriptor).__name__
            mutated = getattr(descriptor, "mutated_input", None)
            is_kept = mutated is not None or kind == "MetadataMutationAOTOutput"
            texts.append(f"{kind} {self._descriptors.get(mutated, descriptor)}" if is_kept else "")
        return ",".join(texts)


def _of_whole_tensor(descriptor: Any) -> Any:
    """AOTAutograd's descriptor of an input or output; of a part of a tensor subclass, that of the whole."""
    while type(descriptor).__name__.startswith("Subclass"):
        descriptor = descriptor.base
    return descriptor


def _elements(tensor: Any) -> tuple[Any, str]:
    """A tensor's elements in row-major order, whatever its strides, as a tensor on the CPU; and their digest. Raises
    HandshakeError if they can't be read, or don't say all (those of a quantised tensor have a scale beside them)."""
    with torch._subclasses.fake_tensor.unset_fake_temporarily():
        if isinstance(tensor, torch._subclasses.FakeTensor):
            tensor = tensor.constant
        if tensor is None or tensor.device.type == "meta":
            raise HandshakeError("the value of a tensor constant can't be read: it is a fake tensor, or on meta")
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise HandshakeError(f"a tensor constant of layout {tensor.layout}, dtype {tensor.dtype} can't be read")
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        if plain.nbytes and not plain.data_ptr():
            raise HandshakeError(f"a tensor constant of class {_class_name(type(tensor))} has no memory to read")
        elements = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()) if plain.nbytes else b""
        return plain, hashlib.blake2b(elements, digest_size=16).hexdigest()


def _has_effect(node: Any) -> bool:
    """Whether a node that is not a collective, and calls no body with an effect, has one."""
    target = node.target
    if node.op == "call_method":
        return _is_in_place(target) or _is_random(target)
    if node.op != "call_function":
        return False
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        overload = _any_overload(target)
        is_known = overload.namespace in _NAMESPACES_WITHOUT_EFFECTS and not overload._schema.is_mutable
        is_random = torch.Tag.nondeterministic_seeded in overload.tags
        return is_random or overload._schema.name.endswith("::wait_tensor") or not is_known
    if "out" in node.kwargs or node.kwargs.get("inplace") is True:
        return True
    name = getattr(target, "__name__", "")
    module = getattr(target, "__module__", None) or ""
    if module in ("_operator", "builtins", "math"):  # of these, setitem, delitem and iadd, imul, … change something
        return name in ("setitem", "delitem") or (name[:1] == "i" and hasattr(operator, f"__{name[1:]}__"))
    if module == "torch.nn.functional" and any(argument is True for argument in node.args):
        return True  # `inplace`, perhaps
    # What Dynamo records no value for switches a state (grad mode, autocast, …).
    return name == "wait_tensor" or _is_in_place(name) or _is_random(name) or _result(node) is None


def _is_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in ("__setitem__", "__delitem__")


def _is_random(name: str) -> bool:
    """Whether the aten op of that name draws random numbers."""
    packet = getattr(torch.ops.aten, name, None) if name.isidentifier() else None
    return packet is not None and torch.Tag.nondeterministic_seeded in _any_overload(packet).tags


# --- What people and reports want to know of a graph ---


def _record(graph_module: Any, fingerprint: str = "") -> dict[str, Any]:
    dist, groups = torch.distributed, dict[str, Any]()
    return {
        "handshake_graph": 1,  # the version of this form
        "fingerprint": fingerprint,
        "unhashable": _unhashable(graph_module),
        "rank": dist.get_rank() if dist.is_available() and dist.is_initialized() else None,
        "body": _body_record(graph_module, graph_module._get_name(), groups),
        "groups": groups,
    }


def _unhashable(graph_module: Any) -> str:
    """Why the graph can't be hashed; empty if it can."""
    try:
        _Shared(group_naming(None)).body(graph_module)
    except Exception as error:
        return str(error)
    return ""


def _body_record(graph_module: Any, name: str, groups: dict[str, Any]) -> dict[str, Any]:
    """The record of a graph and of those nested in it; adds the groups of their collectives to `groups`, by name."""
    mutations = _mutations(graph_module)
    positions: dict[Any, int] = {}
    first_of: dict[int, str] = {}  # the first input in each storage
    nodes: list[dict[str, Any]] = []
    for node in graph_module.graph.nodes:
        source, user_source = _frames(node.meta.get("stack_trace") or "")
        facts = {"mutated_by": mutations.get(node), "source": source, "user_source": user_source} | _origin(node)
        if node.op == "get_attr":
            facts["constant"] = _constant_text(_attribute(node, graph_module))
        value = _result(node) if node.op == "placeholder" else None
        is_wrapper = torch.utils._python_dispatch.is_traceable_wrapper_subclass
        if isinstance(value, torch.Tensor) and value.layout is torch.strided and not is_wrapper(value):
            first = first_of.setdefault(value.untyped_storage()._cdata, node.name)
            facts["shares"] = first if first != node.name else None
        record = _call_record(node, positions) | _group_record(node, groups) | facts
        positions[node] = len(nodes)
        nodes.append({key: value for key, value in record.items() if value})
    children = {key: each for key, each in graph_module.named_children() if isinstance(each, torch.fx.GraphModule)}
    bodies = {key: _body_record(child, key, groups) for key, child in children.items()}
    return {"name": name, "nodes": nodes, "bodies": bodies}


def _call_record(node: Any, positions: dict[Any, int]) -> dict[str, Any]:
    """What a node calls, with which arguments, and the form of its result; spelled as torch's `print_readable` does."""
    op, target = node.op, str(node.target)
    arguments: list[tuple[str, str, int | None]] = []
    values = [(key, _as_device(node, key, value)) for key, value in (*enumerate(node.args), *node.kwargs.items())]
    for key, argument in values:
        for path, empty, leaf in _leaves(argument, {"placeholder": "default", "output": ""}.get(op, str(key))):
            producer = positions.get(leaf) if type(leaf) is type(node) else None
            arguments.append((path, empty or _text(leaf), producer))
    texts = [_text(value) if type(key) is int else f"{key} = {_text(value)}" for key, value in values]
    if op == "call_method":
        target, text = f".{target}", f"{texts[0]}.{target}({', '.join(texts[1:])})"
    elif op in ("call_function", "call_module"):
        target = _text(node.target) if op == "call_function" else f"self.{target}"
        text = f"{target}({', '.join(texts)})"
    else:
        text = f"self.{target}" if op == "get_attr" else ", ".join(texts)
        target = {"get_attr": target, "output": op}.get(op, "")
    form = _form(_result(node))
    name = f"{node.name}: {form['dtype']}[{', '.join(form['shape'])}]" if form else node.name
    line = f"return {text}" if op == "output" else f"{name} = {text}" if text else name
    op = "call" if op.startswith("call") else op
    return {"name": node.name, "op": op, "target": target, "arguments": arguments, **form, "line": line}


def _origin(node: Any) -> dict[str, str]:
    """The path of the module that the node is in, and what the program called there, if Dynamo has noted them."""
    last: list[Any] = []
    for key in ("nn_module_stack", "source_fn_stack"):
        stack = node.meta.get(key) or node.meta.get(f"fwd_{key}") or [("", "")]
        last.append([*(stack.values() if isinstance(stack, dict) else stack)][-1])
    called = last[1][1]
    return {"module": _NO_PATH.sub("", str(last[0][0])), "origin": str(getattr(called, "__name__", called))}


def _text(value: Any) -> str:
    """An argument or what is called as people read it, without what differs in each process."""
    try:
        if isinstance(value, torch.device):
            return f"device(type={value.type!r})"
        if getattr(value, "__module__", None) == "_operator":
            return f"operator.{value.__name__.rstrip('_')}"
        if callable(value):
            return str(torch.fx.node._get_qualified_name(value))
        return _ADDRESS.sub("0x0", repr(value))
    except Exception:  # a report must not fail because of it
        return _class_name(type(value))


def _form(value: Any) -> dict[str, Any]:
    """The type, sizes, strides in elements and device of a tensor; the expression of a symbolic number."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return {"dtype": "Sym", "shape": [str(value)]}
    if not isinstance(value, torch.Tensor):
        return {}
    is_plain = type(value) in (torch.Tensor, torch.nn.Parameter, torch._subclasses.FakeTensor)
    placements = "".join(map(str, getattr(value, "placements", ())))
    return {
        "dtype": torch.utils._dtype_abbrs.dtype_abbrs.get(value.dtype, str(value.dtype)),
        "shape": list(map(str, value.shape)),
        "stride": list(map(str, value.stride())) if value.layout is torch.strided else None,
        "device": value.device.type,
        "note": "" if is_plain else f"{type(value).__name__} {placements}".strip(),
    }


def _group_record(node: Any, groups: dict[str, Any]) -> dict[str, Any]:
    """Whether a node is a collective, and its group's name. A report must not fail where the graph did."""
    call = _collective_call(node)
    if call is None:
        return {}
    name = call.arguments.get(call.group_argument)
    with contextlib.suppress(HandshakeConfigError):
        group = _resolve(node, call)
        name = getattr(group.process_group, "group_name", None)
        if name is not None and name not in groups:
            groups[name] = {"ranks": runs(sorted(group.ranks)), "description": _description(group.process_group)}
    return {"collective": True, "group": name if isinstance(name, str) else None}


def _constant_text(tensor: Any) -> str | None:
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, torch.nn.Parameter):
        return None
    text = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    try:
        elements, digest = _elements(tensor)
        with torch._subclasses.fake_tensor.unset_fake_temporarily():
            first = elements.flatten()[:MAX_CONSTANT_VALUES_SHOWN].tolist()
        more = ", …" if elements.numel() > len(first) else ""
        return f"{text} blake2b:{digest} [{', '.join(map(repr, first))}{more}]"
    except Exception:  # its elements can't be read: what is known is said
        return text


def _mutations(graph_module: Any) -> dict[Any, str]:
    """The inputs that a graph changes, and what changes each: an op, or the output."""
    mutations, inputs = {}, {}
    for node in graph_module.graph.nodes:
        changed: list[Any] = []
        schema = getattr(node.target, "_schema", None)
        if node.op == "placeholder" and "desc" in node.meta:
            inputs[node.meta["desc"]] = node
        elif node.op == "output":
            descriptors = node.meta.get("desc") or ()
            changed = [inputs.get(getattr(descriptor, "mutated_input", None)) for descriptor in descriptors]
        elif node.op == "call_method" and _is_in_place(node.target):
            changed = list(node.args[:1])
        elif schema is not None and schema.is_mutable:
            names = [argument.name for argument in schema.arguments]
            given = dict(zip(names, node.args, strict=False)) | node.kwargs
            changed = [given.get(argument.name) for argument in schema.arguments if argument.is_write]
        inputs_changed = [leaf for *_, leaf in _leaves(changed) if getattr(leaf, "op", None) == "placeholder"]
        mutations.update(dict.fromkeys(inputs_changed, str(node.target)))
    return mutations


def _fact_lines(body: dict[str, Any], path: str = "") -> Iterator[str]:
    """What the record of a graph says that its printed text leaves out."""
    for node in body["nodes"]:
        if "constant" in node:
            yield f"constant {path}{node['target']} = {node['constant']}"
        if "mutated_by" in node:
            yield f"mutated {path}{node['name']} = {node['mutated_by']}"
        if "shares" in node:
            yield f"shares {path}{node['name']} = {node['shares']}"
        if "user_source" in node and node["user_source"] != node["source"]:
            yield f"source {path}{node['name']} = {node['user_source']}"
    for name, nested in body["bodies"].items():
        yield from _fact_lines(nested, f"{path}{name}.")
