"""The tokenizer of a model folder, from the files Hugging Face writes."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.processors import TemplateProcessing

from ropeway.errors import LoadError
from ropeway.text.tokenizer import Tokenizer

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTED = ("additional_special_tokens", "extra_special_tokens")
_FOREIGN = ("tokenizer.model", "vocab.json", "spiece.model", "sentencepiece.bpe.model", "tekken.json")
"""Vocabularies transformers knows how to convert."""


def tokenizer_from_folder(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer, or None when it has no vocabulary. Raises ``LoadError``."""
    if not (folder / "tokenizer.json").is_file() and not any((folder / name).is_file() for name in _FOREIGN):
        return None
    config = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
    backend = _backend(folder)
    named = {name: text for name in _NAMED if (text := _spelling(config.get(name))) is not None}
    _declare_special_tokens(backend, config, named)
    _surround(backend, config, named)
    return Tokenizer(
        backend,
        eos_ids=_eos_ids(folder, backend, named),
        named_tokens=named,
        chat_templates=_chat_templates(folder, config),
    )


def _backend(folder: Path) -> tokenizers.Tokenizer:
    path = folder / "tokenizer.json"
    if path.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise LoadError(f"{path} is no valid tokenizer: {error}") from error
    if importlib.util.find_spec("transformers") is None:
        raise LoadError(
            f"{folder} has no tokenizer.json; converting its other files needs transformers (pip install transformers)"
        )
    from transformers import AutoTokenizer

    try:
        converted = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        backend: tokenizers.Tokenizer = converted.backend_tokenizer
    except Exception as error:  # whatever a conversion may meet
        raise LoadError(f"transformers cannot convert the tokenizer of {folder}: {error}") from error
    return backend


def _declare_special_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """Make special what the configuration calls so. A token the vocabulary lacks is added only where its id is the
    next one: an id of our own choosing would mean nothing to the model."""
    for id_, token in _added_tokens(config):
        known = backend.token_to_id(token.content)
        if known == id_ or (known is None and id_ == backend.get_vocab_size()):
            (backend.add_special_tokens if token.special else backend.add_tokens)([token])
    listed = [entry for name in _LISTED for entry in _entries(config.get(name))]
    spellings = [*named.values(), *(text for entry in listed if (text := _spelling(entry)) is not None)]
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(text, special=True, normalized=False)
            for text in dict.fromkeys(spellings)
            if text not in special and backend.token_to_id(text) is not None
        ]
    )


def _added_tokens(config: dict[str, Any]) -> list[tuple[int, tokenizers.AddedToken]]:
    """``added_tokens_decoder``, by ascending id."""
    added: dict[int, tokenizers.AddedToken] = {}
    try:
        for id_text, spec in (config.get("added_tokens_decoder") or {}).items():
            flags = {name: spec[name] for name in ("single_word", "lstrip", "rstrip", "normalized") if name in spec}
            added[int(id_text)] = tokenizers.AddedToken(spec["content"], special=bool(spec.get("special")), **flags)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise LoadError(f"tokenizer_config.json: added_tokens_decoder is invalid: {error!r}") from error
    return sorted(added.items())


def _surround(backend: tokenizers.Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """Obey ``add_bos_token`` and ``add_eos_token`` where the tokenizer's own post-processing says otherwise."""
    bos, eos = (backend.token_to_id(named[name]) if name in named else None for name in ("bos_token", "eos_token"))
    around = backend.encode("", add_special_tokens=True).ids
    has_bos = bos is not None and around[:1] == [bos]
    has_eos = eos is not None and around[-1:] == [eos] and len(around) > has_bos
    want_bos = bos is not None and bool(config.get("add_bos_token", has_bos))
    want_eos = eos is not None and bool(config.get("add_eos_token", has_eos))
    if (want_bos, want_eos) == (has_bos, has_eos):
        return
    single = [*([named["bos_token"]] if want_bos else []), "$A", *([named["eos_token"]] if want_eos else [])]
    used = [
        (name, id_) for name, id_ in ((named.get("bos_token"), bos), (named.get("eos_token"), eos)) if id_ is not None
    ]
    backend.post_processor = TemplateProcessing(single=single, pair=[*single, "$B:1"], special_tokens=used)


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, named: dict[str, str]) -> Iterator[int]:
    config = _read_json(folder / "config.json")
    nested = config.get("text_config") or {}
    if not isinstance(nested, dict):
        raise LoadError(f"{folder / 'config.json'}: text_config must be an object or null, not {nested!r}")
    sources = (_read_json(folder / "generation_config.json"), config, nested)
    for source in sources:
        for id_ in _entries(source.get("eos_token_id")):
            if isinstance(id_, int):
                yield id_
    if "eos_token" in named and (id_ := backend.token_to_id(named["eos_token"])) is not None:
        yield id_


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """By name. Files win over ``tokenizer_config.json``, as newer releases of a model keep templates there."""
    inline = config.get("chat_template")
    templates: dict[str, str] = {}
    if isinstance(inline, str):
        templates["default"] = inline
    elif isinstance(inline, list | dict):
        templates.update(_named_templates(inline))
    legacy = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        templates["default"] = legacy
    for path in [folder / "chat_template.jinja", *sorted((folder / "additional_chat_templates").glob("*.jinja"))]:
        if path.is_file():
            name = "default" if path.parent == folder else path.stem
            try:
                templates[name] = path.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise LoadError(f"{path} cannot be read as UTF-8 text: {error}") from error
    return templates


def _named_templates(inline: list[Any] | dict[str, Any]) -> dict[str, str]:
    """From a list of objects with ``name`` and ``template``, or a table."""
    try:
        named = inline if isinstance(inline, dict) else {entry["name"]: entry["template"] for entry in inline}
    except (LookupError, TypeError) as error:
        raise LoadError(f"tokenizer_config.json: chat_template is invalid: {error!r}") from error
    if not all(isinstance(text, str) for pair in named.items() for text in pair):
        raise LoadError("tokenizer_config.json: chat_template must hold names and templates as text")
    return named


def _entries(value: Any) -> list[Any]:
    """A single value, a list or a table of values, or nothing, as a list."""
    if value is None:
        return []
    if isinstance(value, dict) and "content" not in value:
        return list(value.values())
    return value if isinstance(value, list) else [value]


def _spelling(value: Any) -> str | None:
    """A token given as text, or as the fields of an added token."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; {} when there is no such file. Raises ``LoadError``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise LoadError(f"{path} must hold a JSON object")
    return content
