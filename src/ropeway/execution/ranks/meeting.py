"""How a rank's process comes to its communicator."""

from __future__ import annotations

import socket
from pathlib import Path

from ropeway.errors import ConfigError
from ropeway.execution.ranks.messages import Meeting
from ropeway.parallel.communicator import Communicator


def meet(meeting: Meeting) -> Communicator:
    """Returns when the other ranks are there too, at the latest at the first collective. Raises ``RopewayError``."""
    if meeting.shared_memory is not None:
        from ropeway.parallel.shared_memory import SharedMemoryCommunicator

        return SharedMemoryCommunicator(meeting.shared_memory, meeting.rank, meeting.size)
    from ropeway.parallel.gloo import GlooCommunicator, local_store, network_store

    if meeting.host is None:
        assert meeting.folder is not None
        store = local_store(Path(meeting.folder), meeting.size)
        return GlooCommunicator(store, meeting.rank, meeting.size)
    store = network_store(meeting.host, meeting.port, meeting.rank, meeting.size, meeting.timeout_s)
    address = None if meeting.interface is not None else local_address(meeting.host)
    return GlooCommunicator(store, meeting.rank, meeting.size, address=address, interface=meeting.interface)


def local_address(towards: str) -> str:
    """This host's address on the route to another. Raises ``ConfigError``."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(towards, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:  # nothing is sent
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(f"there is no way to master_addr {towards}: {error}", param="master_addr") from error
