"""How a rank's process comes to its communicator."""

from __future__ import annotations

import socket
from pathlib import Path

from ropeway.config import ParallelConfig
from ropeway.errors import ConfigError
from ropeway.execution.ranks.messages import Meeting
from ropeway.parallel.communicator import Communicator


def meet(meeting: Meeting, parallel: ParallelConfig) -> Communicator:
    """``parallel``: rank 0's, since all must talk alike. Returns when the other ranks are there too, at the latest at
    the first collective. Raises ``RopewayError``."""
    if meeting.shared_memory is not None:
        from ropeway.parallel.shared_memory import SharedMemoryCommunicator

        return SharedMemoryCommunicator(meeting.shared_memory, meeting.rank, meeting.size)
    from ropeway.parallel.stores import local_store, network_store

    rank, size = meeting.rank, meeting.size
    if meeting.host is None:
        assert meeting.folder is not None
        store, address = local_store(Path(meeting.folder), size), "127.0.0.1"
    else:
        store = network_store(meeting.host, meeting.port, rank, size, meeting.timeout_s)
        interface = meeting.interface
        address = local_address(meeting.host) if interface is None else address_of(interface)
    if parallel.collectives == "gloo":
        from ropeway.parallel.gloo import GlooCommunicator

        return GlooCommunicator(store, rank, size, address=address, timeout_s=meeting.timeout_s)
    from ropeway.parallel.tcp import TcpCommunicator

    secret = meeting.secret or ""
    return TcpCommunicator(store, rank, size, address=address, secret=secret, timeout_s=meeting.timeout_s)


def address_of(interface: str) -> str:
    """This host's address on a network interface; IPv4 first. Raises ``ConfigError``."""
    import psutil

    interfaces = psutil.net_if_addrs()
    if interface not in interfaces:
        raise ConfigError(
            f"there is no network interface {interface}; there are {', '.join(sorted(interfaces))}",
            param="network_interface",
        )
    families = {each.family: each.address for each in reversed(interfaces[interface])}
    address = families.get(socket.AF_INET) or families.get(socket.AF_INET6)
    if address is None:
        raise ConfigError(f"network interface {interface} has no address", param="network_interface")
    return address


def local_address(towards: str) -> str:
    """This host's address on the route to another. Raises ``ConfigError``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:  # nothing is sent
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"there is no way to master_addr {towards}: {error}", param="master_addr") from error
