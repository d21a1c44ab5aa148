"""Perplexity of checkpoints on a text, in float32 with transformers: what a conversion costs.

`python -m pic_models.perplexity DIR [DIR ...] --text FILE`.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path

from sglang_pic.errors import ConfigError


def perplexity(model_dir: Path, text: str, *, window_len: int = 1024) -> float:
    """Exponential of the mean negative log likelihood of a text's tokens.

    The text is cut into windows that do not overlap. The first token of each window is context only, and a last window
    of fewer than two tokens is left out.

    Args:
        model_dir: A checkpoint folder with its tokenizer.
        text: At least two tokens.
        window_len: Tokens of a window, 2 or more.

    Raises:
        ConfigError: The text or the window is too short.
    """
    from pic_platform import torchvision_shim

    torchvision_shim.install()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = torch.tensor(AutoTokenizer.from_pretrained(model_dir)(text)["input_ids"])
    if min(len(tokens), window_len) < 2:
        raise ConfigError(f"window_len={window_len}, {len(tokens)} tokens: both must be 2 or more.")
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    loss, count = 0.0, 0
    with torch.no_grad():
        for window in tokens.split(window_len):
            if len(window) < 2:
                continue
            logits = model(window[None], use_cache=False).logits[0, :-1]
            loss += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))
            count += len(window) - 1
    return math.exp(loss / count)


def main(argv: list[str] | None = None) -> int:
    """Print one line per checkpoint: its perplexity, then its folder.

    Returns:
        0; errors of the project are raised.
    """
    parser = argparse.ArgumentParser(prog="python -m pic_models.perplexity", description=__doc__)
    parser.add_argument("models", metavar="DIR", type=Path, nargs="+", help="checkpoint folders")
    parser.add_argument("--text", metavar="FILE", type=Path, required=True, help="a UTF-8 text")
    parser.add_argument("--window", metavar="TOKENS", type=int, default=1024, help="tokens of a window (1024)")
    args = parser.parse_args(argv)
    text = args.text.read_text(encoding="utf-8")
    for model_dir in args.models:
        print(f"{perplexity(model_dir, text, window_len=args.window):.3f} {model_dir}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
