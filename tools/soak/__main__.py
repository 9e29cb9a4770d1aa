"""The command line: `python -m tools.soak COMMAND --out REPORT.json`."""

import argparse
import sys
import tempfile
from pathlib import Path

from tools.soak import full_disk, kills, load, mutations, replicas, reproductions
from tools.soak.report import Report


def main() -> int:
    """Runs a command and returns its exit code: 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description="Attacks a server from outside.")
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--out", type=Path, help="write the report to this file, as JSON")
    shared.add_argument("--small", action="store_true", help="a few seconds of it")
    shared.add_argument("--cache", type=Path, help="a directory of compiled programs; default: a new one")
    shared.add_argument("--seed", type=int, default=0, help="of all random choices")
    shared.add_argument("--health-seconds", type=float, default=1, help="time that an answer of /health may take")
    shared.add_argument(
        "--memory-margin", type=float, help="MiB that the server may grow by; default: 300, and 100 from a load's start"
    )

    crowd = commands.add_parser("load", parents=[shared], help="a crowd of clients, and probes among them")
    crowd.add_argument("--clients", type=int, default=500)
    crowd.add_argument("--seconds", type=float, default=600)
    crowd.add_argument("--backend", default="portable", help="stock is a control, whose answers have to differ")
    kill = commands.add_parser("kills", parents=[shared], help="SIGKILL at any time, and starts with the same cache")
    kill.add_argument("--times", type=int, default=16)
    commands.add_parser("disk", parents=[shared], help="a cache of compiled programs on a full disk")
    mutated = commands.add_parser("mutations", parents=[shared], help="requests that are damaged in any way")
    mutated.add_argument("--requests", type=int, default=50_000)
    killed = commands.add_parser(
        "replicas", parents=[shared], help="SIGKILL of replicas of Ray Serve while clients stream"
    )
    killed.add_argument("--clients", type=int, default=200)
    killed.add_argument("--replicas", type=int, default=3)
    killed.add_argument("--seconds", type=float, default=120)
    killed.add_argument("--every", type=float, default=10, help="seconds from one kill to the next")
    commands.add_parser("reproductions", parents=[shared], help="attacks that once succeeded")

    options = parser.parse_args()
    report = Report({key: value for key, value in vars(options).items()})
    margin = options.memory_margin or (100 if options.command == "load" else 300)
    limits = {"health": options.health_seconds, "margin": margin}
    with tempfile.TemporaryDirectory(prefix="detjax-soak-") as name:
        folder = Path(name)
        cache = options.cache or folder / "cache"
        match options.command:
            case "load":
                sizes = load.Sizes(options.clients, options.seconds, warm_up=min(60, options.seconds / 4))
                sizes = load.Sizes(20, 4, 1, slow_clients=1, max_tokens=10, is_small=True) if options.small else sizes
                load.run(report, folder, cache, sizes, backend=options.backend, seed=options.seed, **limits)
            case "kills":
                kills.run(report, folder, cache, 3 if options.small else options.times, options.seed, options.small)
            case "disk":
                full_disk.run(report, folder, options.small)
            case "mutations":
                requests = min(200, options.requests) if options.small else options.requests
                mutations.run(report, folder, cache, requests, options.seed, options.small, **limits)
            case "replicas":
                sizes = replicas.Sizes(options.clients, options.replicas, options.seconds, options.every)
                sizes = replicas.Sizes(8, 2, 30, 15, is_small=True) if options.small else sizes
                replicas.run(report, folder, cache, sizes, options.seed)
            case "reproductions":
                reproductions.run(report, folder, cache, options.small, **limits)
    return report.write(options.out)


if __name__ == "__main__":
    sys.exit(main())
