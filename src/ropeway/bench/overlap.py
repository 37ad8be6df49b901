"""How much of the ranks' communication is hidden behind what they compute: steps of prompts run whole, in two
micro-batches, and with fused collectives, in turns.

    kernel overlap    = 1 - exposed / communication          how much of it nobody waited for
    effective overlap = (serial - overlapped) / communication of the serial step    how much faster that made the step

The steps are the engine's own, on rank 0's clock: what the device took from the first embedding to the last layer.
"""

from __future__ import annotations

import dataclasses
import math
import os
import secrets
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Literal

from ropeway.bench.network import TwoHosts
from ropeway.config import Config, ParallelConfig
from ropeway.engine.assembly import Assembly, assemble
from ropeway.errors import ConfigError
from ropeway.execution.ranks.cutting import CutTable, Cutter, measure, prompts_plan
from ropeway.execution.ranks.executor import RanksExecutor
from ropeway.loading.sources import resolve
from ropeway.parallel.overlap import Overlapping
from ropeway.plan import Plan

Mode = Literal["serial", "micro_batch", "fused"]
Kind = Literal["one prompt", "many prompts"]
KINDS: tuple[Kind, ...] = ("one prompt", "many prompts")
MANY = 8
"""Prompts of a step of many."""
_FREE_RATE = "100gbit"
"""More than a core can send."""


@dataclass(frozen=True)
class OverlapRun:
    """Medians over the turns, seconds on rank 0."""

    mode: Mode
    what: str
    tokens: int
    link_rate: str | None
    """None: the ranks are on one host."""
    comm_fraction: float
    """Share of communication in the serial step that ran in turns with this one."""
    wall_s: float
    compute_s: float
    """The step without what it waited for communication."""
    comm_s: float
    exposed_comm_s: float
    """Of that, what nothing was computed during."""
    kernel_overlap: float
    effective_overlap: float
    speedup: float
    """Median over the turns of serial time / this one's."""
    slowest: float
    """Upper 95 % bound of the mean over the turns of this one's time / serial time."""


@dataclass(frozen=True)
class Sample:
    wall_s: float
    comm_s: float
    exposed_s: float


class OverlapBench:
    """An engine on ranks that overlaps in one of the two ways, or not at all."""

    def __init__(self, config: Config, *, fused: bool) -> None:
        """Loads the model. Raises what loading raises."""
        mode: Literal["off", "on"] = "off" if fused else "on"
        parallel = dataclasses.replace(config.parallel, micro_batch=mode, fused_collectives=fused)
        config = dataclasses.replace(config, parallel=parallel)
        self.fused = fused
        self._assembly = assemble(config, resolve(config.model.model), lambda _: None)
        executor, communicator = self._assembly.engine.executor, self._assembly.worker.communicator
        assert isinstance(executor, RanksExecutor)
        assert isinstance(communicator, Overlapping)
        self._executor, self._communicator = executor, communicator
        self._cutter = Cutter("on", self._assembly.worker.model.spec)
        self._longest = self._assembly.info.max_model_len

    @property
    def assembly(self) -> Assembly:
        return self._assembly

    def plan(self, kind: Kind, tokens: int) -> Plan:
        """Raises ``ConfigError`` for a step that the engine cannot run."""
        info, most = self._assembly.info, self._assembly.engine.scheduler.config.max_batched_tokens
        longest = tokens if kind == "one prompt" else -(-tokens // MANY)
        if tokens > most or longest > self._longest or tokens > (info.num_blocks - MANY) * info.block_size:
            raise ConfigError(
                f"a step of {tokens} tokens does not fit: max_batched_tokens is {most}, max_model_len "
                f"{self._longest}, and the KV pool has {info.num_blocks} blocks of {info.block_size}",
                param="prompt_tokens",
            )
        return prompts_plan(tokens, longest, info.block_size)

    def run(self, plan: Plan, *, overlapped: bool) -> Sample:
        """One step, serial or as this engine overlaps."""
        if not self.fused and overlapped:
            plan = self._cutter.cut(plan)
        self._communicator.take()
        wall_s = self._executor.rehearse(plan, fused=self.fused and overlapped)
        spent = self._communicator.take()
        return Sample(wall_s, spent.busy_s, spent.exposed_s)

    def pairs(self, plan: Plan, repeat: int) -> Iterator[tuple[Sample, Sample]]:
        """(serial, overlapped), ``repeat`` times, in turns."""
        for turn in range(repeat + 1):
            order = (False, True) if turn % 2 else (True, False)
            pair = {overlapped: self.run(plan, overlapped=overlapped) for overlapped in order}
            if turn:  # the first touches memory
                yield pair[False], pair[True]

    def table(self, tokens: int) -> CutTable:
        """As ``micro_batch auto`` measures it, for steps up to so many tokens."""
        info = self._assembly.info
        return measure(
            self._executor.rehearse,
            max_tokens=tokens,
            max_model_len=info.max_model_len,
            max_num_seqs=info.max_num_seqs,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
        )

    def close(self) -> None:
        self._assembly.close()


def measure_overlap(
    config: Config,
    *,
    tokens: Sequence[int],
    kinds: Sequence[Kind] = KINDS,
    rates: Sequence[str] = (),
    fractions: Sequence[float] = (),
    fused: bool = True,
    repeat: int = 20,
    progress: Callable[[int, int], None] | None = None,
) -> list[OverlapRun]:
    """All modes on steps of every kind and size. With ``rates`` of a link (as tc(8) writes them), or ``fractions`` of
    the serial step that communication is to take, two ranks on two network namespaces joined by it, each with a core
    of its own; else the configured ranks on this host. ``repeat``: turns of each.

    Raises ``NoNetwork``, ``ConfigError`` and what loading raises."""
    links: list[str | float | None] = [*rates, *fractions] or [None]
    cases = list(product(links, tokens, kinds))
    engines = (False, True) if fused else (False,)
    total, done = len(cases) * len(engines) * repeat, 0
    runs: list[OverlapRun] = []
    with _ranks(config, netns=bool(rates or fractions)) as (config, hosts):
        for is_fused in engines:
            with _engine(config, hosts, is_fused) as bench:
                for link, count, kind in cases:
                    plan = bench.plan(kind, count)
                    rate = _set_rate(bench, hosts, link, plan)
                    pairs = []
                    for pair in bench.pairs(plan, repeat):
                        pairs.append(pair)
                        done += 1
                        if progress is not None:
                            progress(done, total)
                    runs += _figures("fused" if is_fused else "micro_batch", kind, count, rate, pairs)
    return runs


def measure_auto(
    config: Config, *, rate: str, tokens: Sequence[int], repeat: int = 20
) -> tuple[CutTable, list[OverlapRun]]:
    """What ``micro_batch auto`` would decide by over a link of this rate, and steps of these sizes that it cuts, in
    turns with whole ones. Those that it does not cut are whole."""
    with between_hosts(config, rate) as bench:
        table = bench.table(max(tokens))
        runs = []
        for count in filter(table.pays, tokens):
            pairs = list(bench.pairs(bench.plan("one prompt", count), repeat))
            runs.append(_figures("micro_batch", "one prompt", count, rate, pairs)[1])
    return table, runs


@contextmanager
def between_hosts(config: Config, rate: str) -> Iterator[OverlapBench]:
    """Micro-batches on two ranks in two network namespaces joined by a link of this rate, with a core each. This
    process is rank 0. Raises ``NoNetwork``, ``ConfigError`` and what loading raises."""
    with _ranks(config, netns=True) as (config, hosts), _engine(config, hosts, fused=False) as bench:
        assert hosts is not None
        hosts.limit(rate)
        yield bench


def crossover(runs: Sequence[OverlapRun]) -> list[dict[str, object]]:
    """For every kind of step, link and size: the mode with the largest speed-up over the serial steps it took turns
    with, which is "serial" where none has any."""
    best: dict[tuple[str, str | None, int], OverlapRun] = {}
    for run in runs:
        key = run.what, run.link_rate, run.tokens
        if key not in best or run.speedup > best[key].speedup:
            best[key] = run
    return [
        {"what": what, "link_rate": rate, "tokens": count, "best": run.mode, "speedup": run.speedup}
        for (what, rate, count), run in sorted(best.items(), key=lambda item: (item[0][0], str(item[0][1]), item[0][2]))
    ]


def upper_bound(values: Sequence[float]) -> float:
    """Of the mean, 95 %, one-sided; Student's t by its expansion in the normal quantile (Abramowitz and Stegun,
    26.7.5). Infinite for a single value."""
    freedom = len(values) - 1
    if freedom < 1:
        return math.inf
    z = statistics.NormalDist().inv_cdf(0.95)
    t = z + (z**3 + z) / (4 * freedom)
    return statistics.fmean(values) + t * statistics.stdev(values) / math.sqrt(len(values))


def _figures(
    mode: Mode, kind: Kind, tokens: int, rate: str | None, pairs: Sequence[tuple[Sample, Sample]]
) -> list[OverlapRun]:
    """Of the serial steps and the overlapped ones that took turns."""

    def median(samples: Sequence[Sample]) -> Sample:
        columns = zip(*((each.wall_s, each.comm_s, each.exposed_s) for each in samples), strict=True)
        return Sample(*(statistics.median(column) for column in columns))

    whole, parts = (median(column) for column in zip(*pairs, strict=True))
    speedup = statistics.median(a.wall_s / b.wall_s for a, b in pairs)
    slowest = upper_bound([b.wall_s / a.wall_s for a, b in pairs])
    both: tuple[tuple[Mode, Sample, float, float], ...] = (("serial", whole, 1.0, 1.0), (mode, parts, speedup, slowest))
    made = []
    for name, sample, gain, bound in both:
        made.append(
            OverlapRun(
                mode=name,
                what=kind,
                tokens=tokens,
                link_rate=rate,
                comm_fraction=whole.comm_s / whole.wall_s,
                wall_s=sample.wall_s,
                compute_s=sample.wall_s - sample.exposed_s,
                comm_s=sample.comm_s,
                exposed_comm_s=sample.exposed_s,
                kernel_overlap=1 - sample.exposed_s / sample.comm_s,
                effective_overlap=(whole.wall_s - sample.wall_s) / whole.comm_s,
                speedup=gain,
                slowest=bound,
            )
        )
    return made


def _set_rate(bench: OverlapBench, hosts: TwoHosts | None, link: str | float | None, plan: Plan) -> str | None:
    """The link's rate from here on; that of a fraction follows from what the step takes without the link."""
    if hosts is None or link is None:
        return None
    if isinstance(link, str):
        hosts.limit(link)
        return link
    hosts.limit(_FREE_RATE)
    samples = [bench.run(plan, overlapped=False) for _ in range(4)][1:]
    compute_s = statistics.median(each.wall_s - each.comm_s for each in samples)
    wanted_s = link / (1 - link) * compute_s
    spec = bench.assembly.worker.model.spec
    sent = 4 * spec.hidden_size * (2 * spec.num_layers + 1) * plan.num_tokens  # bytes, each way
    mbit = 8e-6 * sent / wanted_s
    hosts.limit(f"{mbit:.0f}mbit")
    bench.run(plan, overlapped=False)
    # What else a byte costs beside the cable's time.
    mbit *= bench.run(plan, overlapped=False).comm_s / wanted_s
    rate = f"{mbit:.0f}mbit"
    hosts.limit(rate)
    return rate


@contextmanager
def _ranks(config: Config, *, netns: bool) -> Iterator[tuple[Config, TwoHosts | None]]:
    """Where the ranks are to be, and the config for that. In namespaces, this process is on the first host and on one
    core."""
    if not netns:
        yield config, None
        return
    if config.parallel.collectives == "shared":
        raise ConfigError("hosts share no memory; use collectives tcp or gloo", param="collectives")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise ConfigError("two ranks need a core each; this process may use one")
    parallel = ParallelConfig(
        tensor_parallel_size=2,
        nnodes=2,
        master_addr=TwoHosts.addresses[0],
        cluster_secret=secrets.token_hex(16),
        collectives=config.parallel.collectives,
    )
    engine = dataclasses.replace(config.engine, threads=1)
    os.sched_setaffinity(0, {cores[0]})
    try:
        with TwoHosts() as hosts, hosts.first():
            yield dataclasses.replace(config, parallel=parallel, engine=engine), hosts
    finally:
        os.sched_setaffinity(0, cores)


@contextmanager
def _engine(config: Config, hosts: TwoHosts | None, fused: bool) -> Iterator[OverlapBench]:
    with ExitStack() as stack:
        if hosts is not None:
            if fused:  # the ports of the engine before may not be free yet
                port = config.parallel.master_port + 3
                config = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, master_port=port))
            stack.enter_context(_second_node(config.parallel, hosts))
        bench = OverlapBench(config, fused=fused)
        stack.callback(bench.close)
        yield bench


@contextmanager
def _second_node(parallel: ParallelConfig, hosts: TwoHosts) -> Iterator[None]:
    """The other host's ranks, as a user starts them."""
    command = [
        *(sys.executable, "-m", "ropeway", "serve"),
        *("--tensor-parallel-size", "2", "--nnodes", "2", "--node-rank", "1"),
        *("--master-addr", parallel.master_addr, "--master-port", str(parallel.master_port)),
    ]
    assert parallel.cluster_secret is not None
    environment = os.environ | {"ROPEWAY_CLUSTER_SECRET": parallel.cluster_secret}
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(range(os.cpu_count() or 2)) - own)  # inherited by what is started now
    try:
        node = subprocess.Popen(hosts.on_second(command), env=environment)
    finally:
        os.sched_setaffinity(0, own)
    try:
        yield
    finally:
        try:
            node.wait(10)
        except subprocess.TimeoutExpired:
            node.kill()
            node.wait()
