"""OpenVINO GenAI's continuous batching. Settings: ``model`` (a folder), ``scheduler`` (fields of ``SchedulerConfig``),
``properties`` (of the CPU plugin)."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import openvino_genai
from lines import Generate, serve


def start(settings: dict[str, Any]) -> Generate:
    scheduler = openvino_genai.SchedulerConfig()
    for name, value in settings["scheduler"].items():
        if not hasattr(scheduler, name):
            raise ValueError(f"SchedulerConfig has no field {name}")
        setattr(scheduler, name, value)
    pipeline = openvino_genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", settings["properties"])

    def generate(requests: list[dict[str, Any]]) -> list[list[int]]:
        prompts = [openvino.Tensor(np.array([request["prompt"]], dtype=np.int64)) for request in requests]
        done = pipeline.generate(prompts, [greedy(request["output_tokens"]) for request in requests])
        return [[int(token) for token in each.m_generation_ids[0]] for each in done]

    return generate


def greedy(output_tokens: int) -> openvino_genai.GenerationConfig:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = output_tokens
    config.ignore_eos = True
    config.do_sample = False
    return config


if __name__ == "__main__":
    serve(start)
