"""SGLang's command line in a process that asks the doctor about many servers."""

from __future__ import annotations

import functools
from argparse import ArgumentParser
from typing import Any

import msgspec.structs

from tests.helpers.workers import collect_nothing


def read_flags_once() -> None:
    """Has this process read the declarations of SGLang's flags once: for each server it takes about half of the time.

    SGLang is not imported before the first server is asked for, because it finds its platform then.
    """
    from sglang_pic.adapter.doctor import server

    collect_nothing()
    msgspec.structs.fields = functools.cache(msgspec.structs.fields)
    parse = server._parse
    made: list[ArgumentParser] = []

    def parse_again(argv: list[str]) -> Any:
        from sglang.srt.server_args import ServerArgs

        if not made:
            add = ServerArgs.add_cli_args

            def add_once(parser: ArgumentParser) -> None:
                if not made:
                    add(parser)
                    made.append(parser)
                parser.__dict__ = made[0].__dict__

            ServerArgs.add_cli_args = staticmethod(add_once)
        return parse(argv)

    server._parse = parse_again
