"""Encoders: the model's own ids, the stand-in's, where messages and text lie in them, and what is refused."""

from __future__ import annotations

import json
import random
import re
import sys
import time
import tomllib
from collections.abc import Callable
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pic_traces import Call, load
from pic_traces.encode import EncodedCall, load_encoder
from pic_traces.encode.tokenized import TokenizedCache, TokenizedText
from pic_traces.encode.tokenizer import TextEncoder, load_tokenizer
from pic_traces.errors import TraceError

from tests.conftest import MODELS

TEMPLATES: dict[str, str] = tomllib.loads(Path(__file__).with_name("chat_templates.toml").read_text())
CHATML = TEMPLATES["chatml"]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|header|>", "<|eot|>", "[INST]", "[/INST]"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and over 1234 lazy dogs more.",
    "def add(left: int, right: int) -> int:\n    return left + right\n\n\nprint(add(1, 2))",
    "system user assistant tool\nBe good. naïve café über Straße 東京 🦊",
] * 3


def _byte_level() -> Any:
    """As of GPT-2 and its successors: bytes, spaces belong to the word behind them."""
    from tokenizers import ByteLevelBPETokenizer

    # Cuts spaces off what the library says of a token's place.
    tokenizer = ByteLevelBPETokenizer(trim_offsets=True)
    tokenizer.train_from_iterator(CORPUS, vocab_size=400, show_progress=False)
    return tokenizer


def _metaspace() -> Any:
    """As of SentencePiece: spaces are a letter, and the text's beginning is given one."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"]))
    return tokenizer


Folders = Callable[..., str]
TOKENIZERS: dict[str, Callable[[], Any]] = {"byte_level": _byte_level, "metaspace": _metaspace}


def make_folder(folder: Path, template: object, kind: str = "byte_level") -> str:
    """A model's folder, as far as an encoder reads it."""
    from tokenizers import AddedToken

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = TOKENIZERS[kind]()
    tokenizer.add_special_tokens(SPECIAL)
    # Tokens that take white space with them, and one that is looked for after normalising.
    tokenizer.add_tokens([AddedToken("<wide>", lstrip=True, rstrip=True, normalized=False), AddedToken("<norm>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Folders by template and kind of tokenizer, each made once."""
    root = tmp_path_factory.mktemp("models")
    made = cache(lambda template, kind: make_folder(root / template / kind, TEMPLATES[template], kind))
    return lambda template, kind="byte_level": made(template, kind)


def make_call(*contents: str, answer: str | None = None, **fields: object) -> Call:
    """Messages of user and assistant in turns, beginning with a user."""
    roles = cycle(("user", "assistant"))
    values: dict[str, Any] = {
        "messages": [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)],
        "completion": None if answer is None else {"role": "assistant", "content": answer},
        **{"session_id": "s", "index": 3, "tools": None, "agent": None, "options": {}},
    }
    return Call(**{**values, **fields})


def whole_text(encoded: EncodedCall) -> str:
    return encoded.text(0, len(encoded.tokens))


def part_texts(encoded: EncodedCall) -> list[tuple[str, str]]:
    return [(part.role, encoded.text(part.start, part.end)) for part in encoded.parts]


# One encoder a folder, so that its cache is in play.
load_once = cache(load_encoder)

WORDS = [*SPECIAL, "<wide>", "<norm>", " ", "\n", "  \n\t", "word", " word", "é", "\u0301", "東"]
texts_strategy = st.lists(st.sampled_from(WORDS) | st.text(max_size=8), max_size=6).map("".join)
contents_strategy = st.lists(texts_strategy, min_size=1, max_size=5)


@pytest.mark.parametrize("kind", sorted(TOKENIZERS))
@pytest.mark.parametrize("template", ["chatml", "headers", "plain", "inst"])
@given(contents=contents_strategy, answer=contents_strategy)
def test_ids_are_those_of_the_text(
    folders: Folders, template: str, kind: str, contents: list[str], answer: list[str]
) -> None:
    """Cutting at added tokens and keeping stretches changes nothing, whatever the contents are made of."""
    from tokenizers import Tokenizer

    folder = folders(template, kind)
    whole = Tokenizer.from_file(f"{folder}/tokenizer.json")
    encoded = load_once(folder).encode(make_call(*contents, answer="".join(answer)))
    text = whole_text(encoded)
    assert encoded.tokens.tolist() == whole.encode(text, add_special_tokens=False).ids
    assert all(content.strip() in text for content in contents)
    # A server's cache holds the prompt's own tokens, however the answer begins.
    assert encoded.path[: len(encoded.tokens)].tolist() == encoded.tokens.tolist()
    assert "".join(answer).strip() in encoded.text(len(encoded.tokens), len(encoded.path))
    starts, ends = zip(*((part.start, part.end) for part in encoded.parts), strict=True)
    assert (0, *ends) == (*starts, len(encoded.tokens))
    cut = len(encoded.path) // 2
    assert encoded.text(0, cut) + encoded.text(cut, len(encoded.path)) == encoded.text(0, len(encoded.path))


@pytest.mark.parametrize("template", ["chatml", None])
def test_a_prompt_goes_on_where_the_path_before_it_ended(folders: Folders, template: str | None) -> None:
    encoder = load_encoder(template and folders(template))
    first = encoder.encode(make_call("Where is the quick fox?", answer="Over there."))
    second = encoder.encode(make_call("Where is the quick fox?", "Over there.", "Thanks, fox."))
    assert whole_text(first).endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert first.text(len(first.tokens), len(first.path)) == "Over there.<|im_end|>"
    assert np.array_equal(second.tokens[: len(first.path)], first.path)
    assert (first.path.dtype, first.path.ndim, first.path.flags.c_contiguous) == (np.int32, 1, True)
    assert encoder.is_exact == (template is not None)
    assert template is None or encoder.name == folders(template)
    delimiters = {first.text(at, at + 1) for at, token in enumerate(first.path) if token in encoder.delimiters}
    assert delimiters == {"<|im_start|>", "<|im_end|>"}
    assert encoder.encode(make_call("x")).path.tolist() == encoder.encode(make_call("x")).tokens.tolist()


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_id_has_its_text(tmp_path: Path, kind: str) -> None:
    encoder = load_encoder(make_folder(tmp_path / kind, CHATML, kind))
    encoded = encoder.encode(make_call("the lazy dog\nprint(add(1, 2)) <wide> over"))
    texts = [encoder.texts[token] for token in encoded.tokens]
    # A text's beginning may have a space more, and a token that takes spaces with it none of them.
    assert "".join("".join(texts).split()) == "".join(whole_text(encoded).split())
    assert texts[0] == "<|im_start|>"
    assert any(text.startswith(" ") and text.strip() for text in encoder.texts), "a space in front belongs to the token"


def test_a_path_ends_with_the_token_that_ends_the_turn(tmp_path: Path) -> None:
    chatty = CHATML.replace("<|im_end|>\\n' }}\n{%- endfor %}", "<|im_end|> --\\n' }}\n{%- endfor %}")
    assert chatty != CHATML
    encoded = load_encoder(make_folder(tmp_path, chatty)).encode(make_call("over", answer="fox"))
    assert encoded.text(len(encoded.tokens), len(encoded.path)) == "fox<|im_end|>"


IN_CHATML = [
    ("user", "<|im_start|>user\nthe quick brown fox<|im_end|>\n"),
    ("assistant", "<|im_start|>assistant\nover the lazy dog<|im_end|>\n"),
    ("user", "<|im_start|>user\nok<|im_end|>\n"),
    ("template", "<|im_start|>assistant\n"),
]


def test_parts_are_the_messages_with_what_opens_and_closes_them(folders: Folders) -> None:
    call = make_call("the quick brown fox", "over the lazy dog", "ok")
    system = ("template", "<|im_start|>system\nBe good.<|im_end|>\n")
    assert part_texts(load_encoder(folders("chatml")).encode(call)) == [system, *IN_CHATML]
    assert part_texts(load_encoder(folders("headers")).encode(call)) == [
        ("user", "<s><|begin|>user<|header|>\n\nthe quick brown fox<|eot|>"),
        ("assistant", "<|begin|>assistant<|header|>\n\nover the lazy dog<|eot|>"),
        ("user", "<|begin|>user<|header|>\n\nok<|eot|>"),
        ("template", "<|begin|>assistant<|header|>\n\n"),
    ]
    call_of_two = make_call("the quick brown fox", "over the lazy dog")
    assert part_texts(load_encoder(folders("inst")).encode(call_of_two)) == [
        ("user", "<s>[INST]the quick brown fox"),
        ("assistant", "[/INST]over the lazy dog</s>"),
    ]
    plain = load_encoder(folders("plain")).encode(call)
    assert "".join(text for _, text in part_texts(plain)) == whole_text(plain)
    assert [part.role for part in plain.parts] == ["user", "assistant", "user", "template"]


CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"what": "é"}'}}
WITH_TOOLS: dict[str, Any] = {
    "messages": [
        {"role": "user", "content": "the quick brown fox", "reasoning_content": "hm"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c", "content": "over the lazy dog"},
    ],
    "tools": [{"type": "function", "function": {"name": "find"}}],
}


def test_a_template_that_shows_tools_is_given_them(folders: Folders) -> None:
    encoder = load_encoder(folders("tools"))
    encoded = encoder.encode(make_call(**WITH_TOOLS))
    assert part_texts(encoded) == [
        ("user", f"<|im_start|>user\n{json.dumps(WITH_TOOLS['tools'][0])}\nthe quick brown fox<|im_end|>\n"),
        ("assistant", '<|im_start|>assistant\nfind={"what": "é"}<|im_end|>\n'),
        ("tool", "<|im_start|>tool\nover the lazy dog<|im_end|>\n"),
        ("template", "<|im_start|>assistant\n"),
    ]
    assert encoder.notes == ()
    without = encoder.encode(make_call(**{**WITH_TOOLS, "options": {"tool_choice": "none"}}))
    assert '"type": "function"' not in whole_text(without)


PARTS: list[Any] = [
    {"type": "text", "text": "the quick"},
    {"type": "image_url", "image_url": {"url": "data:..."}},
    {"type": "input_text", "text": "fox"},
]


@pytest.mark.parametrize("template", [None, "chatml", "tools"])
def test_content_of_parts_is_joined_and_images_are_counted(folders: Folders, template: str | None) -> None:
    encoder = load_encoder(None if template is None else folders(template))
    encoded = encoder.encode(make_call(messages=[{"role": "user", "content": PARTS}]))
    joined = r"the quick\[image_url \w{8}\]fox" if template == "tools" else r"the quick \[image_url \w{8}\] fox"
    assert re.search(rf"<\|im_start\|>user\n{joined}<\|im_end\|>", whole_text(encoded))
    assert encoder.notes == ("1 images or other parts that are no text count as one short placeholder each",)


def test_a_template_that_refuses_names_session_and_call(folders: Folders) -> None:
    encoder = load_encoder(folders("inst"))
    two_users = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    refusal = r"session 's', call 3: the chat template of .* refuses .*roles must alternate"
    with pytest.raises(TraceError, match=refusal):
        encoder.encode(make_call(messages=two_users))
    # Where it only refuses the answer, the path is the prompt and the answer's text.
    encoded = encoder.encode(make_call("a", "b", answer="c"))
    assert encoded.text(len(encoded.tokens), len(encoded.path)) == "c"


def test_what_a_template_may_use(tmp_path: Path) -> None:
    """Named templates, options of the call, loop controls, the generation tag, text with no ASCII escapes, the date."""
    templates = {"default": TEMPLATES["all"], "tool_use": TEMPLATES["tools"]}
    named = [{"name": name, "template": template} for name, template in templates.items()]
    encoder = load_encoder(make_folder(tmp_path, named))
    call = make_call("hello", "no", options={"chat_template_kwargs": {"mood": "glad"}, "tool_choice": "auto"})
    assert whole_text(encoder.encode(call)) == 'hello glad ["é<"] 4 </s>'
    (tmp_path / "chat_template.jinja").write_text("{{ messages | length }} {{ bos_token }}")
    assert whole_text(load_encoder(str(tmp_path)).encode(call)) == "2 <s>"


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(folder: str | Path, message: str) -> None:
        with pytest.raises(TraceError, match=message):
            load_encoder(str(folder))

    refused("/no/where", r"tokenizer='/no/where': no such folder")
    refused(tmp_path, r"tokenizer\.json does not exist")
    folder = Path(make_folder(tmp_path / "model", "{% for %}"))
    refused(folder, r"the chat template cannot be compiled")
    (folder / "tokenizer_config.json").write_text("{")
    refused(folder, r"tokenizer_config\.json: bad JSON")
    (folder / "tokenizer_config.json").unlink()
    refused(folder, r"no chat template: neither chat_template\.jinja nor")
    (folder / "chat_template.jinja").write_text(CHATML)
    load_encoder(str(folder))
    (folder / "tokenizer.json").write_text("{}")
    refused(folder, r"tokenizer\.json cannot be read")
    make_folder(folder, CHATML)
    for package in ("jinja2.sandbox", "tokenizers"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            refused(folder, rf"needs the package {package.partition('.')[0]}: pip install")


def test_the_stand_in_needs_no_files() -> None:
    encoder = load_encoder(None)
    encoded = encoder.encode(make_call("the quick brown fox", "over the lazy dog", "ok"))
    assert part_texts(encoded) == IN_CHATML
    assert "".join(encoder.texts[token] for token in encoded.tokens) == whole_text(encoded)
    roles = [part.role for part in encoder.encode(make_call(**WITH_TOOLS)).parts]
    assert roles == ["system", "user", "assistant", "tool", "template"]
    with pytest.raises(IndexError, match=r"tokens \[0, 99\) of a path of"):
        encoded.text(0, 99)


def test_a_cache_forgets_what_was_not_used_longest() -> None:
    made: list[str] = []

    def make(text: str) -> TokenizedText:
        made.append(text)
        return TokenizedText(text, np.zeros(10, np.int32), np.zeros(10, np.int32))

    cache = TokenizedCache(make, max_bytes=1200)
    for text in ("a", "b", "a", "c", "a", "b"):
        assert cache.get(text).text == text
    assert made == ["a", "b", "c", "b"]


def test_a_row_of_spaces_is_cut_in_linear_time(folders: Folders) -> None:
    """Before a token that takes the spaces to its left with it, each space would be a beginning."""
    encoder = TextEncoder(load_tokenizer(Path(folders("chatml"))))
    begun = time.perf_counter()
    assert list(encoder.cuts(" " * 100_000 + "a  <wide>b<wide> <wide>")) == [100_001, 100_010, 100_017]
    assert time.perf_counter() - begun < 2


@pytest.mark.skipif(not (MODELS / "smollm2" / "tokenizer.json").is_file(), reason="SmolLM2 is not prepared")
def test_smollm2_as_transformers_has_it() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("tokenizers")
    from pic_platform import torchvision_shim

    torchvision_shim.install()
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoTokenizer.from_pretrained(MODELS / "smollm2")
    encoder = load_encoder(str(MODELS / "smollm2"))
    calls = [call for session in load("sample:opendevin") for call in session.calls()]
    for call in random.Random(1).sample(calls, 12):
        encoded = encoder.encode(call)
        prompt = model.apply_chat_template(call.messages, add_generation_prompt=True, return_dict=False)
        assert encoded.tokens.tolist() == prompt
        path = model.apply_chat_template([*call.messages, call.completion], return_dict=False)
        assert [*encoded.path.tolist(), *path[-1:]] == path
