# SPDX-License-Identifier: Apache-2.0
"""torch_tpu as released, on a machine without a TPU: what it needs is installed into a folder.

What it finds in the place of a TPU is XLA's plug-in for CPUs, through `one_device.c`. torch and numpy are those of the
running interpreter. `FOLDER_VARIABLE` names a folder that is kept, so that only the first run downloads anything.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

FOLDER_VARIABLE = "HANDSHAKE_TORCH_TPU_FOLDER"
PINNED = ("torch-tpu==0.2.0", "lammps-jax-pjrt-cpu==0.11.2")
# What torch_tpu imports beside torch and numpy. (It names more; pyzmq was needed by its own handshake alone.)
IMPORTED = ("absl-py", "frozendict", "immutabledict", "portpicker", "psutil")
PLUGIN = Path("lammps_jax_pjrt_cpu", "pjrt_c_api_cpu_plugin.so")
INSTALL_WITHIN_S = 600
SHIM = Path(__file__).with_name("one_device.c")


class UnavailableError(Exception):
    """It can't be had here; the text says why."""


class Environment:
    """An installation in `folder`; made where there is none yet."""

    def __init__(self, folder: Path) -> None:
        """Raises UnavailableError."""
        for module in ("torch", "numpy"):
            if importlib.util.find_spec(module) is None:
                raise UnavailableError(f"{module} is not installed")
        compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
        if compiler is None:
            raise UnavailableError("there is no C compiler")
        tag = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        self.site = folder / "-".join([tag, *PINNED]).replace("==", "-")
        if not self.site.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            self._install(folder)
        self.shim = self.site / f"one_device-{os.getpid()}.so"
        _run([compiler, "-O1", "-shared", "-fPIC", "-o", str(self.shim), str(SHIM), "-ldl"])

    def _install(self, folder: Path) -> None:
        """All of it or nothing: another run may be at it in the same folder."""
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
            _run([*pip, "--only-binary=:all:", "--target", f"{scratch}/site", *PINNED, *IMPORTED])
            try:
                Path(scratch, "site").rename(self.site)
            except OSError:
                if not self.site.is_dir():
                    raise

    def close(self) -> None:
        """Removes what is of this run alone."""
        self.shim.unlink(missing_ok=True)

    def variables(self, package: Path, rank: int, world_size: int) -> dict[str, str]:
        """The environment of a rank whose `torch_tpu` is in the folder `package`. It has a compile cache of its own."""
        ranks = range(world_size)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("TORCH_", "TPU_"))}
        return kept | {
            "PYTHONPATH": os.pathsep.join([str(package), str(self.site)]),
            "PYTHONWARNINGS": "ignore",
            "OMP_NUM_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(package / f"compiled-{rank}"),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            # torch_tpu wants them set. They are not used: the ranks meet in a file, and the plug-in has no network.
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "1",
            "TORCH_TPU_SLICEBUILDER_ADDRESSES": ",".join(f"localhost:{rank + 1}" for rank in ranks),
            "TORCH_TPU_TOPOLOGY": f"{world_size // 2},2,1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "TPU_LIBRARY_PATH": str(self.shim),
            "INNER_PLUGIN": str(self.site / PLUGIN),
        }


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_WITHIN_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UnavailableError(str(error)) from error
    if done.returncode:
        lines = done.stdout.strip().splitlines() or [f"status {done.returncode}"]
        reason = next((line for line in reversed(lines) if "error" in line.lower()), lines[-1])
        raise UnavailableError(f"{' '.join(command[:4])} … failed: {reason}")
