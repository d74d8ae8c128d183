"""Do the tests notice a fault? Each of faults.toml is put into a copy of the project.

    python .bench/faults.py [--jobs 2] [--only WORD]     # a minute a fault

A text that is replaced must stand once in the code. `--only ?` checks this alone.
"""

import ast
import concurrent.futures
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import common


def with_fault(file: str, old: str, new: str) -> str:
    """Return a module with a fault, or nothing if its text does not stand once."""
    source = (common.ROOT / file).read_text()
    tokens = map(re.escape, re.findall(r"\w+|\S", old))
    # A formatter may put a comma before a bracket that closes.
    pattern = re.sub(r"(?=\\[)\]}])", r",?\\s*", r"\s*".join(tokens))
    faulty, places = re.subn(pattern, lambda _: new, source)
    ast.parse(faulty)  # every test would notice a SyntaxError
    return faulty if places == 1 else ""


def run_tests(file: str, content: str) -> bool:
    """Tell whether the tests pass in a copy of the project with another file."""
    ignored = shutil.ignore_patterns(".git", "__pycache__", "data", ".venv")
    with tempfile.TemporaryDirectory() as folder:
        project = shutil.copytree(common.ROOT, Path(folder, "copy"), ignore=ignored)
        (project / file).write_text(content)
        command = ["timeout", "900", sys.executable, "-m", "pytest", "-q", "-x"]
        run = subprocess.run(command, check=False, cwd=project, capture_output=True)
        return not run.returncode


def main() -> None:
    options = common.options(__doc__, jobs=2, only="")
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    faults = [
        (promise, name, file, with_fault(file, *texts))
        for promise in table
        for name, (file, *texts) in table[promise].items()
    ]
    if stale := [name for _, name, _, content in faults if not content]:
        raise SystemExit(f"These do not fit the code: {', '.join(stale)}")
    faults = [fault for fault in faults if options.only in fault[1]]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        if faults and not run_tests("no fault", ""):
            raise SystemExit("The tests fail without a fault.")
        missed = [*pool.map(lambda fault: run_tests(*fault[2:]), faults)]
    rows = [[*f[:2], "MISSED" if m else "caught"] for f, m in zip(faults, missed)]
    caught = f"{missed.count(False)} of {len(faults)}"
    common.print_table(["promise", "fault", caught], rows)
    sys.exit(any(missed))


if __name__ == "__main__":
    main()
