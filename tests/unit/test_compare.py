"""The race against other engines: what is measured, what is kept, what is told. Ropeway runs for real on a tiny model;
engines that misbehave are small scripts in processes of their own."""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import textwrap
import time
import zipfile

import psutil
import pytest
import torch
import typer
from safetensors.torch import load_file
from typer.testing import CliRunner

from benchmarks.compare import __main__ as command
from benchmarks.compare import competition
from benchmarks.compare.checkpoints import ModelFiles, write_gguf
from benchmarks.compare.competition import Options
from benchmarks.compare.engines.base import SCENARIOS, WORKERS, Place, Prompt, Ran, RunningWorker, Setting, checked
from benchmarks.compare.engines.llama_cpp import LlamaCpp, link_libraries
from benchmarks.compare.engines.openvino import OpenVINO
from benchmarks.compare.engines.ropeway import Ropeway
from benchmarks.compare.engines.vllm import VLLM
from benchmarks.compare.environments import Environment, Unavailable
from benchmarks.compare.process import EngineFailed, EngineProcess
from benchmarks.compare.race import Race
from benchmarks.compare.report import fastest, markdown, plot, report_of
from benchmarks.compare.scenarios import Course, Measured, median
from benchmarks.compare.store import Round, Store
from benchmarks.compare.w8a8 import write_w8a8
from benchmarks.goals import raced
from benchmarks.goals.__main__ import GOALS
from ropeway.bench.random_model import random_model
from ropeway.bench.shapes import SHAPES
from ropeway.bench.workload import WorkloadRequest
from ropeway.errors import ConfigError
from ropeway.loading.open import open_checkpoint
from tests.support.tiny_models import tiny_oracle

TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
COURSE = Course(
    (WorkloadRequest(9, 4), WorkloadRequest(5, 7)), prefill_tokens=20, decode_prompt_tokens=6, decode_tokens=40
)
PLACE_BYTES = 1 << 28


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """A folder with random weights of a shape."""

    def make(shape):
        monkeypatch.setitem(SHAPES, "tiny", {**SHAPES[shape], **TINY})
        return random_model("tiny", tmp_path / shape)

    return make


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path / "environments", tmp_path / "logs", cpus=(0,), kv_bytes=PLACE_BYTES)


class Scripted:
    """An engine that is a script: it answers as ``body`` says."""

    environment = None
    groups = (SCENARIOS,)

    def __init__(self, name, folder, body, *, log=None, version="1"):
        self.name = name
        self._version = version
        self._script = folder / f"{name}.py"
        self._script.write_text(
            f"import sys; sys.path.insert(0, {str(WORKERS)!r})\nfrom lines import serve\n" + textwrap.dedent(body)
        )
        self._log = [] if log is None else log

    def settings(self, files):
        return [Setting("plain", "bf16", "bf16")]

    def prepare(self, setting, files, place, say):
        pass

    def start(self, setting, files, place, load):
        self._log.append(self.name)
        return RunningWorker(str(self._script), {}, log=place.logs / f"{self.name}.log")

    def version(self, place):
        return self._version


OBEDIENT = """
import time
def complete(request):
    time.sleep(0.002 * request["output_tokens"])
    return [7] * request["output_tokens"]
def start(settings):
    return lambda requests: [complete(request) for request in requests]
serve(start)
"""


def race_of(engines, tiny, place, tmp_path, said=None, weights=("bf16",)):
    files = ModelFiles(tiny("qwen3-0.6b"), tmp_path / "models")
    say = (said if said is not None else []).append
    return Race(engines, files, COURSE, place, Store(tmp_path / "races", "m", "x"), say, weights=weights)


# ---------------------------------------------------------------------- one model in every format


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "smollm2-135m"])
def test_the_gguf_of_a_folder_holds_its_weights_in_every_bit(tiny, tmp_path, shape):
    folder = tiny(shape)
    files = ModelFiles(folder, tmp_path / "models")
    there, here = open_checkpoint(files.gguf("BF16")), open_checkpoint(folder)
    assert set(there.names()) == set(here.names())
    for name in here.names():
        assert torch.equal(there.get(name).dequantize().float(), here.get(name).dequantize().float()), name


def test_a_quantised_gguf_is_near_the_weights_it_was_made_of(tiny, tmp_path):
    folder = tiny("smollm2-135m")
    files = ModelFiles(folder, tmp_path / "models")
    name, here = "model.layers.1.self_attn.q_proj.weight", open_checkpoint(folder)
    for kind, bound in (("Q8_0", 0.0005), ("Q4_0", 0.008)):
        there = open_checkpoint(files.gguf(kind))
        assert (there.get(name).dequantize() - here.get(name).dequantize()).abs().max() < bound


def test_a_gguf_model_is_dequantised_for_engines_that_read_folders(tiny, tmp_path):
    source = tmp_path / "shipped.gguf"
    write_gguf(tiny("qwen3-0.6b"), source, "Q8_0")
    files = ModelFiles(source, tmp_path / "models")
    assert files.shipped == source
    config = json.loads((files.folder / "config.json").read_text())
    assert config["model_type"] == "qwen3"
    assert config["dtype"] == "bfloat16"
    written, original = load_file(files.folder / "model.safetensors"), open_checkpoint(source)
    assert set(written) == set(original.names())
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(written[name], original.get(name).dequantize().bfloat16())


def test_formats_are_written_once(tiny, tmp_path):
    files = ModelFiles(tiny("qwen3-0.6b"), tmp_path / "models")
    written = files.gguf("Q8_0").stat().st_mtime_ns
    assert files.gguf("Q8_0").stat().st_mtime_ns == written


def test_eight_bit_weights_for_vllm_have_a_scale_per_output_channel(tiny, tmp_path):
    folder = tiny("qwen3-0.6b")
    write_w8a8(folder, tmp_path / "w8a8")
    tensors, here = load_file(tmp_path / "w8a8" / "model.safetensors"), open_checkpoint(folder)
    config = json.loads((tmp_path / "w8a8" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    for name in here.names():
        values = here.get(name).dequantize().float()
        if not name.endswith("_proj.weight"):
            assert torch.equal(tensors[name].float(), values), name
            continue
        scales = tensors[f"{name}_scale"].float()
        assert tensors[name].dtype == torch.int8
        assert scales.shape == (len(values), 1)
        # Half a step, and what the largest codes lose when the scale was rounded down to bfloat16.
        assert ((tensors[name] * scales - values).abs() <= scales).all(), name


def test_what_fails_halfway_is_converted_again(tiny, tmp_path):
    files = ModelFiles(tiny("qwen3-0.6b"), tmp_path / "models")

    def broken(target):
        target.mkdir()
        raise Unavailable("no memory")

    with pytest.raises(Unavailable):
        files.exported("own", broken)
    assert not any((tmp_path / "models").rglob("own*"))
    assert list(files.exported("own", lambda target: target.mkdir()).iterdir()) == []


def test_quantised_weights_for_openvino_have_groups_that_divide_the_rows(tiny, tmp_path):
    sizes = {}
    for shape in ("qwen3-0.6b", "smollm2-135m"):
        files = ModelFiles(tiny(shape), tmp_path / "models")
        files.config["hidden_size"] = SHAPES[shape]["hidden_size"]
        (int4,) = (setting for setting in OpenVINO().settings(files) if setting.weights == "int4")
        sizes[shape] = int4.options["quantisation"]["group_size"]
    assert sizes == {"qwen3-0.6b": 128, "smollm2-135m": 64}


@pytest.mark.parametrize("engine", [Ropeway(), VLLM(), OpenVINO(), LlamaCpp()], ids=lambda engine: engine.name)
def test_the_settings_of_an_engine_have_names_of_their_own_and_survive_json(engine, tiny, tmp_path):
    files = ModelFiles(tiny("qwen3-0.6b"), tmp_path / "models")
    settings = engine.settings(files)
    assert len({setting.name for setting in settings}) == len(settings)
    for setting in settings:
        told = dataclasses.asdict(setting)
        assert json.loads(json.dumps(told)) == told


# ---------------------------------------------------------------------- the race


def test_ropeway_runs_every_scenario_and_an_interrupted_race_goes_on_where_it_was(tiny, place, tmp_path):
    said: list[str] = []
    race = race_of([Ropeway()], tiny, place, tmp_path, said)
    race.run(1)
    (entry,) = race.entries
    assert entry.out is None
    (done,) = entry.rounds
    assert set(done.scenarios) == set(SCENARIOS)
    assert all(rate > 0 for measured in done.scenarios.values() for rate in measured.tokens_per_s)
    assert len(done.scenarios["batch"].first_tokens) == len(COURSE.workload)
    assert done.load_s > 0
    assert done.peak_memory_bytes > 50e6  # a process with torch in it
    again = race_of([Ropeway()], tiny, place, tmp_path)
    began = time.perf_counter()
    again.run(1)
    assert again.entries[0].rounds == [done]
    assert time.perf_counter() - began < done.load_s  # nothing was started


def test_engines_take_turns_and_every_round_turns_the_order_around(tiny, place, tmp_path):
    log: list[str] = []
    engines = [Scripted(name, tmp_path, OBEDIENT, log=log) for name in ("a", "b")]
    race = race_of(engines, tiny, place, tmp_path)
    race.run(3)
    assert log == ["a", "b", "b", "a", "a", "b"]
    assert [len(entry.rounds) for entry in race.entries] == [3, 3]


def test_only_rounds_that_are_missing_run(tiny, place, tmp_path):
    log: list[str] = []
    race_of([Scripted("a", tmp_path, OBEDIENT, log=log)], tiny, place, tmp_path).run(1)
    race_of([Scripted("a", tmp_path, OBEDIENT, log=log)], tiny, place, tmp_path).run(2)
    assert log == ["a", "a"]
    race_of([Scripted("a", tmp_path, OBEDIENT, log=log, version="2")], tiny, place, tmp_path).run(2)
    assert log == ["a"] * 4  # another version has no rounds yet


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("serve(lambda settings: lambda requests: [[7] for request in requests])", "tokens were asked and 1 came"),
        ("serve(lambda settings: lambda requests: [])", "requests were sent and 0 answered"),
        ("raise SystemExit('no such model')", "no such model"),
        ("def start(settings): raise MemoryError('too little of it')\nserve(start)", "too little of it"),
        ("import os\nserve(lambda settings: lambda requests: os._exit(1))", "the engine has ended"),
    ],
)
def test_an_engine_that_misbehaves_is_out_with_the_reason_and_the_others_go_on(tiny, place, tmp_path, body, reason):
    said: list[str] = []
    race = race_of([Scripted("bad", tmp_path, body), Scripted("good", tmp_path, OBEDIENT)], tiny, place, tmp_path, said)
    race.run(2)
    bad, good = race.entries
    assert reason in (bad.out or "")
    assert not bad.rounds
    assert len(good.rounds) == 2
    assert any("bad plain fails" in line for line in said)
    assert "- bad plain:" in markdown(report_of(race))


def test_what_an_engine_prints_does_not_get_between_the_answers(tiny, place, tmp_path):
    body = OBEDIENT.replace("return lambda", "print('loading'); import os; os.system('echo child'); return lambda")
    race = race_of([Scripted("chatty", tmp_path, body)], tiny, place, tmp_path)
    race.run(1)
    assert race.entries[0].out is None
    assert "child" in (place.logs / "chatty.log").read_text()


def test_an_engine_that_hangs_is_given_up_and_ended_with_its_children(place, tmp_path):
    body = """
    import subprocess, time
    child = subprocess.Popen(["sleep", "600"])
    serve(lambda settings: lambda requests: [[child.pid]] if requests[0]["output_tokens"] == 1 else time.sleep(600))
    """
    running = Scripted("slow", tmp_path, body).start(None, None, place, None)
    child = running.run([Prompt((1,), 1)], 30).tokens[0][0]
    with pytest.raises(EngineFailed, match="no answer within 1 s"):
        running.run([Prompt((1,), 2)], 1)
    running.stop()
    deadline = time.monotonic() + 5
    while psutil.pid_exists(child) and psutil.Process(child).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the engine's child goes on"
        time.sleep(0.01)


def test_memory_of_an_engine_is_that_of_all_its_processes(tmp_path):
    script = tmp_path / "grow.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "block = b'1' * (80 << 20)\n"
        "if len(sys.argv) == 1: subprocess.Popen([sys.executable, __file__, 'child'])\n"
        "time.sleep(60)\n"
    )
    process = EngineProcess([sys.executable, str(script)], log=tmp_path / "log")
    try:
        until = time.monotonic() + 30
        while process.memory.peak_bytes < 160 << 20 and time.monotonic() < until:
            time.sleep(0.1)
            process.memory.look()
    finally:
        process.stop()
    assert 160 << 20 <= process.memory.peak_bytes < 240 << 20


# ---------------------------------------------------------------------- figures


def answered(wall_s, prompts):
    return checked(Ran(wall_s, [[1] * prompt.output_tokens for prompt in prompts]), prompts)


def test_decode_is_what_the_tokens_after_the_first_take():
    def ask(prompts):
        (prompt,) = prompts
        return answered(1.0 + 0.1 * (prompt.output_tokens - 1), prompts)

    measured = COURSE.measure("decode", ask, 100, seed=0)
    assert measured.tokens_per_s == pytest.approx([10.0, 10.0])


def test_a_machine_too_busy_to_tell_tokens_from_noise_gives_no_figure():
    walls = iter([2.0, 1.0])
    with pytest.raises(EngineFailed, match="too busy to measure"):
        COURSE.measure("decode", lambda prompts: answered(next(walls), prompts), 100, seed=0)


def test_prefill_is_the_time_to_the_first_token_of_one_prompt():
    def ask(prompts):
        (prompt,) = prompts
        assert (len(prompt.token_ids), prompt.output_tokens) == (20, 1)
        return answered(4.0, prompts)

    assert COURSE.measure("prefill", ask, 100, seed=0).tokens_per_s == [5.0, 5.0]


def test_no_two_prompts_are_the_same_and_every_engine_gets_the_same_ones():
    def asked(seed):
        prompts = [prompt.token_ids for call in COURSE.warm_up(SCENARIOS, 1000) for prompt in call]

        def ask(wanted):
            prompts.extend(prompt.token_ids for prompt in wanted)
            return answered(0.1 * sum(prompt.output_tokens for prompt in wanted), wanted)

        for name in SCENARIOS:
            COURSE.measure(name, ask, 1000, seed)
        return prompts

    assert asked(3) == asked(3)
    measured = asked(3) + asked(4)[3:]  # the warm-up is the same
    assert len(set(measured)) == len(measured)


def test_room_is_made_for_the_scenarios_that_a_start_serves():
    assert COURSE.load(("prefill", "decode")).requests == 1
    assert COURSE.load(("batch",)).requests == 2
    assert COURSE.load(SCENARIOS).longest >= 21


def test_a_workload_that_arrives_over_time_is_refused():
    with pytest.raises(ConfigError, match="arrival_s"):
        Course((WorkloadRequest(3, 3, arrival_s=1.0),))


def test_a_decode_without_tokens_after_the_first_is_refused():
    with pytest.raises(ConfigError, match="decode_tokens is 1; it must be at least 2"):
        Course((WorkloadRequest(3, 3),), decode_tokens=1)


def row(engine, setting, weights, batch, *, precise=True, out=None):
    """An entry of a report that decodes at half its rate in the batch and prefills at ten times of it."""
    medians = {"prefill": 10 * batch, "decode": batch / 2, "batch": batch} if batch else {}
    return {
        "engine": engine,
        "version": "1.2",
        "setting": setting,
        "weights": weights,
        "kv": "bf16",
        "precise": precise,
        "note": "",
        "out": out,
        "medians": medians,
        "same_first_tokens": 0.75,
        "load_s": 3.0,
        "peak_memory_bytes": 2e9,
    }


REPORT = {
    "model": "m",
    "course": {
        "requests": 2,
        "prompt_tokens": 14,
        "output_tokens": 11,
        "prefill_tokens": 20,
        "decode_prompt_tokens": 6,
        "decode_tokens": 5,
    },
    "entries": [
        row("ropeway", "bf16", "bf16", 90.0),
        row("ropeway", "int8", "int8", 150.0),
        row("ropeway", "int4", "int4", 200.0, precise=False),
        row("openvino", "bf16", "bf16", 60.0),
        row("openvino", "int4", "int4", 80.0),
        row("vllm", "bf16", "bf16", None, out="vllm cannot be installed: no such version\nmore"),
    ],
}


def test_the_table_compares_equal_precision_and_tells_who_is_missing_and_why():
    text = markdown(REPORT)
    assert "| openvino 1.2, bf16 | bf16 | 600.0 (1.50x) | 30.0 (1.50x) | 60.0 (1.50x) | 3.0 s | 2.00 GB | 75% |" in text
    assert "| openvino | 800.0 (int4) | 40.0 (int4) | 80.0 (int4) |" in text
    assert "- vllm bf16: vllm cannot be installed: no such version\n" in text


def test_the_plot_names_every_entry_that_ran(tmp_path):
    plot(REPORT, tmp_path / "race.svg")
    svg = (tmp_path / "race.svg").read_text()
    assert "openvino int4" in svg
    assert "vllm" not in svg


def test_the_fastest_entry_of_an_engine_is_found_at_one_precision_or_at_any():
    rows = REPORT["entries"]
    assert fastest(rows, "ropeway", "batch")["setting"] == "int4"
    assert fastest(rows, "ropeway", "batch", "bf16")["setting"] == "bf16"
    assert fastest(rows, "vllm", "batch") is None


def test_a_median_is_over_all_measurements_of_all_rounds():
    assert median([Measured([1.0, 9.0], [], []), Measured([2.0, 3.0], [], [])]) == 2.5


# ---------------------------------------------------------------------- goals


def test_a_goal_divides_by_the_best_of_the_engines_at_equal_precision():
    check = raced.against(REPORT, "batch", ("openvino", "vllm"), 1.5, "bf16")
    assert (check.figure, check.verdict) == (1.5, "met")
    assert check.name == "m, batch, bf16 against openvino bf16"


def test_ropeway_at_its_fastest_must_be_precise_and_the_others_need_not():
    check = raced.against_fastest(REPORT, "batch", 1.7)
    assert check.figure == pytest.approx(150 / 80)
    assert check.name == "m, batch, int8 against openvino int4"


def test_a_goal_against_an_engine_that_could_not_run_is_skipped_with_the_reason():
    check = raced.against(REPORT, "batch", ("vllm",), 1.5, "bf16")
    assert check.verdict == "skipped"
    assert "vllm cannot be installed: no such version" in check.note


@pytest.mark.parametrize("name", [2, "2b", 3, 4])
def test_the_goals_of_the_race_are_known_by_their_names(name):
    assert callable(importlib.import_module(GOALS[name].module).measure)


# ---------------------------------------------------------------------- environments and rounds on disk


def test_an_environment_is_made_once_and_again_when_it_changes(tmp_path):
    said: list[str] = []
    wheel = tiny_wheel(tmp_path)
    environment = Environment("one", (str(wheel),), unwanted=("not-there",))
    environment.ensure(tmp_path / "root", said.append)
    assert environment.python(tmp_path / "root").exists()
    assert "ropeway-test-wheel" in environment.versions(tmp_path / "root")
    environment.ensure(tmp_path / "root", said.append)
    assert len(said) == 1
    other = dataclasses.replace(environment, requirements=(str(tmp_path / "missing.whl"),))
    with pytest.raises(Unavailable, match=r"one cannot be installed \(see .*missing.whl"):
        other.ensure(tmp_path / "root", said.append)
    assert not environment.versions(tmp_path / "root")


def tiny_wheel(folder):
    wheel = folder / "ropeway_test_wheel-1.0-py3-none-any.whl"
    info = "ropeway_test_wheel-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: ropeway-test-wheel\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def test_the_libraries_of_llama_cpp_are_linked_as_its_package_lists_them(tmp_path):
    (tmp_path / "libllama.so.0.6.0").write_text("code")
    (tmp_path / "_symlinks.json").write_text('{"libllama.so": "libllama.so.0", "libllama.so.0": "libllama.so.0.6.0"}')
    for _ in range(2):
        link_libraries(tmp_path)
    assert (tmp_path / "libllama.so").read_text() == "code"


def test_a_round_that_is_damaged_on_disk_counts_as_missing(tmp_path):
    store = Store(tmp_path, "m", "x")
    done = Round({"batch": Measured([1.0], [2.0], [3])}, load_s=1.0, peak_memory_bytes=5, stolen_time_fraction=0.0)
    store.put("a", "KV int8, fast", "f", 0, done)
    assert store.get("a", "KV int8, fast", "f", 0) == done
    assert store.get("a", "KV int8, fast", "other", 0) is None
    (file,) = store.folder.iterdir()
    file.write_text(file.read_text()[:-20])
    assert store.get("a", "KV int8, fast", "f", 0) is None


def test_without_resume_a_race_begins_anew(tiny, tmp_path, monkeypatch):
    log: list[str] = []
    monkeypatch.setitem(competition._ENGINES, "ropeway", lambda: Scripted("ropeway", tmp_path, OBEDIENT, log=log))
    options = Options(model=str(tiny("qwen3-0.6b")), cache=tmp_path / "cache", requests=2, rounds=1)
    options = dataclasses.replace(options, engines=("ropeway",))
    for resume in (False, True, False):
        competition.compare(dataclasses.replace(options, resume=resume), print)
    assert len(log) == 2


# ---------------------------------------------------------------------- transformers' padded batches


def test_a_padded_batch_gives_the_tokens_of_each_request_alone(monkeypatch):
    monkeypatch.syspath_prepend(str(WORKERS))
    padded = importlib.import_module("run_transformers").padded
    model = tiny_oracle("llama")
    monkeypatch.setattr(model.generation_config, "eos_token_id", None)
    monkeypatch.setattr(model.generation_config, "pad_token_id", 0)
    requests = [
        {"prompt": [3, 4, 5], "output_tokens": 5},
        {"prompt": list(range(20, 32)), "output_tokens": 2},
        {"prompt": list(range(40, 47)), "output_tokens": 9},
    ]
    together = padded(model, requests)
    assert [len(tokens) for tokens in together] == [5, 2, 9]
    assert together == [padded(model, [request])[0] for request in requests]


# ---------------------------------------------------------------------- the command


def run(*args):
    app = typer.Typer()
    app.command()(command._main)
    return CliRunner().invoke(app, [*map(str, args)])


def test_the_command_writes_figures_table_and_plot(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(competition._ENGINES, "ropeway", lambda: Scripted("ropeway", tmp_path, OBEDIENT))
    where = ("--engines", "ropeway", "--cache", tmp_path / "cache", "--json", tmp_path / "out" / "race.json")
    result = run(tiny("qwen3-0.6b"), "--requests", 2, "--rounds", 1, *where)
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "race.json").read_text())
    assert report["entries"][0]["medians"].keys() == set(SCENARIOS)
    assert "cpu" in report["machine"]
    assert "ropeway 1, plain" in (tmp_path / "out" / "race.md").read_text()
    assert (tmp_path / "out" / "race.svg").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "name either a MODEL or a --shape"),
        (("m", "--shape", "qwen3-0.6b"), "name either a MODEL or a --shape"),
        (("m", "--engines", "ropeway,ollama"), "there is no engine 'ollama'; known are ropeway, vllm"),
        (("m", "--engines", ","), "name at least one engine"),
        (("m", "--weights", "int3"), "there is no precision 'int3'; known are bf16, int8, int4, shipped"),
    ],
)
def test_a_race_that_names_nothing_to_run_is_refused(args, message):
    result = run(*args)
    assert result.exit_code == 2
    assert message in " ".join(result.output.replace("│", "").split())


def test_an_unknown_shape_is_refused(tmp_path):
    result = run("--shape", "gpt-2", "--cache", tmp_path, "--json", tmp_path / "x.json")
    assert result.exit_code == 1
    assert f"there is no shape 'gpt-2'; known are {', '.join(SHAPES)}" in result.output
