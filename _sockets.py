# SPDX-License-Identifier: Apache-2.0
"""How both ends of a connection set their sockets."""

import socket
import struct

# A host that vanishes without a word is noticed after KEEPALIVE_IDLE_S + KEEPALIVE_PROBES * KEEPALIVE_INTERVAL_S.
KEEPALIVE_IDLE_S = 10
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 4


def prepare_socket(sock: socket.socket) -> None:
    """Small messages go out at once; a host that vanishes without a word is noticed within half a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_PROBES),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def limit_waits(sock: socket.socket, receive_s: float, send_s: float) -> None:
    """Each `recv` and `send` of a blocking socket raises BlockingIOError after so many seconds. In the kernel: unlike
    `settimeout`, it costs no system call more."""
    sock.settimeout(None)
    for option, seconds in ((socket.SO_RCVTIMEO, receive_s), (socket.SO_SNDTIMEO, send_s)):
        sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6)))
