"""One device with its part of the model: runs plans.

A step has two halves. What follows from its plan alone (positions, block tables, sampling parameters) is made on the
thread that submits it, while the device still computes the step before. What the device does is submitted to its
stream: there it is a few native calls where the device captured the model, and the model's own Python where it did not.
"""

from __future__ import annotations

import time

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ropeway.devices.base import AttentionPlan, Device, KVCache, Sampled, SampleInputs
from ropeway.devices.programs import PreparedSample, PreparedStep, Program, ProgramInput
from ropeway.execution.batch import Batch, build_batch, cut_plan
from ropeway.execution.rows import PromptPositions, Rows
from ropeway.models.model import Model
from ropeway.outcome import LogprobColumns, PromptLogprobColumns
from ropeway.parallel.communicator import Communicator, SingleProcess
from ropeway.parallel.overlap import Overlapping
from ropeway.plan import Masks, Plan, Result
from ropeway.trace import COMPUTE, Trace

_NO_TOKENS = np.empty(0, dtype=np.int32)
_INTS = ProgramInput()
_PROMPT_ROWS = 32
"""Of logits that are held at once for log-probabilities of prompts."""


class Worker:
    """Holds the rows, the KV cache and the model, captured where the device can."""

    def __init__(
        self,
        device: Device,
        model: Model,
        cache: KVCache,
        *,
        max_num_seqs: int,
        max_step_tokens: int,
        max_model_len: int,
        vocab_size: int,
        host: NDArray[np.uint8] | None = None,
        communicator: Communicator = SingleProcess(),
        micro_batches: bool = False,
    ) -> None:
        """``vocab_size``: ids from here on are never sampled, though the model may have logits for them. ``host``:
        uint8 [host blocks, block bytes], where plans copy blocks to and from. ``communicator``: the model's.
        ``micro_batches``: whether plans may be cut in two, which takes activations twice and a communicator that
        overlaps. Raises ``OutOfMemory`` where there is no room for the activations of ``max_step_tokens``."""
        self.device = device
        self.model = model
        self.cache = cache
        self.vocab_size = vocab_size
        self.host = host
        self.communicator = communicator
        self._trace: Trace | None = None
        self.rows = Rows(device, max_num_seqs, max_model_len, cache.block_size)
        self.forward_program = capture_forward(device, model, cache, max_step_tokens)
        self.logits_program = device.capture(
            lambda hidden, _: model.logits(hidden), (ProgramInput(model.spec.hidden_size),), max_num_seqs
        )

        self._fused_blocks = communicator.fused_blocks if isinstance(communicator, Overlapping) else 0
        self._second_arena: Tensor | None = None
        if micro_batches and self.forward_program is not None:
            self._second_arena = self.forward_program.arena()

    @property
    def programs(self) -> list[Program]:
        """What the device captured of the model."""
        return [program for program in (self.forward_program, self.logits_program) if program is not None]

    def begin(self, plan: Plan) -> Step:
        """Take over a plan's seats and blocks, and make its batch. Called in plan order."""
        self.rows.apply(plan)
        if not len(plan.slot):
            return Step(self, plan, None, None)
        batch = self._batch(plan)
        prompts = self.rows.prompts_told(plan)
        if prompts is not None:
            return Step(self, plan, batch, None, prompts=prompts)
        if plan.cut:
            first, second = cut_plan(plan, plan.cut)
            return Step(self, plan, batch, None, (self._batch(first), self._batch(second)))
        return Step(self, plan, batch, self._prepare(batch))

    def _batch(self, plan: Plan) -> Batch:
        return build_batch(plan, self.rows, self.device, self.cache.block_size)

    def _prepare(self, batch: Batch) -> PreparedStep | None:
        forward, logits = self.forward_program, self.logits_program
        if forward is None or logits is None:
            return None
        tokens = self.rows.tokens
        return self.device.prepare_step(
            forward, logits, self.cache, tokens, batch.slot_of_token, batch.shape, batch.sampled
        )

    @property
    def trace(self) -> Trace | None:
        """Takes what the device does when."""
        return self._trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._trace = trace
        if isinstance(self.communicator, Overlapping):
            self.communicator.trace = trace

    def close(self) -> None:
        """Finish what the device is doing and give it back."""
        self.device.close()
        if isinstance(self.communicator, Overlapping):
            self.communicator.close()

    def fuse(self, on: bool) -> None:
        """Fuse collectives with products, where that was configured, from the next step on; on the device's stream."""
        if isinstance(self.communicator, Overlapping):
            self.communicator.fused_blocks = self._fused_blocks if on else 0

    def copy(self, plan: Plan) -> None:
        """Copy the plan's blocks, to the host first. Raises ``RuntimeError`` for copies without host memory."""
        if not plan.copies:
            return
        if self.host is None:
            raise RuntimeError("a plan copies blocks, but the worker has no host memory")
        if len(plan.to_host):
            self.cache.to_host(plan.to_host[:, 0], self.host, plan.to_host[:, 1])
        if len(plan.to_device):
            self.cache.to_device(plan.to_device[:, 0], self.host, plan.to_device[:, 1])

    @torch.inference_mode()
    def compute(self, batch: Batch) -> Tensor | None:
        """Keys and values of all positions, and the logits of the sampling rows, if there are any: float32
        [s, vocabulary], valid until the next step."""
        hidden = self._sampled_rows(batch, self._hidden(batch))
        return self._logits(hidden)[:, : self.vocab_size] if len(hidden) else None

    @torch.inference_mode()
    def compute_with_prompts(
        self, batch: Batch, prompts: PromptPositions
    ) -> tuple[Tensor | None, PromptLogprobColumns]:
        """As ``compute``, and the log-probabilities of tokens of prompts."""
        hidden = self._hidden(batch)
        told = self._prompt_logprobs(hidden, prompts)  # first: the sampling rows' logits are to stand
        sampled = self._sampled_rows(batch, hidden)
        return (self._logits(sampled)[:, : self.vocab_size] if len(sampled) else None), told

    def _prompt_logprobs(self, hidden: Tensor, prompts: PromptPositions) -> PromptLogprobColumns:
        """In slices, so that the memory of logits is that of a few rows however long the prompt."""
        most = _PROMPT_ROWS if self.logits_program is None else min(_PROMPT_ROWS, self.logits_program.max_rows)
        up, down, kernels = self.device.upload, self.device.download, self.device.kernels
        token = down(kernels.read_tokens(self.rows.tokens, up(prompts.slot), up(prompts.position + 1)))
        parts: list[tuple[Tensor, ...]] = []
        for first in range(0, len(token), most):
            rows = up(prompts.token[first : first + most])
            logits = self._logits(kernels.take(hidden, rows))[:, : self.vocab_size]
            logprobs = logits.log_softmax(-1)
            chosen = logprobs.gather(1, up(token[first : first + most]).long()[:, None])
            rank = (logprobs > chosen).sum(1, dtype=torch.int32) + 1
            top, ids = logprobs.topk(min(prompts.top, self.vocab_size), dim=-1)
            parts.append((chosen[:, 0], rank, ids.int(), top))
        columns = [down(torch.cat(each)) for each in zip(*parts, strict=True)]
        return PromptLogprobColumns(prompts.request, prompts.position + 1, token, *columns)

    @torch.inference_mode()
    def compute_both(self, first: Batch, second: Batch) -> Tensor | None:
        """The same of two micro-batches, of which the first's tokens come before the second's. They are joined before
        the final norm."""
        assert isinstance(self.communicator, Overlapping)
        hidden = torch.cat(
            self.communicator.both(
                lambda: self._sampled_rows(first, self._hidden(first)),
                lambda: self._sampled_rows(second, self._hidden(second, self._second_arena)),
            )
        )
        return self._logits(hidden)[:, : self.vocab_size] if len(hidden) else None

    def _sampled_rows(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Of the hidden states of a batch's tokens, those that are sampled."""
        if len(batch.slots) == len(hidden):
            return hidden
        return self.device.kernels.take(hidden, batch.sampled)

    @torch.inference_mode()
    def hidden_states(self, plan: Plan) -> Tensor:
        """A forward without sampling -> float32 [tokens, hidden] of all its tokens, as ``Model.logits`` takes them,
        valid until the next one. For measuring: a step that is sampled keeps those of its sampling rows alone."""
        self.rows.apply(plan)
        self.rows.write_prompts(plan.seats)
        return self._hidden(self._batch(plan))

    def _hidden(self, batch: Batch, arena: Tensor | None = None) -> Tensor:
        kernels = self.device.kernels
        plan = kernels.plan_attention(self.cache, batch.shape)
        ids = kernels.read_tokens(self.rows.tokens, batch.slot_of_token, batch.shape.positions)
        return self._forward(ids, batch.shape.positions, plan, arena)

    @torch.inference_mode()
    def sample(self, logits: Tensor, inputs: SampleInputs) -> Sampled:
        """Choose a token for every sampling row, and append it to its row."""
        kernels = self.device.kernels
        sampled = kernels.sample(logits, inputs)
        kernels.write_tokens(self.rows.tokens, inputs.slots, inputs.lengths, sampled.token_ids)
        return sampled

    def _forward(self, ids: Tensor, positions: Tensor, plan: AttentionPlan, arena: Tensor | None) -> Tensor:
        if self.forward_program is not None:
            return self.forward_program.run(ids, positions, plan=plan, arena=arena)
        return self.model.forward(ids, positions, self.cache, plan)

    def _logits(self, hidden: Tensor) -> Tensor:
        if self.logits_program is not None:
            return self.logits_program.run(hidden)
        return self.model.logits(hidden)


def capture_forward(device: Device, model: Model, cache: KVCache, max_step_tokens: int) -> Program | None:
    """See ``Device.capture``."""
    return device.capture(
        lambda ids, positions, plan: model.forward(ids, positions, cache, plan), (_INTS, _INTS), max_step_tokens
    )


class Step:
    """One plan on its way. ``forward`` and ``sample`` run on the device's stream, in plan order, each once; the others
    where the step is submitted."""

    def __init__(
        self,
        worker: Worker,
        plan: Plan,
        batch: Batch | None,
        prepared: PreparedStep | None,
        micro_batches: tuple[Batch, Batch] | None = None,
        prompts: PromptPositions | None = None,
    ) -> None:
        self.plan = plan
        self._prompts = prompts
        self._prompt_logprobs: PromptLogprobColumns | None = None
        self._micro_batches = micro_batches
        self._worker = worker
        self._batch = batch
        self._prepared = prepared
        self._prepared_sample: PreparedSample | None = None
        self._logits: Tensor | None = None
        self._inputs: SampleInputs | None = None
        self._sampled: Sampled | None = None
        self._copy_s = self._device_s = 0.0

    def forward(self) -> None:
        """Copy the plan's blocks; then write the tokens of those who take a seat, and compute."""
        began = time.perf_counter()
        self._worker.copy(self.plan)
        copied = time.perf_counter()
        self._worker.rows.write_prompts(self.plan.seats)
        if self._prepared is not None:
            self._prepared.run()
            self._logits = self._prepared.logits
        elif self._micro_batches is not None:
            self._logits = self._worker.compute_both(*self._micro_batches)
        elif self._batch is not None and self._prompts is not None:
            self._logits, self._prompt_logprobs = self._worker.compute_with_prompts(self._batch, self._prompts)
        elif self._batch is not None:
            self._logits = self._worker.compute(self._batch)
        ended = time.perf_counter()
        self._copy_s, self._device_s = copied - began, ended - copied
        if (trace := self._worker.trace) is not None:
            if self.plan.copies:
                trace.add(COMPUTE, "copies", began, copied)
            if self._micro_batches is None:  # which tell of themselves
                trace.add(COMPUTE, "forward", copied, ended, step=self.plan.seq, tokens=self.plan.num_tokens)

    def prepare_sampling(self, masks: Masks | None = None) -> None:
        """Gather the sampling parameters of the step's rows, from what is known now."""
        batch = self._batch
        if batch is None or not len(batch.slots):
            return
        self._inputs = self._worker.rows.sample_inputs(batch.slots, batch.lengths, masks)
        if self._prepared is not None:
            self._prepared_sample = self._prepared.prepare_sample(self._inputs, self._worker.vocab_size)

    def sample(self) -> None:
        """Choose the tokens and append them to their rows; nothing where the forward failed."""
        logits, inputs = self._logits, self._inputs
        if logits is None or inputs is None:
            return
        began = time.perf_counter()
        if self._prepared_sample is not None:
            self._prepared_sample.run()
            self._sampled = self._prepared_sample.sampled
        else:
            self._sampled = self._worker.sample(logits, inputs)
        self._worker.communicator.broadcast(self._sampled.token_ids)
        self._logits = None
        ended = time.perf_counter()
        self._device_s += ended - began
        if (trace := self._worker.trace) is not None:
            trace.add(COMPUTE, "sample", began, ended, step=self.plan.seq)

    def follow(self) -> None:
        """Instead of ``sample`` on other ranks than 0: append to their rows the tokens that one chooses."""
        batch = self._batch
        if batch is None or not len(batch.slots):
            return
        worker = self._worker
        up = worker.device.upload
        token_ids = up(np.empty(len(batch.slots), dtype=np.int32))
        worker.communicator.broadcast(token_ids)
        worker.device.kernels.write_tokens(worker.rows.tokens, up(batch.slots), up(batch.lengths), token_ids)

    def result(self) -> Result:
        """What was sampled, on the host; after ``sample``."""
        sampled, batch = self._sampled, self._batch
        if sampled is None or batch is None:
            token_ids, logprobs = _NO_TOKENS, None
        else:
            token_ids, logprobs = self._worker.device.download(sampled.token_ids), self._logprobs(sampled)
        return Result(token_ids, logprobs, self._device_s, self._copy_s, self._prompt_logprobs)

    def _logprobs(self, sampled: Sampled) -> LogprobColumns | None:
        if sampled.logprobs is None or sampled.top_ids is None or sampled.top_logprobs is None:
            return None
        assert self._inputs is not None
        down = self._worker.device.download
        row = np.flatnonzero(down(self._inputs.top_logprobs) >= 0).astype(np.int32)
        return LogprobColumns(
            row=row,
            chosen=down(sampled.logprobs)[row],
            top_ids=down(sampled.top_ids)[row],
            top=down(sampled.top_logprobs)[row],
        )
