# SPDX-License-Identifier: Apache-2.0
"""A torch.compile backend whose graphs run fat or skinny, as the ranks agree. The reference for integrating this.

    torch.compile(model, backend=make_backend("inductor", stage="DISPATCH_STAGE", partial=True))

What a compiler has to do, and where it is done here:

1. Work on AOTAutograd's graphs, which show all collectives: `Backend`.
2. Count a graph's collectives, take its fingerprint, and make its gate: `Executable`. A graph that comes from a compile
   cache gets one too, so that no rank waits for one whose cache is warm.
3. Compile, then vote, then run, in this order: a graph that fails to compile, or is never run, has no vote. `Programs`
   compiles the whole graph; once it is needed, each collective in an executable of its own, or, by a plan, one for each
   part that diverging graphs have in common; and keeps them all. Should that fail, it tells the other ranks.
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
from _graph_plan import Program, Programs
from handshake import DispatchGate, HandshakeConfigError, HandshakeStage

# A compiled graph takes its arguments in one list.
Compiled = Callable[[list[Any]], Any]


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
        self._programs: dict[Program, int] = {}  # that have run

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

    def count_graph(self) -> None:
        with self._lock:
            self._counters["graphs"] += 1

    def count_run(self, program: Program, has_voted: bool) -> None:
        with self._lock:
            if has_voted:
                self._counters["handshakes"] += 1
                self._counters["split" if program.kind == "skinny" else program.kind] += 1
            if program not in self._programs:
                self._programs[program] = program.num_segments

    def report(self) -> dict[str, Any]:
        """What has happened: `graphs` with collectives, compiled or loaded; `handshakes` that ended, each `fat`,
        `split` (skinny) or `partial` (a plan); `segments`, the number of parts of each program that has run."""
        with self._lock:
            return {**self._counters, "segments": list(self._programs.values())}


class _Loading(threading.local):
    """The backend for which torch's cache loads executables in this thread."""

    backend: Backend


_loading = _Loading()


class Executable(OutputCode):
    """One graph, which votes when it is run."""

    def __init__(self, backend: Backend, graph_module: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> None:
        super().__init__()
        self._boxed_call = True
        self._graph_module: torch.fx.GraphModule | None = graph_module
        self._serialized = b""
        # Dynamo takes guards on sizes only now; Inductor may have some.
        self._join(backend, graph_module, any(isinstance(value, torch.SymInt) for value in example_inputs))

    def _join(self, backend: Backend, graph_module: torch.fx.GraphModule, split_too: bool = False) -> None:
        """Compiles the graph, and prepares its votes."""
        collectives = count_collectives(graph_module)
        fingerprint = graph_fingerprint(graph_module, backend.groups)
        record = functools.partial(graph_record, graph_module)  # called only if a split is to be explained
        gate = DispatchGate(fingerprint, collectives, record, stage=backend.stage, partial=backend.partial)
        fake_mode = detect_fake_mode([node.meta.get("val") for node in graph_module.graph.nodes])
        compile_graph = functools.partial(backend.inner.compile, fake_mode=fake_mode)
        self._programs = Programs(graph_module, gate, compile_graph, groups=backend.groups, split_too=split_too)
        self._backend, self._gate = backend, gate
        if collectives:
            backend.count_graph()

    def __call__(self, inputs: Any) -> Any:
        votes = self._gate.answer is None
        program = self._programs.agreed()
        self._backend.count_run(program, votes)
        return program.run(inputs)

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
