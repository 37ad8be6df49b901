"""vLLM's offline engine. Settings: keyword arguments of ``vllm.LLM``."""

from __future__ import annotations

from typing import Any

from lines import Generate, serve


def start(settings: dict[str, Any]) -> Generate:
    from vllm import LLM, SamplingParams

    engine = LLM(**settings)

    def generate(requests: list[dict[str, Any]]) -> list[list[int]]:
        prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
        params = [
            SamplingParams(temperature=0.0, max_tokens=request["output_tokens"], ignore_eos=True, detokenize=False)
            for request in requests
        ]
        done = engine.generate(prompts, params, use_tqdm=False)
        return [list(each.outputs[0].token_ids) for each in done]

    return generate


if __name__ == "__main__":
    serve(start)
