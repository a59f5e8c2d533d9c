# SPDX-License-Identifier: Apache-2.0
"""How ranks find their coordinator: hosts, ports, the job's store, sessions."""

import json
import shutil
import socket
import subprocess
import sys
import time

import pytest
from layout import TESTS, child_environment, load
from ranks import PATIENCE_S, handshake, job, request, submit_all
from two_hosts import SCENES, torch_distributed

_client = load("_client")
_rendezvous = load("_rendezvous")
_vocabulary = load("_vocabulary")
Deadline = _client.Deadline


def place(host="localhost", port=0, uses_store=True, secret=None):
    return _rendezvous.Place(0, host, port, "port", secret, uses_store)


class Store:
    """A job's store in memory, which first fails as often as it is told to, and at once."""

    def __init__(self, host=None, failures=(), contents=None):
        self.host = host
        self.failures = list(failures)
        self.contents = contents or {}
        self.waits = 0

    def set(self, key, value):
        self._fail()
        self.contents[key] = value.encode()

    def get(self, key):
        self._fail()
        return self.contents[key]

    def wait(self, keys, timeout):
        self.waits += 1
        self._fail()
        if not all(key in self.contents for key in keys):
            time.sleep(timeout.total_seconds())
            raise RuntimeError("wait timeout, says the store")

    def _fail(self):
        if self.failures:
            raise self.failures.pop(0)


@pytest.fixture(autouse=True)
def _a_bare_environment(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


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
        return [
            found for address in addresses for found in look_up(address, port, *arguments, flags=flags, **keywords)
        ]

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


# ---------------------------------------------------------------------- hosts and ports as they are given


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
    assert _rendezvous.parse_host(given, "MASTER_ADDR") == host


@pytest.mark.parametrize(
    "given",
    [
        *("", "[]", " ", "node0 ", "a..b", ".", "x" * 64, "a." * 200, "no\0de", "node\n", "no\udcffde"),
        *("node0:29500", "10.0.0.1:29500", "[::1]:29500", "::1::2", "tcp://node0"),
    ],
    ids=ascii,
)
def test_what_is_no_host_is_refused_with_the_name_of_what_gave_it(given):
    with pytest.raises(_vocabulary.HandshakeConfigError) as raised:
        _rendezvous.parse_host(given, "MASTER_ADDR")
    assert str(raised.value).startswith("MASTER_ADDR=") and "is no host" in str(raised.value)
    assert len(str(raised.value)) < 400


@pytest.mark.parametrize("given", [b"node0", 3, None, ("node0", 1)], ids=repr)
def test_a_host_is_text(given):
    with pytest.raises(_vocabulary.HandshakeTypeError, match=r"^host=.* it must be text"):
        _rendezvous.parse_host(given, "host")


class Whole:
    def __index__(self):
        return 4000


@pytest.mark.parametrize(("given", "port"), [(0, 0), (65535, 65535), ("4000", 4000), (Whole(), 4000)])
def test_what_is_a_port(given, port):
    assert _rendezvous.parse_port(given, "port") == port


@pytest.mark.parametrize("given", [-1, 65536, True, False, 1.0, None, b"4000", "", "many", "9" * 10_000, []], ids=repr)
def test_what_is_no_port(given):
    with pytest.raises(_vocabulary.HandshakeConfigError, match=r"^port=.* is no port") as raised:
        _rendezvous.parse_port(given, "port")
    assert len(str(raised.value)) < 300


# ---------------------------------------------------------------------- without a store


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1", "127.0.0.2", "127.1", "::1"])
@pytest.mark.parametrize("launcher", [None, "1", "2"])
def test_a_loopback_address_is_reached_as_it_is_given_and_by_no_other_host(host, launcher, monkeypatch, no_job):
    skip_without_ipv6([host])
    if launcher:
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", launcher)
    listener, endpoint = _rendezvous.select_handshake_port(place(host))
    with listener:
        assert is_loopback(listener)
        assert endpoint.hosts == (host,)
        assert reaches(host, listener)
        assert reaches(_rendezvous.loopback_address(host), listener)


@pytest.mark.parametrize(
    ("name", "addresses", "local_world_size", "only_here"),
    [
        ("node0", ["127.0.1.1"], None, False),  # on another host, the same name may lead here by the network
        ("node0", ["127.0.1.1"], "1", False),
        ("node0", ["127.0.1.1"], "2", True),
        ("node0", ["::1"], "2", True),
        ("node0", ["127.0.1.1", "::1"], "2", True),
        ("localhost", ["::1"], None, True),
        ("LocalHost.", ["127.0.0.1"], None, True),
        ("ip6-loopback", ["::1"], None, True),
        ("localhost.localdomain", ["127.0.0.1"], "1", True),
        ("a.localhost", ["127.0.0.1"], None, True),
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
    listener, endpoint = _rendezvous.select_handshake_port(place(name))
    with listener:
        assert is_loopback(listener) is only_here
        assert endpoint.hosts == (name,)
        assert reaches(name, listener)
        assert reaches(_rendezvous.loopback_address(name), listener)


def test_a_name_that_leads_nowhere_here_may_lead_here_from_elsewhere(names, no_job):
    names["node0"] = []
    listener, endpoint = _rendezvous.select_handshake_port(place("node0"))
    with listener:
        assert endpoint.hosts == ("node0",)
        assert not is_loopback(listener)
        assert reaches("127.0.0.1", listener)


def test_an_address_that_this_host_does_not_have(monkeypatch, no_job):
    def create_server(*_, **__):
        raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(socket, "create_server", create_server)
    with pytest.raises(_vocabulary.HandshakeConfigError, match=r"can't listen at ::1 .*: set MASTER_ADDR to"):
        _rendezvous.select_handshake_port(place("::1"))


# ---------------------------------------------------------------------- with a store


@pytest.mark.parametrize(
    ("server", "master_addr", "local_world_size", "only_here"),
    [
        ("localhost", None, None, True),
        ("127.0.1.1", None, None, True),
        ("localhost", "node0", None, True),  # the store is where it is
        ("localhost", None, "1", False),  # the launcher knows of another host
        ("node0", None, None, False),
        ("node0", None, "2", True),  # nobody else needs to come in
        ("node0", "localhost", None, False),
        (None, "localhost", None, True),
        (None, "[::1]", None, True),
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
    where = place(_rendezvous.strip_brackets(master_addr or "localhost"))
    listener, own = _rendezvous.select_handshake_port(where)
    with listener:
        assert is_loopback(listener) is only_here
        found = _rendezvous.find_endpoint(where, Deadline(5.0))
        assert found._replace(hosts=()) == own._replace(hosts=())
        assert found.port == listener.getsockname()[1]
        assert len(found.secret) == 32
        for host in {*found.hosts, *own.hosts, _rendezvous.loopback_address(where.host)}:
            assert reaches(host, listener), host
        (published,) = store.contents.values()
        assert (None in json.loads(published)["hosts"]) is (not only_here and bool(server or master_addr))


def test_each_rank_goes_to_the_masters_host_by_the_name_that_it_knows(names, in_job, monkeypatch):
    names["node0"] = ["127.0.1.1"]
    store = in_job(Store("node0"))
    listener, own = _rendezvous.select_handshake_port(place())
    listener.close()
    assert "node0" not in own.hosts, "who is told this address need not know that name"
    in_job(Store("10.1.2.3", contents=store.contents))
    assert _rendezvous.find_endpoint(place(), Deadline(5.0)).hosts == ("10.1.2.3", *own.hosts)


def test_the_server_of_a_real_store_is_found():
    distributed = pytest.importorskip("torch.distributed")
    server = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    store = distributed.PrefixStore("a", distributed.PrefixStore("b", server))
    assert place("node0").master(store) == "localhost"


def test_a_secret_of_ones_own_is_not_published(in_job):
    store = in_job(Store("localhost"))
    where = place(secret="hush")
    listener, own = _rendezvous.select_handshake_port(where)
    listener.close()
    assert own.secret == "hush"
    assert b"hush" not in b"".join(store.contents.values())
    assert _rendezvous.find_endpoint(where, Deadline(5.0)).secret == "hush"


def test_a_coordinator_from_before_there_was_a_store_is_found_in_it(in_job, no_job, monkeypatch):
    """A Handshake() is made at the start of a program, before torch.distributed is initialised."""
    monkeypatch.setenv(_rendezvous.PORT_VARIABLE, "0")
    with handshake.Handshake(0, world_size=2, coordinator="thread", timeout_s=PATIENCE_S) as zero:
        in_job(Store("localhost"))
        with handshake.Handshake(1, world_size=2, timeout_s=PATIENCE_S) as one:
            assert submit_all([zero, one], ((0, 1), 0, 1)) == [True, True]


def test_a_name_that_leads_nowhere_is_said_where_the_coordinator_starts(names, no_job, caplog):
    names["nowhere"] = []
    listener, _ = _rendezvous.select_handshake_port(place("nowhere", uses_store=False))
    listener.close()
    assert ["nowhere, by which the ranks" in record.getMessage() for record in caplog.records] == [True]


# ---------------------------------------------------------------------- stores that fail


def test_a_store_that_fails_at_once_is_not_asked_without_a_pause(in_job):
    store = in_job(Store(failures=[RuntimeError("the server is gone\nframe #0: …")] * 1000))
    started = time.monotonic()
    with pytest.raises(_vocabulary.HandshakePeerLostError) as raised:
        _rendezvous.find_endpoint(place(), Deadline(0.2))
    assert time.monotonic() - started >= 0.2
    assert store.waits <= 3
    assert "the job's store failed" in str(raised.value)
    assert "the server is gone. Its server," in str(raised.value)
    assert "published" not in str(raised.value)
    assert raised.value.seconds == 0.2


def test_a_store_that_waits_in_vain_has_not_failed(in_job):
    in_job(Store())
    with pytest.raises(_vocabulary.HandshakePeerLostError) as raised:
        _rendezvous.find_endpoint(place(), Deadline(0.2))
    assert "the coordinator, rank 0, has not published its address within 0.2 s" in str(raised.value)
    assert "(wait timeout, says the store)" in str(raised.value)
    assert "failed" not in str(raised.value)
    assert raised.value.ranks == (0,)


def test_a_store_that_comes_back_is_as_good_as_ever(in_job, monkeypatch):
    monkeypatch.setattr(_rendezvous, "STORE_WAIT_S", 0.01)
    store = in_job(Store("localhost"))
    listener, own = _rendezvous.select_handshake_port(place())
    listener.close()
    # Of any class; the third comes between the wait and the answer.
    store.failures = [RuntimeError("gone"), OSError("gone"), LookupError("gone")]
    assert _rendezvous.find_endpoint(place(), Deadline(20.0)) == own


def test_a_real_store_whose_server_is_gone(in_job):
    distributed = pytest.importorskip("torch.distributed")
    server = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = distributed.TCPStore("localhost", server.port, is_master=False, wait_for_workers=False)
    in_job(distributed.PrefixStore("job", client))
    with pytest.raises(_vocabulary.HandshakePeerLostError, match="has not published its address"):
        _rendezvous.find_endpoint(place(), Deadline(0.1))
    del server
    with pytest.raises(_vocabulary.HandshakePeerLostError, match="the job's store failed"):
        _rendezvous.find_endpoint(place(), Deadline(0.1))


def test_a_coordinator_that_can_not_publish_itself_does_not_listen(in_job, monkeypatch):
    listeners = []
    create_server = socket.create_server

    def note(*arguments, **keywords):
        listeners.append(create_server(*arguments, **keywords))
        return listeners[-1]

    monkeypatch.setattr(socket, "create_server", note)
    in_job(Store("localhost", failures=[RuntimeError("broken pipe")]))
    with pytest.raises(_vocabulary.HandshakePeerLostError, match=r"the job's store failed.*broken pipe"):
        _rendezvous.select_handshake_port(place())
    assert [listener.fileno() for listener in listeners] == [-1]


@pytest.mark.parametrize("text", [b"", b"\xff", b"[]", b"{}", b'{"hosts": ["a"], "port": "x", "secret": null}'])
def test_what_another_release_published(text, in_job):
    in_job(Store(contents={place().store_key: text}))
    with pytest.raises(_vocabulary.HandshakeProtocolError, match="install the same release on all hosts"):
        _rendezvous.find_endpoint(place(), Deadline(5.0))


# ---------------------------------------------------------------------- sessions


def session(run_id, port="29500"):
    return _rendezvous._session_from_environment({"TORCHELASTIC_RUN_ID": run_id, "MASTER_PORT": port})


def test_a_short_session_can_be_read():
    assert session("bücher") == "bücher/29500"
    assert _rendezvous._session_from_environment({}) == "/"


def test_every_session_is_short_and_its_own():
    run_ids = ["x" * 190, *("x" * length for length in (195, 196, 10_000)), "x" * 9999 + "y", "ü" * 150, "ä" * 150]
    run_ids += ["a\nb", "a\rb", "no text \udcff", "no text \udcfe", "\0" * 1000]
    sessions = [session(run_id) for run_id in run_ids] + [session("x" * 10_000, "29501")]
    assert len(set(sessions)) == len(sessions)
    for text in sessions:
        assert len(text.encode()) <= _rendezvous.MAX_SESSION_BYTES
        assert text.isprintable()
    assert sessions[3].startswith("x" * 100)


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
