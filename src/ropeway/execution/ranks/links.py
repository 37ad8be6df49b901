"""Connections between ranks. Across hosts they are encrypted, and closed to whoever does not know the cluster's secret
(CurveZMQ, https://rfc.zeromq.org/spec/26); within a host they lie in a folder that only this user can enter."""

from __future__ import annotations

import hashlib

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from ropeway.errors import ConfigError

Socket = zmq.Socket[bytes]


class Links:
    """The sockets of one process. Each belongs to the thread that uses it."""

    def __init__(self, secret: str | None = None) -> None:
        self._keys = None if secret is None else keys_of(secret)
        self._context: zmq.Context[Socket] = zmq.Context()
        self._sockets: list[Socket] = []
        self._gate: ThreadAuthenticator | None = None

    def listen(self, address: str) -> Socket:
        """Raises ``ConfigError`` for an address that is taken, or not one of this host."""
        if self._keys is not None and self._gate is None:
            self._gate = ThreadAuthenticator(self._context)
            self._gate.start()
            self._gate.configure_curve_callback(domain="*", credentials_provider=_Knows(self._keys[0]))
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._keys is not None:
            socket.curve_server = True
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"ranks cannot be waited for at {address}: {error}; master_addr must be an address of the first host, "
                "and master_port and the two ports after it free",
                param="master_addr",
            ) from error
        return socket

    def connect(self, address: str, rank: int) -> Socket:
        """To a socket that listens, now or later."""
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity_of(rank))
        socket.reconnect_ivl = 50  # ms
        if self._keys is not None:
            socket.curve_serverkey = self._keys[0]
        socket.connect(address)
        return socket

    def close(self, linger_ms: int = 0) -> None:
        for socket in self._sockets:
            socket.close(linger=linger_ms)
        if self._gate is not None:
            self._gate.stop()
        self._context.term()

    def _socket(self, kind: int) -> Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(0)  # a step waits for the one before it, so little can gather
        if self._keys is not None:
            socket.curve_publickey, socket.curve_secretkey = self._keys
        self._sockets.append(socket)
        return socket


class _Knows:
    """Lets in who has the cluster's key."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public


def keys_of(secret: str) -> tuple[bytes, bytes]:
    """(public, secret) key, in Z85, that everybody makes who knows the secret."""
    private = z85.encode(hashlib.sha256(b"ropeway ranks\0" + secret.encode()).digest())
    return zmq.curve_public(private), private


def identity_of(rank: int) -> bytes:
    return f"rank-{rank}".encode()


def rank_of(identity: bytes) -> int:
    return int(identity.removeprefix(b"rank-"))
