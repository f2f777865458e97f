"""`tinygrad-nv launch -n N COMMAND`: runs a command as N ranks on this host.

Protocol: all work is dist/launcher.py's. Each rank has torchrun's environment variables; the exit status is
that of the rank that failed first.
"""
from __future__ import annotations

import argparse
from pathlib import Path

from tinygrad_nv.dist.launcher import Launch, launch
from tinygrad_nv.dist.processes import GRACE_S
from tinygrad_nv.errors import RequestError


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `launch`."""
    made = commands.add_parser("launch", help="run a command as several ranks, one for each device",
                               usage="%(prog)s [options] COMMAND ...")
    made.add_argument("-n", "--nproc-per-node", type=int, required=True, metavar="N", dest="ranks",
                      help="ranks on this host")
    made.add_argument("--nodes", "--nnodes", type=int, default=1, metavar="M",
                      help="hosts (default 1); start this command on each of them")
    made.add_argument("--node-rank", type=int, default=0, metavar="R",
                      help="the number of this host, from 0 on")
    made.add_argument("--master-addr", default="", metavar="HOST",
                      help="the host with --node-rank 0 (default: this one)")
    made.add_argument("--master-port", type=int, default=0, metavar="PORT",
                      help="a free port of that host (default: one that is free now)")
    made.add_argument("--quiet", action="store_true", help="show the output of this host's first rank alone")
    made.add_argument("--log-dir", type=Path, metavar="DIR", help="write the output of each rank to a file")
    made.add_argument("--grace", type=float, default=GRACE_S, metavar="SECONDS",
                      help="after a rank failed, or a signal, the others have this time to end before they "
                      f"are killed (default {GRACE_S:g})")
    made.add_argument("--max-restarts", type=int, default=0, metavar="N",
                      help="start all ranks again after one failed, so many times (default 0)")
    made.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND",
                      help="a program and its arguments, or a file of Python")
    made.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs the ranks to their end."""
    words = arguments.words[1:] if arguments.words[:1] == ["--"] else arguments.words
    if not 0 <= arguments.grace < float("inf"):
        raise RequestError(f"--grace {arguments.grace:g}", "seconds, 0 or more", "such as --grace 10")
    return launch(Launch(tuple(words), arguments.ranks, arguments.nodes, arguments.node_rank,
                         arguments.master_addr, arguments.master_port, arguments.quiet, arguments.log_dir,
                         arguments.grace, max_restarts=arguments.max_restarts))
