"""ropeway generate"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ropeway.cli.failures import told_plainly
from ropeway.cli.options import ConfigFile, Model, resolved, with_settings
from ropeway.cli.sampling import MaxTokens, Seed, Temperature, sampling_params
from ropeway.logs import log_to_stderr
from ropeway.request import RequestOutput

if TYPE_CHECKING:
    from ropeway.engine.messages import EngineInfo


@told_plainly
@with_settings("model", "cache", "scheduler", "engine", "parallel")
def generate(
    model: Model = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The text to continue.", show_default=False)
    ] = None,
    prompt_ids: Annotated[
        str | None, typer.Option(metavar="1,2,3", help="The same as token ids.", show_default=False)
    ] = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = None,
    seed: Seed = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one object: text, token_ids, finish_reason, usage.")
    ] = False,
    timings: Annotated[
        bool,
        typer.Option("--timings", help="With --json: add how long the start took, part by part, and what it holds."),
    ] = False,
    config: ConfigFile = None,
    **flags: Any,
) -> None:
    """Continue one prompt and print the result."""
    given = _prompt(prompt, prompt_ids)
    log_to_stderr(logging.WARNING)
    settings = resolved(model, config, flags).config
    params = sampling_params(settings, max_tokens=max_tokens, temperature=temperature, seed=seed, ignore_eos=ignore_eos)
    from ropeway.engine.startup import StartUp, process_began_s
    from ropeway.llm import LLM

    startup = StartUp(process_began_s())
    startup.ended("python")
    with LLM.from_config(settings, startup) as llm:
        (output,) = llm.generate([given], params, progress=not as_json)
        engine = llm.info if timings else None
        typer.echo(_as_json(output, engine) if as_json else output.text or ",".join(map(str, output.token_ids)))


def _prompt(text: str | None, ids: str | None) -> str | list[int]:
    if (text is None) == (ids is None):
        raise typer.BadParameter("give either --prompt or --prompt-ids")
    if text is not None:
        return text
    try:
        return [int(part) for part in (ids or "").split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--prompt-ids {ids!r} is no list of whole numbers such as 1,2,3") from error


def _as_json(output: RequestOutput, engine: EngineInfo | None) -> str:
    told: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(output.token_ids),
            "cached_tokens": output.cached_tokens,
        },
    }
    if engine is not None:
        told["engine"] = {
            "weight_bytes": engine.weight_bytes,
            "kv_pool_bytes": engine.kv_pool_bytes,
            "startup_s": engine.startup,
        }
    return json.dumps(told, ensure_ascii=False)
