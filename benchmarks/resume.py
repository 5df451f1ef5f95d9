"""Killed and resumed: `python benchmarks/resume.py [STUDY] [--kills N] [-- RUN OPTIONS]`.

Runs a study once without interruption, then again and again into one folder with `kill -9` at random moments, and
compares the fronts. The moments are spread over the time that the uninterrupted run took.
"""

import argparse
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd


def start(study: str, out: Path, options: list[str]) -> subprocess.Popen[str]:
    """A run of the command line in a process of its own."""
    command = [sys.executable, "-m", "breakeven", "run", study, "--out", str(out), "--no-verify", *options]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def front(out: Path) -> pd.DataFrame:
    """The front in an output folder."""
    return pd.read_csv(out / "front.csv")


def main() -> None:
    """Print where each kill struck, and whether the fronts are the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", default="coding-agent")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given, options = parser.parse_known_args()
    options = [o for o in options if o != "--"]
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder) / "whole", Path(folder) / "killed"
        clock = time.perf_counter()
        if start(given.study, whole, options).wait() not in (0, 1):
            sys.exit("the run failed")
        seconds = time.perf_counter() - clock
        print(f"uninterrupted: {seconds:.1f} s, front of {len(front(whole))}", flush=True)
        for kill in range(given.kills):
            process = start(given.study, killed, options)
            moment = chance.uniform(0.2, 1.0) * seconds
            try:
                said = process.communicate(timeout=moment)[1]
                where = "it was done before"
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                said = process.communicate()[1]
                where = said.strip().splitlines()[-1] if said.strip() else "before the first word"
            print(f"kill {kill + 1} after {moment:.1f} s: {where}", flush=True)
        if start(given.study, killed, options).wait() not in (0, 1):
            sys.exit("the resumed run failed")
        same = front(whole).equals(front(killed))
        print("the same front" if same else "ANOTHER FRONT")
        sys.exit(not same)


if __name__ == "__main__":
    main()
