# SPDX-License-Identifier: Apache-2.0
"""Where the tests find the modules under test.

``load("_vocabulary")`` is the one way in. By default it imports the flat file beside this folder; with
``HANDSHAKE_PACKAGE=torch_tpu._internal.distributed`` it imports
``torch_tpu._internal.distributed._vocabulary``, so that the same suite runs on a vendored copy.

A child process that a test starts uses `child_environment()`; it can then say ``from layout import load`` as well.
"""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

TESTS = Path(__file__).resolve().parent
PROJECT = TESTS.parent
PACKAGE = os.environ.get("HANDSHAKE_PACKAGE", "")


def extend_path() -> None:
    """Puts this folder on `sys.path` and, in the flat layout, the project's root."""
    for folder in [TESTS] if PACKAGE else [TESTS, PROJECT]:
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))


def load(name: str) -> ModuleType:
    """The module `name` of the project, from the layout under test."""
    extend_path()
    return importlib.import_module(f"{PACKAGE}.{name}" if PACKAGE else name)


def import_folder() -> Path:
    """The folder that has to be on `sys.path` for the modules under test to be found."""
    if not PACKAGE:
        return PROJECT
    package = importlib.import_module(PACKAGE)
    return Path(package.__path__[0]).parents[PACKAGE.count(".")]


def module_file(name: str) -> Path:
    """The file of the module `name` in the layout under test. The module itself is not imported."""
    return import_folder().joinpath(*PACKAGE.split("."), f"{name}.py")


def child_environment(**variables: str) -> dict[str, str]:
    """An environment for a Python child process that finds this folder and the modules under test.

    It holds none of the handshake's own settings and no rank of this process, only `variables`.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TORCH_TPU_INTERNAL_")
        and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    }
    folders = [str(TESTS), str(import_folder()), os.environ.get("PYTHONPATH", "")]
    kept["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder)
    return kept | variables
