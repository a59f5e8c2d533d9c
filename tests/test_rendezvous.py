# SPDX-License-Identifier: Apache-2.0
"""How ranks find their coordinator: settings, hosts, ports, the job's store, sessions."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
from layout import TESTS, child_environment, load
from ranks import PATIENCE_S, job, open_rank, request, submit_all
from two_hosts import SCENES, torch_distributed

_protocol = load("_protocol")
_rendezvous = load("_rendezvous")
_vocabulary = load("_vocabulary")
Deadline = _rendezvous.Deadline
Settings = _rendezvous.Settings
ConfigError = _vocabulary.HandshakeConfigError


def settings(host=None, port=0, secret=None):
    """Those of rank 1 of a world of two."""
    return Settings.resolve({"current_rank": 1, "world_size": 2, "host": host, "port": port, "secret": secret})


LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", *_rendezvous.SESSION_VARIABLES)


class Store:
    """A job's store in memory, which first fails as often as it is told to, and at once."""

    def __init__(self, host=None, failures=(), contents=None):
        self.host = host
        self.failures = list(failures)
        self.contents = contents or {}
        self.looks = 0

    def set(self, key, value):
        self._fail()
        self.contents[key] = value.encode()

    def get(self, key):
        self._fail()
        return self.contents[key]

    def check(self, keys):
        self.looks += 1
        self._fail()
        return all(key in self.contents for key in keys)

    def _fail(self):
        if self.failures:
            raise self.failures.pop(0)


@pytest.fixture(autouse=True)
def _a_bare_environment(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("TORCH_TPU_", "MASTER_")) or name in LAUNCHER_VARIABLES:
            monkeypatch.delenv(name)


@pytest.fixture
def in_job(monkeypatch):
    """Makes this process a rank of a job of two with a store."""

    def enter(store):
        monkeypatch.setitem(sys.modules, "torch.distributed", torch_distributed(store, 0))
        return store

    return enter


@pytest.fixture
def no_job(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)


@pytest.fixture
def names(monkeypatch):
    """Names that lead where a test wants, as /etc/hosts could have it."""
    known = {}
    look_up = socket.getaddrinfo

    def getaddrinfo(host, port, *arguments, flags=0, **keywords):
        if host in known and flags & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        addresses = known.get(host, [host])
        return [found for address in addresses for found in look_up(address, port, *arguments, flags=flags, **keywords)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return known


def reaches(host, listener):
    """Whether `host` leads to `listener`."""
    try:
        with socket.create_connection((host, listener.getsockname()[1]), timeout=5) as connection:
            accepted, peer = listener.accept()
            accepted.close()
            return peer[1] == connection.getsockname()[1]
    except OSError:
        return False


def skip_without_ipv6(addresses):
    if "::1" in addresses:
        try:
            socket.create_server(("::1", 0), family=socket.AF_INET6).close()
        except OSError:
            pytest.skip("this host has no IPv6")


def is_loopback(listener):
    address = listener.getsockname()[0]
    return address.startswith("127.") or address == "::1"


# ---------------------------------------------------------------------- settings

TWO_RANKS = {"current_rank": 0, "world_size": 2}


def resolved(keyword, value):
    return getattr(Settings.resolve({**TWO_RANKS, keyword: value}), keyword)


@pytest.mark.usefixtures("no_job")
def test_defaults():
    got = Settings.resolve(dict.fromkeys(["coordinator_rank", "host", "stage", "debug"]) | TWO_RANKS)
    assert got == Settings(
        rank=0,
        world_size=2,
        coordinator_rank=0,
        host="",
        port=None,
        port_source=_rendezvous.PORT_VARIABLE,
        secret=None,
        timeout_s=60.0,
        split_on_timeout=False,
        raise_on_mismatch=False,
        observe=False,
        stage=_vocabulary.HandshakeStage.OFF,
        groups="role",
        debug="",
        coordinator="process",
    )


# Keyword, variable, what both are given, the field, what it is then, and the text of another value.
SETTABLE = [
    ("current_rank", "RANK", "3", "rank", 3, "4"),
    ("world_size", "WORLD_SIZE", "9", "world_size", 9, "10"),
    ("host", "MASTER_ADDR", "node0", "host", "node0", "node1"),
    ("port", _rendezvous.PORT_VARIABLE, "4000", "port", 4000, "4001"),
    ("timeout_s", _rendezvous.TIMEOUT_VARIABLE, "2.5", "timeout_s", 2.5, "3"),
    ("on_timeout", _rendezvous.ON_TIMEOUT_VARIABLE, "split", "split_on_timeout", True, "raise"),
    ("on_mismatch", _rendezvous.ON_MISMATCH_VARIABLE, "raise", "raise_on_mismatch", True, "warn"),
    ("mode", _rendezvous.MODE_VARIABLE, "observe", "observe", True, "enforce"),
    ("secret", _rendezvous.SECRET_VARIABLE, "hush", "secret", "hush", "loud"),
    *(
        ("stage", name, "dispatch_stage", "stage", _vocabulary.HandshakeStage.DISPATCH_STAGE, "OFF")
        for name in _vocabulary.STAGE_VARIABLES
    ),
    ("groups", _vocabulary.GROUPS_VARIABLE, "exact", "groups", "exact", "role"),
    ("debug", _rendezvous.DEBUG_VARIABLE, "somewhere", "debug", os.path.abspath("somewhere"), "elsewhere"),
]
ENOUGH = {"current_rank": 0, "world_size": 5}


@pytest.mark.usefixtures("no_job")
@pytest.mark.parametrize(("keyword", "variable", "text", "field", "value", "other"), SETTABLE)
def test_a_keyword_goes_before_the_variable_and_the_variable_before_the_default(
    keyword, variable, text, field, value, other, monkeypatch
):
    rest = {name: number for name, number in ENOUGH.items() if name != keyword}
    monkeypatch.setenv(variable, text)
    assert getattr(Settings.resolve(rest), field) == value
    assert getattr(Settings.resolve({**rest, keyword: None}), field) == value
    monkeypatch.setenv(variable, other)
    assert getattr(Settings.resolve({**rest, keyword: text}), field) == value
    assert getattr(Settings.resolve(rest), field) != value
    monkeypatch.setenv(variable, "")
    default = Settings.resolve(ENOUGH)
    assert getattr(Settings.resolve({**ENOUGH, **rest}), field) == getattr(default, field) != value


def test_a_folder_of_no_name_is_none(monkeypatch, no_job):
    monkeypatch.setenv(_rendezvous.DEBUG_VARIABLE, "somewhere")
    assert resolved("debug", "") == ""


def test_the_ranks_of_torch_distributed_go_before_the_launchers(in_job, monkeypatch):
    in_job(Store())
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "many")
    assert Settings.resolve({})[:2] == (0, 2)
    assert Settings.resolve({"current_rank": 1, "world_size": 3})[:2] == (1, 3)


@pytest.mark.parametrize("given", [{}, {"host": "localhost"}, {"port": 0}, {"host": "localhost", "port": 0}])
@pytest.mark.parametrize("by", ["keyword", "variable"])
def test_an_address_of_ones_own_costs_neither_the_store_nor_its_secret(given, by, in_job, monkeypatch):
    """As of `Handshake(port=…)` under torchrun, and of the variable."""
    store = in_job(Store("localhost"))
    if by == "variable":
        for keyword, name in (("host", "MASTER_ADDR"), ("port", _rendezvous.PORT_VARIABLE)):
            if keyword in given:
                monkeypatch.setenv(name, str(given[keyword]))
    where = Settings.resolve({**TWO_RANKS, **(given if by == "keyword" else {})})
    listener, own = _rendezvous.select_handshake_port(where)
    with listener:
        assert store.contents and len(own.secret) == 32
        found = _rendezvous.find_endpoint(where)
        assert (found.port, found.secret, found.session) == (own.port, own.secret, own.session)


@pytest.mark.usefixtures("no_job")
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "current_rank is not known: initialise torch.distributed, set RANK, or pass Handshake(current_rank=…)"),
        ({"current_rank": 0}, "world_size is not known: initialise torch.distributed, set WORLD_SIZE, or pass"),
        ({**TWO_RANKS, "current_rank": 2}, "current_rank 2 is outside a world of 2 ranks"),
        ({**TWO_RANKS, "coordinator_rank": 2}, "coordinator_rank 2 is outside a world of 2 ranks"),
    ],
)
def test_ranks_that_can_not_be(given, text):
    with pytest.raises(ConfigError) as raised:
        Settings.resolve(given)
    assert str(raised.value).startswith(text)


@pytest.mark.usefixtures("no_job")
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("current_rank", 0.5, "='?0.5'? is not a whole number"),
        ("RANK", "zero", "='zero' is not a whole number"),
        ("coordinator_rank", -1, "=-1 is not a whole number from 0 on"),
        ("coordinator_rank", "x", "='x' is not a whole number"),
        ("world_size", 0, "=0 is not a whole number from 1 to"),
        ("WORLD_SIZE", "9" * 10_000, "='9+… .* is not a whole number"),
        ("MASTER_ADDR", "node0:29500", "='node0:29500' is not a valid host"),
        (_rendezvous.PORT_VARIABLE, "many", "='many' is not a valid port"),
        (_rendezvous.TIMEOUT_VARIABLE, "soon", "='soon' is not a valid timeout"),
        *(
            ("timeout_s", value, "=.* is not a valid timeout")
            for value in (0, -1, True, [], "", float("nan"), float("inf"), 10**400)
        ),
        (_rendezvous.ON_TIMEOUT_VARIABLE, "explode", "='explode' is not raise or split"),
        ("on_timeout", [], r"=\[\] is not raise or split"),
        ("stage", "SOMETIMES", "='SOMETIMES' is not a valid stage: OFF, COMPILE_STAGE, DISPATCH_STAGE"),
        *((name, "SOMETIMES", "='SOMETIMES' is not a valid stage") for name in _vocabulary.STAGE_VARIABLES),
        ("groups", "loose", '=\'loose\' is not "role" or "exact"'),
        ("debug", 3, "=3 is not a folder"),
        ("coordinator", "rocket", '=\'rocket\' is not "process" or "thread"'),
        ("secret", b"hush", " is not text"),
        (_rendezvous.SECRET_VARIABLE, "hush\udcff", " is not text that UTF-8 can encode"),
    ],
    ids=lambda value: ascii(value)[:50],
)
def test_what_can_not_be_used_is_named_by_its_keyword_or_variable(name, value, text, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    if name.isupper():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=f"^{name}{text}") as raised:
        Settings.resolve({} if name.isupper() else {name: value})
    assert "hush" not in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.usefixtures("no_job")
def test_groups_of_a_variable_that_can_not_be_used(monkeypatch):
    monkeypatch.setenv(_vocabulary.GROUPS_VARIABLE, "loose")
    with pytest.raises(ConfigError, match=f"'loose' is not .*{_vocabulary.GROUPS_VARIABLE}"):
        Settings.resolve(TWO_RANKS)


@pytest.mark.usefixtures("no_job")
def test_an_open_handshake_agrees_with_what_it_was_given_and_with_nothing_else():
    given = {
        "current_rank": 0,
        "coordinator_rank": 1,
        "world_size": 2,
        "host": "[::1]",
        "port": "4000",
        "timeout_s": 5,
        "on_timeout": "split",
        "secret": "hush",
        "stage": "compile_stage",
        "groups": "exact",
        "debug": "somewhere",
        "coordinator": "thread",
    }
    others = {
        "current_rank": 1,
        "coordinator_rank": 0,
        "world_size": 1,
        "host": "localhost",
        "port": 0,
        "timeout_s": 6,
        "on_timeout": "raise",
        "secret": "loud",
        "stage": "OFF",
        "groups": "role",
        "debug": "elsewhere",
        "coordinator": "process",
    }
    session = Settings.resolve(given)
    session.must_agree_with(given)
    session.must_agree_with({"stage": _vocabulary.HandshakeStage.COMPILE_STAGE, "timeout_s": 5.0, "port": 4000})
    session.must_agree_with(dict.fromkeys(given))
    session.must_agree_with({})
    for keyword, value in others.items():
        with pytest.raises(ConfigError, match=rf"with another {keyword}\. .*close\(\)") as raised:
            session.must_agree_with({**given, keyword: value})
        assert "hush" not in str(raised.value) and "loud" not in str(raised.value)
    with pytest.raises(ConfigError, match="port='x' is not a valid port"):
        session.must_agree_with({"port": "x"})


def test_a_world_is_as_large_as_the_protocol_lets_it_be():
    assert _rendezvous.MAX_WORLD_SIZE == _protocol.MAX_WORLD_SIZE
    given = {"current_rank": 0, "world_size": _protocol.MAX_WORLD_SIZE}
    assert Settings.resolve(given).world_size == _protocol.MAX_WORLD_SIZE
    with pytest.raises(ConfigError, match="world_size="):
        Settings.resolve({**given, "world_size": _protocol.MAX_WORLD_SIZE + 1})


@pytest.mark.parametrize(
    ("given", "host"),
    [
        *[(host, host) for host in ("localhost", "node-0.cluster_a", "10.0.0.1", "bücher.example")],
        *[(host, host) for host in ("::1", "fe80::1%eth0")],
        ("[::1]", "::1"),
        ("[fd00::2]", "fd00::2"),
    ],
)
def test_what_is_a_host(given, host):
    assert resolved("host", given) == host


@pytest.mark.parametrize(
    "given",
    [
        *("", "[]", " ", "node0 ", "a..b", ".", "x" * 64, "a." * 200, "no\0de", "node\n", "no\udcffde"),
        *("node0:29500", "10.0.0.1:29500", "[::1]:29500", "::1::2", "tcp://node0"),
    ],
    ids=ascii,
)
def test_what_is_not_a_host(given):
    with pytest.raises(ConfigError, match=r"^host=.* is not a valid host") as raised:
        resolved("host", given)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("given", [b"node0", 3, ("node0", 1)], ids=repr)
def test_a_host_is_text(given):
    with pytest.raises(_vocabulary.HandshakeTypeError, match=r"^host=.* is not a valid host"):
        resolved("host", given)


class Whole:
    def __index__(self):
        return 4000


@pytest.mark.parametrize(("given", "port"), [(0, 0), (65535, 65535), ("4000", 4000), (Whole(), 4000)])
def test_what_is_a_port(given, port):
    assert resolved("port", given) == port


@pytest.mark.parametrize("given", [-1, 65536, True, False, 1.0, b"4000", "", "many", "9" * 10_000, []], ids=repr)
def test_what_is_not_a_port(given):
    with pytest.raises(ConfigError, match=r"^port=.* is not a valid port") as raised:
        resolved("port", given)
    assert len(str(raised.value)) < 300


# ---------------------------------------------------------------------- deadlines


def test_a_deadline(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(_rendezvous.time, "monotonic", lambda: now[0])
    deadline = Deadline(2.0)
    assert (deadline.seconds, deadline.remaining()) == (2.0, 2.0)
    now[0] = 101.5
    assert (deadline.seconds, deadline.remaining()) == (2.0, 0.5)
    now[0] = 103.0
    assert (deadline.seconds, deadline.remaining()) == (2.0, 0.0)
    deadline = Deadline(5.0)
    deadline.cut()
    assert (deadline.seconds, deadline.remaining()) == (5.0, 0.0)


# ---------------------------------------------------------------------- without a store


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "127.0.1.1", "127.0.0.2", "127.1", "::1", "::ffff:127.0.0.1"]
)
@pytest.mark.parametrize("launcher", [None, "1", "2"])
def test_a_loopback_address_is_reached_as_it_is_given(host, launcher, monkeypatch, no_job):
    """Only the launcher knows that all ranks are on this host: to others, rank 0 may have another name."""
    skip_without_ipv6(["::1"] if ":" in host else [])
    if launcher:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", launcher)
    listener, endpoint = _rendezvous.select_handshake_port(settings(host))
    with listener:
        assert is_loopback(listener) is (launcher == "2")
        assert endpoint.hosts == (host,)
        assert reaches(host, listener)
        assert reaches(_rendezvous.loopback_address(host), listener)


@pytest.mark.parametrize(
    ("name", "addresses", "local_world_size", "only_here"),
    [
        ("node0", ["127.0.1.1"], None, False),
        ("node0", ["127.0.1.1"], "1", False),
        ("node0", ["127.0.1.1"], "2", True),
        ("node0", ["::1"], "2", True),
        ("node0", ["127.0.1.1", "::1"], "2", True),
        ("localhost", ["::1"], None, False),
        ("localhost", ["::1"], "1", False),
        ("localhost", ["::1"], "2", True),
    ],
)
def test_a_name_of_a_loopback_address_is_reached_by_every_address_that_it_leads_to(
    name, addresses, local_world_size, only_here, names, monkeypatch, no_job
):
    skip_without_ipv6(addresses)
    names[name] = addresses
    monkeypatch.setenv("WORLD_SIZE", "2")
    if local_world_size:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    listener, endpoint = _rendezvous.select_handshake_port(settings(name))
    with listener:
        assert is_loopback(listener) is only_here
        assert endpoint.hosts == (name,)
        assert reaches(name, listener)
        assert reaches(_rendezvous.loopback_address(name), listener)


def test_a_name_that_leads_nowhere_here_may_lead_here_from_elsewhere(names, no_job):
    names["node0"] = []
    listener, endpoint = _rendezvous.select_handshake_port(settings("node0"))
    with listener:
        assert endpoint.hosts == ("node0",)
        assert not is_loopback(listener)
        assert reaches("127.0.0.1", listener)


def test_localhost_is_an_ipv4_address_where_it_is_both(names, no_job):
    """Many a container lists ::1 and has no IPv6."""
    names["localhost"] = ["::1", "127.0.0.1"]
    listener, own = _rendezvous.select_handshake_port(settings())
    with listener:
        assert listener.getsockname()[0] == "127.0.0.1"
        assert own.hosts == ("localhost",)


def test_ports_that_nobody_chose(in_job, no_job):
    """Without a store an agreed one; with one, the kernel's, so that jobs on one machine never meet."""
    unset = settings()._replace(port=None)
    assert _rendezvous.find_endpoint(unset).port == _rendezvous.DEFAULT_PORT
    in_job(Store("localhost"))
    listener, own = _rendezvous.select_handshake_port(unset)
    with listener:
        assert own.port == listener.getsockname()[1] != _rendezvous.DEFAULT_PORT


def test_port_zero_is_for_the_coordinator(no_job):
    with pytest.raises(ConfigError, match=r"^port 0 \(from port\) .* rank 0; the other ranks need the port"):
        _rendezvous.find_endpoint(settings())


@pytest.mark.parametrize("has_store", [False, True])
def test_a_port_that_is_taken(has_store, in_job, no_job):
    if has_store:
        in_job(Store("localhost"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as raised:
            _rendezvous.select_handshake_port(settings(port=port))
    text = str(raised.value)
    assert text.startswith(f"handshake port {port} can't be used on this host (Address already in use): set port to a")
    assert text.endswith("or leave it unset: a free one is picked then") is has_store


def test_an_address_that_this_host_does_not_have(monkeypatch, no_job):
    def create_server(*_, **__):
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", create_server)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"handshake address ::1 can't be used .*: set host or MASTER_ADDR to"):
        _rendezvous.select_handshake_port(settings("::1"))


# ---------------------------------------------------------------------- with a store


@pytest.mark.parametrize(
    ("server", "master_addr", "local_world_size", "only_here"),
    [
        ("localhost", None, None, False),  # others may have found the store by another name
        ("127.0.1.1", None, None, False),
        ("localhost", "node0", None, False),
        ("localhost", None, "1", False),
        ("localhost", "node0", "2", True),
        ("node0", None, None, False),
        ("node0", None, "2", True),  # nobody else needs to come in
        ("node0", "localhost", None, False),
        (None, "localhost", None, False),
        (None, "[::1]", None, False),
        (None, "[::1]", "2", True),
        (None, "node0", None, False),
        (None, None, None, False),
        (None, None, "2", True),
    ],
)
def test_whom_the_coordinator_of_a_job_with_a_store_listens_to(
    server, master_addr, local_world_size, only_here, names, in_job, monkeypatch
):
    names["node0"] = ["127.0.1.1"]
    skip_without_ipv6([(master_addr or "").strip("[]")])
    store = in_job(Store(server))
    for name, value in (("MASTER_ADDR", master_addr), ("LOCAL_WORLD_SIZE", local_world_size)):
        if value:
            monkeypatch.setenv(name, value)
    where = settings(master_addr)
    listener, own = _rendezvous.select_handshake_port(where)
    with listener:
        assert is_loopback(listener) is only_here
        found = _rendezvous.find_endpoint(where)
        assert found._replace(hosts=()) == own._replace(hosts=())
        assert found.port == listener.getsockname()[1]
        assert len(found.secret) == 32
        assert found.hosts if only_here else set(found.hosts) >= set(own.hosts)
        for host in {*(own.hosts if only_here else found.hosts), _rendezvous.loopback_address(where.host)}:
            assert reaches(host, listener), host
        (published,) = store.contents.values()
        assert json.loads(published)["at_master"] is (not only_here and bool(server or master_addr))


def test_each_rank_goes_to_the_masters_host_by_the_name_that_it_knows(names, in_job, monkeypatch):
    names["node0"] = ["127.0.1.1"]
    store = in_job(Store("node0"))
    listener, own = _rendezvous.select_handshake_port(settings())
    listener.close()
    assert "node0" not in own.hosts, "who is told this address need not know that name"
    in_job(Store("10.1.2.3", contents=store.contents))
    assert _rendezvous.find_endpoint(settings()).hosts == ("10.1.2.3", *own.hosts)
    assert _rendezvous.find_endpoint(settings("node0")).hosts == ("10.1.2.3", *own.hosts, "node0")


def test_a_host_without_a_network_and_a_name_is_reached_from_itself(names, in_job, monkeypatch):
    names["nowhere"] = []
    in_job(Store())
    monkeypatch.setattr(_rendezvous, "_ANYWHERE", ())
    monkeypatch.setattr(socket, "gethostname", lambda: "nowhere")
    listener, own = _rendezvous.select_handshake_port(settings())
    with listener:
        assert own.hosts == ("127.0.0.1",)
        assert reaches("127.0.0.1", listener)


def test_the_server_of_a_real_store_is_found():
    distributed = pytest.importorskip("torch.distributed")
    server = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store = distributed.PrefixStore("a", distributed.PrefixStore("b", server))
    assert _rendezvous._master(settings("node0"), store) == "localhost"


def test_a_secret_of_ones_own_is_not_published(in_job):
    store = in_job(Store("localhost"))
    where = settings(secret="hush")
    listener, own = _rendezvous.select_handshake_port(where)
    listener.close()
    assert own.secret == "hush"
    assert b"hush" not in b"".join(store.contents.values())
    assert _rendezvous.find_endpoint(where).secret == "hush"


def test_a_coordinator_that_is_published_late_is_found_as_it_is(in_job, no_job, monkeypatch):
    """A Handshake() is made at the start of a program, before torch.distributed is initialised."""
    monkeypatch.setenv("MASTER_PORT", "29500")
    listener, own = _rendezvous.select_handshake_port(settings())
    with listener:
        assert not _rendezvous.publish_late(settings(), own)
        in_job(Store("localhost"))
        assert _rendezvous.publish_late(settings(), own)
        monkeypatch.setenv("MASTER_PORT", "29501")
        assert _rendezvous.find_endpoint(settings()) == own


def test_ranks_meet_at_a_coordinator_from_before_there_was_a_store(in_job, no_job, monkeypatch):
    monkeypatch.setenv(_rendezvous.PORT_VARIABLE, "0")
    with open_rank(0, world_size=2, coordinator="thread", timeout_s=PATIENCE_S) as zero:
        in_job(Store("localhost"))
        with open_rank(1, world_size=2, timeout_s=PATIENCE_S) as one:
            assert submit_all([zero, one], ((0, 1), 0, 1)) == [True, True]


# ---------------------------------------------------------------------- stores that fail


def test_a_store_that_fails_is_asked_once(in_job):
    """Torch's can't recover, and logs a page each time."""
    store = in_job(Store(failures=[RuntimeError("the server is gone\nframe #0: …")] * 1000))
    with (
        open_rank(1, world_size=2, timeout_s=PATIENCE_S) as one,
        pytest.raises(
            _vocabulary.HandshakePeerLostError, match=r"the job's store failed, .* the server is gone\. Its server,"
        ),
    ):
        one.submit(request(1, ((0, 1), 0, 1)))
    assert store.looks == 1


def test_a_coordinator_that_has_not_published_itself_is_waited_for(in_job, caplog):
    in_job(Store())
    with pytest.raises(LookupError, match="the coordinator, rank 0, has not published its address there: make a"):
        _rendezvous.find_endpoint(settings())
    with open_rank(1, world_size=2, timeout_s=0.2) as one, pytest.raises(_vocabulary.HandshakePeerLostError) as raised:
        one.submit(request(1, ((0, 1), 0, 1)))
    assert "within 0.2 s: the job's store: the coordinator, rank 0, has not published its address" in str(raised.value)
    assert "failed" not in str(raised.value)
    assert raised.value.ranks == (0,)
    assert not caplog.records


def test_a_real_store_is_asked_without_a_word_of_its_own_and_once_it_is_gone_no_more(in_job, capfd):
    distributed = pytest.importorskip("torch.distributed")
    server = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = distributed.TCPStore("localhost", server.port, is_master=False, wait_for_workers=False)
    in_job(distributed.PrefixStore("job", client))
    with pytest.raises(LookupError):
        _rendezvous.find_endpoint(settings())
    assert capfd.readouterr().err == ""
    del server
    with pytest.raises(_vocabulary.HandshakePeerLostError, match="the job's store failed"):
        _rendezvous.find_endpoint(settings())


@pytest.mark.parametrize("name", ["HashStore", "FakeStore"])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_store_of_one_process_is_none(name, wrapped, in_job, monkeypatch):
    """Such as that of the fake backend: the address and the port are used."""
    distributed = pytest.importorskip("torch.distributed")
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    store = distributed.HashStore() if name == "HashStore" else fake.FakeStore()
    in_job(distributed.PrefixStore("job", store) if wrapped else store)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    listener, own = _rendezvous.select_handshake_port(settings())
    with listener:
        found = _rendezvous.find_endpoint(settings(port=own.port))
        assert found == own and found.hosts == ("127.0.0.1",)


def test_a_coordinator_that_can_not_publish_itself_does_not_listen(in_job, monkeypatch):
    listeners = []
    create_server = socket.create_server

    def note(*arguments, **keywords):
        listeners.append(create_server(*arguments, **keywords))
        return listeners[-1]

    monkeypatch.setattr(socket, "create_server", note)
    in_job(Store("localhost", failures=[RuntimeError("broken pipe")]))
    with pytest.raises(_vocabulary.HandshakePeerLostError, match=r"the job's store failed.*broken pipe"):
        _rendezvous.select_handshake_port(settings())
    assert [listener.fileno() for listener in listeners] == [-1]


@pytest.mark.parametrize("text", [b"", b"\xff", b"[]", b"{}", b'{"hosts": ["a"], "port": "x", "secret": null}', None])
def test_what_another_release_published(text, in_job):
    store = in_job(Store("localhost"))
    listener, _ = _rendezvous.select_handshake_port(settings())
    listener.close()
    store.contents = dict.fromkeys(store.contents, text)
    with pytest.raises(_vocabulary.HandshakeProtocolError, match="install the same release on all hosts"):
        _rendezvous.find_endpoint(settings())


# ---------------------------------------------------------------------- sessions


@pytest.fixture
def session(monkeypatch, no_job):
    """The session of a job without a store."""

    def of(run_id, port="29500"):
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        monkeypatch.setenv("MASTER_PORT", port)
        return _rendezvous.find_endpoint(settings(port=4000)).session

    return of


def test_a_short_session_can_be_read(session):
    user = f"user {os.getuid()}"
    assert session("bücher") == f"{user}/bücher/29500"
    assert session("", "") == user


def test_every_session_is_short_and_its_own(session):
    run_ids = ["x" * 190, *("x" * length for length in (195, 196, 10_000)), "x" * 9999 + "y", "ü" * 150, "ä" * 150]
    run_ids += ["a\nb", "a\rb", "no text \udcff", "no text \udcfe", "\1" * 1000]
    sessions = [session(run_id) for run_id in run_ids] + [session("x" * 10_000, "29501")]
    assert len(set(sessions)) == len(sessions)
    for text in sessions:
        assert len(text.encode()) <= _rendezvous.MAX_SESSION_BYTES
        assert text.isprintable()
    assert "x" * 80 in sessions[3]


@pytest.mark.parametrize("name", _rendezvous.SESSION_VARIABLES)
def test_every_name_of_a_job_tells_it_apart(name, session, monkeypatch):
    monkeypatch.setenv(name, "17")
    one = _rendezvous.find_endpoint(settings(port=4000)).session
    monkeypatch.setenv(name, "18")
    assert _rendezvous.find_endpoint(settings(port=4000)).session != one


def test_a_second_job_on_this_host_does_not_meet_the_first(monkeypatch, no_job):
    """Its own coordinator finds the port taken; its other ranks go on looking for it, and are never told a verdict."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    with open_rank(0, world_size=2, port=0, coordinator="thread", timeout_s=PATIENCE_S) as zero:
        port = zero.address[1]
        monkeypatch.setenv("SLURM_JOB_ID", "18")
        with pytest.raises(ConfigError, match="Address already in use"):
            open_rank(0, world_size=2, port=port, timeout_s=PATIENCE_S)
        with (
            open_rank(1, world_size=2, port=port, timeout_s=0.3) as other,
            pytest.raises(_vocabulary.HandshakePeerLostError, match="the coordinator there is another job's"),
        ):
            other.submit(request(1, ((0, 1), 0, 1)))
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        with open_rank(1, world_size=2, port=port, timeout_s=PATIENCE_S) as one:
            assert submit_all([zero, one], ((0, 1), 0, 1)) == [True, True]


# ---------------------------------------------------------------------- what rank 0 can see at its start


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({}, "another job of this user on this host would meet this one, as nothing tells them apart"),
        ({"host": "127.0.0.1", "port": 0}, "whoever reaches port"),
        ({"host": "127.0.0.1", "port": 0, "secret": "hush"}, None),
        ({"port": 0}, None),
    ],
)
def test_a_job_without_a_secret_is_told_what_that_means(given, words, monkeypatch, caplog, no_job):
    with socket.create_server(("127.0.0.1", 0)) as free:
        monkeypatch.setattr(_rendezvous, "DEFAULT_PORT", free.getsockname()[1])
    listener, _ = _rendezvous.select_handshake_port(Settings.resolve({**TWO_RANKS, **given}))
    listener.close()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == (words is not None)
    for line in lines:
        assert line.startswith(f"handshake: there is no secret: {words}")
        assert line.endswith(f"Set {_rendezvous.SECRET_VARIABLE} to the same text on all ranks")


def test_a_job_with_a_store_has_a_secret(in_job, caplog):
    in_job(Store("localhost"))
    listener, _ = _rendezvous.select_handshake_port(settings())
    listener.close()
    assert not caplog.records


@pytest.mark.parametrize(("addresses", "is_wrong"), [(["192.0.2.77"], True), (["127.0.0.1"], False), ([], False)])
def test_a_master_address_of_another_host_is_seen_at_the_start(addresses, is_wrong, names, caplog, no_job):
    names["master"] = addresses
    listener, _ = _rendezvous.select_handshake_port(settings("master", secret="hush"))
    listener.close()
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == is_wrong
    assert all("MASTER_ADDR=master is not an address of this host, where rank 1 runs" in line for line in lines)


def test_ranks_with_a_long_run_id_are_let_in(monkeypatch, no_job):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run " * 5000)
    with job(2) as ranks:
        tickets = [rank.submit_async(request(rank.rank, ((0, 1), 0, 1))) for rank in ranks]
        assert [ticket.result() for ticket in tickets] == [True, True]


# ---------------------------------------------------------------------- two hosts

UNSHARE = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--uts"]


def has_network_namespaces():
    if not all(map(shutil.which, ("unshare", "ip", "mount", "hostname"))):
        return False
    trial = "mount --bind /etc/hosts /etc/hosts && hostname node0 && ip link add link0 type veth peer name link1"
    return not subprocess.run([*UNSHARE, "sh", "-c", trial], capture_output=True, timeout=60, check=False).returncode


def test_two_hosts_whose_own_names_are_loopback_addresses(tmp_path):
    if not has_network_namespaces():
        pytest.skip("this host lets nobody make hosts of their own")
    done = subprocess.run(
        [*UNSHARE, sys.executable, str(TESTS / "two_hosts.py"), str(tmp_path)],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    results = dict(map(json.loads, done.stdout.splitlines()))
    assert results == {scene: [True, True] for scene in SCENES}, done.stderr
