"""`python -m pic_replay TRACE --base-url URL --out DIR`: the replay without the main program."""

from __future__ import annotations

import argparse
import sys

from pic_replay import command

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m pic_replay", description=command.DESCRIPTION)
    command.add_arguments(parser)
    sys.exit(command.run(parser.parse_args()))
