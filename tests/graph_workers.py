# SPDX-License-Identifier: Apache-2.0
"""Graphs for the tests of `_graph`: any rank of a world played in one process, functions traced by torch itself.

Run as a program it prints `sample_fingerprints` as JSON, for comparison with another process's.
"""

import contextlib
import json
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint


@contextlib.contextmanager
def world(rank=0, size=4):
    """This process as one rank of a world in which nothing is really sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


class CapturedError(Exception):
    """Ends a compilation once its graphs are known: what follows, Dynamo's guards, takes half of the time."""


class Graphs:
    """A backend that keeps Dynamo's graphs, and AOTAutograd's of forward and backward.

    `seen` is called with each while it is being compiled; its results are in `seen_results`.
    """

    def __init__(self, seen, with_backward):
        self.dynamo, self.forward, self.backward = [], [], []
        self.seen_results = []
        self._seen = seen
        self._with_backward = with_backward

    def _keep(self, kind, graph_module):
        kind.append(graph_module)
        if self._seen is not None:
            self.seen_results.append(self._seen(graph_module))

    def _compiler(self, kind):
        def compiler(graph_module, example_inputs):
            self._keep(kind, graph_module)
            return make_boxed_func(graph_module.forward)

        return compiler

    def __call__(self, graph_module, example_inputs):
        self._keep(self.dynamo, graph_module)
        aot = aot_autograd(fw_compiler=self._compiler(self.forward), bw_compiler=self._compiler(self.backward))
        whole = aot(graph_module, example_inputs)
        if not self._with_backward:
            raise CapturedError
        return whole

    @property
    def all(self):
        return [*self.dynamo, *self.forward, *self.backward]


def compiled(function, *inputs, seen=None, with_backward=False, **options):
    """The graphs that torch.compile makes of a function, of its backward too if that is asked for."""
    torch._dynamo.reset()
    graphs = Graphs(seen, with_backward)
    try:
        output = torch.compile(function, backend=graphs, fullgraph=True, **options)(*inputs)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, CapturedError):
            raise
    else:
        output.sum().backward()
    return graphs


def traced(function, *inputs):
    """The graph of a function by make_fx: no Dynamo, real inputs."""
    return make_fx(function)(*inputs)


def built(*calls):
    """A graph of calls `(target, args)` or `(target, args, kwargs)` made by hand, for what can't be traced here.

    The number `n` in a one-element set `{n}` in args stands for the n-th node; node 0 is the only input. Arguments are
    set last, so that they need not be ones that torch can write as code.
    """
    graph = torch.fx.Graph()
    nodes = [graph.placeholder("x")]
    nodes += [graph.call_function(target, (nodes[0],)) for target, *_ in calls]
    graph.output((nodes[-1],))
    graph_module = torch.fx.GraphModule(torch.nn.Module(), graph)
    for node, (_, args, *kwargs) in zip(nodes[1:], calls, strict=True):
        node.args = tuple(nodes[next(iter(a))] if type(a) is set else a for a in args)
        node.kwargs = kwargs[0] if kwargs else {}
    return graph_module


def sample_fingerprints(fingerprint, dtensor_rank):
    """Fingerprints of graphs that a hash seed, a path or a process could leak into.

    Those under "exact" are of rank 1, those under "role", of distributed tensors, of `dtensor_rank`.
    """
    torch.manual_seed(os.getpid())
    weight = torch.nn.Parameter(torch.randn(4, 4))

    def block(x):
        return torch.relu(funcol.all_reduce(x @ weight, "sum", dist.group.WORLD) + torch.tensor([1.5, 2.5, 3.5, 4.5]))

    def model(x):
        return checkpoint(block, x, use_reentrant=False) * 2 + block(x)

    def dynamic(x, y):
        return torch.cat([x, y]).view(-1) * x.shape[0]

    def scaled(x, by):
        return x * by

    with world(1):
        graphs = compiled(model, torch.randn(8, 4, requires_grad=True), with_backward=True).all
        rows = torch.randint(5, 9, ()).item()
        graphs += compiled(dynamic, torch.randn(rows, 3), torch.randn(rows + 1, 3), dynamic=True).all
        graphs.append(built((scaled, ({0}, 2)), (isinstance, ({1}, (frozenset({"a", "b", "c"}), {"k": 1, "j": 2})))))
        exact = [fingerprint(graph) for graph in graphs]
    with world(dtensor_rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        sharded = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
        graphs = compiled(lambda x: (x @ x).redistribute(mesh, [Replicate(), Replicate()]).to_local(), sharded).all
        role = [fingerprint(graph, "role") for graph in graphs]
    return {"exact": exact, "role": role}


if __name__ == "__main__":
    from layout import load

    for _ in range(int(sys.argv[1])):  # graphs compiled before
        compiled(lambda x: x + 1, torch.ones(2))
    print(json.dumps(sample_fingerprints(load("_graph").graph_fingerprint, int(sys.argv[2]))))
