"""The application of an HTTP server with several tokenizer workers, in whose processes SGLang loads no plugins.

The main process names it in SGLang's variable for the application's path. The import is the entry point.
"""

from __future__ import annotations

from sglang.srt.entrypoints.http_server import app
from sglang.srt.plugins import load_plugins

from sglang_pic.adapter.serve.frontend import install_http

__all__ = ["app"]

load_plugins()
install_http()
