"""API keys: who a caller is, and what a caller may have.

With ``api_key`` there is one key, and all its callers are alike. With ``api_keys`` there is a file of them, in which
each key is known by its SHA-256 only (they are 32 random bytes, which nobody can guess from it)::

    [[key]]
    name = "alice"                 # what logs call it
    sha256 = "5e88489..."          # made by: ropeway keys new alice
    tenant = "team-a"              # default: the name
    tier = "interactive"           # the highest it may ask for, and what it gets by default
    requests_per_minute = 60
    tokens_per_minute = 100000     # of prompts and answers together
    max_concurrent = 8
    share_cache = false            # whether its prompts may hit what other tenants left in the prefix cache
    admin = false                  # whether it may see everybody's requests in the dashboard (never their text)
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from ropeway.errors import ConfigError, QueueFull
from ropeway.settings import read_file
from ropeway.tiers import Tier

logger = logging.getLogger(__name__)

PREFIX = "rw-"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[\w.@-]{1,64}", re.ASCII)


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the file."""

    name: str
    sha256: str
    tenant: str | None = None
    tier: str | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    max_concurrent: int | None = None
    share_cache: bool = False
    admin: bool = False


class TooManyRequests(QueueFull):
    """A caller has used up what its key allows."""

    default_code = "rate_limit_exceeded"


class Allowance:
    """So many units a minute, of which a minute's worth can be saved up. More may be taken than is there; then it takes
    longer until there is something again."""

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_minute / 60
        self._most = max(per_minute, 1.0)
        self._level = self._most
        self._clock = clock
        self._at_s = clock()

    def wait_s(self, least: float = 0.0) -> float:
        """Seconds until something may be taken, of which so much must be there; 0: now."""
        now = self._clock()
        self._level = min(self._level + (now - self._at_s) * self._rate, self._most)
        self._at_s = now
        if self._level > 0 and self._level >= least:
            return 0.0
        return (least - self._level + 1e-9) / self._rate

    def take(self, units: float) -> None:
        self._level -= units


class Caller:
    """Whoever has a key, and what is going on for them."""

    def __init__(self, key: ApiKey, *, rank: int | None = None) -> None:
        """``rank``: of the key's tier."""
        self.key = key
        self.name = key.name
        self.tenant = key.name if key.tenant is None else key.tenant
        self.rank = rank
        self.running = 0
        self._requests = None if key.requests_per_minute is None else Allowance(key.requests_per_minute)
        self._tokens = None if key.tokens_per_minute is None else Allowance(key.tokens_per_minute)

    def salt(self, given: str | None) -> str | None:
        """Under which prefixes are cached for this caller. No caller can spell another one's: what is shared and what
        belongs to a tenant begin differently."""
        if self.key.share_cache:
            return None if given is None else f"shared:{given}"
        return f"tenant:{len(self.tenant)}:{self.tenant}:{given or ''}"

    def begin(self) -> Lease:
        """Let one more request in. Raises ``TooManyRequests`` naming the limit."""
        most = self.key.max_concurrent
        if most is not None and self.running >= most:
            raise TooManyRequests(f"{self.running} requests of this key are under way, as many as it may have at once")
        for allowance, what in ((self._requests, "requests"), (self._tokens, "tokens")):
            # What a request will come to in tokens is known at its end, so it may overdraw them.
            wait_s = 0.0 if allowance is None else allowance.wait_s(1.0 if what == "requests" else 0.0)
            if wait_s > 0:
                limit = getattr(self.key, f"{what}_per_minute")
                raise TooManyRequests(
                    f"this key may have {limit:g} {what} a minute; try again in {wait_s:.1f} s", retry_after_s=wait_s
                )
        if self._requests is not None:
            self._requests.take(1)
        self.running += 1
        return Lease(self)

    def end(self, tokens: int) -> None:
        self.running -= 1
        if self._tokens is not None:
            self._tokens.take(tokens)


class Lease:
    """One request under way."""

    def __init__(self, caller: Caller) -> None:
        self._caller: Caller | None = caller

    def end(self, tokens: int) -> None:
        """It is over, and has had so many tokens. The first time counts."""
        if self._caller is not None:
            self._caller.end(tokens)
            self._caller = None


class KeyRing:
    """All keys of a server."""

    def __init__(self, api_key: str | None, file: Path | None, tiers: Sequence[Tier]) -> None:
        """Raises ``ConfigError`` naming the file, the entry and what is wrong with it."""
        self._file = file
        self._tiers = tiers
        self._one: dict[str, Caller] = {}
        if api_key is not None:
            # A mounted secret ends in a newline, a header never does.
            digest = digest_of(api_key.strip().encode())
            self._one[digest] = Caller(ApiKey(name="api_key", sha256=digest, tenant="", share_cache=True, admin=True))
        self._callers: dict[str, Caller] = dict(self._one)
        if file is not None:
            self.reload()

    @property
    def needed(self) -> bool:
        """Whether callers need a key at all."""
        return self._file is not None or bool(self._one)

    def find(self, given: bytes) -> Caller | None:
        """Whose key this is."""
        return self._callers.get(digest_of(given)) if given else None

    def reload(self) -> int:
        """Read the file again -> how many keys there are. What is under way goes on; a key that is gone or has changed
        counts from then on. Raises ``ConfigError``, and leaves things as they are."""
        if self._file is not None:
            read = {key.sha256: key for key in read_keys(self._file)}
            ranks = {digest: self._rank(key) for digest, key in read.items()}
            kept = {
                digest: known if (known := self._callers.get(digest)) is not None and known.key == key else None
                for digest, key in read.items()
            }
            self._callers = self._one | {
                digest: kept[digest] or Caller(key, rank=ranks[digest]) for digest, key in read.items()
            }
        return len(self._callers)

    def _rank(self, key: ApiKey) -> int | None:
        if key.tier is None:
            return None
        for rank, tier in enumerate(self._tiers):
            if tier.name == key.tier:
                return rank
        known = ", ".join(tier.name for tier in self._tiers)
        raise ConfigError(
            f"{self._file}: key {key.name}: there is no tier {key.tier!r}, only {known}", param="api_keys"
        )


def read_keys(file: Path) -> list[ApiKey]:
    """The keys in a file ending in .toml, .yaml, .yml or .json. Raises ``ConfigError``."""

    def refuse(problem: str) -> ConfigError:
        return ConfigError(f"{file}: {problem}", param="api_keys")

    content: Mapping[str, object] = read_file(file, "api_keys")
    entries = content.get("key", [])
    if set(content) - {"key"} or not isinstance(entries, list):
        raise refuse("keys are given as a list of tables under 'key', and there is nothing else")
    keys: list[ApiKey] = []
    for place, entry in enumerate(entries, 1):
        try:
            key = msgspec.convert(entry, ApiKey)
        except msgspec.ValidationError as error:
            raise refuse(f"key {place}: {str(error).replace('`', '')}") from None
        problem = _problem(key, keys)
        if problem is not None:
            raise refuse(f"key {place}: {problem}")
        keys.append(key)
    return keys


def _problem(key: ApiKey, others: Sequence[ApiKey]) -> str | None:
    if not _NAME.fullmatch(key.name):
        return f"name {key.name!r:.80} must be 1 to 64 letters, digits, or any of _.@-"
    if not _DIGEST.fullmatch(key.sha256):
        return "sha256 must be 64 hexadecimal digits in lower case; make an entry with: ropeway keys new NAME"
    for other in others:
        if key.name == other.name or key.sha256 == other.sha256:
            return f"its name or its sha256 is that of {other.name} too"
    for field in ("requests_per_minute", "tokens_per_minute", "max_concurrent"):
        value = getattr(key, field)
        if value is not None and not 0 < value < math.inf:
            return f"{field} is {value}; it must be above 0 (leave it out for no limit)"
    return None


def digest_of(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()


def new_key() -> str:
    """A key that nobody else has."""
    return PREFIX + secrets.token_urlsafe(32)
