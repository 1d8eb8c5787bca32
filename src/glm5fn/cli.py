"""The ``glm5fn`` command. Each subcommand is one function here; it adds its options and returns what runs it."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence

from glm5fn import __version__

__all__ = ["main"]

Run = Callable[[argparse.Namespace], int]


def info(parser: argparse.ArgumentParser) -> Run:
    """Show versions, hardware, the settings in force, and which backend can run what."""
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    parser.add_argument("--hardware", metavar="CHIP", help="answer for this chip, for instance Ascend910B2 or H100")
    parser.add_argument("--torch-problem", help=argparse.SUPPRESS)

    def run(args: argparse.Namespace) -> int:
        from glm5fn import diagnostics

        if args.torch_problem is None and diagnostics.autoload_breaks_torch():
            options = [*(["--json"] if args.json else []), *(["--hardware", args.hardware] if args.hardware else [])]
            return diagnostics.run_without_autoload(options)
        report = diagnostics.collect(args.hardware, args.torch_problem)
        print(json.dumps(report, indent=2) if args.json else diagnostics.text(report))
        return 0

    return run


def generate(parser: argparse.ArgumentParser) -> Run:
    """Continue a prompt, and show the cache and which backend ran each operation."""
    parser.add_argument("path", nargs="?", help="checkpoint folder (default: the small one that ships with glm5fn)")
    parser.add_argument("--prompt", default='The "for" statement', help="text to continue; - reads standard input")
    parser.add_argument("--max-new-tokens", type=int, default=400, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, help="0, the default, takes the likeliest")
    parser.add_argument("--top-p", type=float, default=1.0, help="sample from the likeliest tokens of this mass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: as stored")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", help="backend of every operation (default: auto)")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: 1 if the model is small)")
    parser.add_argument("--prefill-chunk", type=int, default=4096, metavar="N", help="prompt tokens fed at a time")

    def run(args: argparse.Namespace) -> int:
        from glm5fn.streaming import stream

        return stream(**{name: value for name, value in vars(args).items() if name not in ("run", "traceback")})

    return run


COMMANDS = (info, generate)
"""The subcommands, by the names of their functions; the first one runs when none is given."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line ``argv`` (default: that of the process) and return its exit code: 0, or 2 for bad input."""
    if sys.stderr is None:  # closed by the caller; what is said there goes nowhere, as intended
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for the rest of the process)
    if sys.stdout is None:
        print("glm5fn: standard output is closed, so there is nowhere to write to.", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser(prog="glm5fn", description="GLM-5.3-Flash as pure functions on PyTorch tensors.")
    parser.add_argument("--version", action="version", version=f"glm5fn {__version__}")
    subparsers = parser.add_subparsers(metavar="command", title="commands")
    for command in COMMANDS:
        purpose = (command.__doc__ or "").partition("\n")[0]
        subparser = subparsers.add_parser(command.__name__, help=purpose, description=purpose)
        subparser.add_argument("--traceback", action="store_true", help="show where an error comes from")
        subparser.set_defaults(run=command(subparser))
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or (words[0].startswith("-") and words[0] not in ("-h", "--help", "--version")):
        words.insert(0, COMMANDS[0].__name__)
    args = parser.parse_args(words)
    try:
        code = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader, `head` for instance, has seen enough; Python must not complain at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        if args.traceback:
            raise
        text = str(error).removeprefix(f"{words[0]}: ")
        print(f"glm5fn {words[0]}: {text}\n(--traceback shows where this comes from)", file=sys.stderr)
        return 2
