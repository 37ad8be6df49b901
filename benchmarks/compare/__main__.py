"""Race Ropeway against other engines: the same model, the same requests, in turns.

python -m benchmarks.compare --shape qwen3-0.6b         # random weights of that shape; hours on two cores
python -m benchmarks.compare smollm2-135m --engines ropeway,llama.cpp --rounds 1
python -m benchmarks.compare --shape qwen3-0.6b --resume   # go on where an interrupted race stopped
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.compare.competition import ENGINES, MIXED, WEIGHTS, Options, compare, default_cache
from benchmarks.compare.report import markdown, plot
from ropeway.bench.report import reported_to
from ropeway.bench.shapes import SHAPES
from ropeway.cli.failures import told_plainly

RESULTS = Path(__file__).parents[1] / "results"


@told_plainly
def _main(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder with safetensors, a .gguf file, or a built-in name.", show_default=False),
    ] = None,
    shape: Annotated[str | None, typer.Option(help=f"Random weights instead: {', '.join(SHAPES)}.")] = None,
    workload: Annotated[Path, typer.Option(metavar="FILE.jsonl", help="Requests of the batch.")] = MIXED,
    requests: Annotated[int | None, typer.Option(min=1, help="Only the first N of the workload.")] = None,
    engines: Annotated[str, typer.Option(help="Which, with commas between them.")] = ",".join(ENGINES),
    weights: Annotated[str, typer.Option(help="Only settings with weights of these precisions.")] = ",".join(WEIGHTS),
    rounds: Annotated[int, typer.Option(min=1, help="Times that every setting runs.")] = 3,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the rounds of an earlier run of this race.")] = False,
    prefill_tokens: Annotated[int, typer.Option(min=1, help="Prompt of the prefill.")] = 2048,
    decode_tokens: Annotated[int, typer.Option(min=2, help="Output of the single request.")] = 128,
    kv_gib: Annotated[float, typer.Option(min=1, help="GiB for keys and values, for every engine.")] = 4,
    cache: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Environments, converted models, rounds: some 20 GB.", show_default=False),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", help="Figures; the table (.md) and plot (.svg) go beside.", show_default=False
        ),
    ] = None,
) -> None:
    """Run a race; print and write its table."""
    if (model is None) == (shape is None):
        raise typer.BadParameter("name either a MODEL or a --shape")
    options = Options(
        model=model,
        shape=shape,
        workload=workload,
        requests=requests,
        engines=_words(engines, ENGINES, "engine"),
        weights=_words(weights, WEIGHTS, "precision"),
        rounds=rounds,
        resume=resume,
        prefill_tokens=prefill_tokens,
        decode_tokens=decode_tokens,
        kv_bytes=int(kv_gib * 2**30),
        cache=cache or default_cache(),
    )
    file = json_file or RESULTS / f"compare_{options.name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    with reported_to(file) as report:
        report["command"] = " ".join(["python -m benchmarks.compare", *sys.argv[1:]])
        report.update(compare(options, lambda text: typer.echo(text, err=True)))
    text = markdown(report)
    file.with_suffix(".md").write_text(text)
    if any(row["medians"] for row in report["entries"]):
        plot(report, file.with_suffix(".svg"))
    typer.echo(text)


def _words(text: str, known: tuple[str, ...], what: str) -> tuple[str, ...]:
    words = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    for word in words:
        if word not in known:
            raise typer.BadParameter(f"there is no {what} {word!r}; known are {', '.join(known)}")
    if not words:
        raise typer.BadParameter(f"name at least one {what} of {', '.join(known)}")
    return words


if __name__ == "__main__":
    typer.run(_main)
