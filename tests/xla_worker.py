# SPDX-License-Identifier: Apache-2.0
"""The ranks of `test_xla`: ``xla_worker.py FOLDER``. Each is forked off this process, which has imported everything.

A scenario is a function without arguments. It checks its own rank's outcomes, and values and gradients against eager.
What a rank found is one line in FOLDER/RANKofRANKS.jsonl as soon as the scenario is over. The ranks stay in step: all
run all scenarios of their job in order, and on each group all members issue the same collectives.
"""

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from layout import PROJECT, load
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh

sys.path[:0] = [str(PROJECT), str(PROJECT / "examples")]
import vocab_parallel  # noqa: E402
from handshake_backend import Backend, make_backend  # noqa: E402
from train import WIDTH, Block  # noqa: E402
from xla_backend import Program, Xla  # noqa: E402

handshake = load("handshake")
_graph = load("_graph")

COMPILE, DISPATCH = "COMPILE_STAGE", "DISPATCH_STAGE"
VOTE_TIMEOUT_S = 60.0

rank, world_size = 0, 1
folder = Path(sys.argv[1])
surprises: list[str] = []


def expect(seen: Any, expected: Any) -> None:
    """Notes what is not as expected. The scenario goes on: a rank that left it would make the others wait."""
    if seen != expected:
        surprises.append(f"line {sys._getframe(1).f_lineno}: {seen}, expected {expected}")


# ---------------------------------------------------------------------- programs


class Reduced(torch.autograd.Function):
    """all_reduce forward, and backward."""

    @staticmethod
    def forward(ctx, x, group_name):
        ctx.group_name = group_name
        return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", group_name))

    @staticmethod
    def backward(ctx, gradient):
        started = torch.ops._c10d_functional.all_reduce(gradient, "sum", ctx.group_name)
        return torch.ops._c10d_functional.wait_tensor(started), None


def reduce(x, group_name="0"):
    return Reduced.apply(x, group_name)


def own_matrix():
    return (torch.arange(6.0).reshape(2, 3) + rank) / 20


def merged(x, scale):
    """For a scale of 1.0 XLA makes one all-reduce of both."""
    return torch.tanh(reduce(x)) + torch.sin(reduce(x * scale))


def dropped(x, factor):
    """For a factor of 0, XLA drops the all-reduce."""
    return reduce((x * 20).long()) * factor


def folded(x, value):
    """XLA multiplies the constant by the number of ranks, on each rank."""
    return x * reduce(torch.full((3,), value))


# ---------------------------------------------------------------------- compiled


def all_reduces(hlo: str) -> list[int]:
    """How many operands each all-reduce of an executable has."""
    return [found.count("%") for found in re.findall(r" all-reduce(?:-start)?\(([^)]*)\)", hlo)]


class KeepsPrograms(Xla):
    """Keeps what has run, in the order of their first runs: the whole graph is compiled even if it is split."""

    def __init__(self) -> None:
        super().__init__()
        self.programs: list[Program] = []

    def compile(self, graph_module: torch.fx.GraphModule, fake_mode: Any) -> Callable[[list[Any]], Any]:
        program = Program(graph_module)

        def run(inputs: list[Any]) -> Any:
            if program not in self.programs:
                self.programs.append(program)
            return program(inputs)

        return run


class Seen(NamedTuple):
    """What came of one run: how many verdicts were fat, split and plans; the all-reduces of each executable that had
    not run before."""

    verdicts: tuple[int, ...]
    made: list[list[int]]


class Compiled:
    """A function, compiled by the example's backend. A call runs it, and eagerly too, and compares."""

    def __init__(
        self, function: Callable[..., Any], stage: str = DISPATCH, partial: bool = False, groups: str = "role"
    ) -> None:
        torch._dynamo.reset()
        self.function = function
        self.inner = KeepsPrograms()
        self.backend = Backend(self.inner, handshake.HandshakeStage.parse(stage, "stage"), partial, groups)
        self.compiled = torch.compile(function, backend=self.backend, dynamic=False)

    def __call__(self, *inputs: Any) -> Seen:
        before = self.backend.report()
        first = len(self.inner.programs)
        compare(self.compiled, self.function, inputs)
        after = self.backend.report()
        verdicts = tuple(after[name] - before[name] for name in ("fat", "split", "partial"))
        return Seen(verdicts, [all_reduces(program.hlo) for program in self.inner.programs[first:]])

    def expect_same_on_all_ranks(self) -> None:
        """Of the executables with collectives, byte for byte."""
        own = [program.hlo for program in self.inner.programs if "replica_groups" in program.hlo]
        of_all: list[Any] = [None] * world_size
        dist.all_gather_object(of_all, own)
        expect([texts == own for texts in of_all], [True] * world_size)


def compare(compiled: Callable[..., Any], function: Callable[..., Any], inputs: Sequence[Any]) -> None:
    for place, (value, eager) in enumerate(zip(run(compiled, inputs), run(function, inputs), strict=True)):
        if not (value.dtype == eager.dtype and torch.allclose(value, eager, rtol=1e-4, atol=1e-5)):
            surprises.append(f"{'a gradient' if place else 'the value'} is {value}, eagerly {eager}")


def run(function: Callable[..., Any], inputs: Sequence[Any]) -> list[torch.Tensor]:
    """The value, and the gradients with respect to the inputs and parameters that get one."""
    inputs = [x.clone() if isinstance(x, torch.Tensor) else x for x in inputs]
    leaves = [x.requires_grad_() for x in inputs if isinstance(x, torch.Tensor) and x.is_floating_point()]
    leaves += function.parameters() if isinstance(function, torch.nn.Module) else []
    value = function(*inputs)
    if not value.requires_grad:
        return [value]
    gradients = torch.autograd.grad(value.square().sum(), leaves, allow_unused=True)
    return [value.detach(), *(gradient for gradient in gradients if gradient is not None)]


def made_whole(function: Callable[..., Any], own: float) -> list[list[int]]:
    """The all-reduces of this rank's graph, compiled whole. It runs eagerly."""
    made = []

    def compile_graph(graph_module, example_inputs):
        made.append(all_reduces(Program(graph_module).hlo))
        return make_boxed_func(graph_module.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compile_graph, decompositions=Xla.decompositions)
    with torch.no_grad():
        compare(torch.compile(function, backend=backend), function, [own_matrix(), own])
    return made


# ---------------------------------------------------------------------- scenarios of several ranks


def xla_makes_other_collectives():
    """The reason for all of this: graphs with the same collectives, and executables with others."""
    expect(made_whole(merged, rank + 1.0), [[1] if rank == 0 else [2]])
    expect(made_whole(dropped, rank), [[] if rank == 0 else [1]])
    expect(made_whole(folded, rank + 1.0), [[]])


def graphs_that_differ_run_split():
    def alone(seen: Seen) -> int:
        """How many all-reduces were made, each in an executable of its own."""
        expect([made for made in seen.made if made not in ([], [1])], [])
        return seen.made.count([1])

    call = Compiled(merged, DISPATCH)
    seen = call(own_matrix(), rank + 1.0)
    expect((seen.verdicts, alone(seen)), ((0, 2, 0), 4))
    expect(call(own_matrix(), rank + 1.0), Seen((0, 2, 0), []))
    with torch.no_grad():
        call = Compiled(merged, COMPILE)
        seen = call(own_matrix(), rank + 1.0)
        expect((seen.verdicts, alone(seen)), ((0, 1, 0), 2))
        expect(call(own_matrix(), rank + 1.0), Seen((0, 0, 0), []))
    for function, own in ((dropped, rank), (folded, rank + 1.0)):
        seen = Compiled(function)(own_matrix(), own)
        expect((seen.verdicts, alone(seen)), ((0, 1, 0), 1))


def plan_keeps_what_is_common():
    for function, own, verdicts, made in (
        # Forward, only x * scale differs, before the two; backward only the product with scale, behind them.
        (merged, rank + 1.0, (0, 0, 2), [[], [2], [2], []]),
        (dropped, rank, (0, 0, 1), [[1], []]),
        (folded, rank + 1.0, (0, 0, 1), [[], [1], []]),
    ):
        call = Compiled(function, partial=True)
        expect(call(own_matrix(), own), Seen(verdicts, made))
        call.expect_same_on_all_ranks()


def constant_that_became_a_tensor():
    call = Compiled(merged)
    expect(call(own_matrix(), torch.tensor(rank + 1.0)), Seen((2, 0, 0), [[2], [2]]))
    call.expect_same_on_all_ranks()


def tensor_parallel_mlp():
    torch.manual_seed(0)
    call = Compiled(Block(rank, world_size, "none"))
    x = torch.randn(4, WIDTH)
    expect(call(x), Seen((2, 0, 0), [[1], [1]]))
    expect(call(x), Seen((2, 0, 0), []))
    call.expect_same_on_all_ranks()


def vocab_parallel_embedding():
    vocab_parallel.ROWS_PER_RANK = 10
    tokens = torch.arange(0, 10 * world_size, 3)
    for mended, seen in ((False, Seen((0, 0, 1), [[], [1], []])), (True, Seen((1, 0, 0), [[1], []]))):
        call = Compiled(vocab_parallel.VocabParallelEmbedding(rank, mended), partial=True)
        expect(call(tokens), seen)
        call.expect_same_on_all_ranks()


def mesh_of_two_by_two():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp, dp = mesh.get_group("tp").group_name, mesh.get_group("dp").group_name

    def function(x):
        return reduce(torch.tanh(reduce(x * 2, tp)), dp) * 3

    call = Compiled(function)
    expect(call(own_matrix()), Seen((2, 0, 0), [[1, 1], [1, 1]]))
    call.expect_same_on_all_ranks()  # with all rows, and all columns, as replica groups
    with torch.no_grad():
        expect(Compiled(function, groups="exact")(own_matrix()).verdicts, (0, 1, 0))


def every_collective():
    """On the world and on a column at once; on pairs that no mesh has as rows; on a group of three."""
    functional = torch.ops._c10d_functional
    wait = functional.wait_tensor

    def function(x, *groups):
        for group in groups:
            name, size = group.group_name, group.size()
            x = wait(functional.all_gather_into_tensor(x, size, name))
            x = wait(functional.all_to_all_single(x * x, [1] * size, [1] * size, name))
            for reduction in ("sum", "avg", "max", "min"):
                x = x + wait(functional.all_reduce(x * 2, reduction, name))
            x = wait(functional.reduce_scatter_tensor(x, "sum", size, name))
        return x

    x = torch.arange(6.0).reshape(1, 6) / 7 + rank
    column, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    pair, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    three = dist.new_group([0, 1, 2])
    with torch.no_grad():
        expect(Compiled(function)(x, dist.group.WORLD, column).verdicts, (1, 0, 0))
        expect(Compiled(lambda x: reduce(torch.tanh(reduce(x)), pair.group_name))(x).verdicts, (0, 1, 0))
        if rank < 3:
            expect(Compiled(function)(x, three).verdicts, (1, 0, 0))


# ---------------------------------------------------------------------- scenarios of one rank


def ops_do_what_pytorch_does():
    """Forward and backward; each function has about a dozen ops of the table."""
    x, y, rows = torch.randn(4, 6), torch.randn(4, 6), torch.randn(7, 6)
    integers, mask, index = torch.randint(-5, 5, (4, 6)), torch.rand(4, 6) < 0.5, torch.randint(0, 4, (4,))
    functional = torch.nn.functional

    def unary(x):
        rounded = x.floor() + x.ceil() + x.round() + x.trunc() + x.sign()
        smooth = x.exp() + x.sin() + x.cos() + x.tanh() + x.sigmoid() + x.erf() + x.expm1() + x.atan() + x.sinh()
        return rounded + smooth + x.abs().log() + x.abs().sqrt() + x.abs().rsqrt() + functional.gelu(x) + x.relu()

    def binary(x, y):
        y = torch.where(y > 0, x * y, x / (y.abs() + 1)) + torch.maximum(x, y) - x.pow(3) + x.atan2(y) + 2 / y
        return y + torch.clamp(x, -1, 1) + (x @ y.t()).sum(1, keepdim=True) + torch.addmm(y, x @ x.t(), y) * (x < y)

    def integer(x, n):
        exact = (
            n // 3 + n % 3 + torch.div(n, 3, rounding_mode="trunc") + n.fmod(3) + (n & 3) + (n | 1) + (~n) + n.cumsum(0)
        )
        return x * exact + n.float().mean() + n.sum() + n / 2 + (n > 0).sum(0) + n.bool().any(1, keepdim=True)

    def reductions(x):
        extremes = x.amax(0) + x.max(1)[0].sum() + x.min(0)[0] + x.max() + x.argmax(1).sum() + x.argmin()
        return extremes + x.sum(-1, keepdim=True) + x.mean() + x.var(0) + x.std(1, keepdim=True) + x.prod(0) + x.norm()

    def norms(x, index):
        soft = x.softmax(1) + x.log_softmax(0) + functional.layer_norm(x, (6,)) + functional.rms_norm(x, (6,))
        return soft + functional.cross_entropy(x, index) + functional.group_norm(x[None], 2)[0]

    def views(x):
        reshaped = x.t().reshape(4, 6) + x.view(6, 4).transpose(0, 1) + x[None].expand(2, 4, 6)[1] + x.repeat(2, 1)[2:6]
        joined = (
            torch.cat([x[:2], x[2:]]) + torch.stack([x, x])[1] + torch.cat(x.chunk(3, 1), 1) + x.flip(0) + x.roll(1, 0)
        )
        return reshaped + joined + x[:, ::2].repeat(1, 2) + x.unbind(0)[1] + x.triu() + x.detach().diagonal().sum()

    def indices(x, rows, index):
        picked = x[index] + x.index_select(0, index) + x[index, index].sum() + functional.embedding(index, rows)
        return picked + x.gather(0, index[:, None].repeat(1, 6)) + x.scatter_add(0, index[:, None].repeat(1, 6), x)

    def writes(x, mask):
        y = x.clone()
        y[1:3] = x[:2] * 2
        y[0, ::2] = 1.0
        y[mask] = 0.0
        return y.mul_(3).masked_fill(mask, 2.0) + torch.arange(6) + torch.full((4, 1), 2) + torch.tensor([1.0] * 6)

    def dtypes(x):
        return (
            x.double()
            + x.bfloat16()
            + x.int()
            + x.detach().view(torch.int32).bool()
            + x.half().float()
            + x.to(torch.bool)
        )

    for function, *inputs in (
        (unary, x), (binary, x, y), (integer, x, integers), (reductions, x), (norms, x, index), (views, x),
        (indices, x, rows, index), (writes, x, mask), (dtypes, x),
    ):  # fmt: skip
        Compiled(function)(*inputs)


def tensors_are_the_callers():
    """Inputs that are written to, outputs that are copies of inputs, or transposed."""
    counter, x = torch.zeros(3), torch.ones(3)

    def function(x, counter):
        counter.add_(1)
        return x.clone(), x * counter, (torch.outer(x, counter) * 2).t()

    compiled = torch.compile(function, backend=make_backend("xla", stage="OFF"))
    for number in (1.0, 2.0):
        copy, product, transposed = compiled(x, counter)
        expect((counter.tolist(), product.tolist()), ([number] * 3, [number] * 3))
    copy.add_(1)
    expect((x.tolist(), transposed.stride()), ([1.0] * 3, (1, 3)))


def what_xla_is_not_given():
    def missing(x):
        return torch.fft.rfft(x).abs()

    def product(x):
        return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "product", "0"))

    for function, text in (
        (missing, "the XLA backend has no op aten._fft_r2c.default (node _fft_r2c): add it to OPS"),
        (torch.nn.functional.dropout, "has no op aten.native_dropout.default"),
        (product, "has no all_reduce of product"),
    ):
        torch._dynamo.reset()
        try:
            torch.compile(function, backend=make_backend("xla", stage="OFF"))(torch.ones(4))
            surprises.append(f"no error of {function.__name__}")
        except Exception as error:
            if text not in str(error):
                surprises.append(f"{error}, expected {text}")
    try:
        torch.compile(torch.sin, backend=make_backend("xla", stage="OFF"), dynamic=True)(torch.ones(4))
        surprises.append("no error of a size that is not fixed")
    except Exception as error:
        if "fixed sizes" not in str(error):
            surprises.append(str(error))


# ---------------------------------------------------------------------- all ranks in step

JOBS: dict[int, list[Callable[[], None]]] = {  # by the number of ranks
    4: [
        xla_makes_other_collectives,
        graphs_that_differ_run_split,
        plan_keeps_what_is_common,
        constant_that_became_a_tensor,
        tensor_parallel_mlp,
        vocab_parallel_embedding,
        mesh_of_two_by_two,
        every_collective,
    ],
    1: [ops_do_what_pytorch_does, tensors_are_the_callers, what_xla_is_not_given],
}


def run_rank(number: int, of: int) -> None:
    global rank, world_size
    rank, world_size = number, of
    os.environ["TORCH_TPU_INTERNAL_HANDSHAKE_TIMEOUT_S"] = str(VOTE_TIMEOUT_S)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{of}", rank=rank, world_size=world_size)
    Xla()
    for scenario in JOBS[world_size]:
        surprises.clear()
        torch.manual_seed(0)
        try:
            scenario()
        except Exception:
            surprises.append(traceback.format_exc())
        with (folder / f"{rank}of{world_size}.jsonl").open("a") as file:
            print(json.dumps({"name": scenario.__name__, "surprises": surprises}), file=file)
    dist.barrier()
    jax.distributed.shutdown()
    handshake.Handshake().close()


def main() -> None:
    """One job after the other. A rank that dies takes its job along: JAX ends the others."""
    for of in JOBS:
        ranks = []
        for number in range(of):
            ranks.append(os.fork())  # no thread runs here
            if not ranks[-1]:
                try:
                    run_rank(number, of)
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(0)
        for process in ranks:
            os.waitpid(process, 0)


if __name__ == "__main__":
    main()
