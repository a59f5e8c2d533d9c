# SPDX-License-Identifier: Apache-2.0
"""A job of two ranks on two hosts, each with its own network, host name and /etc/hosts, in which its own name leads to
a loopback address, as Debian has it.

Run it as root of a user namespace with a network, a mount and a UTS namespace (``unshare``); that is the first host,
and it makes the second. Argument: an empty folder. Prints a line of JSON for each of `SCENES`: what both ranks got.
"""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

from layout import load
from ranks import request

handshake = load("handshake")
_vocabulary = load("_vocabulary")

NAMES = ("node0", "node1")
ADDRESSES = ("10.1.0.1", "10.1.0.2")
PATIENCE_S = 20.0

# What each host is told: its variables, and the server of the job's store as it names that ("": the store has none;
# None: there is no store). The last is the coordinator's rank.
SCENES = {
    "the store's server has a name that is a loopback address on its own host": (({}, "node0"), ({}, "node0"), 0),
    "the coordinator is on the other host": (({}, "node0"), ({}, "node0"), 1),
    "the first host calls itself localhost, and the launcher says that there are two": (
        ({"LOCAL_WORLD_SIZE": "1"}, "localhost"),
        ({}, "10.1.0.1"),
        0,
    ),
    "a store without a server, and no master": (({}, ""), ({}, ""), 0),
    "a store without a server, and a master": (({"MASTER_ADDR": "node0"}, ""), ({"MASTER_ADDR": "node0"}, ""), 0),
    "the first host calls itself localhost, and no launcher says anything": (
        ({"MASTER_ADDR": "localhost"}, "localhost"),
        ({"MASTER_ADDR": "10.1.0.1"}, "10.1.0.1"),
        0,
    ),
    "no store, and the first host calls itself localhost": (
        ({"MASTER_ADDR": "localhost"}, None),
        ({"MASTER_ADDR": "node0"}, None),
        0,
    ),
    "a store that says something else than the address of the second host": (
        ({"MASTER_ADDR": "node0"}, "10.99.0.1"),
        ({"MASTER_ADDR": "node0"}, "10.99.0.1"),
        0,
    ),
    "no store, and a name": (({"MASTER_ADDR": "node0"}, None), ({"MASTER_ADDR": "node0"}, None), 0),
}


class FolderStore:
    """A store in a folder that both hosts see."""

    def __init__(self, folder: Path, host: str) -> None:
        self._folder = folder
        self.host = host

    def _path(self, key):
        return self._folder / key.replace("/", ".")

    def set(self, key, value):
        part = self._path(key + ".part")
        part.write_text(value)
        part.rename(self._path(key))

    def get(self, key):
        return self._path(key).read_bytes()

    def check(self, keys):
        return all(self._path(key).exists() for key in keys)


def torch_distributed(store, rank):
    """As much of torch.distributed as the handshake looks at."""
    return types.SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda: rank,
        get_world_size=lambda: 2,
        distributed_c10d=types.SimpleNamespace(_get_default_store=lambda: store),
    )


def set_up(rank, link, folder):
    """Makes this process's host."""
    hosts = folder / f"hosts{rank}"
    lines = [f"127.0.1.1 {NAMES[rank]}"]
    if rank == 1:  # the first host does not know the second's name
        lines.append(f"{ADDRESSES[0]} {NAMES[0]}")
    hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    for command in (
        f"mount --bind {hosts} /etc/hosts",
        f"hostname {NAMES[rank]}",
        "ip link set lo up",
        f"ip address add {ADDRESSES[rank]}/24 dev {link}",
        f"ip link set {link} up",
    ):
        subprocess.run(command.split(), check=True)


def play(rank, scene, folder):
    """One rank's part: yields what it got, and then leaves."""
    *hosts, coordinator_rank = SCENES[scene]
    variables, store_host = hosts[rank]
    for name in ("MASTER_ADDR", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    os.environ.update(variables, RANK=str(rank), WORLD_SIZE="2")
    sys.modules.pop("torch.distributed", None)
    if store_host is not None:
        folder = folder / str(list(SCENES).index(scene))
        folder.mkdir(exist_ok=True)
        sys.modules["torch.distributed"] = torch_distributed(FolderStore(folder, store_host), rank)
    with handshake.Handshake(coordinator_rank=coordinator_rank, timeout_s=PATIENCE_S, coordinator="thread") as h:
        try:
            yield h.submit(request(rank, ((0, 1), 0, 1)))
        except _vocabulary.HandshakeError as error:
            yield str(error)


def first(folder):
    command = ["unshare", "--net", "--mount", "--uts", sys.executable, __file__, str(folder), "second"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:

        def tell(line):
            other.stdin.write(line + "\n")
            other.stdin.flush()

        other.stdout.readline()  # it has its own network now
        ip = f"ip link add link0 type veth peer name link1 netns {other.pid}"
        subprocess.run(ip.split(), check=True)
        set_up(0, "link0", folder)
        tell("set up")
        other.stdout.readline()
        for scene in SCENES:
            tell(scene)
            for got in play(0, scene, folder):
                print(json.dumps([scene, [got, json.loads(other.stdout.readline())]]), flush=True)
            tell("")  # both have their verdicts, so either may leave
            other.stdout.readline()
        other.stdin.close()


def second(folder):
    print("has a network", flush=True)
    sys.stdin.readline()
    set_up(1, "link1", folder)
    print("is set up", flush=True)
    for line in sys.stdin:
        for got in play(1, line.rstrip("\n"), folder):
            print(json.dumps(got), flush=True)
            sys.stdin.readline()
        print("has left", flush=True)


if __name__ == "__main__":
    (second if sys.argv[2:] else first)(Path(sys.argv[1]))
