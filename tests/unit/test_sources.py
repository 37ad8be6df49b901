import io
import json
import multiprocessing
import random
import shutil
import socket
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ropeway.errors import LoadError, ModelNotFound, Unsupported
from ropeway.loading import pypi, sources
from ropeway.loading.download import RemoteFile, Retries, download, http_client
from ropeway.loading.sources import BuiltinModel, HubModel, PackagedModel, Places, parse, resolve
from ropeway.loading.store import MANIFEST
from tests.support.model_hub import ModelHub, model_hub, sha256, wheel

_RANDOM = random.Random(0)
GGUF = _RANDOM.randbytes(300_000)
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    "merges.txt": b"a b",
    "chat_template.jinja": b"{{ messages }}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "model-00001-of-00002.safetensors": _RANDOM.randbytes(1000),
    "model-00002-of-00002.safetensors": _RANDOM.randbytes(2000),
    "model.safetensors.index.json": b"{}",
    "consolidated.safetensors": b"the same again",
    "pytorch_model.bin": b"pickle",
    "modeling_custom.py": b"import os",
    "README.md": b"#",
    "onnx/model.safetensors": b"elsewhere",
}
UNWANTED = {
    "consolidated.safetensors",
    "pytorch_model.bin",
    "modeling_custom.py",
    "README.md",
    "onnx/model.safetensors",
}


@pytest.fixture
def hub() -> Iterator[ModelHub]:
    with model_hub() as hub:
        hub.hf = {"org/weights": dict(FILES), "org/one": {"one.gguf": GGUF, "README.md": b"#"}}
        yield hub


@pytest.fixture
def places(hub: ModelHub, tmp_path: Path) -> Places:
    return Places(
        cache=tmp_path / "cache",
        hugging_face=hub.url,
        modelscope=hub.url,
        pypi=f"{hub.url}/simple",
        retries=Retries(attempts=3, first_wait_s=0.01),
    )


def parts_left(places: Places) -> list[str]:
    return [path.name for path in (places.cache / "blobs").glob("*.part")]


def replaced(value: Any, field: str, new: object) -> Any:
    """``value`` with every field of that name, at any depth, holding ``new``."""
    if isinstance(value, list):
        return [replaced(item, field, new) for item in value]
    if isinstance(value, dict):
        return {name: new if name == field else replaced(item, field, new) for name, item in value.items()}
    return value


def files_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {MANIFEST}


# -- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("hf:Org/Name", HubModel("hf", "Org/Name", "main")),
        ("Org/Na.me-1_B", HubModel("hf", "Org/Na.me-1_B", "main")),
        ("hf:Org/Name@v1.0:sub/x.Q4.gguf", HubModel("hf", "Org/Name", "v1.0", "sub/x.Q4.gguf")),
        ("Org/Name:x.gguf", HubModel("hf", "Org/Name", "main", "x.gguf")),
        ("modelscope:Org/Name", HubModel("modelscope", "Org/Name", "master")),
        ("pypi:some-package", PackagedModel("some-package")),
        ("pypi:some_package==1.2", PackagedModel("some_package", "1.2")),
        ("smollm2-135m", sources.BUILTIN["smollm2-135m"]),
    ],
)
def test_names_are_understood(name: str, meaning: object) -> None:
    assert parse(name) == meaning


@pytest.mark.parametrize(
    "name",
    [
        "",
        "nosuch",
        "./nosuch",
        "/no/such",
        "../up/there",
        "folder/no.gguf",
        "hf:",
        "hf:a/b/c",
        "pypi:",
        "ftp:a/b",
        "a/../b",
    ],
)
def test_a_name_that_means_nothing_is_not_found_and_tells_what_was_tried(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"smollm2-135m.*hf:ORG/NAME"):
        parse(name)


def test_what_is_here_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "weights").mkdir(parents=True)
    (tmp_path / "x.gguf").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    assert resolve("org/weights") == Path("org/weights")
    assert resolve(str(tmp_path / "x.gguf")) == tmp_path / "x.gguf"


def test_the_environment_names_places(tmp_path: Path) -> None:
    config = tmp_path / "pip.conf"
    config.write_text("[global]\nindex-url = https://index.example/simple\n")
    places = Places.from_environment({"PIP_CONFIG_FILE": str(config), "ROPEWAY_CACHE": "/c", "HF_TOKEN": "t"})
    assert (places.pypi, places.cache, places.token) == ("https://index.example/simple", Path("/c"), "t")
    assert Places.from_environment({"PIP_CONFIG_FILE": str(config), "PIP_INDEX_URL": "https://e/"}).pypi == "https://e/"
    assert Places.from_environment({"HF_ENDPOINT": "https://mirror/"}).hugging_face == "https://mirror"


# -- hubs --------------------------------------------------------------------------------------------------------


def test_weights_come_with_all_around_them_and_nothing_that_runs(hub: ModelHub, places: Places) -> None:
    heard: dict[str, tuple[int, int | None]] = {}
    folder = resolve(
        "org/weights", places=places, progress=lambda name, done, total: heard.update({name: (done, total)})
    )
    assert files_below(folder) == set(FILES) - UNWANTED
    assert all((folder / name).read_bytes() == FILES[name] for name in files_below(folder))
    assert heard == {name: (len(FILES[name]), len(FILES[name])) for name in set(FILES) - UNWANTED}
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["source"] == "hf:org/weights@main"
    assert manifest["revision"] == "c0ffee"
    assert {f["name"]: f["sha256"] for f in manifest["files"]} == {n: sha256(FILES[n]) for n in set(FILES) - UNWANTED}


def test_what_was_fetched_is_used_again_without_asking(hub: ModelHub, places: Places) -> None:
    first = resolve("hf:org/one", places=places)
    asked = hub.listings, len(hub.contents)
    assert resolve("org/one", places=places) == first
    assert (hub.listings, len(hub.contents)) == asked
    assert first.name == "one.gguf"
    assert first.read_bytes() == GGUF


def test_refreshing_fetches_what_changed_and_drops_what_is_gone(hub: ModelHub, places: Places) -> None:
    folder = resolve("org/weights", places=places)
    del hub.hf["org/weights"]["merges.txt"]
    hub.hf["org/weights"]["config.json"] = b'{"new": 1}'
    hub.contents.clear()
    assert resolve("org/weights", places=places, refresh=True) == folder
    assert [seen.path for seen in hub.contents] == ["/storage/org/weights/config.json"]
    assert files_below(folder) == set(FILES) - UNWANTED - {"merges.txt"}
    assert (folder / "config.json").read_bytes() == b'{"new": 1}'


def test_a_file_damaged_afterwards_is_fetched_again(hub: ModelHub, places: Places) -> None:
    path = resolve("org/one", places=places)
    with path.open("r+b") as stream:
        stream.truncate(1000)
    assert resolve("org/one", places=places).read_bytes() == GGUF


def test_one_file_of_several_is_named_with_all_its_parts(hub: ModelHub, places: Places) -> None:
    parts = {f"big-0000{n}-of-00003.gguf": _RANDOM.randbytes(100) for n in (1, 2, 3)}
    hub.hf["org/many"] = {"small.gguf": b"small", **parts}
    with pytest.raises(LoadError, match=r"several models; name one.*small\.gguf"):
        resolve("org/many", places=places)
    assert resolve("org/many:small.gguf", places=places).read_bytes() == b"small"
    first = resolve("hf:org/many:big-00002-of-00003.gguf", places=places)
    assert first.name == "big-00001-of-00003.gguf"
    assert files_below(first.parent) == set(parts)
    with pytest.raises(LoadError, match=r"no such file; its \.gguf files: .*small\.gguf"):
        resolve("org/many:other.gguf", places=places)


def test_a_repository_of_pickles_is_unsupported(hub: ModelHub, places: Places) -> None:
    hub.hf["org/pickles"] = {"config.json": b"{}", "pytorch_model.bin": b"x"}
    with pytest.raises(Unsupported, match="neither safetensors nor GGUF"):
        resolve("org/pickles", places=places)


def test_an_unknown_repository_is_not_found_and_tells_where_it_was_sought(hub: ModelHub, places: Places) -> None:
    for name in ("org/unknown", "modelscope:org/unknown"):
        with pytest.raises(ModelNotFound, match=f"{hub.url}.*'org/unknown'.*no folder of that name"):
            resolve(name, places=places)


def test_modelscope_is_understood(hub: ModelHub, places: Places) -> None:
    hub.modelscope["org/weights"] = dict(FILES)
    folder = resolve("modelscope:org/weights", places=places)
    assert files_below(folder) == set(FILES) - UNWANTED


def test_a_repository_cannot_write_outside_its_folder(hub: ModelHub, places: Places) -> None:
    hub.hf["org/evil"] = {"../../evil.gguf": b"x"}
    with pytest.raises(LoadError, match="unsafe name"):
        resolve("org/evil", places=places)


@pytest.mark.parametrize("value", ["../../x", "../" * 21 + "x", "0" * 63, "0" * 64 + "\n", "", 5])
def test_a_listed_hash_that_is_none_is_a_load_error_naming_the_source(
    hub: ModelHub, places: Places, tmp_path: Path, value: object
) -> None:
    (tmp_path / "x").write_bytes(GGUF)
    hub.modelscope["org/one"] = hub.hf["org/one"]
    hub.packages["pkg"] = {"pkg-1.0-py3-none-any.whl": wheel({"pkg/m.gguf": GGUF})}
    before = files_below(tmp_path)
    hub.faults.relist = lambda listing: replaced(listing, "sha256", value)
    for name in ("hf:org/one", "pypi:pkg"):
        with pytest.raises(LoadError, match=rf"{hub.url}.*for a SHA-256"):
            resolve(name, places=places)
    assert {name for name in files_below(tmp_path) if not name.startswith("cache/locks/")} == before
    if value:  # this hub says "" for a file without one
        hub.faults.relist = lambda listing: replaced(listing, "Sha256", value)
        with pytest.raises(LoadError, match=rf"{hub.url}.*for a SHA-256"):
            resolve("modelscope:org/one", places=places)


def test_a_hash_may_be_listed_in_upper_case(hub: ModelHub, places: Places) -> None:
    hub.faults.relist = lambda listing: replaced(listing, "sha256", sha256(GGUF).upper())
    assert resolve("org/one", places=places).read_bytes() == GGUF
    assert (places.cache / "blobs" / sha256(GGUF)).exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("siblings", None),
        ("siblings", ["one.gguf"]),
        ("rfilename", None),
        ("rfilename", 5),
        ("rfilename", "\ud800.gguf"),
        ("size", "many"),
        ("Files", None),
        ("Data", []),
        ("Path", None),
        ("Size", -1),
        ("files", None),
        ("filename", 5),
        ("url", None),
        ("hashes", None),
    ],
)
def test_a_listing_of_another_shape_is_a_load_error(hub: ModelHub, places: Places, field: str, value: object) -> None:
    hub.modelscope["org/one"] = hub.hf["org/one"]
    hub.packages["pkg"] = {"pkg-1.0-py3-none-any.whl": wheel({"pkg/m.gguf": GGUF})}
    hub.faults.relist = lambda listing: replaced(listing, field, value)
    kind = "modelscope:org/one" if field[0].isupper() else "hf:org/one"
    with pytest.raises(LoadError) as caught:
        resolve("pypi:pkg" if field in ("files", "filename", "url", "hashes") else kind, places=places)
    assert type(caught.value) is LoadError


def test_a_file_called_like_the_manifest_is_left_out(hub: ModelHub, places: Places) -> None:
    hub.hf["org/weights"][MANIFEST] = b'{"files": [], "main": "../../../../../x"}'
    hub.packages["pkg"] = {"pkg-1.0-py3-none-any.whl": wheel({"m.gguf": GGUF, MANIFEST: b"{}"})}
    for name, files in (("org/weights", set(FILES) - UNWANTED), ("pypi:pkg", {"m.gguf"})):
        path = resolve(name, places=places)
        folder = path if path.is_dir() else path.parent
        assert {file["name"] for file in json.loads((folder / MANIFEST).read_text())["files"]} == files
        asked = hub.listings
        assert resolve(name, places=places) == path
        assert hub.listings == asked


def test_the_token_goes_to_the_hub_and_not_to_its_storage(hub: ModelHub, places: Places) -> None:
    resolve("org/one", places=Places(cache=places.cache, hugging_face=hub.url, token="secret"))
    assert [seen.authorization for seen in hub.contents] == [None]


# -- broken networks ---------------------------------------------------------------------------------------------


def test_a_broken_connection_is_resumed_where_it_broke(hub: ModelHub, places: Places) -> None:
    hub.faults.breaks = 2
    assert resolve("org/one", places=places).read_bytes() == GGUF
    assert [seen.range for seen in hub.contents] == [None, "bytes=150000-", "bytes=225000-"]


def test_a_server_that_ignores_ranges_is_read_from_the_beginning(hub: ModelHub, places: Places) -> None:
    hub.faults.breaks = 1
    hub.faults.ignore_range = True
    assert resolve("org/one", places=places).read_bytes() == GGUF
    assert len(hub.contents) == 2


def test_a_busy_server_is_asked_again(hub: ModelHub, places: Places) -> None:
    hub.faults.busy = 2
    assert resolve("org/one", places=places).read_bytes() == GGUF


def test_a_download_given_up_is_resumed_by_the_next_run(hub: ModelHub, places: Places) -> None:
    hub.faults.breaks = 1
    once = Places(cache=places.cache, hugging_face=hub.url, retries=Retries(attempts=1))
    with pytest.raises(LoadError, match=r"cannot fetch .*one\.gguf.*check the network"):
        resolve("org/one", places=once)
    assert parts_left(places) == [f"{sha256(GGUF)}.part"]
    assert resolve("org/one", places=places).read_bytes() == GGUF
    assert [seen.range for seen in hub.contents] == [None, "bytes=150000-"]
    assert parts_left(places) == []


@pytest.mark.parametrize("listed", [True, False], ids=["listed", "on the redirect"])
def test_a_wrong_hash_names_both_and_leaves_nothing(hub: ModelHub, places: Places, listed: bool) -> None:
    hub.listed_hashes = listed
    damaged = GGUF[:-1] + bytes([GGUF[-1] ^ 1])
    hub.faults.tamper = lambda content: damaged
    with pytest.raises(LoadError, match=f"{sha256(damaged)}, not {sha256(GGUF)}"):
        resolve("org/one", places=places)
    assert parts_left(places) == []
    hub.faults.tamper = lambda content: content
    assert resolve("org/one", places=places).read_bytes() == GGUF


def test_a_content_without_any_hash_is_never_joined_from_two_answers(hub: ModelHub, places: Places) -> None:
    name = "pkg-1.0-py3-none-any.whl"
    hub.packages["pkg"] = {name: wheel({"pkg/m.gguf": GGUF})}
    hub.faults.breaks = 1
    with http_client() as client:
        part = places.cache / "x.part"
        part.parent.mkdir(parents=True)
        part.write_bytes(b"from an earlier run")
        file = RemoteFile(name, f"{hub.url}/files/{name}")
        found = download(client, file, part, progress=lambda *_: None, retries=places.retries)
    assert found == sha256(hub.packages["pkg"][name]) == sha256(part.read_bytes())
    assert [seen.range for seen in hub.contents] == [None, None]


def test_without_network_the_message_says_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}"
        places = Places(cache=tmp_path, hugging_face=nobody, pypi=nobody, retries=Retries(2, 0.01))
        for name in ("org/one", "smollm2-135m"):
            with pytest.raises(LoadError, match=r"cannot fetch .*check the network, or name a local folder"):
                resolve(name, places=places)


def _resolve_in_child(places: Places, results: "multiprocessing.Queue[str]") -> None:
    results.put(str(resolve("org/one", places=places)))


def test_two_processes_fetch_a_model_once(hub: ModelHub, places: Places) -> None:
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[str] = context.Queue()
    children = [context.Process(target=_resolve_in_child, args=(places, results)) for _ in range(2)]
    for child in children:
        child.start()
    found = {results.get(timeout=60) for _ in children}
    for child in children:
        child.join()
    assert found == {str(resolve("org/one", places=places))}
    assert len(hub.contents) == 1


def test_a_folder_that_cannot_be_written_is_a_load_error(hub: ModelHub, places: Places) -> None:
    places.cache.write_text("a file where the folder should be")
    with pytest.raises(LoadError, match="cannot keep org/one"):
        resolve("org/one", places=places)


# -- packages ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("html", [False, True], ids=["json", "html"])
def test_a_package_gives_its_newest_final_wheel(hub: ModelHub, places: Places, html: bool) -> None:
    hub.html_index = html
    hub.packages["some-package"] = {
        f"some_package-{version}-py3-none-any.whl": wheel({"some_package/m.gguf": version.encode()})
        for version in ("0.9", "0.10", "1.0rc1")
    } | {"some_package-2.0.tar.gz": b"source"}
    assert resolve("pypi:Some_Package", places=places).read_bytes() == b"0.10"
    assert resolve("pypi:some-package==0.9", places=places).read_bytes() == b"0.9"
    with pytest.raises(ModelNotFound, match=r"no wheel of some-package==3 .* 0\.9, 0\.10, 1\.0rc1"):
        resolve("pypi:some-package==3", places=places)
    with pytest.raises(ModelNotFound, match="no package 'nosuch'"):
        resolve("pypi:nosuch", places=places)


def test_only_data_is_taken_from_a_wheel(hub: ModelHub, places: Places) -> None:
    members = {
        "pkg/__init__.py": b"raise SystemExit",
        "pkg/model/config.json": b"{}",
        "pkg/model/model.safetensors": b"w",
        "pkg/model/tokenizer.model": b"t",
        "pkg/weights.bin": b"pickle",
        "pkg-1.0.dist-info/metadata.json": b"{}",
    }
    hub.packages["pkg"] = {"pkg-1.0-py3-none-any.whl": wheel(members)}
    folder = resolve("pypi:pkg", places=places)
    assert files_below(folder) == {"config.json", "model.safetensors", "tokenizer.model"}
    assert not list((places.cache / "blobs").glob("*.part"))
    assert len(list((places.cache / "blobs").iterdir())) == 3


@pytest.mark.parametrize(
    "name", ["../evil.gguf", "/evil.gguf", "a/../../evil.gguf", "a\\..\\evil.gguf", "C:/evil.gguf"]
)
def test_a_wheel_cannot_write_outside_its_folder(hub: ModelHub, places: Places, name: str) -> None:
    hub.packages["pkg"] = {"pkg-1.0-py3-none-any.whl": wheel({name: b"x"})}
    with pytest.raises(LoadError, match="unsafe name"):
        resolve("pypi:pkg", places=places)


@pytest.mark.parametrize("content", [b"no zip at all", wheel({"pkg/m.gguf": GGUF})[:-200]], ids=["other", "cut"])
def test_a_damaged_wheel_is_a_load_error(hub: ModelHub, places: Places, content: bytes) -> None:
    hub.packages["pkg"] = {"pkg-1.0-py3-none-any.whl": content}
    with pytest.raises(LoadError, match="no valid wheel"):
        resolve("pypi:pkg", places=places)


def patched(content: bytes, offset: int, form: str, *values: int) -> bytes:
    """A wheel of one member, with ``values`` at ``offset`` of its entry in the central directory."""
    changed = bytearray(content)
    struct.pack_into(form, changed, content.rindex(b"PK\x01\x02") + offset, *values)
    return bytes(changed)


ONE = wheel({"pkg/m.gguf": b"x" * 100_000})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ONE[:40] + b"\xff" * 20 + ONE[60:], "cannot read pkg/m.gguf.*Error -3"),
        (patched(ONE, 8, "<H", 1), "cannot read pkg/m.gguf.*encrypted"),
        (patched(ONE, 10, "<H", 99), "pkg/m.gguf is compressed by method 99"),
        (patched(ONE, 10, "<H", zipfile.ZIP_LZMA), "pkg/m.gguf is compressed by method 14"),
        (patched(ONE, 24, "<I", 1000), "cannot read pkg/m.gguf.*CRC"),
        (patched(ONE, 6, "<H", 99), "no valid wheel"),
    ],
    ids=["garbled", "encrypted", "unknown method", "lzma", "longer than stated", "version"],
)
def test_a_member_that_cannot_be_read_is_a_load_error(
    hub: ModelHub, places: Places, content: bytes, message: str
) -> None:
    hub.packages["pkg"] = {"pkg-1.0-py3-none-any.whl": content}
    with pytest.raises(LoadError, match=message):
        resolve("pypi:pkg", places=places)
    assert parts_left(places) == []


def test_no_more_is_unpacked_than_a_wheel_states(tmp_path: Path) -> None:
    path = tmp_path / "pkg.whl"
    path.write_bytes(patched(ONE, 24, "<I", 1000))
    out = io.BytesIO()
    with pytest.raises(LoadError, match="CRC"):
        pypi.extract(path, "pkg/m.gguf", out, "pkg")
    assert len(out.getvalue()) <= 1000


def test_a_wheel_larger_than_the_free_space_is_refused_before_it_is_unpacked(
    hub: ModelHub, places: Places, cut_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.packages["pkg"] = {"pkg-1.0-py3-none-any.whl": wheel({"pkg/m.gguf": GGUF, "pkg/x.json": b"{}"})}
    extracted: list[str] = []
    monkeypatch.setattr(pypi, "extract", lambda wheel, member, *_: extracted.append(member))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=len(GGUF) - 1))
    with pytest.raises(LoadError, match=rf"pypi:pkg takes {len(GGUF) + 2} bytes unpacked, and {len(GGUF) - 1} are"):
        resolve("pypi:pkg", places=places)
    with pytest.raises(LoadError, match=f"cut takes {len(GGUF)} bytes unpacked"):
        resolve(cut_model, places=places)
    assert extracted == []


def test_a_wheel_without_a_model_is_unsupported(hub: ModelHub, places: Places) -> None:
    hub.packages["pkg"] = {"pkg-1.0-py3-none-any.whl": wheel({"pkg/x.json": b"{}"})}
    with pytest.raises(Unsupported, match="holds no single model"):
        resolve("pypi:pkg", places=places)


@pytest.fixture
def cut_model(hub: ModelHub, monkeypatch: pytest.MonkeyPatch) -> str:
    """A built-in model cut over two packages."""
    for n, content in enumerate((GGUF[:100_000], GGUF[100_000:])):
        hub.packages[f"part{n}"] = {f"part{n}-1.0-py3-none-any.whl": wheel({f"part{n}/data.bin": content})}
    parts = tuple((PackagedModel(f"part{n}", "1.0"), f"part{n}/data.bin") for n in range(2))
    model = BuiltinModel("cut", "whole.gguf", sha256(GGUF), parts, "for tests")
    monkeypatch.setattr(sources, "BUILTIN", {**sources.BUILTIN, "cut": model})
    return model.name


def test_a_built_in_model_cut_over_packages_is_joined(hub: ModelHub, places: Places, cut_model: str) -> None:
    path = resolve(cut_model, places=places)
    assert path.name == "whole.gguf"
    assert path.read_bytes() == GGUF
    manifest = json.loads((path.parent / MANIFEST).read_text())
    assert manifest["note"] == "for tests"
    assert manifest["revision"] == "pypi:part0==1.0, pypi:part1==1.0"
    assert [file.name for file in (places.cache / "blobs").iterdir()] == [sha256(GGUF)]


def test_a_built_in_model_with_another_content_is_refused(hub: ModelHub, places: Places, cut_model: str) -> None:
    hub.packages["part1"] = {"part1-1.0-py3-none-any.whl": wheel({"part1/data.bin": b"other"})}
    with pytest.raises(LoadError, match=f"whole.gguf is not what was expected.*not {sha256(GGUF)}"):
        resolve(cut_model, places=places)
    assert list((places.cache / "blobs").iterdir()) == []


def test_the_pinned_hashes_are_the_published_ones() -> None:
    assert sources.BUILTIN["smollm2-135m"].sha256.startswith("b179c9523d0e6a0f98a330c7562b6827")
    assert sources.BUILTIN["qwen2.5-coder-0.5b"].sha256.startswith("1d9614638d18024d0fbb36575a15f130")
    assert "without a stated licence" in sources.BUILTIN["qwen2.5-coder-0.5b"].note
