# SPDX-License-Identifier: Apache-2.0
"""Prints what XLA makes of a program with two all-reduces, on four devices of a CPU: `python hlo_program.py 2.0`."""

import os
import sys

os.environ |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SCALE = float(sys.argv[1])
PAIRS = [[0, 1], [2, 3]]


def model(x):
    reduced = jax.lax.psum(x, "ranks", axis_index_groups=PAIRS)
    return jnp.tanh(reduced) + jnp.sin(jax.lax.psum(x * SCALE, "ranks", axis_index_groups=PAIRS))


mesh = Mesh(np.array(jax.devices()), ("ranks",))
spec = PartitionSpec("ranks")
on_each = jax.jit(jax.shard_map(model, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
inputs = jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=NamedSharding(mesh, spec))
print(on_each.lower(inputs).compile().as_text())
