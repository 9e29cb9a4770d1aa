"""The command line: `python -m tools.soak COMMAND --out REPORT.json`."""

import argparse
import sys
import tempfile
from pathlib import Path

from tools.soak import kills, load, replicas
from tools.soak.report import Report


def main() -> int:
    """Runs a command and returns its exit code: 1 if a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m tools.soak", description="Attacks a server from outside.")
    commands = parser.add_subparsers(dest="command", required=True)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--out", type=Path, help="write the report to this file, as JSON")
    shared.add_argument("--small", action="store_true", help="run for a few seconds only")
    shared.add_argument("--cache", type=Path, help="a directory of compiled programs; default: a new one")
    shared.add_argument("--seed", type=int, default=0, help="the seed of all random choices")
    shared.add_argument("--health-seconds", type=float, default=1, help="time limit for an answer of /health")

    crowd = commands.add_parser("load", parents=[shared], help="a crowd of clients, and probes among them")
    crowd.add_argument("--clients", type=int, default=500)
    crowd.add_argument("--seconds", type=float, default=600)
    crowd.add_argument("--memory-margin", type=float, default=100, help="maximum growth of the server's memory, in MiB")
    crowd.add_argument("--backend", default="portable", help="stock is a control, whose answers must differ")
    kill = commands.add_parser("kills", parents=[shared], help="SIGKILL at any time, and restarts with the same cache")
    kill.add_argument("--times", type=int, default=16)
    killed = commands.add_parser(
        "replicas", parents=[shared], help="SIGKILL of replicas of Ray Serve while clients stream"
    )
    killed.add_argument("--clients", type=int, default=200)
    killed.add_argument("--replicas", type=int, default=3)
    killed.add_argument("--seconds", type=float, default=120)
    killed.add_argument("--every", type=float, default=10, help="seconds between kills")

    options = parser.parse_args()
    report = Report({key: value for key, value in vars(options).items()})
    with tempfile.TemporaryDirectory(prefix="detjax-soak-") as name:
        folder = Path(name)
        cache = options.cache or folder / "cache"
        match options.command:
            case "load":
                sizes = load.Sizes(options.clients, options.seconds, warm_up=min(60, options.seconds / 4))
                sizes = load.Sizes(20, 4, 1, slow_clients=1, max_tokens=10, is_small=True) if options.small else sizes
                limits = {"health": options.health_seconds, "margin": options.memory_margin}
                load.run(report, folder, cache, sizes, backend=options.backend, seed=options.seed, **limits)
            case "kills":
                kills.run(report, folder, cache, 3 if options.small else options.times, options.seed, options.small)
            case "replicas":
                sizes = replicas.Sizes(options.clients, options.replicas, options.seconds, options.every)
                sizes = replicas.Sizes(8, 2, 30, 15, is_small=True) if options.small else sizes
                replicas.run(report, folder, cache, sizes, options.seed)
    return report.write(options.out)


if __name__ == "__main__":
    sys.exit(main())
