"""The application of an HTTP server with several tokenizer workers, in whose processes SGLang loads no plugins.

SGLang's variable for the application's path names this module; importing it installs the hooks.
"""

from __future__ import annotations

from sglang.srt.entrypoints.http_server import app
from sglang.srt.plugins import load_plugins

from sglang_pic.adapter.serve.frontend import install_http

__all__ = ["app"]

load_plugins()
install_http()
