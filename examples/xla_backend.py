# SPDX-License-Identifier: Apache-2.0
"""XLA as the inner compiler of the example's backend, on CPUs: JAX's client, which runs collectives over gloo.

    make_backend("xla", stage="DISPATCH_STAGE", partial=True)    # on every rank, with torch.distributed initialised

A segment without collectives is an executable of this rank's own device. One with collectives is an executable over the
devices of its groups' ranks, which each of them compiles for itself, as torch_tpu does. XLA may merge or drop
collectives by what is around them, so ranks that compile different programs may get different ones: see `Program.hlo`.

A graph is traced node by node, by the table `OPS`. An op that is not in it is an error that names it. Random ops are
not: PyTorch and JAX draw different numbers.
"""

import functools
import operator
import socket
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.distributed as dist
from handshake_backend import Compiled, Inner
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from torch._decomp import core_aten_decompositions, get_decompositions
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import map_arg

from _graph import collective_group, count_collectives, is_collective

RANKS = "ranks"  # the one axis of an executable's mesh, on which each of its ranks has a place
Op = Callable[..., Any]


class Xla(Inner):
    """Compiles with XLA. Making one starts JAX, which waits for all ranks to do so."""

    name = "xla"

    def __init__(self) -> None:
        start()

    @staticmethod
    @functools.cache
    def decompositions() -> dict[Any, Any]:
        """PyTorch's core ops, without some that others in it can say."""
        names = """addmm clamp elu gelu hardtanh leaky_relu linalg_vector_norm _log_softmax _native_batch_norm_legit
            native_group_norm native_layer_norm _softmax"""
        others = [getattr(torch.ops.aten, name) for name in names.split()]
        return {**core_aten_decompositions(), **get_decompositions(others)}

    def compile(self, graph_module: torch.fx.GraphModule, fake_mode: FakeTensorMode | None) -> Compiled:
        """The graph as a `Program`. Raises what that raises."""
        return Program(graph_module)


def start() -> None:
    """Joins the ranks' processes, all on this machine, to one JAX. Called again, it does nothing.

    At the end all ranks call ``jax.distributed.shutdown()``. If a rank ends without, JAX ends the others too.
    """
    if jax.distributed.is_initialized():
        return
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_x64", True)  # without, 64 bits become 32
    with socket.socket() as reserved:
        # Keeps the port for JAX, which binds it as well: with SO_REUSEPORT both may, and only JAX listens.
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        address = [f"127.0.0.1:{reserved.getsockname()[1]}"]
        dist.broadcast_object_list(address, src=0)
        world_size, rank = dist.get_world_size(), dist.get_rank()
        jax.distributed.initialize(address[0], world_size, rank, coordinator_bind_address=address[0])
    jax.devices()  # waits for those of all ranks


class Program:
    """A graph, compiled. Called with its inputs in a list, it returns a tuple, as the graph does.

    An array of the executable is the tensors of all its ranks, one after the other in their first dimension.

    Attributes:
        hlo: XLA's optimised program, as text.

    Raises:
        NotImplementedError: an op, or a kind of it, that is not in the table, or a size that is not fixed.
    """

    def __init__(self, graph_module: torch.fx.GraphModule) -> None:
        nodes = list(graph_module.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        attributes = [node for node in nodes if node.op == "get_attr"]
        returned = nodes[-1].args[0]
        results = [node for node in returned if isinstance(node, torch.fx.Node)]
        # Attributes may be weights, so they are inputs of the executable too.
        self._attributes = [operator.attrgetter(node.target)(graph_module) for node in attributes]
        self._returned = [node.meta["val"] if node in results else node for node in returned]

        groups = [set(group.ranks) for group in count_collectives(graph_module)] or [{dist.get_rank()}]
        largest = max(groups, key=len)
        ranks = sorted(largest) if all(map(largest.issuperset, groups)) else list(range(dist.get_world_size()))
        mesh = Mesh(np.array([device for device in jax.devices() if device.process_index in ranks]), RANKS)
        self._sharding = NamedSharding(mesh, PartitionSpec(RANKS))

        samples = [*[node.meta["val"] for node in placeholders], *self._attributes]

        def run(*inputs: jax.Array) -> list[jax.Array]:
            tensors = [x.reshape(sample.shape) for x, sample in zip(inputs, samples, strict=True)]
            values = dict(zip([*placeholders, *attributes], tensors, strict=True))
            for node in nodes:
                if node.op not in ("placeholder", "get_attr", "output"):
                    values[node] = _trace(node, values, ranks)
            return [jnp.atleast_1d(values[node]) for node in results]

        shapes = [jax.ShapeDtypeStruct(self._shape(x), _dtype(x), sharding=self._sharding) for x in samples]
        on_each_rank = jax.shard_map(
            run, mesh=mesh, in_specs=self._sharding.spec, out_specs=self._sharding.spec, check_vma=False
        )
        self._executable = jax.jit(on_each_rank).lower(*shapes).compile()
        self.hlo: str = self._executable.as_text() or ""

    def __call__(self, inputs: list[Any]) -> tuple[Any, ...]:
        results = self._executable(*[self._to_jax(tensor) for tensor in [*inputs, *self._attributes]])
        jax.block_until_ready(results)  # till then it may read its inputs, which are the caller's tensors
        tensors = iter([torch.utils.dlpack.from_dlpack(result.addressable_data(0)) for result in results])
        return tuple(_as_traced(x, next(tensors)) if isinstance(x, torch.Tensor) else x for x in self._returned)

    def _shape(self, tensor: Any) -> tuple[int, ...]:
        if not isinstance(tensor, torch.Tensor) or any(isinstance(size, torch.SymInt) for size in tensor.shape):
            what = getattr(tensor, "shape", type(tensor).__name__)
            raise NotImplementedError(f"XLA takes tensors of fixed sizes (dynamic=False), and no {what}")
        first, *others = tensor.shape or (1,)
        return (self._sharding.mesh.size * first, *others)

    def _to_jax(self, tensor: torch.Tensor) -> jax.Array:
        own = jax.dlpack.from_dlpack(torch.atleast_1d(tensor.detach().contiguous()))
        return jax.make_array_from_single_device_arrays(self._shape(tensor), self._sharding, [own])


def _dtype(tensor: torch.Tensor) -> Any:
    return jnp.dtype(str(tensor.dtype).removeprefix("torch."))


def _as_traced(traced: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with the shape and the strides with which the rest of the model was traced."""
    tensor, strides = tensor.view(traced.shape), traced.stride()
    is_as_traced = tensor.stride() == strides or 0 in strides
    return tensor if is_as_traced else torch.empty_strided(traced.shape, strides, dtype=tensor.dtype).copy_(tensor)


def _trace(node: torch.fx.Node, values: dict[torch.fx.Node, Any], ranks: list[int]) -> Any:
    """What the node computes in an executable over these ranks, while JAX traces it."""
    name = str(node.target if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "__name__", "?"))
    op = OPS.get(name) or OPS.get(name.rpartition(".")[0])
    if op is None:
        raise NotImplementedError(f"the XLA backend has no op {name} (node {node}): add it to OPS")
    arguments = list(map_arg(node.args, values.__getitem__))
    if is_collective(node):
        arguments[-1] = _partition([ranks.index(rank) for rank in collective_group(node).ranks], len(ranks))
    options = {key: map_arg(x, values.__getitem__) for key, x in node.kwargs.items() if key not in TOLD_BY_RESULT}
    like = node.meta["val"]
    value = op(like, *arguments, **options)
    if isinstance(like, torch.Tensor):
        return value.reshape(like.shape).astype(_dtype(like))
    return [part.reshape(of.shape).astype(_dtype(of)) for part, of in zip(value, like, strict=True)]


def _partition(members: list[int], num_places: int) -> list[list[int]] | None:
    """A group, given by its ranks' places, and all other places in groups beside it; None if there are no others. These
    lie as the group does, as the rows of a mesh do, so that all ranks name the same groups. Where that can't be, they
    are any: a rank takes part in its own group's collective alone."""
    left, groups = set(range(num_places)), []
    while left:
        groups.append([min(left) + place - min(members) for place in members])
        if not left.issuperset(groups[-1]):
            others = [place for place in range(num_places) if place not in members]
            return [members, *(others[i : i + len(members)] for i in range(0, len(others), len(members)))]
        left.difference_update(groups[-1])
    return groups if len(groups) > 1 else None


# An op takes what its result is `like`, then what PyTorch's takes, a group as a partition. `_trace` sees to the dtype.
TOLD_BY_RESULT = ("dtype", "layout", "device", "pin_memory", "memory_format")


def _all_reduce(like: Any, x: Any, reduction: str, groups: Any) -> Any:
    reductions = {"sum": lax.psum, "avg": lax.pmean, "max": lax.pmax, "min": lax.pmin}
    if reduction not in reductions:
        raise NotImplementedError(f"the XLA backend has no all_reduce of {reduction}")
    return reductions[reduction](x, RANKS, axis_index_groups=groups)


def _reduce_scatter(like: Any, x: Any, reduction: str, group_size: int, groups: Any) -> Any:
    if reduction not in ("sum", "avg"):
        raise NotImplementedError(f"the XLA backend has no reduce_scatter of {reduction}")
    summed = lax.psum_scatter(x, RANKS, axis_index_groups=groups, tiled=True)
    return summed / group_size if reduction == "avg" else summed


def _all_to_all(like: Any, x: Any, output_sizes: list[int], input_sizes: list[int], groups: Any) -> Any:
    if len({*output_sizes, *input_sizes}) > 1:
        raise NotImplementedError(f"the XLA backend has no all_to_all of uneven parts: {input_sizes}, {output_sizes}")
    return lax.all_to_all(x, RANKS, 0, 0, axis_index_groups=groups, tiled=True)


def _plain(function: Op) -> Op:
    return lambda like, *arguments, **options: function(*arguments, **options)


def _reduction(function: Op, adds_up: bool = False) -> Op:
    def reduce(like: torch.Tensor, x: Any, dims: Any = None, keepdim: bool = False, **options: Any) -> Any:
        axis = dims if dims is None or isinstance(dims, int) else tuple(dims) or None
        return function(x, axis=axis, **options, **({"dtype": _dtype(like)} if adds_up else {}))

    return reduce


def _pair(first: Op, second: Op) -> Op:
    return lambda likes, *args, **options: [first(likes[0], *args, **options), second(likes[1], *args, **options)]


def _var(like: Any, x: Any, dims: Any = None, correction: float | None = None, **options: Any) -> Any:
    return _reduction(jnp.var)(like, x, dims, ddof=1 if correction is None else correction)


def _div(like: Any, x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    if rounding_mode == "trunc" and not like.is_floating_point():
        return lax.div(*[jnp.broadcast_to(jnp.asarray(operand, _dtype(like)), like.shape) for operand in (x, y)])
    return {None: jnp.divide, "floor": jnp.floor_divide, "trunc": lambda x, y: jnp.trunc(x / y)}[rounding_mode](x, y)


def _at(x: Any, dim: int, index: Any) -> Any:
    """The elements with this index in one dimension, for ``get()`` or ``set()``."""
    return x.at[(slice(None),) * (dim % x.ndim) + (index,)]


def _along(x: Any, dim: int, index: Any) -> Any:
    """The elements with these indices in one dimension, each at its index's own place in the others."""
    places = list(jnp.indices(index.shape, sparse=True))
    places[dim] = index
    return x.at[tuple(places)]


def _by(x: Any, indices: Sequence[Any]) -> Any:
    return x.at[tuple(slice(None) if index is None else index for index in indices)]


def _index_put(like: Any, x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    if len(indices) == 1 and indices[0].dtype == bool and values.size == 1:
        mask = jnp.expand_dims(indices[0], tuple(range(indices[0].ndim, x.ndim)))
        return jnp.where(mask, x * accumulate + values, x)
    return _by(x, indices).add(values) if accumulate else _by(x, indices).set(values)


def _table(names: str, op: Callable[[str], Op]) -> dict[str, Op]:
    """By PyTorch's names, the ops of JAX's names, given as ``name``, or ``name=other`` where JAX has another."""
    return {f"aten.{name}": op(other or name) for name, _, other in [word.partition("=") for word in names.split()]}


# By PyTorch's names; with the overload where other overloads do something else.
OPS: dict[str, Op] = {
    "_c10d_functional.all_reduce": _all_reduce,
    "_c10d_functional.all_gather_into_tensor": lambda like, x, group_size, groups: lax.all_gather(
        jnp.atleast_1d(x), RANKS, axis_index_groups=groups, tiled=True
    ),
    "_c10d_functional.reduce_scatter_tensor": _reduce_scatter,
    "_c10d_functional.all_to_all_single": _all_to_all,
    "_c10d_functional.wait_tensor": _plain(lambda x: x),
    "getitem": _plain(operator.getitem),
    "prims.convert_element_type": _plain(lambda x, dtype: x),
    **_table(
        """abs acos acosh asin asinh atan atan2 atanh bitwise_and bitwise_not bitwise_or bitwise_xor bmm=matmul
        cat=concatenate ceil clamp_max=minimum clamp_min=maximum cos cosh diagonal eq=equal exp exp2
        expm1 flip floor fmod ge=greater_equal gt=greater hypot isinf isnan le=less_equal log log10 log1p log2
        logical_and logical_not logical_or logical_xor lt=less maximum minimum mm=matmul mul=multiply ne=not_equal
        neg=negative permute=transpose pow reciprocal remainder repeat=tile round scalar_tensor=asarray sign sin sinh
        sqrt tan tanh trunc where""",
        lambda name: _plain(getattr(jnp, name)),
    ),
    **_table("erf erfc rsqrt", lambda name: _plain(getattr(lax, name))),
    **_table("relu sigmoid", lambda name: _plain(getattr(jax.nn, name))),
    **_table("sum mean prod", lambda name: _reduction(getattr(jnp, name), adds_up=True)),
    **_table("cumprod cumsum", lambda name: lambda like, x, dim: getattr(jnp, name)(x, dim, dtype=_dtype(like))),
    **_table("any amax amin argmax argmin max.default=max min.default=min", lambda n: _reduction(getattr(jnp, n))),
    **_table("max.dim=max min.dim=min", lambda n: _pair(*[_reduction(getattr(jnp, name)) for name in (n, "arg" + n)])),
    "aten.var": _var,
    "aten.var_mean": _pair(_var, lambda like, x, dims=None, **others: _reduction(jnp.mean)(like, x, dims)),
    "aten.add": lambda like, x, y, alpha=1: x + y if alpha == 1 else x + alpha * y,
    "aten.sub": lambda like, x, y, alpha=1: x - y if alpha == 1 else x - alpha * y,
    "aten.div": _div,
    **_table("_to_copy alias clone lift_fresh_copy squeeze unsqueeze view", lambda _: lambda like, x, *_, **options: x),
    "aten.copy": lambda like, x, y, *_: jnp.broadcast_to(y, like.shape),
    **_table("empty empty_permuted empty_strided new_empty_strided", lambda _: lambda like, *_: jnp.zeros(like.shape)),
    **_table("full full_like", lambda _: lambda like, _, value: jnp.full(like.shape, value)),
    "aten.arange": lambda like, start, end, step=1: start + step * jnp.arange(like.shape[0]),
    "aten.view.dtype": lambda like, x, dtype: lax.bitcast_convert_type(x, _dtype(like)),
    "aten.expand": lambda like, x, *_, **options: jnp.broadcast_to(x, like.shape),
    "aten.split_with_sizes": lambda likes, x, sizes, dim=0: jnp.split(x, np.cumsum(sizes)[:-1], dim),
    **_table("select index_select", lambda _: _plain(lambda x, dim, index: _at(x, dim, index).get())),
    "aten.slice": _plain(lambda x, dim=0, a=None, b=None, step=1: _at(x, dim, slice(a, b, step)).get()),
    "aten.select_scatter": _plain(lambda x, y, dim, index: _at(x, dim, index).set(y)),
    "aten.slice_scatter": _plain(lambda x, y, dim=0, a=None, b=None, step=1: _at(x, dim, slice(a, b, step)).set(y)),
    "aten.embedding": _plain(lambda rows, indices, *_: rows[indices]),
    **_table("index _unsafe_index", lambda _: _plain(lambda x, indices: _by(x, indices).get())),
    **_table("index_put _unsafe_index_put", lambda _: _index_put),
    "aten.gather": _plain(lambda x, dim, index: _along(x, dim, index).get()),
    "aten.scatter": _plain(lambda x, dim, index, y: _along(x, dim, index).set(y)),
    "aten.scatter_add": _plain(lambda x, dim, index, y: _along(x, dim, index).add(y)),
}
