"""``LLM`` over the tiny chat model, and copies of that model with a few files changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ropeway import LLM, RequestOutput, SamplingParams
from tests.support.chat_model import tiny_chat_model

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tiny_llm(model: Path | None = None, **fields: Any) -> LLM:
    """Eight seats, 64 tokens a step, room for everybody; ``fields`` win."""
    defaults = {"threads": 1, "max_num_seqs": 8, "max_batched_tokens": 64, "kv_blocks": 512}
    return LLM(str(model or tiny_chat_model()), **{**defaults, **fields})


def model_copy(folder: Path, *, without: str = "", generation_config: dict[str, Any] | None = None) -> Path:
    """A copy of the tiny chat model in ``folder``, less the files whose name begins with ``without``."""
    ignored = shutil.ignore_patterns(f"{without}*") if without else None
    copy = Path(shutil.copytree(tiny_chat_model(), folder / "copy", ignore=ignored))
    if generation_config is not None:
        (copy / "generation_config.json").write_text(json.dumps(generation_config))
    return copy


def tokens(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[list[int]]:
    """Token ids of the first completion of every prompt."""
    return [output.token_ids for output in llm.generate(prompts, params, progress=False)]


def one(llm: LLM, prompt: list[int] | str, **params: Any) -> RequestOutput:
    """A single greedy request unless ``params`` say otherwise."""
    (output,) = llm.generate(prompt, SamplingParams(**{"temperature": 0, **params}), progress=False)
    return output


def idle(llm: LLM) -> bool:
    """Whether nothing is under way and every block has been given back."""
    pool = llm.engine.scheduler.pool
    llm.engine.scheduler.check()
    return not llm.engine.has_work and pool.live == 0 and pool.cached + pool.free == pool.num_blocks
