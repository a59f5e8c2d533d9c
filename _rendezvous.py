# SPDX-License-Identifier: Apache-2.0
"""How ranks find their coordinator: its address, its port, and what proves that they belong to its job.

Where `torch.distributed` is initialised, the coordinator publishes all of it in the job's store, so that several jobs
on one machine never meet. Without a store the address is `MASTER_ADDR` and the port an agreed one.

A port is never looked for, closed and bound again later: the listening socket that found it is the one that is used.
"""

import json
import operator
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, NamedTuple

if __package__:
    from ._client import Deadline, Endpoint
    from ._vocabulary import HandshakeConfigError, HandshakePeerLostError
else:
    from _client import Deadline, Endpoint
    from _vocabulary import HandshakeConfigError, HandshakePeerLostError

PORT_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_PORT"
ADDRESS_VARIABLE = "MASTER_ADDR"
# Where there is no store and no port was set: torch_tpu 0.2.0's port for the same purpose.
DEFAULT_PORT = 36423
DEFAULT_HOST = "localhost"
# Connections that the kernel keeps while the coordinator is starting: all ranks may come at once. The kernel caps it
# at net.core.somaxconn, and a rank that finds the queue full tries again.
BACKLOG = 8192
# One answer of the store is waited for so long; then other things are looked at, and it is asked again.
STORE_WAIT_S = 1.0


def torch_distributed() -> Any:
    """`torch.distributed`, if this process has imported and initialised it, else None. Never imports it."""
    module = sys.modules.get("torch.distributed")
    if module is not None and module.is_available() and module.is_initialized():
        return module
    return None


class Place(NamedTuple):
    """What is known beforehand of where the coordinator is."""

    coordinator_rank: int
    host: str  # by which the ranks reach it, where no store says better
    port: int | None  # one that was asked for; 0: one that the kernel picks
    port_source: str  # what to change if that port is taken
    secret: str | None
    uses_store: bool  # whether the job's store is asked; not where a caller says what the address is

    def store(self) -> Any:
        """The job's store, or None."""
        distributed = torch_distributed() if self.uses_store else None
        return None if distributed is None else distributed.distributed_c10d._get_default_store()

    @property
    def store_key(self) -> str:
        """Where in the store the coordinator is described."""
        return f"torch_tpu_handshake/coordinator/{self.coordinator_rank}"


def parse_port(value: str | int, source: str) -> int:
    """A port, 0 to 65535, where 0 stands for one that the kernel picks.

    Raises:
        HandshakeConfigError: `value`, which `source` gave, is none.
    """
    try:
        port = int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        port = -1
    if not 0 <= port <= 65535 or isinstance(value, bool):
        raise HandshakeConfigError(f"{source}={value!r} is no port: it must be a whole number from 1 to 65535")
    return port


def strip_brackets(host: str) -> str:
    """An IPv6 address without its brackets; anything else as it is."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def select_handshake_port(place: Place) -> tuple[socket.socket, Endpoint]:
    """On the coordinator rank: binds the handshake's port, and tells the other ranks through the store if there is one.

    An explicit port is bound as it is. Else, with a store, the kernel picks a free one. Else it is `DEFAULT_PORT`.

    Returns:
        The listening socket, and what the other ranks need to reach it.

    Raises:
        HandshakeConfigError: the port is taken, or can't be bound.
    """
    store = place.store()
    port = place.port if place.port is not None else (0 if store is not None else DEFAULT_PORT)
    listener = _listen(place.host, port, place.port_source)
    bound = int(listener.getsockname()[1])
    if store is None:
        return listener, Endpoint((place.host,), bound, place.secret or "", _session_from_environment())
    endpoint = Endpoint(
        _own_addresses(place.host, bound),
        bound,
        secrets.token_hex(16) if place.secret is None else place.secret,
        secrets.token_hex(8),
    )
    published = endpoint._asdict() if place.secret is None else {**endpoint._asdict(), "secret": None}
    store.set(place.store_key, json.dumps(published))
    return listener, endpoint


def find_endpoint(place: Place, deadline: Deadline) -> Endpoint:
    """On every other rank: where the coordinator listens, from the store if there is one.

    Raises:
        HandshakePeerLostError: the coordinator did not publish itself by the deadline.
        HandshakeConfigError: port 0 was given where nobody says what the kernel picked.
    """
    store = place.store()
    if store is None:
        if place.port == 0:
            raise HandshakeConfigError(
                f"port 0 (from {place.port_source}) is for the coordinator, rank {place.coordinator_rank}; "
                f"the other ranks need the port that it was given (Handshake.address on that rank)"
            )
        port = DEFAULT_PORT if place.port is None else place.port
        return Endpoint((place.host,), port, place.secret or "", _session_from_environment())
    while True:
        seconds = max(0.01, min(STORE_WAIT_S, deadline.remaining()))
        try:
            store.wait([place.store_key], timedelta(seconds=seconds))
            break
        except RuntimeError as error:  # torch's DistStoreError, when the wait is over
            if not deadline.remaining():
                raise HandshakePeerLostError(
                    f"the coordinator, rank {place.coordinator_rank}, has not published its address within "
                    f"{deadline.seconds:.1f} s: make a Handshake() on that rank too, which starts the coordinator "
                    f"({error})",
                    ranks=[place.coordinator_rank],
                    seconds=deadline.seconds,
                ) from error
    published = json.loads(store.get(place.store_key))
    secret = place.secret if published["secret"] is None else published["secret"]
    return Endpoint(tuple(published["hosts"]), int(published["port"]), secret or "", published["session"])


def _session_from_environment(environment: Mapping[str, str] = os.environ) -> str:
    """Tells jobs apart that share a machine and have no store: the launcher's names for this one."""
    return "/".join(environment.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT"))


def _listen(host: str, port: int, source: str) -> socket.socket:
    loopback = _is_loopback(host)
    try:
        if loopback:
            address = loopback_address(host)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, port), family=family, backlog=BACKLOG)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True
            )
        return socket.create_server(("", port), backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else error
        raise HandshakeConfigError(
            f"handshake port {port} can't be used on this host ({reason}): set {source} to a free port, "
            f"the same on all ranks. With torch.distributed initialised it can stay unset: a free one is found then"
        ) from error


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1", "ip6-localhost") or host.startswith("127.")


def loopback_address(host: str) -> str:
    """This host's own address, of the family of `host`."""
    return "::1" if ":" in host or host == "ip6-localhost" else "127.0.0.1"


def _own_addresses(master: str, port: int) -> tuple[str, ...]:
    """The addresses by which the job reaches this process: the one from which this host reaches the master, then
    this host's name."""
    if _is_loopback(master):
        return (loopback_address(master),)
    addresses = []
    try:
        for family, *_, address in socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM):
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)  # sends nothing: the kernel only chooses the route
                own = str(probe.getsockname()[0])
            if own not in addresses:
                addresses.append(own)
    except OSError:
        pass  # the host name remains
    return (*addresses, socket.gethostname())
