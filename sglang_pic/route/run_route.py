"""The verb `route`: its arguments, and the program that they start."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from string import Template

from sglang_pic.errors import ConfigError

# HAProxy's buffer, as large as bodies that the sidecar reads, and its part for a request's head.
_BUFFER_BYTES, _HEAD_BYTES = 1 << 19, 1 << 15


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `sglang-pic route`."""
    add = parser.add_argument
    add(
        "--server",
        required=True,
        action="append",
        metavar="URL=EVENTS",
        help="a server and its endpoint of content events, e.g. http://10.0.0.1:30000=tcp://10.0.0.1:5570; "
        "repeat for each",
    )
    add("--salt-file", metavar="FILE", help="the secret of the servers' content_events; needed to listen")
    add(
        "--tokenizer",
        metavar="DIR",
        help="the servers' tokenizer.json and chat template; without it only requests with token ids are routed",
    )
    add("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    add("--port", type=int, default=30080, help="port to listen on, 1 to 65535 (default: 30080)")
    add(
        "--haproxy",
        metavar="ADDRESS:PORT",
        help="print HAProxy's configuration instead: it listens there, asks this sidecar, and sends requests on",
    )
    parser.epilog = _EPILOG


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, or print HAProxy's configuration.

    Raises:
        ConfigError: an argument is not allowed, the secret cannot be read, or the port is taken.
        TraceError: the tokenizer cannot be read.
    """
    from aiohttp import web

    from sglang_pic.route.request_body import Prompts
    from sglang_pic.route.sidecar import Sidecar
    from sglang_pic.route.wire import read_salt
    from sglang_pic.route.workers import Workers

    servers = dict(map(_server, args.server))
    if not 1 <= args.port <= 65535:
        raise ConfigError(f"--port={args.port}: must be 1 to 65535; 30080 is the default.")
    if len(servers) < len(args.server) or len(set(servers.values())) < len(args.server):
        raise ConfigError("--server: two have the same URL or endpoint of content events; give each its own.")
    if args.haproxy is not None:
        print(_haproxy(args.haproxy, f"http://{args.host}:{args.port}", list(servers)), end="")
        return 0
    if args.salt_file is None:
        raise ConfigError("--salt-file: name the file with the secret of the servers' content_events.")
    salt = read_salt(args.salt_file)
    # Errors of the tokenizer are raised here, not in a worker.
    Prompts(args.tokenizer, salt)
    sidecar = Sidecar(servers, salt, Workers(args.tokenizer, salt))
    reads = f"texts as {args.tokenizer} does" if args.tokenizer else "token ids only, for want of --tokenizer"
    started = f"http://{args.host}:{args.port}: {len(servers)} servers; reads {reads}"
    try:
        web.run_app(
            sidecar.app(), host=args.host, port=args.port, access_log=None,
            print=lambda _: print(started, file=sys.stderr, flush=True),
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"--host {args.host} --port {args.port}: {error.strerror}; give a free one.") from error
    return 0


def _haproxy(listen: str, sidecar: str, servers: list[str]) -> str:
    from sglang_pic.route.sidecar import PATHS

    if not re.fullmatch(r"[\w.*:\[\]-]*:\d{1,5}", listen):
        raise ConfigError(f"--haproxy {listen!r}: must be like 127.0.0.1:30000.")
    folder = Path(__file__).parent
    names = [server.removeprefix("http://") for server in servers]
    return Template((folder / "haproxy.cfg").read_text("utf8")).substitute(
        bufsize=_BUFFER_BYTES,
        kept=_BUFFER_BYTES - _HEAD_BYTES,
        sidecar=sidecar,
        lua=folder / "haproxy.lua",
        listen=listen,
        paths=" ".join(PATHS),
        servers="\n".join(f"    server {name} {name}" for name in names),
    )


def _server(text: str) -> tuple[str, str]:
    url, _, endpoint = text.partition("=")
    if not re.fullmatch(r"http://[\w.-]+:\d{1,5}/?", url) or not re.match(r"tcp://.+:\d+", endpoint):
        raise ConfigError(f"--server {text!r}: must be like http://10.0.0.1:30000=tcp://10.0.0.1:5570.")
    return url.rstrip("/"), endpoint


_EPILOG = """\
on each server, in SGLANG_PIC_CONFIG:
  {"content_events": {"endpoint": "tcp://10.0.0.1:5570", "salt_file": "FILE"}}
HAProxy 2.6 or later carries the requests:
  sglang-pic route --server ... --haproxy 127.0.0.1:30000 > haproxy.cfg && haproxy -f haproxy.cfg
a gateway, if there is one, has HAProxy as its only worker: smg launch --worker-urls http://127.0.0.1:30000
  POST /route?path=/generate    a request's body: the server with most of its text, or null
  GET  /health, /metrics, /status"""
