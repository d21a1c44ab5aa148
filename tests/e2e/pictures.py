"""Prompts with images for the servers of a vision model."""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

from tests.e2e.serving import Client, random_tokens

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"


def image(seed: int, width: int, height: int) -> str:
    """An image of noise, of so many pixels; 28 x 28 of them are a token."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(stream := io.BytesIO(), "PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def words(client: Client, seed: int, count: int) -> str:
    """Text of about so many tokens."""
    return str(client.post("/detokenize", {"tokens": random_tokens(seed, count)})["text"])


A, B, C = image(1, 280, 196), image(2, 196, 280), image(3, 140, 336)
