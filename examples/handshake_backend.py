# SPDX-License-Identifier: Apache-2.0
"""A torch.compile backend whose graphs run fat or skinny, as the ranks agree. The reference for integrating this.

    torch.compile(model, backend=make_backend("inductor", stage="DISPATCH_STAGE", partial=True))

What a compiler has to do, and where it is done here:

1. Work on AOTAutograd's graphs, which show all collectives: `Backend`.
2. Count a graph's collectives, take its fingerprint, and vote: `Executable`. In COMPILE_STAGE it votes once, when the
   graph is compiled *or loaded from a compile cache*, so that no rank waits for one whose cache is warm; in
   DISPATCH_STAGE at each dispatch.
3. Run by the verdict: the whole graph in one executable; each collective in one of its own; or, by a plan, one for
   each part that diverging graphs have in common. Each is compiled once it is needed, and kept. Should that fail, the
   other ranks run what was agreed on all the same: this one raises, and has to end.
4. Keep the graph as it was voted on, for the report and the plan: an inner compiler that changes graphs gets a copy.
"""

import copy
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.schemas import SerializableAOTDispatchCompiler
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.replace_random import replace_random_passes
from torch._inductor.output_code import OutputCode
from torch._inductor.virtualized import V
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx._graph_pickler import GraphPickler, Options
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from _graph import count_collectives, graph_fingerprint, graph_record
from _graph_plan import OwnGraph, Plan, agree_on_plan, split_skinny
from handshake import (
    DispatchGate,
    HandshakeConfigError,
    HandshakeStage,
    Ticket,
    has_collectives_between_ranks,
    submit_handshake_async,
)

# A compiled graph takes its arguments in one list.
Compiled = Callable[[list[Any]], Any]
# What a vote ends in. True: the whole graph fat. False: all of it skinny.
Verdict = bool | Plan


def make_backend(
    inner: str = "eager", stage: HandshakeStage | str | None = None, partial: bool = False, groups: str | None = None
) -> "Backend":
    """A backend for `torch.compile`.

    Args:
        inner: what compiles a graph or a segment of one: "eager", "inductor" or "xla" (see `xla_backend`).
        stage: when to vote; by default what ``TORCH_TPU_INTERNAL_HANDSHAKE_STAGE`` says.
        partial: after a split, keep fat what the ranks' graphs have in common.
        groups: how a fingerprint names process groups, "role" or "exact"; by default as the open handshake or
            ``TORCH_TPU_INTERNAL_HANDSHAKE_GROUPS`` says.

    Raises:
        HandshakeConfigError: `inner` or the stage is none of these.

    With ``torch._functorch.config.bundled_autograd_cache`` set, graphs come from torch's own compile cache.

    Inductor draws random numbers by a generator of its own, seeded by torch's: they aren't those of an eager run, and
    one cut of a graph may draw others than another. With ``torch._inductor.config.fallback_random`` set, they are
    those of an eager run however the graph is cut.
    """
    if inner not in _INNER:
        raise HandshakeConfigError(f"inner={inner!r} is not a compiler; use one of {', '.join(_INNER)}")
    stage = HandshakeStage.from_env() if stage is None else HandshakeStage.parse(stage, "stage")
    return Backend(_INNER[inner](), stage, partial, groups)


class Backend:
    """What `make_backend` makes; `report()` says what has happened so far."""

    def __init__(self, inner: "Inner", stage: HandshakeStage, partial: bool, groups: str | None) -> None:
        self.inner = inner
        self.stage = stage
        self.partial = partial
        self.groups = groups
        self._lock = threading.Lock()
        self._counters = dict.fromkeys(("graphs", "handshakes", "fat", "split", "partial"), 0)
        self._segments: list[int] = []

    def __call__(self, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        compiler: Any = functools.partial(Executable, self)
        backward_compiler = compiler
        if torch._functorch.config.bundled_autograd_cache:
            backward_compiler = SerializableAOTDispatchCompiler(Executable, compiler)
            compiler = SerializableAOTDispatchCompiler(Executable, compiler)
        compile_graph = aot_autograd(
            fw_compiler=compiler, bw_compiler=backward_compiler, decompositions=self.inner.decompositions
        )
        _loading.backend = self
        # A cached graph is only of use to the inner compiler for which it was traced.
        tag = f"handshake backend, {self.inner.name}"
        with torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
            return compile_graph(graph_module, example_inputs)

    def count(self, *names: str, segments: int | None = None) -> None:
        with self._lock:
            for name in names:
                self._counters[name] += 1
            if segments is not None:
                self._segments.append(segments)

    def report(self) -> dict[str, Any]:
        """What has happened: `graphs` with collectives, compiled or loaded; `handshakes` that ended, each `fat`,
        `split` (skinny) or `partial` (a plan); `segments`, the number of parts of each program compiled so far."""
        with self._lock:
            return {**self._counters, "segments": list(self._segments)}


class _Loading(threading.local):
    """The backend for which torch's cache loads executables in this thread."""

    backend: Backend


_loading = _Loading()


class Executable(OutputCode):
    """One graph: its votes, and the programs made of it so far."""

    def __init__(self, backend: Backend, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        super().__init__()
        self._boxed_call = True
        self._graph_module: torch.fx.GraphModule | None = graph_module
        self._serialized = b""
        self._join(backend, graph_module)
        if self._verdict is not None:
            self._program(self._verdict)
        elif any(isinstance(value, torch.SymInt) for value in example_inputs):
            # Dynamo takes guards on sizes only now; Inductor may have some.
            self._program(True)
            self._program(False)

    def _join(self, backend: Backend, graph_module: torch.fx.GraphModule) -> None:
        """From here on this rank answers for the graph."""
        self._backend = backend
        self._lock = threading.Lock()
        self._programs: dict[bool, Compiled] = {}
        self._ticket: Ticket | None = None
        self._gate: DispatchGate | None = None
        self._collectives = count_collectives(graph_module)
        if self._collectives:
            backend.count("graphs")
        between_ranks = has_collectives_between_ranks(self._collectives)
        if backend.stage is HandshakeStage.OFF or not between_ranks:
            # Without a vote, collectives are skinny, also those whose groups only another library knows.
            is_known = not self._collectives or not graph_fingerprint(graph_module).startswith("unhashable")
            self._verdict: Verdict | None = not between_ranks and is_known
            return
        self._verdict = None
        self._fingerprint = graph_fingerprint(graph_module, backend.groups)
        self._text = functools.partial(graph_record, graph_module)  # called only if a split is to be explained
        self._own: OwnGraph | None = None
        if backend.partial and not self._fingerprint.startswith("unhashable"):
            self._own = OwnGraph(graph_module, backend.groups)
        if backend.stage is HandshakeStage.COMPILE_STAGE:
            # Not waited for before the first run: a backward graph with dynamic shapes, or from torch's cache, is here
            # before the forward one has run, and other ranks may vote on it only after they ran that with this one.
            self._ticket = self._cast()
        elif self._own is None:
            self._gate = DispatchGate(self._fingerprint, self._collectives, self._text, stage=backend.stage)

    def _cast(self) -> Ticket:
        partial = self._own is not None
        return submit_handshake_async(self._fingerprint, self._collectives, self._text, partial=partial)

    def _settle(self, ticket: Ticket) -> Verdict:
        """Waits for the verdict; after a split the ranks look for a plan, if all of them are able to."""
        if ticket.result():
            return True
        if ticket.exchange is None or self._own is None:
            return False
        return agree_on_plan(ticket.exchange, self._own) or False

    def _decide(self) -> Verdict:
        if self._verdict is not None:
            return self._verdict
        verdict = self._gate.vote() if self._gate is not None else self._settle(self._ticket or self._cast())
        if self._backend.stage is HandshakeStage.COMPILE_STAGE:
            self._verdict = verdict
        self._backend.count("handshakes", "partial" if isinstance(verdict, Plan) else "fat" if verdict else "split")
        return verdict

    def _program(self, verdict: Verdict) -> Compiled:
        if isinstance(verdict, Plan):
            compiled: Compiled = verdict.compiled or self._compile(verdict)
            verdict.compiled = compiled
            return compiled
        if verdict not in self._programs:
            self._programs[verdict] = self._compile(verdict)
        return self._programs[verdict]

    def __call__(self, inputs: Any) -> Any:
        with self._lock:
            program = self._program(self._decide())
        return program(inputs)

    def _compile(self, verdict: Verdict) -> Compiled:
        graph_module = self._graph_module
        assert graph_module is not None
        fake_mode = detect_fake_mode([node.meta.get("val") for node in graph_module.graph.nodes])
        compile_inner = self._backend.inner.compile
        if verdict is True:
            self._backend.count(segments=1)
            return compile_inner(graph_module, fake_mode)
        split = verdict.program if isinstance(verdict, Plan) else split_skinny(graph_module)
        names = [str(node.target) for node in split.graph.find_nodes(op="call_module")]
        segments: list[Any] = [split.get_submodule(name) for name in names]
        for name, compiled in zip(names, [compile_inner(segment, fake_mode) for segment in segments], strict=True):
            split.set_submodule(name, _Segment(compiled))
        self._backend.count(segments=len(names))
        return lambda inputs: split(*inputs)

    # What torch's compile cache calls: before it writes a copy of this, and after it has read one.

    def prepare_for_serialization(self) -> None:
        serialized = GraphPickler.dumps(self._graph_module, Options(ops_filter=None))
        self.__dict__ = {"_boxed_call": True, "_graph_module": None, "_serialized": serialized}

    def post_compile(self, example_inputs: Sequence[Any], constants: Any, graph_kwargs: Any) -> None:
        fake_mode = detect_fake_mode(example_inputs) or FakeTensorMode()
        graph_module: Any = GraphPickler.loads(self._serialized, fake_mode)
        graph_module.recompile()
        self._graph_module = graph_module
        self._join(_loading.backend, graph_module)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Nothing of this is bundled."""


class _Segment(torch.nn.Module):
    def __init__(self, compiled: Compiled) -> None:
        super().__init__()
        self.compiled = compiled

    def forward(self, *arguments: Any) -> Any:
        return self.compiled(list(arguments))


# ---------------------------------------------------------------------- inner compilers


class Inner:
    """Compiles a graph, or a segment of one."""

    name = "eager"
    decompositions: Any = None

    def compile(self, graph_module: torch.fx.GraphModule, fake_mode: FakeTensorMode | None) -> Compiled:
        """Runs the graph as it is."""
        return lambda inputs: graph_module(*inputs)


class Inductor(Inner):
    name = "inductor"
    decompositions = staticmethod(select_decomp_table)

    def compile(self, graph_module: torch.fx.GraphModule, fake_mode: FakeTensorMode | None) -> Compiled:
        if not _keeps_strides(graph_module.graph):
            return super().compile(graph_module, fake_mode)
        # What it makes checks sizes that are known only at run time, also for nodes of other segments. Its cache takes
        # two segments for one whatever is checked in them.
        sizes = None if fake_mode is None else fake_mode.shape_env
        is_cached = torch._inductor.config.fx_graph_cache and not (sizes and sizes.deferred_runtime_asserts)
        with (
            V.set_fake_mode(fake_mode),
            tracing(TracingContext(fake_mode)),
            torch._inductor.config.patch(fx_graph_cache=is_cached),
        ):
            changed = _copy_for_inductor(graph_module)
            examples = [node.meta["val"] for node in changed.graph.find_nodes(op="placeholder")]
            # Other segments, and the backward graph, were traced with these strides.
            output = changed.graph.output_node()
            output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
            return compile_fx_inner(changed, examples)


def _keeps_strides(graph: torch.fx.Graph) -> bool:
    """Whether Inductor keeps the strides of the outputs when it is told to: not where these depend on sizes known only
    at run time. It makes such outputs contiguous."""
    values = [node.meta.get("val") for node in graph.output_node().all_input_nodes]
    tensors = [value for value in values if isinstance(value, torch.Tensor) and value.layout is torch.strided]
    return all(is_contiguous_or_false(value) for value in tensors if free_unbacked_symbols(value.stride()))


def _copy_for_inductor(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A copy, of nested bodies too, without the random ops, which `compile_fx_inner` can't compile. Inductor replaces
    them in a pass of its own backend, between AOTAutograd's trace and this."""
    with unset_fake_temporarily():
        copied = torch.fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    for name, body in copied.named_children():
        if isinstance(body, torch.fx.GraphModule):
            setattr(copied, name, _copy_for_inductor(body))
    replace_random_passes(copied)
    return copied


def _xla() -> Inner:
    from xla_backend import Xla  # needs JAX

    return Xla()


_INNER: dict[str, Callable[[], Inner]] = {"eager": Inner, "inductor": Inductor, "xla": _xla}
