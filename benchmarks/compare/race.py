"""Engines in turns: round by round, each setting of each engine once, the order turned around every time.

Machines drift: a shared host is a third slower an hour later. So no engine runs all its rounds in a row, and figures
are compared within one race only."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import ropeway
from benchmarks.compare.checkpoints import ModelFiles
from benchmarks.compare.engines.base import Engine, Place, Prompt, Ran, Running, ScenarioName, Setting, checked
from benchmarks.compare.environments import Say, Unavailable
from benchmarks.compare.process import EngineFailed
from benchmarks.compare.scenarios import SCENARIO_TIMEOUT_S, Course, Measured
from benchmarks.compare.store import Round, Store
from ropeway.bench.machine import StolenTime
from ropeway.errors import RopewayError


@dataclass
class Entry:
    """One setting of one engine in a race, and how it has done."""

    engine: Engine
    setting: Setting
    version: str = ""
    rounds: list[Round] = field(default_factory=list)
    out: str | None = None
    """Why it does not take part any more: it could not be prepared, or it failed."""

    @property
    def name(self) -> str:
        return f"{self.engine.name} {self.setting.name}"

    @property
    def fingerprint(self) -> str:
        """Another one makes stored rounds worthless."""
        environment = self.engine.environment
        told = [asdict(self.setting), self.version, environment and environment.requirements]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()


class Race:
    """Engines, a model and a course."""

    def __init__(
        self,
        engines: Sequence[Engine],
        files: ModelFiles,
        course: Course,
        place: Place,
        store: Store,
        say: Say,
        *,
        weights: Sequence[str],
    ) -> None:
        """``weights``: only settings with weights of these precisions take part."""
        self.files, self.course, self.place, self.store, self.say = files, course, place, store, say
        self.entries = [
            Entry(engine, setting)
            for engine in engines
            for setting in engine.settings(files)
            if setting.weights in weights
        ]
        self._uninstallable: dict[str, str] = {}

    def run(self, rounds: int) -> None:
        """Prepare all entries, then run what is not in the store yet. An entry that cannot take part is out, with the
        reason; the others go on."""
        for entry in self.entries:
            self._prepare(entry)
        for number in range(rounds):
            for entry in self.entries if number % 2 == 0 else self.entries[::-1]:
                if entry.out is None:
                    self._round(entry, number)

    def _prepare(self, entry: Entry) -> None:
        try:
            self._install(entry.engine)
            entry.engine.prepare(entry.setting, self.files, self.place, self.say)
            entry.version = entry.engine.version(self.place)
        except (Unavailable, RopewayError) as reason:
            entry.out = str(reason)
            self.say(f"{entry.name} does not take part: {reason}")

    def _install(self, engine: Engine) -> None:
        """What failed once is not tried again for every setting."""
        if engine.name in self._uninstallable:
            raise Unavailable(self._uninstallable[engine.name])
        try:
            if engine.environment is not None:
                engine.environment.ensure(self.place.environments, self.say)
        except Unavailable as reason:
            self._uninstallable[engine.name] = str(reason)
            raise

    def _round(self, entry: Entry, number: int) -> None:
        key = (entry.engine.name, entry.setting.name, entry.fingerprint, number)
        done = self.store.get(*key)
        if done is None:
            try:
                done = self._measure(entry, number)
            except EngineFailed as error:
                entry.out = str(error)
                self.say(f"{entry.name} fails: {error}")
                return
            self.store.put(*key, done)
            self.say(f"round {number + 1}: {entry.name}: {_told(done)}")
        entry.rounds.append(done)

    def _measure(self, entry: Entry, number: int) -> Round:
        measured: dict[str, Measured] = {}
        load_s, peak_bytes = 0.0, 0
        stolen = StolenTime()
        for group in entry.engine.groups:
            running = entry.engine.start(entry.setting, self.files, self.place, self.course.load(group))
            try:
                load_s = max(load_s, running.load_s)
                measured |= self._scenarios(running, group, number)
                running.process.memory.look()
            finally:
                running.stop()
            peak_bytes = max(peak_bytes, running.process.memory.peak_bytes)
        return Round(measured, load_s, peak_bytes, stolen.fraction)

    def _scenarios(self, running: Running, group: Sequence[ScenarioName], seed: int) -> dict[str, Measured]:
        def ask(prompts: Sequence[Prompt]) -> Ran:
            return checked(running.run(prompts, SCENARIO_TIMEOUT_S), prompts)

        vocab_size = self.files.vocab_size
        for prompts in self.course.warm_up(group, vocab_size):
            ask(prompts)
        return {name: self.course.measure(name, ask, vocab_size, seed) for name in group}


def ropeway_digest() -> str:
    """Changes with Ropeway's code, the compiled one included."""
    package = Path(ropeway.__file__).parent
    digest = hashlib.sha256()
    for file in sorted([*package.rglob("*.py"), *package.rglob("*.so")]):
        digest.update(file.relative_to(package).as_posix().encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _told(done: Round) -> str:
    rates = ", ".join(f"{name} {measured.tokens_per_s[0]:.1f}" for name, measured in done.scenarios.items())
    return f"{rates} tokens/s; load {done.load_s:.1f} s, {done.peak_memory_bytes / 1e9:.2f} GB"
