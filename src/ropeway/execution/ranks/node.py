"""The ranks of a host other than the first: ``ropeway serve --nnodes 2 --node-rank 1 --master-addr ...``."""

from __future__ import annotations

import logging
import signal
import time

from ropeway.config import ParallelConfig
from ropeway.execution.ranks.messages import meeting_of
from ropeway.execution.ranks.processes import end, ending, start_rank

log = logging.getLogger(__name__)

_LOOK_S = 0.1


def run_node(parallel: ParallelConfig) -> int:
    """Start this host's ranks and wait until they end, with the engine or because of a failure, or until SIGTERM or
    SIGINT; the exit code. Raises ``ConfigError``."""
    told: list[int] = []
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, _: told.append(number))
    ranks = parallel.ranks_of_node
    processes = {}
    try:
        for rank in ranks:
            processes[rank] = start_rank(meeting_of(parallel, rank))
        which = f"rank {ranks[0]} looks" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]} look"
        log.info("%s for rank 0 at %s:%d", which, parallel.master_addr, parallel.master_port)
        while not told:
            codes = {rank: process.poll() for rank, process in processes.items()}
            for rank, code in codes.items():
                if code:
                    log.error("rank %d has ended (%s), and so this host's ranks do", rank, ending(code))
                    return 1
            if all(code == 0 for code in codes.values()):
                return 0
            time.sleep(_LOOK_S)
        return 0
    finally:
        end(processes.values())
