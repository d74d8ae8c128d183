"""Do the tests notice a fault? Each of faults.toml is put into a copy of the project.

    python .bench/faults.py [--jobs 2] [--only WORD]     # half a minute a fault

First all tests run once, to learn which functions each reaches. A fault then meets
those that reach its function, and at last all of them.
"""

import ast
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import common

REACHED: dict[str, set[str]] = defaultdict(set)  # functions, by test
RUNNING = [""]  # the test


def note(frame: Any, event: str, _: Any) -> None:
    path = frame.f_code.co_filename
    if event == "call" and path.endswith(("main.py", "memory.py", "tools.py")):
        place = f"{os.path.basename(path)}:{frame.f_code.co_firstlineno}"
        REACHED[RUNNING[0]].add(place)


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note each function that a test calls. Pytest finds this by `-p faults`."""
    RUNNING[0] = nodeid
    threading.setprofile(note)
    sys.setprofile(note)


def pytest_sessionfinish() -> None:
    reached = {test: sorted(places) for test, places in REACHED.items()}
    Path("reached.json").write_text(json.dumps(reached))


def run_tests(project: Path, *arguments: str) -> str:
    """Run tests in a copy of the project; return what failed, or ""."""
    command = ["timeout", "900", sys.executable, "-m", "pytest", "-q", *arguments]
    path = os.pathsep.join([str(project), str(project / ".bench")])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    known = {"cwd": project, "env": environment, "capture_output": True, "text": True}
    run = subprocess.run(command, check=False, **known)
    return f"{run.stdout[-3000:]} exit {run.returncode}" if run.returncode else ""


def copy_project(folder: str) -> Path:
    ignored = shutil.ignore_patterns(".git", "__pycache__", "data", ".venv")
    return Path(shutil.copytree(common.ROOT, Path(folder, "copy"), ignore=ignored))


def try_fault(file: str, old: str, new: str, reached: dict[str, list[str]]) -> str:
    """Return "caught", "MISSED", or "no place"."""
    with tempfile.TemporaryDirectory() as folder:
        project = copy_project(folder)
        source = (project / file).read_text()
        if source.count(old) != 1:
            return "no place"
        (project / file).write_text(source.replace(old, new))
        line = source[: source.index(old) + len(old) // 2].count("\n") + 1
        kinds, starts = (ast.FunctionDef, ast.AsyncFunctionDef), [0]
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, kinds) and line in range(
                node.lineno, node.end_lineno + 1
            ):
                starts.append([*node.decorator_list, node][0].lineno)
        place = f"{file}:{max(starts)}"
        tests = [test for test, places in reached.items() if place in places]
        tests.sort(key=lambda test: len(reached[test]))
        failed = run_tests(project, "-x", *tests) or run_tests(project, "-x")
        return "caught" if failed else "MISSED"


def main() -> None:
    options = common.options(__doc__, jobs=2, only="")
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    faults = [(p, name, *table[p][name]) for p in table for name in table[p]]
    faults = [fault for fault in faults if options.only in fault[1]]
    with tempfile.TemporaryDirectory() as folder:
        project = copy_project(folder)
        if failed := run_tests(project, "-p", "faults"):
            raise SystemExit(f"The tests fail without a fault: {failed}")
        reached = json.loads((project / "reached.json").read_text())
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        found = list(pool.map(lambda fault: try_fault(*fault[2:], reached), faults))
    caught = f"{found.count('caught')} of {len(faults)}"
    rows = [[*fault[:2], result] for fault, result in zip(faults, found, strict=True)]
    common.print_table(["promise", "fault", caught], rows)
    sys.exit(found.count("caught") < len(found))


if __name__ == "__main__":
    main()
