# SPDX-License-Identifier: Apache-2.0
"""How ranks find their coordinator: its address, its port, and what proves that they belong to its job.

Where `torch.distributed` is initialised, the coordinator publishes all of it in the job's store, so that several jobs
on one machine never meet. Without a store the address is `MASTER_ADDR` and the port an agreed one.

**Which address.** A name or an address means what it means on the host that looks it up: localhost is everywhere
another machine, and on many a host its own name is 127.0.1.1. So the coordinator can't tell how others name its host.
Without a store it need not: all ranks use the address that they were given, and it only has to listen wherever that
may lead. With a store every rank has found one place already, the *master*: the store's server, or `MASTER_ADDR` where
the store is none that has one. If the coordinator is on the master's host, each rank reaches it by the master's
address, as that rank knows it. It publishes this, then the addresses from which its host would send to others,
then its host's name; the ranks try them in this order.

**Whom it listens to.** This host alone, if the launcher says that all ranks are on it (`LOCAL_WORLD_SIZE` is the
world's size), or if it says nothing and the master is localhost or a loopback address: no other host could have found
that. Without a store the latter holds whatever the launcher says: what was asked for as loopback stays there.
Otherwise all interfaces; also where a name leads to a loopback address here, since elsewhere it may lead here.

A port is never looked for, closed and bound again later: the listening socket that found it is the one that is used.
"""

import errno
import hashlib
import json
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

if __package__:
    from ._vocabulary import (
        HandshakeConfigError,
        HandshakeError,
        HandshakePeerLostError,
        HandshakeProtocolError,
        HandshakeTypeError,
        shorten,
        whole_number,
    )
else:
    from _vocabulary import (
        HandshakeConfigError,
        HandshakeError,
        HandshakePeerLostError,
        HandshakeProtocolError,
        HandshakeTypeError,
        shorten,
        whole_number,
    )

logger = logging.getLogger("torch_tpu.handshake")

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
# A name in the domain name system is no longer (RFC 1035); addresses are shorter.
MAX_HOST_CHARACTERS = 253
# It is sent in every hello, which is small (see _protocol.MAX_FRAME_BYTES_AT_FIRST), and shown in messages.
MAX_SESSION_BYTES = 200
# The names that hosts give to their own loopback addresses, up to the first dot.
_LOOPBACK_NAMES = frozenset(("localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"))
# Addresses of nobody's (RFC 5737, RFC 3849), which the default routes lead to. Nothing is sent there.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")


def torch_distributed() -> Any:
    """`torch.distributed`, if this process has imported and initialised it, else None. Never imports it."""
    module = sys.modules.get("torch.distributed")
    if module is not None and module.is_available() and module.is_initialized():
        return module
    return None


class Deadline:
    """A moment by which something must have happened."""

    __slots__ = ("_at", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def passed(self) -> float:
        """Seconds since it was set."""
        return time.monotonic() - self._at + self.seconds

    def cut(self) -> None:
        """It is now."""
        self._at = 0.0

    def remaining(self) -> float:
        """Seconds until then, never negative."""
        return max(0.0, self._at - time.monotonic())


class Endpoint(NamedTuple):
    """Where the coordinator listens, and what a rank must show to be let in."""

    hosts: tuple[str, ...]
    port: int
    secret: str
    session: str


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

    def master(self, store: Any) -> str | None:
        """The host that every rank of a job with a store knows its way to, as this rank names it. None: there is none,
        as where the store is a file."""
        while hasattr(store, "underlying_store"):  # it only puts a prefix to keys
            store = store.underlying_store
        host = getattr(store, "host", None) or os.environ.get(ADDRESS_VARIABLE)
        return strip_brackets(host) if isinstance(host, str) and host else None

    @property
    def store_key(self) -> str:
        """Where in the store the coordinator is described."""
        return f"torch_tpu_handshake/coordinator/{self.coordinator_rank}"


def parse_port(value: Any, source: str) -> int:
    """A port, 0 to 65535, where 0 stands for one that the kernel picks.

    Raises:
        HandshakeConfigError: `value`, which `source` gave, is none.
    """
    try:
        port = whole_number(value, source, text=True)
    except HandshakeConfigError:
        port = -1
    if not 0 <= port <= 65535:
        raise HandshakeConfigError(
            f"{source}={shorten(repr(value))} is no port: it must be a whole number from 1 to 65535"
        )
    return port


def parse_host(value: Any, source: str) -> str:
    """A host's name or address; an IPv6 address without its brackets.

    Raises:
        HandshakeTypeError: `value`, which `source` gave, is no text.
        HandshakeConfigError: it can't be a host.
    """
    if not isinstance(value, str):
        raise HandshakeTypeError(f"{source}={shorten(repr(value))} is no host: it must be text")
    host = strip_brackets(value)
    try:
        if not host or len(host) > MAX_HOST_CHARACTERS or " " in host or not host.isprintable():
            raise ValueError
        if ":" in host:
            socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
        host.encode("idna")  # as a look-up does it
    except (OSError, ValueError):
        raise HandshakeConfigError(
            f"{source}={shorten(repr(value))} is no host: it must be a name, an IPv4 address or an IPv6 address, "
            f"without a port"
        ) from None
    return host


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
        HandshakePeerLostError: the store failed.
    """
    store = place.store()
    master = place.host if store is None else place.master(store)
    port = place.port if place.port is not None else (0 if store is not None else DEFAULT_PORT)
    only_here = _is_for_this_host(master, store is not None)
    listener = _listen(loopback_address(place.host) if only_here else "", port, place.port_source)
    address, bound = listener.getsockname()[:2]
    if store is None:
        if not _resolve(place.host):
            logger.warning(
                "handshake: %s, by which the ranks are to reach this one, leads nowhere on this host: check %s",
                place.host,
                ADDRESS_VARIABLE,
            )
        return listener, Endpoint((place.host,), bound, place.secret or "", _session_from_environment())
    hosts = [address] if only_here else _ways_here(master)
    endpoint = Endpoint(
        tuple(host for host in hosts if host is not None),
        bound,
        secrets.token_hex(16) if place.secret is None else place.secret,
        secrets.token_hex(8),
    )
    try:
        _publish(place, store, endpoint, hosts)
    except HandshakeError:
        listener.close()
        raise
    return listener, endpoint


def publish_late(place: Place, endpoint: Endpoint) -> bool:
    """Publishes a coordinator that was started before the job had a store. Returns whether it has one now.

    Raises:
        HandshakePeerLostError: the store failed.
    """
    store = place.store()
    if store is not None:
        _publish(place, store, endpoint, endpoint.hosts)
    return store is not None


def _publish(place: Place, store: Any, endpoint: Endpoint, hosts: Sequence[str | None]) -> None:
    published = {**endpoint._asdict(), "hosts": hosts, "secret": endpoint.secret if place.secret is None else None}
    try:
        store.set(place.store_key, json.dumps(published))
    except Exception as error:  # a store may be any class of the user's
        raise _store_failed(place, error, None) from error


def find_endpoint(place: Place, deadline: Deadline) -> Endpoint:
    """On every other rank: where the coordinator listens, from the store if there is one.

    Raises:
        HandshakePeerLostError: the coordinator did not publish itself by the deadline, or the store failed until then.
        HandshakeProtocolError: what is published is not what this release publishes.
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
    text = _published(place, store, deadline)
    try:
        published = json.loads(text)
        # None stands for the master, as this rank names it.
        hosts = [place.master(store) if host is None else host for host in published["hosts"]]
        secret = place.secret if published["secret"] is None else published["secret"]
        return Endpoint(
            tuple(dict.fromkeys(host for host in hosts if host is not None)),
            int(published["port"]),
            secret or "",
            published["session"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise HandshakeProtocolError(
            f"what the job's store holds under {place.store_key} describes no coordinator "
            f"({shorten(repr(text))}): install the same release on all hosts"
        ) from error


def _published(place: Place, store: Any, deadline: Deadline) -> Any:
    """What the coordinator has put into the store, waited for until the deadline."""
    while True:
        seconds = max(0.01, min(STORE_WAIT_S, deadline.remaining()))
        started = time.monotonic()
        try:
            store.wait([place.store_key], timedelta(seconds=seconds))
            return store.get(place.store_key)
        except Exception as error:  # a store may be any class of the user's, and torch's raise RuntimeError for all
            left = started + seconds - time.monotonic()
            # One that has waited for as long as it was told to has not failed.
            failed = left > seconds / 2
            time.sleep(max(0.0, left))
            if deadline.remaining():
                continue
            if failed:
                raise _store_failed(place, error, deadline.seconds) from error
            raise HandshakePeerLostError(
                f"the coordinator, rank {place.coordinator_rank}, has not published its address within "
                f"{deadline.seconds:.1f} s: make a Handshake() on that rank too, which starts the coordinator "
                f"({_first_line(error)})",
                ranks=[place.coordinator_rank],
                seconds=deadline.seconds,
            ) from error


def _store_failed(place: Place, error: Exception, seconds: float | None) -> HandshakePeerLostError:
    return HandshakePeerLostError(
        f"the job's store failed, through which rank {place.coordinator_rank} tells where the handshake's coordinator "
        f"is: {_first_line(error)}. Its server, in most jobs in the process of rank 0 or in the launcher, is gone or "
        f"not reachable any more: look at that process",
        seconds=seconds,
    )


def _first_line(error: Exception) -> str:
    return shorten((str(error).splitlines() or [type(error).__name__])[0], 300)


def _session_from_environment(environment: Mapping[str, str] = os.environ) -> str:
    """Tells jobs apart that share a machine and have no store: the launcher's names for this one, or if these are too
    long or can't be printed, what can be read of them and a digest."""
    names = "/".join(environment.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT"))
    data = names.encode("utf-8", "surrogatepass")
    if len(data) <= MAX_SESSION_BYTES and names.isprintable():
        return names
    readable = "".join(letter for letter in names if letter.isascii() and letter.isprintable())
    digest = f"#{hashlib.blake2b(data, digest_size=16).hexdigest()}"
    return readable[: MAX_SESSION_BYTES - len(digest)] + digest


def _listen(address: str, port: int, source: str) -> socket.socket:
    """Listens at an address of this host; "": at all of them."""
    try:
        if not address and socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        if error.errno == errno.EADDRNOTAVAIL:
            raise HandshakeConfigError(
                f"the handshake's coordinator can't listen at {address} ({reason}): set {ADDRESS_VARIABLE} to an "
                f"address that this host has"
            ) from error
        raise HandshakeConfigError(
            f"handshake port {port} can't be used on this host ({reason}): set {source} to a free port, "
            f"the same on all ranks. With torch.distributed initialised it can stay unset: a free one is found then"
        ) from error


def _is_for_this_host(master: str | None, has_store: bool) -> bool:
    """Whether only ranks on this host are to reach the coordinator; see the module's docstring."""
    on_one_host = _is_job_on_one_host()
    if has_store and on_one_host is not None:
        return on_one_host
    if master is None or not all(map(_is_loopback, _resolve(master))):
        return False
    name = master.lower().rstrip(".")
    means_loopback = name.partition(".")[0] in _LOOPBACK_NAMES or name.endswith(".localhost") or _is_literal(master)
    return means_loopback or on_one_host is True


def _is_job_on_one_host() -> bool | None:
    """What the launcher says; None: nothing."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    distributed = torch_distributed()
    world = os.environ.get("WORLD_SIZE") if distributed is None else str(distributed.get_world_size())
    return local == world if local and world else None


def loopback_address(host: str) -> str:
    """This host's own address: one that `host` leads to, if it leads to one here."""
    return next(filter(_is_loopback, _resolve(host)), "127.0.0.1")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _is_literal(host: str) -> bool:
    return bool(_resolve(host, socket.AI_NUMERICHOST))


def _resolve(host: str, flags: int = 0) -> list[str]:
    """The addresses that `host` leads to, IPv4 first; none if there are none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, ValueError):
        return []
    addresses = dict.fromkeys(str(address[0]).removeprefix("::ffff:") for *_, address in found)
    return sorted(addresses, key=lambda address: ":" in address)


def _ways_here(master: str | None) -> list[str | None]:
    """What leads the job's ranks to this host, best first. None: the master's address, as each rank knows it."""
    targets = _resolve(master) if master else []
    sources = {target: _source_towards(target) for target in (*targets, *_ANYWHERE)}
    # From here to here the kernel sends from the very address that it sends to, or from a loopback address.
    is_master = any(sources[target] == target or _is_loopback(sources[target]) for target in targets)
    own = [source for source in dict.fromkeys(sources.values()) if source and not _is_loopback(source)]
    name = socket.gethostname()
    return [
        *([None] if is_master else []),
        *own,
        *([name] if _resolve(name) else []),
        *([] if own else ["127.0.0.1"]),  # without a network there are no other hosts
    ]


def _source_towards(target: str) -> str:
    """The address from which this host would send to `target`; "" if it has no way there, or none that others could
    come back on."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 1))  # sends nothing: the kernel only chooses the route
            source = str(probe.getsockname()[0])
    except OSError:
        return ""
    return "" if source.startswith("fe80:") else source  # a link's own, which means nothing elsewhere

from _vocabulary import HandshakeStage, group_naming
TIMEOUT_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_TIMEOUT_S"
ON_TIMEOUT_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_ON_TIMEOUT"
DEBUG_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_DEBUG"
class Settings(NamedTuple):
    rank: int
    world_size: int
    coordinator_rank: int
    host: str
    port: Any
    port_source: str
    secret: Any
    uses_store: bool
    timeout_s: float
    split_on_timeout: bool
    stage: Any
    groups: str
    debug: str
    coordinator: str
    @classmethod
    def resolve(cls, given):
        d = torch_distributed()
        g = given.get
        e = os.environ.get
        rank = g("current_rank"); world = g("world_size")
        if rank is None: rank = d.get_rank() if d else int(e("RANK"))
        if world is None: world = d.get_world_size() if d else int(e("WORLD_SIZE"))
        port = g("port") if g("port") is not None else (int(e(PORT_VARIABLE)) if e(PORT_VARIABLE) else None)
        return cls(rank, world, g("coordinator_rank") or 0, g("host") or e("MASTER_ADDR") or "localhost", port, "port", g("secret") or e("TORCH_TPU_INTERNAL_HANDSHAKE_SECRET"),
            g("host") is None and g("port") is None, float(g("timeout_s") or e(TIMEOUT_VARIABLE) or 60), (g("on_timeout") or e(ON_TIMEOUT_VARIABLE)) == "split",
            HandshakeStage.parse(g("stage"), "stage") if g("stage") else HandshakeStage.from_env(), group_naming(g("groups")), str(g("debug") or e(DEBUG_VARIABLE) or ""), g("coordinator") or "process")
    def must_agree_with(self, given): pass
    @property
    def place(self): return Place(self.coordinator_rank, self.host, self.port, self.port_source, self.secret, self.uses_store)
    def store(self): return self.place.store()
_sel, _late, _find = select_handshake_port, publish_late, find_endpoint
def select_handshake_port(s): return _sel(s.place)
def publish_late(s, e): return _late(s.place, e)
def find_endpoint(s, d): return _find(s.place, d)
