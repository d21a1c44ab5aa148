"""The verb `route`: its arguments, and the program that they start."""

from __future__ import annotations

import argparse
import re

from sglang_pic.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic route`."""
    add = parser.add_argument
    add(
        "--gateway",
        required=True,
        metavar="URL",
        help="the gateway, which gets every request, e.g. http://127.0.0.1:30000",
    )
    add(
        "--server",
        required=True,
        action="append",
        metavar="URL=EVENTS",
        help="a server as the gateway has it, and where it tells content events, e.g. "
        "http://10.0.0.1:30000=tcp://10.0.0.1:5570; repeat for each",
    )
    add("--salt-file", required=True, metavar="FILE", help="the secret of the servers' content_events")
    add(
        "--tokenizer",
        metavar="DIR",
        help="the servers' tokenizer.json and chat template; without it only requests with token ids are routed",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=30080, help="port to listen on (default: 30080)")
    parser.epilog = _EPILOG


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM.

    Raises:
        ConfigError: an argument is not allowed, or the secret cannot be read.
        TraceError: the tokenizer cannot be read.
    """
    import uvicorn

    from sglang_pic.route.prompts import Prompts
    from sglang_pic.route.proxy import Router
    from sglang_pic.route.wire import read_salt

    servers = dict(map(_server, args.server))
    if not re.match(r"https?://", args.gateway):
        raise ConfigError(f"--gateway {args.gateway!r}: must be like http://127.0.0.1:30000.")
    router = Router(args.gateway, servers, Prompts(args.tokenizer, read_salt(args.salt_file)))
    uvicorn.run(router.app(), host=args.host, port=args.port, log_level="warning")
    return 0


def _server(text: str) -> tuple[str, str]:
    url, _, endpoint = text.partition("=")
    if not re.match(r"https?://.", url) or not re.match(r"tcp://.+:\d+", endpoint):
        raise ConfigError(f"--server {text!r}: must be like http://10.0.0.1:30000=tcp://10.0.0.1:5570.")
    return url.rstrip("/"), endpoint


_EPILOG = """\
on each server, in SGLANG_PIC_CONFIG:
  {"content_events": {"endpoint": "tcp://10.0.0.1:5570", "salt_file": "FILE"}}
the gateway, one of:
  smg launch --worker-urls URL ... --policy manual --assignment-mode random
  sglang-router launch --worker-urls URL ... --policy manual
clients send what they sent to the gateway to the router. It adds x-smg-routing-key; requests that bring this header
or x-smg-target-worker, ask for a mode, a preset or an adapter, or cannot be read go to the gateway as they came.
It learns from answers and content events which key reaches which server.
  POST /route    a request's body: the server and the headers for it, for programs that set them themselves
  GET  /status   what is known of each server, and how many requests were steered"""
