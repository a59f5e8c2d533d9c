# SPDX-License-Identifier: Apache-2.0
"""How a module of this folder is run in a process of its own.

The interpreter is isolated, and the folder is not on its `sys.path`, where a stranger's `multiprocessing.py` beside
these files would take the standard library's place. A package made on the spot has the files as its submodules.
"""

import os
import sys

_BOOTSTRAP = (
    "import sys, types, importlib;"
    "package = types.ModuleType('torch_tpu_handshake');"
    "package.__path__ = [sys.argv[1]];"
    "sys.modules[package.__name__] = package;"
    "sys.exit(importlib.import_module(package.__name__ + '.' + sys.argv[2]).main(sys.argv[3:]))"
)


def command(module: str, *arguments: str) -> list[str]:
    """The command line that calls `main([argument, ...])` of one of these modules."""
    folder = os.path.dirname(os.path.abspath(__file__))
    return [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, folder, module, *arguments]
