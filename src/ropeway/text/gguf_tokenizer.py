"""A ``tokenizers.Tokenizer`` from the metadata of a GGUF file.

Two kinds of vocabulary are in use: byte-level BPE with a list of merges (``tokenizer.ggml.model`` "gpt2") and
SentencePiece BPE with a score per piece ("llama"). For the first, the file names the rule that splits text
before merging (``tokenizer.ggml.pre``) but does not hold it; the rules are written out here, as the models'
own ``tokenizer.json`` have them. Nothing is kept on disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ropeway.errors import LoadError, Unsupported
from ropeway.loading.gguf import vocabulary
from ropeway.loading.gguf.metadata import Metadata
from ropeway.loading.gguf.vocabulary import END_TOKENS, TokenKind, special_ids, token_kinds

SPACE = "▁"
"""SentencePiece's visible space."""


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """What a file says beyond the tokenizer itself."""

    bos_id: int | None
    """Token that begins a text."""
    eos_ids: tuple[int, ...]
    """All tokens that end generation, the file's ``eos`` first; empty when there is none."""
    unk_id: int | None
    pad_id: int | None
    add_bos: bool
    """The tokenizer's ``encode(text)`` puts ``bos_id`` first; ``encode(text, add_special_tokens=False)`` (what a
    rendered chat template wants) does not."""
    add_eos: bool
    """Likewise the first of ``eos_ids`` last."""
    special_ids: frozenset[int]
    """Tokens that are never text: hidden by ``decode(ids, skip_special_tokens=True)``."""
    named_tokens: Mapping[str, str]
    """``bos_token``, ``eos_token``, ``unk_token``, ``pad_token``: what chat templates call them, where there is one."""
    chat_templates: Mapping[str, str]
    """Jinja sources by name: "default", perhaps "tool_use"; empty when the file has none."""

    @property
    def chat_template(self) -> str | None:
        """The default template."""
        return self.chat_templates.get("default")


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How text is cut into words before merging."""

    pattern: str | None
    """A regular expression whose matches are words; None for GPT-2's own, built into the library."""
    digits: bool = False
    """Cut every digit off first."""
    nfc: bool = False
    """Compose characters first (Unicode normalisation form C)."""
    whole_words: bool = False
    """A word that is itself a token is taken without merging."""
    add_bos: bool = False
    """Whether a text begins with ``bos`` when the file does not say."""


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

SPLIT_RULES = {
    "default": SplitRule(None),
    "gpt-2": SplitRule(None),
    "smollm": SplitRule(None, digits=True),
    "qwen2": SplitRule(QWEN2, nfc=True),
    "deepseek-r1-qwen": SplitRule(QWEN2, nfc=True),
    "llama-bpe": SplitRule(LLAMA3, whole_words=True, add_bos=True),
    "llama3": SplitRule(LLAMA3, whole_words=True, add_bos=True),
    "llama-v3": SplitRule(LLAMA3, whole_words=True, add_bos=True),
}
"""By ``tokenizer.ggml.pre``. A file without one gets "default"."""


def tokenizer_from_gguf(metadata: Metadata) -> tuple[Tokenizer, TokenizerSettings]:
    """Build the tokenizer (``ropeway.loading.gguf.reader.read_metadata`` gives the metadata).

    Raises ``Unsupported`` for a kind of vocabulary or splitting rule not known here, by name, and for a file
    without a vocabulary; ``LoadError`` for a damaged one.
    """
    kind = metadata.scalar("tokenizer.ggml.model", str, "none")
    pieces = vocabulary.tokens(metadata)
    if kind in ("none", "no_vocab") or not pieces:
        raise Unsupported(f"{metadata.path}: the file holds no tokenizer; send token ids instead of text")
    if kind == "gpt2":
        rule = split_rule(metadata)
        tokenizer, add_bos = byte_level_tokenizer(metadata, pieces, rule), rule.add_bos
    elif kind == "llama":
        tokenizer, add_bos = sentencepiece_tokenizer(metadata, pieces), True
    else:
        raise Unsupported(f"{metadata.path}: tokenizer '{kind}' is not supported; supported: gpt2, llama")
    special = add_tokens(tokenizer, metadata, pieces)
    settings = read_settings(metadata, pieces, special, add_bos)
    add_template(tokenizer, settings)
    return tokenizer, settings


def split_rule(metadata: Metadata) -> SplitRule:
    name = metadata.scalar("tokenizer.ggml.pre", str, "default")
    try:
        return SPLIT_RULES[name]
    except KeyError:
        known = ", ".join(SPLIT_RULES)
        raise Unsupported(f"{metadata.path}: pre-tokenizer '{name}' is not supported; supported: {known}") from None


def byte_level_tokenizer(metadata: Metadata, pieces: list[str], rule: SplitRule) -> Tokenizer:
    merges = []
    for line in metadata.texts("tokenizer.ggml.merges") or []:
        cut = line.find(" ", 1)
        if cut < 0:
            raise LoadError(f"{metadata.path}: damaged: merge {line!r:.60} has no two parts")
        merges.append((line[:cut], line[cut + 1 :]))
    try:
        model = models.BPE(token_ids(pieces), merges, ignore_merges=rule.whole_words)
    except Exception as error:  # the library raises no narrower type
        raise LoadError(f"{metadata.path}: damaged: the merges do not fit the vocabulary ({error})") from error
    tokenizer = Tokenizer(model)
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule.pattern is None)
    steps: list[pre_tokenizers.PreTokenizer] = [byte_level]
    if rule.pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(rule.pattern), behavior="isolated"))
    if rule.digits:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps) if len(steps) > 1 else byte_level
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentencepiece_tokenizer(metadata: Metadata, pieces: list[str]) -> Tokenizer:
    """SentencePiece BPE merges the pair whose union has the best score (Kudo and Richardson, 2018), which is
    BPE with a merge for every way to cut a piece in two, in the order of the pieces' scores."""
    scores = metadata.numbers("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(pieces):
        found = "no" if scores is None else len(scores)
        raise LoadError(f"{metadata.path}: {found} values in 'tokenizer.ggml.scores' for {len(pieces)} tokens")
    ids = token_ids(pieces)
    kinds = token_kinds(metadata)
    merges = []
    for index in np.argsort(-scores, kind="stable").tolist():
        if kinds[index] not in (TokenKind.NORMAL, TokenKind.USER_DEFINED):
            continue
        piece = pieces[index]
        cuts = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        found_cuts = [pair for pair in cuts if pair[0] in ids and pair[1] in ids]
        merges += sorted(found_cuts, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    unk = special_ids(metadata).unk
    unk_token = None if unk is None else pieces[unk]
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", SPACE)
    leading = metadata.scalar("tokenizer.ggml.add_space_prefix", bool, True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if leading else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if leading else steps)
    return tokenizer


def token_ids(pieces: list[str]) -> dict[str, int]:
    """Token to id; of two tokens with one text the first counts."""
    return dict(zip(reversed(pieces), range(len(pieces) - 1, -1, -1), strict=True))


def add_tokens(tokenizer: Tokenizer, metadata: Metadata, pieces: list[str]) -> frozenset[int]:
    """Let control and user-defined tokens be found in text as they are. Returns the ids that are not text:
    control tokens, the unknown token, and end tokens even where the file calls them ordinary."""
    kinds = token_kinds(metadata)
    special = set(np.flatnonzero(np.isin(kinds, (TokenKind.CONTROL, TokenKind.UNKNOWN))).tolist())
    special |= {index for index in special_ids(metadata).ends if pieces[index] in END_TOKENS}
    plain = set(np.flatnonzero(kinds == TokenKind.USER_DEFINED).tolist()) - special
    added = [AddedToken(pieces[index], normalized=False, special=index in special) for index in sorted(special | plain)]
    tokenizer.add_tokens([token for token in added if token.content])
    return frozenset(special)


def read_settings(metadata: Metadata, pieces: list[str], special: frozenset[int], add_bos: bool) -> TokenizerSettings:
    ids = special_ids(metadata)
    roles = {"bos_token": ids.bos, "eos_token": ids.eos, "unk_token": ids.unk, "pad_token": ids.pad}
    names = metadata.texts("tokenizer.chat_templates") or []
    templates = {name: metadata.require(f"tokenizer.chat_template.{name}", str) for name in names}
    if default := metadata.scalar("tokenizer.chat_template", str):
        templates["default"] = default
    return TokenizerSettings(
        bos_id=ids.bos,
        eos_ids=ids.ends,
        unk_id=ids.unk,
        pad_id=ids.pad,
        add_bos=metadata.scalar("tokenizer.ggml.add_bos_token", bool, add_bos) and ids.bos is not None,
        add_eos=metadata.scalar("tokenizer.ggml.add_eos_token", bool, False) and ids.eos is not None,
        special_ids=special,
        named_tokens={role: pieces[index] for role, index in roles.items() if index is not None},
        chat_templates=templates,
    )


def add_template(tokenizer: Tokenizer, settings: TokenizerSettings) -> None:
    """Make ``encode`` add what the settings say. Tokens stand under their role's name, since the library
    refuses templates with some characters (":") in them."""
    first = {"bos": settings.bos_id} if settings.add_bos else {}
    last = {"eos": settings.eos_ids[0]} if settings.add_eos else {}
    if first or last:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*first, "$A", *last],
            special_tokens=[{"id": role, "ids": [index], "tokens": [role]} for role, index in (first | last).items()],
        )
