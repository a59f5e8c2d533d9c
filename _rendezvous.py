# SPDX-License-Identifier: Apache-2.0
"""How ranks find their coordinator: the settings, its address and port, and what proves that they belong to its job.

Where `torch.distributed` is initialised, the coordinator publishes all of it in the job's store, so that several jobs
on one machine never meet. Without a store the address is `MASTER_ADDR` and the port an agreed one.

**Which address.** A name means what it means on the host that looks it up: localhost is everywhere another machine, and
many a host's own name is 127.0.1.1 there. So the coordinator can't tell how others name its host. Without a store all
ranks use the address that they were given. With one, every rank has found one place already, the *master*: the store's
server, or `MASTER_ADDR` where the store has none. If the coordinator is on the master's host, it publishes this, for
each rank to use the name that it knows; then the addresses from which its host would send to others, then its name.

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
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

if __package__:
    from . import _vocabulary
    from ._vocabulary import HandshakeConfigError, HandshakePeerLostError, HandshakeProtocolError, HandshakeStage
else:
    import _vocabulary
    from _vocabulary import HandshakeConfigError, HandshakePeerLostError, HandshakeProtocolError, HandshakeStage

logger = logging.getLogger("torch_tpu.handshake")

PORT_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_PORT"
TIMEOUT_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_TIMEOUT_S"
ON_TIMEOUT_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_ON_TIMEOUT"
SECRET_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_SECRET"
DEBUG_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_DEBUG"
ADDRESS_VARIABLE = "MASTER_ADDR"
DEFAULT_PORT = 36423  # torch_tpu 0.2.0's for the same purpose
DEFAULT_TIMEOUT_S = 60.0
MAX_WORLD_SIZE = 2**20  # the protocol's bound
BACKLOG = 8192  # all ranks may come while the coordinator is starting; the kernel caps it at net.core.somaxconn
STORE_WAIT_S = 1.0  # one answer of the store; then the deadline is looked at, and it is asked again
MAX_SESSION_BYTES = 200  # it is sent in every hello, which is small, and shown in messages
# The names that hosts give to their own loopback addresses, up to the first dot.
_LOOPBACK_NAMES = ("localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback")
# Addresses of nobody's (RFC 5737, RFC 3849), which the default routes lead to. Nothing is sent there.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")


def torch_distributed() -> Any:
    """`torch.distributed`, if this process has imported and initialised it, else None. Never imports it."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


class Deadline:
    """A moment by which something must have happened."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

    def passed(self) -> float:
        """Seconds since it was set."""
        return time.monotonic() - self._at + self.seconds

    def remaining(self) -> float:
        """Seconds until then, never negative."""
        return max(0.0, self._at - time.monotonic())

    def cut(self) -> None:
        """It is now."""
        self._at = 0.0


class Endpoint(NamedTuple):
    """Where the coordinator listens, and what a rank must show to be let in."""

    hosts: tuple[str, ...]
    port: int
    secret: str
    session: str


def _whole(value: Any, lowest: int, highest: int) -> int:
    number = _vocabulary.whole_number(value, "", least=lowest, text=True)
    return range(highest + 1)[number]


def _seconds(value: Any) -> float:
    seconds = -1.0 if isinstance(value, bool) else float(value)
    if not 0.0 < seconds < float("inf"):
        raise ValueError
    return seconds


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value.encode().decode()  # what UTF-8 can't encode is not text


def _host(value: Any) -> str:
    host = _text(value).removeprefix("[").removesuffix("]")
    if not re.fullmatch(r"[\w.:%-]{1,253}", host):  # RFC 1035; addresses are shorter
        raise ValueError
    if ":" in host:
        socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    return host.encode("idna") and host  # as a look-up does it


# By keyword: the field, the variable ("": none, or not read here), the default, what makes a value of what is given, or
# raises, and what errors say that it must be.
_SETTINGS: dict[str, tuple[str, str, Any, Callable[[Any], Any], str]] = {
    "current_rank": ("rank", "RANK", None, lambda value: _whole(value, 0, MAX_WORLD_SIZE), "a whole number from 0 on"),
    "coordinator_rank":
        ("coordinator_rank", "", 0, lambda value: _whole(value, 0, MAX_WORLD_SIZE), "a whole number from 0 on"),
    "world_size": ("world_size", "WORLD_SIZE", None, lambda value: _whole(value, 1, MAX_WORLD_SIZE),
        f"a whole number from 1 to {MAX_WORLD_SIZE}"),
    "host": ("host", ADDRESS_VARIABLE, "localhost", _host, "a valid host; use a name or an address, without a port"),
    "port": ("port", PORT_VARIABLE, None, lambda value: _whole(value, 0, 65535),
        "a valid port; use a whole number from 1 to 65535"),
    "timeout_s": ("timeout_s", TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S, _seconds,
        "a valid timeout; use a positive number of seconds"),
    "on_timeout": ("split_on_timeout", ON_TIMEOUT_VARIABLE, False, {"raise": False, "split": True}.__getitem__,
        "valid; use raise or split"),
    "secret": ("secret", SECRET_VARIABLE, None, _text, "text that UTF-8 can encode"),
    "stage": ("stage", "", None, lambda value: HandshakeStage.parse(value, ""),
        f"a valid stage; use one of {', '.join(HandshakeStage.__members__)}"),
    "groups": ("groups", "", None, _vocabulary.group_naming, 'a way to name groups; use "role" or "exact"'),
    "debug": ("debug", DEBUG_VARIABLE, "", lambda value: value and os.path.abspath(os.fsdecode(value)),
        "a valid folder"),
    "coordinator": ("coordinator", "", "process", {"process": "process", "thread": "thread"}.__getitem__,
        'valid; use "process" or "thread"'),
}  # fmt: skip


def _parse(keyword: str, value: Any, source: str) -> Any:
    """The setting of that keyword. Raises HandshakeConfigError naming `source`, the keyword or variable that gave it."""
    *_, convert, valid = _SETTINGS[keyword]
    try:
        return convert(value)
    except (LookupError, OSError, OverflowError, TypeError, ValueError) as error:
        kind = _vocabulary.HandshakeTypeError if isinstance(error, TypeError) else HandshakeConfigError
        shown = source if keyword == "secret" else f"{source}={_vocabulary.shorten(repr(value))}"
        raise kind(f"{shown} is not {valid}") from None


class Settings(NamedTuple):
    """What one process's handshake is like."""

    rank: int
    world_size: int
    coordinator_rank: int
    host: str  # by which the ranks reach the coordinator, where no store says better
    port: int | None  # one that was asked for; 0: one that the kernel picks
    port_source: str  # what to change if that port is taken
    secret: str | None
    uses_store: bool  # whether the job's store is asked; not where a caller says what the address is
    timeout_s: float
    split_on_timeout: bool
    stage: HandshakeStage
    groups: str
    debug: str  # a folder's absolute path; "": off
    coordinator: str

    @classmethod
    def resolve(cls, given: Mapping[str, Any]) -> "Settings":
        """Each setting: as given by keyword (None: it is not), else by its variable, else the default. Rank and world
        size are torch.distributed's before the variables'. Raises HandshakeConfigError."""
        given = {keyword: value for keyword, value in given.items() if value is not None}
        uses_store = "host" not in given and "port" not in given
        values = {"port_source": "port" if "port" in given else PORT_VARIABLE, "uses_store": uses_store}
        distributed = torch_distributed()
        if distributed is not None:
            given = {"current_rank": distributed.get_rank(), "world_size": distributed.get_world_size()} | given
        for keyword, (field, variable, default, *_) in _SETTINGS.items():
            source = keyword if keyword in given else variable
            value = given.get(keyword, os.environ.get(variable) or None)
            values[field] = default if value is None else _parse(keyword, value, source)
            if values[field] is None and field in ("rank", "world_size"):
                how = f"initialise torch.distributed, set {variable}, or pass Handshake({keyword}=…)"
                raise HandshakeConfigError(f"{keyword} is not known: {how}")
        values["stage"] = values["stage"] or HandshakeStage.from_env()
        values["groups"] = values["groups"] or _vocabulary.group_naming()
        settings = cls(**values)
        for keyword, rank in (("current_rank", settings.rank), ("coordinator_rank", settings.coordinator_rank)):
            if rank >= settings.world_size:
                raise HandshakeConfigError(f"{keyword} {rank} is outside a world of {settings.world_size} ranks")
        return settings

    def must_agree_with(self, given: Mapping[str, Any]) -> None:
        """Raises HandshakeConfigError where something is given that is not as in these, the open handshake's."""
        for keyword, value in given.items():
            if value is not None and _parse(keyword, value, keyword) != getattr(self, _SETTINGS[keyword][0]):
                raise HandshakeConfigError(
                    f"rank {self.rank} has a handshake open already, with another {keyword}. One process has one: give "
                    f"{keyword} when it is made first, or close() that one first"
                )

    def store(self) -> Any:
        """The job's store, or None."""
        distributed = torch_distributed() if self.uses_store else None
        return None if distributed is None else distributed.distributed_c10d._get_default_store()


def select_handshake_port(settings: Settings) -> tuple[socket.socket, Endpoint]:
    """On the coordinator rank: listens, and tells the other ranks where through the store, if there is one. An explicit
    port is bound as it is; else, with a store, the kernel picks a free one; else it is `DEFAULT_PORT`.

    Returns:
        The listening socket, and what the other ranks need to reach it.

    Raises:
        HandshakeConfigError: the port is taken, or can't be bound.
        HandshakePeerLostError: the store failed.
    """
    store = settings.store()
    master = settings.host if store is None else _master(store)
    only_here = _is_for_this_host(settings, master, store is not None)
    port = settings.port if settings.port is not None else DEFAULT_PORT if store is None else 0
    listener = _listen(loopback_address(settings.host) if only_here else "", port, settings.port_source)
    address, port = listener.getsockname()[:2]
    if store is None:
        if not _resolve(settings.host):
            text = "handshake: %s, by which the ranks are to reach this one, leads nowhere on this host: check %s"
            logger.warning(text, settings.host, ADDRESS_VARIABLE)
        return listener, _agreed_endpoint(settings, port)
    hosts = [address] if only_here else _ways_here(master)
    secret = secrets.token_hex(16) if settings.secret is None else settings.secret
    endpoint = Endpoint(tuple(host for host in hosts if host), port, secret, secrets.token_hex(8))
    try:
        _publish(settings, store, endpoint, hosts)
    except HandshakePeerLostError:
        listener.close()
        raise
    return listener, endpoint


def publish_late(settings: Settings, endpoint: Endpoint) -> bool:
    """Publishes a coordinator that was started before the job had a store. Returns whether it has one now. Raises
    HandshakePeerLostError: the store failed."""
    store = settings.store()
    if store is not None:
        _publish(settings, store, endpoint, endpoint.hosts)
    return store is not None


def find_endpoint(settings: Settings, deadline: Deadline) -> Endpoint:
    """On every other rank: where the coordinator listens, from the store if there is one.

    Raises:
        HandshakePeerLostError: the coordinator did not publish itself by the deadline, or the store failed until then.
        HandshakeProtocolError: what is published is not what this release publishes.
        HandshakeConfigError: port 0 was given where nobody says what the kernel picked.
    """
    store = settings.store()
    if store is None and settings.port == 0:
        raise HandshakeConfigError(
            f"port 0 (from {settings.port_source}) is for the coordinator, rank {settings.coordinator_rank}; "
            f"the other ranks need the port that it was given (Handshake.address on that rank)"
        )
    if store is None:
        return _agreed_endpoint(settings, DEFAULT_PORT if settings.port is None else settings.port)
    text = _published(settings, store, deadline)
    try:
        published = json.loads(text)
        hosts = dict.fromkeys(host or _master(store) for host in published["hosts"])
        secret = settings.secret if published["secret"] is None else published["secret"]
        port = int(published["port"])
        return Endpoint(tuple(host for host in hosts if host), port, secret or "", published["session"])
    except (ValueError, KeyError, TypeError) as error:
        raise HandshakeProtocolError(
            f"what the job's store holds under {_store_key(settings)} does not describe a coordinator "
            f"({_vocabulary.shorten(repr(text))}): install the same release on all hosts"
        ) from error


def _agreed_endpoint(settings: Settings, port: int) -> Endpoint:
    """Without a store. The session tells jobs apart that share a machine: the launcher's names for this one, shortened
    to what can be sent."""
    session = "/".join(os.environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "MASTER_PORT"))
    data = session.encode("utf-8", "surrogatepass")
    if len(data) > MAX_SESSION_BYTES or not session.isprintable():
        session = f"{ascii(session)[1:101]}#{hashlib.blake2b(data, digest_size=16).hexdigest()}"
    return Endpoint((settings.host,), port, settings.secret or "", session)


def _store_key(settings: Settings) -> str:
    return f"torch_tpu_handshake/coordinator/{settings.coordinator_rank}"


def _publish(settings: Settings, store: Any, endpoint: Endpoint, hosts: Sequence[str | None]) -> None:
    """None among `hosts` stands for the master, as each rank knows it. A secret of the user's own is not published."""
    secret = endpoint.secret if settings.secret is None else None
    try:
        store.set(_store_key(settings), json.dumps({**endpoint._asdict(), "hosts": hosts, "secret": secret}))
    except Exception as error:  # a store may be any class of the user's
        raise _store_failed(settings, error, None) from error


def _published(settings: Settings, store: Any, deadline: Deadline) -> Any:
    """What the coordinator has put into the store, waited for until the deadline."""
    while True:
        attempt = Deadline(max(0.01, min(STORE_WAIT_S, deadline.remaining())))
        try:
            store.wait([_store_key(settings)], timedelta(seconds=attempt.seconds))
            return store.get(_store_key(settings))
        except Exception as error:  # a store may be any class of the user's, and torch's raise RuntimeError for all
            # One that has waited for as long as it was told to has not failed.
            left = attempt.remaining()
            time.sleep(left)
            if deadline.remaining():
                continue
            if left > attempt.seconds / 2:
                raise _store_failed(settings, error, deadline.seconds) from error
            rank, seconds = settings.coordinator_rank, deadline.seconds
            raise HandshakePeerLostError(
                f"the coordinator, rank {rank}, has not published its address within {seconds:.1f} s: make a "
                f"Handshake() on that rank too, which starts the coordinator ({_first_line(error)})",
                ranks=[rank],
                seconds=seconds,
            ) from error


def _store_failed(settings: Settings, error: Exception, seconds: float | None) -> HandshakePeerLostError:
    return HandshakePeerLostError(
        f"the job's store failed, through which rank {settings.coordinator_rank} tells where the handshake's "
        f"coordinator is: {_first_line(error)}. Its server, in most jobs in the process of rank 0 or in the launcher, "
        f"is gone or not reachable any more: look at that process",
        seconds=seconds,
    )


def _first_line(error: Exception) -> str:
    return _vocabulary.shorten((str(error).splitlines() or [type(error).__name__])[0], 300)


def _master(store: Any) -> str | None:
    """The host that every rank of a job with a store knows its way to, as this rank names it; None: there is none, as
    where the store is a file."""
    while hasattr(store, "underlying_store"):  # it only puts a prefix to keys
        store = store.underlying_store
    host = getattr(store, "host", None) or os.environ.get(ADDRESS_VARIABLE)
    return host.strip("[]") if isinstance(host, str) and host else None


def _listen(address: str, port: int, source: str) -> socket.socket:
    """Listens at an address of this host; "": at all of them."""
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        if error.errno == errno.EADDRNOTAVAIL:
            how = f"{ADDRESS_VARIABLE} to an address that this host has, other than {address}"
        else:
            how = f"{source} to a free port, the same on all ranks. With torch.distributed initialised it can stay unset: a free one is found then"
        raise HandshakeConfigError(f"handshake port {port} can't be used on this host ({reason}): set {how}") from error


def _is_for_this_host(settings: Settings, master: str | None, has_store: bool) -> bool:
    """Whether only ranks on this host are to reach the coordinator; see the module's docstring."""
    local_world_size = os.environ.get("LOCAL_WORLD_SIZE")
    on_one_host = local_world_size == str(settings.world_size)
    if has_store and local_world_size:
        return on_one_host
    if master is None or not all(map(_is_loopback, _resolve(master))):
        return False
    name = master.lower().rstrip(".")
    means_loopback = name.partition(".")[0] in _LOOPBACK_NAMES or name.endswith(".localhost")
    return means_loopback or on_one_host or bool(_resolve(master, socket.AI_NUMERICHOST))


def loopback_address(host: str) -> str:
    """This host's own address: one that `host` leads to, if it leads to one here."""
    return next(filter(_is_loopback, _resolve(host)), "127.0.0.1")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


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
    names = [name for name in (socket.gethostname(),) if _resolve(name)]
    return [*([None] if is_master else []), *own, *names, *([] if own else ["127.0.0.1"])]


def _source_towards(target: str) -> str:
    """The address from which this host would send to `target`; "" if there is none, or none that others could reach."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in target else socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 1))  # sends nothing: the kernel only chooses the route
            source = str(probe.getsockname()[0])
    except OSError:
        return ""
    return "" if source.startswith("fe80:") else source  # a link's own, which means nothing elsewhere
