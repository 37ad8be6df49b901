"""Whether everybody was served, refused and told as it should be."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from ropeway import errors
from ropeway.outcome import Finished
from ropeway.request import FinishReason, Timeline
from tests.support.fake_device import END, alone

if TYPE_CHECKING:
    from tests.support.world import Record, World

_CODES = {
    "Shed": "shed",
    "QueueFull": "queue_full",
    "QueueTimeout": "queue_timeout",
    "DeadlineExceeded": "deadline_exceeded",
}
"""Error -> the name under which refusals are counted."""
_LATE = ("QueueTimeout", "DeadlineExceeded")
"""Errors of requests whose time is over."""


def check_record(world: World, record: Record) -> None:
    """It got the tokens it gets alone, to their end unless it was refused or given up; and was told so once."""
    arrival, finished, got = record.arrival, record.finished, record.tokens
    limit = min(world.max_len, len(arrival.prompt) + (arrival.params.max_tokens or world.max_len))
    if len(arrival.prompt) >= limit:
        assert finished is not None
        assert finished.refusal is not None
        assert finished.refusal.error == "ContextLengthExceeded"
        assert not got
        return
    end_ids = (() if arrival.params.ignore_eos else (END,)) + arrival.params.stop_token_ids
    want = alone(arrival.prompt, arrival.params, record.new.seed, end_ids, limit)
    _check_prefix_hit(world, record)
    if arrival.params.logprobs is not None:
        assert record.logprobs == [-float(token) for token in got]
    if finished is None:
        assert record.aborted
        assert got == want[: len(got)]
        return
    assert not record.aborted
    assert finished.timeline is not None
    assert finished.timeline.phase == "finished"
    check_timeline(world, record, finished.timeline, record.ended_s)
    if finished.reason is FinishReason.ERROR:
        assert got == want[: len(got)]
        _check_refusal(world, record, finished)
        return
    assert got == want
    assert finished.reason is (FinishReason.STOP if want[-1] in end_ids else FinishReason.LENGTH)
    assert finished.end_token == (want[-1] if want[-1] in end_ids else None)
    assert finished.refusal is None


def check_timeline(world: World, record: Record, timeline: Timeline, now: float) -> None:
    """The phases sum to the time since its arrival; so do the reasons, to the time without a seat, but for what passed
    before the engine heard of it."""
    request = record.request
    assert timeline.tier == world.setup.tiers[record.new.tier].name
    assert timeline.output_tokens == len(record.tokens)
    if request is None:
        refusal = None if record.finished is None else record.finished.refusal
        assert refusal is not None
        assert abs(timeline.total_s - (now - record.arrival_s if refusal.error in _LATE else 0)) < 1e-6
        return
    parts = timeline.queued_s, timeline.prefill_s, timeline.decode_s, timeline.preempted_s, timeline.swapped_s
    assert min(parts) >= 0
    assert abs(timeline.total_s - (now - record.arrival_s)) < 1e-6
    assert sum(timeline.preemptions.values()) == request.preemptions
    assert timeline.cached_tokens == (request.cached_tokens or 0)
    unseated, explained = sum(parts) - timeline.prefill_s - timeline.decode_s, sum(timeline.waits.values())
    assert min(timeline.waits.values(), default=0.0) >= 0
    assert explained <= unseated + 1e-6
    assert explained >= unseated - record.arrival.early_s - 1e-4, "time without a seat that nothing explains"
    if request.gate is None:
        assert "gate" not in timeline.waits
    if request.gated:
        assert set(timeline.waits) <= {"gate"}


def check_ledgers(world: World) -> None:
    """What is counted by tier is what has happened; nobody is left."""
    for rank, ledger in enumerate(world.scheduler.lifecycle.ledgers):
        assert (ledger.waiting, ledger.swapped) == (0, 0)
        records = [record for record in world.records.values() if record.new.tier == rank]
        requests = [record.request for record in records if record.request is not None]
        finished = [record.finished for record in records if record.finished is not None]
        errors_seen = Counter(each.refusal.error for each in finished if each.refusal is not None)
        assert +ledger.refused == +Counter({code: errors_seen[error] for error, code in _CODES.items()})
        served = [r for r in records if r.finished is not None and r.finished.refusal is None]
        assert ledger.finished == len(served)
        assert ledger.output_tokens == sum(len(record.tokens) for record in served)
        assert ledger.predicted_tokens == sum(r.request.predicted_tokens for r in served if r.request is not None)
        kinds = ledger.preemptions
        assert kinds["swap"] + kinds["recompute"] == sum(request.preemptions for request in requests)
        assert kinds["admission"] <= kinds["swap"] + kinds["recompute"]


def _check_refusal(world: World, record: Record, finished: Finished) -> None:
    refusal, tier = finished.refusal, world.setup.tiers[record.new.tier]
    assert refusal is not None
    assert issubclass(getattr(errors, refusal.error), errors.RopewayError)
    assert refusal.message
    match refusal.error:
        case "Shed":
            assert world.config.shed
            assert tier.ttft_s is not None
        case "QueueFull":
            assert tier.max_queue is not None or tier.max_queue_tokens is not None
        case "QueueTimeout":
            assert tier.queue_limit_s is not None
            assert record.ended_s >= record.arrival_s + tier.queue_limit_s
            assert record.request is None or not record.request.started
        case "DeadlineExceeded":
            assert record.new.deadline_s is not None
            assert record.ended_s >= record.new.deadline_s
        case _:
            raise AssertionError(refusal.error)
    if refusal.error not in _LATE:
        assert record.request is None
        assert refusal.retry_after_s is not None
        assert refusal.retry_after_s >= 1


def _check_prefix_hit(world: World, record: Record) -> None:
    """What was found had been left by another call, under the same salt, and is short of the prompt's last token."""
    arrival, cached = record.arrival, record.cached
    assert (cached is None) == (not record.tokens)
    if not cached:
        return
    assert world.setup.prefix_cache
    assert cached <= len(arrival.prompt) - 1
    found = arrival.prompt[:cached]
    first = record.new.id if record.new.leader is None else record.new.leader
    others = [r for r in world.records.values() if first not in (r.new.id, r.new.leader)]
    others += [r for earlier in world.before for r in earlier.records.values()]
    same_salt = (r for r in others if r.arrival.salt == arrival.salt)
    assert any((*r.arrival.prompt, *r.tokens)[:cached] == found for r in same_salt), "nobody could have left this"
