"""Ropeway's step loop in one process, token ids in and out. Settings: flat names of ``ropeway.config``."""

from __future__ import annotations

from typing import Any

from lines import Generate, serve

from ropeway.bench.driver import Driver
from ropeway.bench.workload import WorkloadRequest
from ropeway.settings import resolve


def start(settings: dict[str, Any]) -> Generate:
    driver = Driver(resolve(settings, environ={}).config)

    def generate(requests: list[dict[str, Any]]) -> list[list[int]]:
        workload = [
            WorkloadRequest(
                prompt_tokens=len(request["prompt"]),
                output_tokens=request["output_tokens"],
                prompt_token_ids=tuple(request["prompt"]),
            )
            for request in requests
        ]
        return [record.token_ids for record in driver.run(workload).requests]

    return generate


if __name__ == "__main__":
    serve(start)
