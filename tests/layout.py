# SPDX-License-Identifier: Apache-2.0
"""Where the tests find the modules under test.

``load("_vocabulary")`` is the one way in. By default it imports the flat file beside this folder. The same tests run

- on files elsewhere, such as the core alone, with ``HANDSHAKE_FOLDER=/path/to/it``;
- on a vendored copy, with ``HANDSHAKE_PACKAGE=torch_tpu._internal.distributed`` (and the folder that holds `torch_tpu`
  on ``PYTHONPATH``): ``load`` imports ``torch_tpu._internal.distributed._vocabulary`` then.

A process that a test starts uses `child_environment()`; it can then say ``from layout import load`` as well.
"""

import contextlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = Path(__file__).resolve().parent
PROJECT = TESTS.parent
PACKAGE = os.environ.get("HANDSHAKE_PACKAGE", "")
FOLDER = Path(os.environ.get("HANDSHAKE_FOLDER") or PROJECT)
# The settings of the job in which the tests may happen to run.
_NOT_FOR_CHILDREN = ("HANDSHAKE_FOLDER", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def extend_path() -> None:
    """Puts this folder on `sys.path` and, in the flat layout, the one of the modules under test."""
    for folder in [TESTS] if PACKAGE else [TESTS, FOLDER]:
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))


def load(name: str) -> ModuleType:
    """The module `name` of the project, from the layout under test."""
    extend_path()
    return importlib.import_module(f"{PACKAGE}.{name}" if PACKAGE else name)


def import_folder() -> Path:
    """The folder that has to be on `sys.path` for the modules under test to be found."""
    if not PACKAGE:
        return FOLDER
    package = importlib.import_module(PACKAGE)
    return Path(package.__path__[0]).parents[PACKAGE.count(".")]


def module_file(name: str) -> Path:
    """The file of the module `name` in the layout under test. The module itself is not imported."""
    return import_folder().joinpath(*PACKAGE.split("."), f"{name}.py")


def needs(name: str) -> Any:
    """Marks a test of what the core does with the module `name`, which may be absent."""
    import pytest  # not in every process that a test starts

    return pytest.mark.skipif(not module_file(name).exists(), reason=f"there is no {name}.py")


def child_environment(**variables: str) -> dict[str, str]:
    """An environment for a Python child process that finds this folder and the modules under test.

    It holds none of the handshake's own settings and no rank of this process, only `variables`.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TORCH_TPU_") and name not in _NOT_FOR_CHILDREN
    }
    if not PACKAGE:
        kept["HANDSHAKE_FOLDER"] = str(FOLDER)
    folders = [str(TESTS), str(import_folder()), os.environ.get("PYTHONPATH", "")]
    kept["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder)
    return kept | variables


def run(command: Sequence[str], within_s: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a process that must end by itself. Then, or when its time is up, all processes that it has left are killed.

    Returns:
        Its exit status, and its stdout and stderr as one text in `stdout`.
    """
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, **options}
    with subprocess.Popen(command, text=True, start_new_session=True, **options) as process:
        try:
            output, _ = process.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            _kill_group(process.pid)
            output, _ = process.communicate()
            raise AssertionError(f"not done within {within_s:g} s: {' '.join(command)}\n{output}") from None
        finally:
            _kill_group(process.pid)
    return subprocess.CompletedProcess(command, process.returncode, output)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
