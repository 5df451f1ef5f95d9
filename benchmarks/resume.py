"""Killed and resumed: `python benchmarks/resume.py [STUDY] [--kills N] [-- RUN OPTIONS]`.

Runs a study without interruption, then again and again with `kill -9` at random moments, spread over the time that the
uninterrupted run took. A killed run is resumed, and killed again; when it gets to its end, the fronts are compared, and
the next begins.
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


def finish(study: str, out: Path, options: list[str]) -> None:
    """Run to the end."""
    if start(study, out, options).wait() not in (0, 1):
        sys.exit("a run failed")


def kill(study: str, out: Path, options: list[str], moment_s: float) -> bool:
    """Start or resume a run and kill it after so long; False where it was done before."""
    process = start(study, out, options)
    try:
        process.communicate(timeout=moment_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        said = process.communicate()[1].strip().splitlines()
        print(f"killed after {moment_s:.1f} s: {said[-1] if said else 'before the first word'}", flush=True)
        return True
    return False


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
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for whole in (folder / "compiling", folder / "whole"):  # what is compiled is kept, so the second run is quicker
            clock = time.perf_counter()
            finish(given.study, whole, options)
        seconds = time.perf_counter() - clock
        print(f"uninterrupted: {seconds:.1f} s, front of {len(front(whole))}", flush=True)
        kills, same, into = 0, True, 0
        while kills < given.kills and into < 3 * given.kills:
            killed, struck = folder / str(into), kills
            while kills < given.kills and kill(given.study, killed, options, chance.uniform(0.1, 1.0) * seconds):
                kills += 1
            finish(given.study, killed, options)
            alike = front(whole).equals(front(killed))
            print(f"{kills - struck} kills, then {'the same front' if alike else 'ANOTHER FRONT'}", flush=True)
            same, into = same and alike, into + 1
        print(f"{kills} kills: {'the same front' if same else 'ANOTHER FRONT'}")
        sys.exit(not same)


if __name__ == "__main__":
    main()
