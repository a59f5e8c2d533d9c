# SPDX-License-Identifier: Apache-2.0
"""How ranks find their coordinator: the settings, its address and port, and what proves that they belong to its job.

Where `torch.distributed` is initialised, the coordinator publishes all of it in the job's store, so that several jobs
on one machine never meet. Without a store the address is `MASTER_ADDR` and the port an agreed one. A port is never
looked for, closed and bound again later: the listening socket that found it is the one that is used.

**Which address.** A name means what it means on the host that looks it up: many a host's own name is 127.0.1.1 there.
So the coordinator can't tell how others name its host. With a store, every rank has found one place already, the
*master*: the store's server, or `MASTER_ADDR` where the store has none. If the coordinator is on the master's host, it
publishes this, for each rank to use the name that it knows; then the addresses from which its host would send to
others, then its host's name. The ranks try them in this order, and what they were told themselves in the end.

**Whom it listens to.** This host alone, if the launcher says that all ranks are on it (`LOCAL_WORLD_SIZE` is the
world's size), or if there is no store and no address was given: then no other host could find it. Otherwise all
interfaces; also where the address is localhost here, since elsewhere it may be another one, which leads here.
"""

import contextlib
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
from collections.abc import Callable, Iterator, Mapping
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
MODE_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_MODE"
ON_MISMATCH_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_ON_MISMATCH"
SECRET_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_SECRET"
DEBUG_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_DEBUG"
ADDRESS_VARIABLE = "MASTER_ADDR"
DEFAULT_PORT = 36423  # torch_tpu 0.2.0's for the same purpose
DEFAULT_TIMEOUT_S = 60.0
MAX_WORLD_SIZE = _vocabulary.MAX_WORLD_SIZE
BACKLOG = 8192  # all ranks may come while the coordinator is starting; the kernel caps it at net.core.somaxconn
MAX_SESSION_BYTES = 200  # it is sent in every hello, which is small, and shown in messages
# What launchers and schedulers call a job, the same on all its ranks. (An elastic restart count is not, nor is a step.)
SESSION_VARIABLES = ("TORCHELASTIC_RUN_ID", "MASTER_PORT", "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
_STORE_KEY = "torch_tpu_handshake/coordinator/{}"
_STORES_OF_ONE_PROCESS = {"FakeStore", "HashStore"}  # torch's, for tests: nobody else reads them
# Addresses that nobody has (RFC 5737, RFC 3849), which the default routes lead to. Nothing is sent there.
_ANYWHERE = ("192.0.2.1", "2001:db8::1")
_REQUIRED = object()


def torch_distributed() -> Any:
    """`torch.distributed`, if this process has imported and initialised it, else None. Never imports it."""
    module = sys.modules.get("torch.distributed")
    return module if module is not None and module.is_available() and module.is_initialized() else None


class Deadline:
    """A moment by which something must have happened."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._at = time.monotonic() + seconds

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
    at_master: bool = False  # whether the master's address leads there too, before all others

    def addresses(self, failures: dict[str, str]) -> Iterator[tuple[str, int, Any]]:
        """What its hosts lead to: how messages name it, family, address. Puts hosts that lead nowhere in `failures`."""
        for host in self.hosts:
            found: list[Any] = []
            try:
                found = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM)
            except (OSError, UnicodeError) as error:
                failures[host] = getattr(error, "strerror", None) or str(error)
            for family, *_, address in found:
                yield f"{' '.join(dict.fromkeys([host, address[0]]))} port {self.port}", family, address


def _whole(lowest: int, highest: int) -> Callable[[Any], int]:
    return lambda value: range(highest + 1)[_vocabulary.whole_number(value, "", least=lowest, text=True)]


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not 0.0 < float(value) < float("inf"):
        raise ValueError
    return float(value)


def _host(value: Any) -> str:
    host = str.strip(value, "[]")
    if not re.fullmatch(r"[\w.:%-]{1,253}", host):  # RFC 1035; addresses are shorter
        raise ValueError
    if ":" in host:
        socket.inet_pton(socket.AF_INET6, host.partition("%")[0])
    host.encode("idna")  # as a look-up does it
    return host


# By keyword: the field, the variable ("": not one that is read here), the default or what finds it, what makes the
# setting of a value or raises, and what errors say that it must be.
_SETTINGS: dict[str, tuple[str, str, Any, Callable[[Any], Any], str]] = {
    "current_rank": ("rank", "RANK", _REQUIRED, _whole(0, sys.maxsize - 1), "a whole number from 0 on"),
    "coordinator_rank": ("coordinator_rank", "", 0, _whole(0, sys.maxsize - 1), "a whole number from 0 on"),
    "world_size": ("world_size", "WORLD_SIZE", _REQUIRED, _whole(1, MAX_WORLD_SIZE), "a whole number from 1 to 2**20"),
    "host": ("host", ADDRESS_VARIABLE, "", _host, "a valid host: a name or an address, without a port"),
    "port": ("port", PORT_VARIABLE, None, _whole(0, 65535), "a valid port: a whole number from 1 to 65535"),
    "timeout_s": ("timeout_s", TIMEOUT_VARIABLE, DEFAULT_TIMEOUT_S, _seconds, "a valid timeout: seconds, more than 0"),
    "on_timeout": ("split_on_timeout", ON_TIMEOUT_VARIABLE, False,
        {"raise": False, "split": True}.__getitem__, "raise or split"),
    "on_mismatch": ("raise_on_mismatch", ON_MISMATCH_VARIABLE, False,
        {"warn": False, "raise": True}.__getitem__, "warn or raise"),
    "mode": ("observe", MODE_VARIABLE, False,
        {"enforce": False, "observe": True}.__getitem__, "enforce or observe"),
    "secret": ("secret", SECRET_VARIABLE, None, lambda value: str.encode(value).decode(), "text that UTF-8 can encode"),
    "stage": ("stage", "", HandshakeStage.from_env,
        lambda value: HandshakeStage.parse(value, ""), f"a valid stage: {', '.join(HandshakeStage.__members__)}"),
    "groups": ("groups", "", _vocabulary.group_naming, _vocabulary.group_naming, '"role" or "exact"'),
    "debug": ("debug", DEBUG_VARIABLE, "", lambda value: value and os.path.abspath(os.fsdecode(value)), "a folder"),
    "coordinator": ("coordinator", "", "process",
        {"process": "process", "thread": "thread"}.__getitem__, '"process" or "thread"'),
}  # fmt: skip


class Settings(NamedTuple):
    """What one process's handshake is like."""

    rank: int
    world_size: int
    coordinator_rank: int
    host: str  # by which the ranks reach the coordinator, where no store says better; "": nobody said
    port: int | None  # one that was asked for; 0: one that the kernel picks
    port_source: str  # what to change if that port is taken
    secret: str | None
    timeout_s: float
    split_on_timeout: bool
    raise_on_mismatch: bool
    observe: bool
    stage: HandshakeStage
    groups: str
    debug: str  # a folder's absolute path; "": off
    coordinator: str

    @classmethod
    def resolve(cls, given: Mapping[str, Any]) -> "Settings":
        """Each setting: as given by keyword (None: it is not), else by its variable, else the default. Rank and world
        size are torch.distributed's before the variables'. Raises HandshakeConfigError."""
        known = {keyword: value for keyword, value in given.items() if value is not None}
        port_source = "port" if "port" in known else PORT_VARIABLE
        values: dict[str, Any] = {"port_source": port_source}
        if (distributed := torch_distributed()) is not None:
            known = {"current_rank": distributed.get_rank(), "world_size": distributed.get_world_size(), **known}
        for keyword, (field, variable, default, *_) in _SETTINGS.items():
            if keyword in known:
                values[field] = _parse(keyword, known[keyword], keyword)
            elif os.environ.get(variable):
                values[field] = _parse(keyword, os.environ[variable], variable)
            elif default is _REQUIRED:
                how = f"initialise torch.distributed, set {variable}, or pass Handshake({keyword}=…)"
                raise HandshakeConfigError(f"{keyword} is not known: {how}")
            else:
                values[field] = default() if callable(default) else default
        settings = cls(**values)
        for keyword, rank in (("current_rank", settings.rank), ("coordinator_rank", settings.coordinator_rank)):
            if rank >= settings.world_size:
                raise HandshakeConfigError(f"{keyword} {rank} is outside a world of {settings.world_size} ranks")
        return settings

    def must_agree_with(self, given: Mapping[str, Any]) -> None:
        """Raises HandshakeConfigError where something is given that is not as in these, the open handshake's."""
        for keyword, value in given.items():
            if value is not None and _parse(keyword, value, keyword) != getattr(self, _SETTINGS[keyword][0]):
                text = f"rank {self.rank} has a handshake open already, with another {keyword}. One process has one"
                raise HandshakeConfigError(f"{text}: give {keyword} when it is made first, or close() that one first")

    def store(self) -> Any:
        """The job's store; None where there is none that other processes can read."""
        if (distributed := torch_distributed()) is None:
            return None
        store = distributed.distributed_c10d._get_default_store()
        of_class = type(_server(store))
        names = {each.__name__ for each in of_class.__mro__}
        # A prefix around a store of Python's may have lost its class: all that is left of it is the base.
        is_lost = of_class is getattr(distributed, "Store", None)
        return None if names & _STORES_OF_ONE_PROCESS or is_lost else store


def _parse(keyword: str, value: Any, source: str) -> Any:
    """Raises HandshakeConfigError, which names `source`: the keyword or the variable that gave the value."""
    *_, convert, valid = _SETTINGS[keyword]
    try:
        return convert(value)
    except (LookupError, OSError, OverflowError, TypeError, ValueError) as error:
        kind = _vocabulary.HandshakeTypeError if isinstance(error, TypeError) else HandshakeConfigError
        shown = source if keyword == "secret" else f"{source}={_vocabulary.shorten(repr(value))}"
        raise kind(f"{shown} is not {valid}") from None


def select_handshake_port(settings: Settings) -> tuple[socket.socket, Endpoint]:
    """On the coordinator rank: the listening socket, and what the other ranks need to reach it, which is published if
    the job has a store. An explicit port is bound as it is; else, with a store, the kernel picks a free one; else it is
    `DEFAULT_PORT`. Raises HandshakeConfigError: it can't be bound; HandshakePeerLostError: the store failed."""
    store = settings.store()
    address = loopback_address(settings.host) if _is_for_this_host(settings, store is not None) else ""
    port = settings.port if settings.port is not None else DEFAULT_PORT if store is None else 0
    both = not address and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both or ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        what, how = f"port {port}", f"{settings.port_source} to a free port, the same on all ranks"
        if error.errno == errno.EADDRNOTAVAIL:
            what, how = f"address {address}", f"host or {ADDRESS_VARIABLE} to an address that this host has"
        elif store is not None:
            how += ", or leave it unset: a free one is picked then"
        reason = os.strerror(error.errno or 0)
        raise HandshakeConfigError(f"handshake {what} can't be used on this host ({reason}): set {how}") from error
    port = listener.getsockname()[1]
    hosts, at_master = ([address], False) if address else _ways_here(_master(settings, store))
    if store is None:
        endpoint = _agreed_endpoint(settings, port)
        if not address and not at_master and _resolve(settings.host):
            text = f"{ADDRESS_VARIABLE}={settings.host} is not an address of this host, where rank {settings.rank} runs"
            how = f"the coordinator, and others look for it there. Set it to {hosts[0]} on all ranks"
            logger.warning("handshake: %s %s", text, how)
    else:
        secret = secrets.token_hex(16) if settings.secret is None else settings.secret
        endpoint = Endpoint(tuple(hosts), port, secret, secrets.token_hex(8), at_master)
        try:
            publish_late(settings, endpoint)
        except HandshakePeerLostError:
            listener.close()
            raise
    risk = ""
    if not address:
        risk = f"whoever reaches port {port} of this host can take part in this job's handshakes, or answer them"
    elif store is None and settings.port is None and not any(map(os.environ.get, SESSION_VARIABLES)):
        risk = "another job of this user on this host would meet this one, as nothing tells them apart"
    if risk and not endpoint.secret:
        logger.warning("handshake: there is no secret: %s. Set %s to the same text on all ranks", risk, SECRET_VARIABLE)
    return listener, endpoint


def publish_late(settings: Settings, endpoint: Endpoint) -> bool:
    """Publishes a coordinator if the job has a store, which it may not have had when the coordinator was started, and
    returns whether it has. Raises HandshakePeerLostError: the store failed."""
    if (store := settings.store()) is None:
        return False
    secret = endpoint.secret if settings.secret is None else None  # a user's own is told to all ranks
    published = json.dumps(endpoint._asdict() | {"secret": secret})
    try:
        store.set(_STORE_KEY.format(settings.coordinator_rank), published)
    except Exception as error:  # a store may be any class of the user's
        raise _store_failed(error) from error
    return True


def find_endpoint(settings: Settings) -> Endpoint:
    """On every other rank: where the coordinator listens, from the store if there is one. Raises LookupError: the
    coordinator has not published itself yet; HandshakeConfigError: port 0 was given, and nobody says what the kernel
    picked; HandshakePeerLostError: the store failed; HandshakeProtocolError: another release published itself."""
    store, rank = settings.store(), settings.coordinator_rank
    if store is None and settings.port == 0:
        how = "the other ranks need the port that it was given (Handshake.address on that rank)"
        raise HandshakeConfigError(f"port 0 (from {settings.port_source}) is for the coordinator, rank {rank}; {how}")
    if store is None:
        return _agreed_endpoint(settings, settings.port or DEFAULT_PORT)
    key = _STORE_KEY.format(rank)
    try:
        # Not `wait`: torch logs each one that ends in vain, and on each rank.
        is_there = store.check([key])
        text = store.get(key) if is_there else b""
    except Exception as error:  # a store may be any class of the user's, and torch's raise RuntimeError for all
        raise _store_failed(error) from error
    if not is_there:
        how = "make a Handshake() on that rank too, which starts the coordinator"
        raise LookupError(f"the coordinator, rank {rank}, has not published its address there: {how}")
    try:
        published = Endpoint(**json.loads(text))
        master = _master(settings, store)
        hosts = dict.fromkeys([master if published.at_master else "", *published.hosts, master, settings.host])
        secret = (settings.secret or "") if published.secret is None else published.secret
        return published._replace(hosts=tuple(host for host in hosts if host), secret=secret)
    except (ValueError, TypeError):
        what = f"what the job's store holds under {key} does not describe a coordinator"
        raise HandshakeProtocolError(f"{what}: install the same release on all hosts") from None


def _agreed_endpoint(settings: Settings, port: int) -> Endpoint:
    """Where there is no store. The session tells jobs apart that share a machine."""
    session = "/".join([f"user {os.getuid()}", *filter(None, map(os.environ.get, SESSION_VARIABLES))])
    data = session.encode("utf-8", "surrogatepass")
    if len(data) > MAX_SESSION_BYTES or not session.isprintable():
        session = f"{ascii(session)[1:101]}#{hashlib.blake2b(data, digest_size=16).hexdigest()}"
    return Endpoint((settings.host or "localhost",), port, settings.secret or "", session)


def _store_failed(error: Exception) -> HandshakePeerLostError:
    line = _vocabulary.shorten((str(error).splitlines() or [type(error).__name__])[0], 300)
    what = f"the job's store failed, through which the handshake's coordinator is found: {line}"
    how = "Its server, in most jobs in the process of rank 0 or in the launcher, may be gone: look at that process"
    return HandshakePeerLostError(f"{what}. {how}")


def _server(store: Any) -> Any:
    while hasattr(store, "underlying_store"):  # it only puts a prefix to keys
        store = store.underlying_store
    return store


def _master(settings: Settings, store: Any) -> str:
    """The host that every rank has found, as this rank names it; "" if there is none, as with a store in a file."""
    host = getattr(_server(store), "host", None)
    return host.strip("[]") if isinstance(host, str) and host else settings.host


def _is_for_this_host(settings: Settings, has_store: bool) -> bool:
    """Whether only ranks on this host are to reach the coordinator; see the module's docstring."""
    if not has_store and not settings.host:
        return True
    on_one_host = os.environ.get("LOCAL_WORLD_SIZE") == str(settings.world_size)
    return on_one_host and (has_store or all(map(_is_loopback, _resolve(settings.host))))


def loopback_address(host: str) -> str:
    """This host's own address: one that `host` leads to, if it leads to one here."""
    return next(filter(_is_loopback, _resolve(host or "localhost")), "127.0.0.1")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def _resolve(host: str) -> list[str]:
    """The addresses that `host` leads to, IPv4 first; none if there are none."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, ValueError):
        return []
    addresses = {str(address[0]).removeprefix("::ffff:"): None for *_, address in found}
    return sorted(addresses, key=lambda address: ":" in address)


def _ways_here(master: str) -> tuple[list[str], bool]:
    """What leads the job's ranks to this host, best first; and whether the master's address does."""
    targets = _resolve(master) if master else []
    sources = {}  # by target, the address from which this host would send there
    for target in (*targets, *_ANYWHERE):
        family = socket.AF_INET6 if ":" in target else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 1))  # sends nothing: the kernel only chooses the route
            sources[target] = str(probe.getsockname()[0])
    # From here to here the kernel sends from the very address that it sends to, or from a loopback address.
    is_master = any(sources.get(target) == target or _is_loopback(sources.get(target, "")) for target in targets)
    # What begins with fe80 is a link's own, which means nothing elsewhere.
    own = [source for source in sources.values() if not _is_loopback(source) and not source.startswith("fe80:")]
    names = [name for name in (socket.gethostname(),) if _resolve(name)]
    return [*dict.fromkeys(own), *names, *([] if own else ["127.0.0.1"])], is_master
