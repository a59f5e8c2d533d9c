# SPDX-License-Identifier: Apache-2.0
"""Runs torch_tpu's executables on a CPU. `install()` it before anything is compiled.

Everything up to an executable is torch_tpu's own and the plug-in's. But XLA's client for CPUs runs no program that is
for devices of several processes. So what runs is the graph of which the executable was made, on CPU tensors, with
gloo's collectives.

`ran` notes what did: "fat" for an executable with collectives and computing, "split" for one that only has collectives,
which is what a split leaves of a graph, and "local" for one without any. `threads` notes in which threads that was, and
in which ones graphs were compiled.
"""

import copy
import hashlib
import threading

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch_tpu._internal.compile import compiler, split_compiler, torch_tpu_compiled_executable
from torch_tpu._internal.distributed import collective_ops

ran = []
threads = {"compiled": [], "ran": []}
_lock = threading.Lock()


def install():
    compile_static = compiler.StaticCompiler._compile
    compile_any = split_compiler.SplitCompiler.__call__

    def compile_and_keep_graph(self, graph_module, *args, **kwargs):
        with unset_fake_temporarily():
            graph = torch.fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
        self._debug = True  # so that the program's text is kept, for `_fingerprint`
        executable = compile_static(self, graph_module, *args, **kwargs)
        executable._fast_runner = _Runner(graph)
        return executable

    def compile_and_note_thread(self, *args, **kwargs):
        _note_thread("compiled")
        return compile_any(self, *args, **kwargs)

    compiler.StaticCompiler._compile = compile_and_keep_graph
    split_compiler.SplitCompiler.__call__ = compile_and_note_thread
    torch_tpu_compiled_executable.TorchTpuCompiledExecutable.fingerprint = _fingerprint


def _note_thread(what):
    is_main = threading.current_thread() is threading.main_thread()
    threads[what].append("main" if is_main else "another")


def _fingerprint(executable):
    """Of the program that PJRT was given. The plug-in's own is of machine code, which ranks that compile at the same
    time can make differently; a rank that finds it in the node's compile cache has another's."""
    return hashlib.sha256(executable.mlir_text.encode()).hexdigest()


class _Runner:
    def __init__(self, graph):
        calls = [node for node in graph.graph.nodes if node.op == "call_function"]
        collectives = [node for node in calls if collective_ops.is_collective_op(node.target)]
        waits = [node for node in calls if node.target is torch.ops._c10d_functional.wait_tensor.default]
        self.kind = "local"
        if collectives:
            self.kind = "fat" if len(calls) > len(collectives) + len(waits) else "split"
        for node in calls:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": torch.device("cpu")}
        graph.recompile()
        self.graph = graph

    def __call__(self, args):
        if len(args) == 1 and isinstance(args[0], list | tuple):
            args = args[0]
        with _lock:
            ran.append(self.kind)
            _note_thread("ran")
        outputs = self.graph(*[value.cpu() if isinstance(value, torch.Tensor) else value for value in args])
        outputs = outputs if isinstance(outputs, list | tuple) else (outputs,)
        return [value.to("tpu") if isinstance(value, torch.Tensor) else value for value in outputs]
