# SPDX-License-Identifier: Apache-2.0
"""How one process's handshake is set: by keywords, else by variables, else by defaults."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

if __package__:
    from . import _protocol, _rendezvous
    from ._vocabulary import HandshakeConfigError, HandshakeStage, whole_number
else:
    import _protocol
    import _rendezvous
    from _vocabulary import HandshakeConfigError, HandshakeStage, whole_number

TIMEOUT_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_TIMEOUT_S"
ON_TIMEOUT_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_ON_TIMEOUT"
SECRET_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_SECRET"
DEBUG_VARIABLE = "TORCH_TPU_INTERNAL_HANDSHAKE_DEBUG"
DEFAULT_TIMEOUT_S = 60.0


class Settings(NamedTuple):
    """What one process's handshake is like."""

    rank: int
    world_size: int
    place: _rendezvous.Place
    timeout_s: float
    split_on_timeout: bool
    stage: HandshakeStage
    debug: str
    coordinator: str

    @classmethod
    def resolve(
        cls, rank: int | None, world_size: int | None, coordinator_rank: int, given: Mapping[str, Any]
    ) -> "Settings":
        """Every setting: as given by keyword, else from its variable, else the default.

        Raises:
            HandshakeConfigError: one of them can't be used; the text names the keyword or variable.
        """
        rank = _known("current_rank", rank, "RANK")
        world_size = _known("world_size", world_size, "WORLD_SIZE")
        if world_size < 1 or world_size > _protocol.MAX_WORLD_SIZE:
            raise HandshakeConfigError(f"world_size must be from 1 to {_protocol.MAX_WORLD_SIZE}, got {world_size}")
        for name, value in (("current_rank", rank), ("coordinator_rank", coordinator_rank)):
            if not 0 <= value < world_size:
                raise HandshakeConfigError(f"{name} {value} is outside a world of {world_size} ranks")
        if given["coordinator"] not in (None, "process", "thread"):
            raise HandshakeConfigError(f'coordinator must be "process" or "thread", got {given["coordinator"]!r}')
        port, port_source = _given_or_variable(given["port"], "port", _rendezvous.PORT_VARIABLE)
        host, host_source = _given_or_variable(given["host"], "host", _rendezvous.ADDRESS_VARIABLE)
        timeout_s, timeout_source = _given_or_variable(given["timeout_s"], "timeout_s", TIMEOUT_VARIABLE)
        on_timeout, on_timeout_source = _given_or_variable(given["on_timeout"], "on_timeout", ON_TIMEOUT_VARIABLE)
        secret, secret_source = _given_or_variable(given["secret"], "secret", SECRET_VARIABLE)
        debug, debug_source = _given_or_variable(given["debug"], "debug", DEBUG_VARIABLE)
        if on_timeout not in (None, "raise", "split"):
            raise HandshakeConfigError(f"{on_timeout_source}={on_timeout!r} must be raise or split")
        return cls(
            rank,
            world_size,
            _rendezvous.Place(
                coordinator_rank,
                _rendezvous.DEFAULT_HOST if host is None else _rendezvous.parse_host(host, host_source),
                None if port is None else _rendezvous.parse_port(port, port_source),
                port_source,
                None if secret is None else _text(secret, secret_source),
                given["host"] is None and given["port"] is None,
            ),
            DEFAULT_TIMEOUT_S if timeout_s is None else _positive_seconds(timeout_s, timeout_source),
            on_timeout == "split",
            stage_of(given["stage"]),
            "" if debug is None else _folder(debug, debug_source),
            given["coordinator"] or "process",
        )

    def has_place(self, given: Mapping[str, Any]) -> bool:
        """Whether it is at the host and port that are given, if any are."""
        return (given["host"] is None or _rendezvous.parse_host(given["host"], "host") == self.place.host) and (
            given["port"] is None or _rendezvous.parse_port(given["port"], "port") == self.place.port
        )

    def must_agree_with(self, session: "Settings", given: Mapping[str, Any]) -> None:
        """Refuses what is given and is not as in `session`, which is open.

        Raises:
            HandshakeConfigError: as said.
        """
        mine, theirs = self._asdict() | self.place._asdict(), session._asdict() | session.place._asdict()
        for keyword, name in _GIVEN_ONCE.items():
            if given[keyword] is not None and mine[name] != theirs[name]:
                raise HandshakeConfigError(
                    f"rank {self.rank} has a handshake open already, with another {keyword}. One process "
                    f"opens one for its job: give {keyword} when the first is made, or close() that first"
                )


# The keywords that an open handshake's settings are compared by, and what those are called.
_GIVEN_ONCE = {
    "timeout_s": "timeout_s",
    "on_timeout": "split_on_timeout",
    "secret": "secret",
    "stage": "stage",
    "debug": "debug",
    "coordinator": "coordinator",
}


def _given_or_variable(given: Any, keyword: str, variable: str) -> tuple[Any, str]:
    if given is not None:
        return given, keyword
    return os.environ.get(variable) or None, variable


def rank_or_size(name: str, given: Any, variable: str) -> int | None:
    """A rank or a world's size: as given, else as the variable says; None: nobody says.

    Raises:
        HandshakeConfigError: it is no whole number.
    """
    value, source = _given_or_variable(given, name, variable)
    return None if value is None else whole_number(value, source, text=True)


def _known(name: str, value: int | None, variable: str) -> int:
    if value is None:
        raise HandshakeConfigError(
            f"{name} is not known: initialise torch.distributed, set {variable}, or pass Handshake({name}=…)"
        )
    return value


def _text(value: Any, source: str) -> str:
    try:
        value.encode()
    except (AttributeError, UnicodeEncodeError):
        raise HandshakeConfigError(f"{source} must be text that UTF-8 can encode") from None
    return str(value)


def _folder(value: Any, source: str) -> str:
    try:
        return os.path.abspath(os.fsdecode(value))
    except TypeError:
        raise HandshakeConfigError(f"{source}={value!r} is no folder") from None


def _positive_seconds(value: Any, source: str) -> float:
    try:
        seconds = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0.0 < seconds < float("inf"):
        raise HandshakeConfigError(f"{source}={value!r} is no timeout: it must be a positive number of seconds")
    return seconds


def stage_of(stage: HandshakeStage | str | None) -> HandshakeStage:
    """The stage that was given, or the variable's.

    Raises:
        HandshakeConfigError: it is none.
    """
    if stage is None:
        return HandshakeStage.from_env()
    return stage if isinstance(stage, HandshakeStage) else HandshakeStage.parse(str(stage), "stage")
