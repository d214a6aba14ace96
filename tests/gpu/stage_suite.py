"""The tests of the suite that take a device (``pytest --device``), on this one."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from stage import NotTried, Stage, main

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tests/unit", "tests/compat")


def files() -> list[Path]:
    """Those with a test that takes the fixture; collecting all files would take longer."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("test_*.py")):
            if re.search(r"^def \w+\(.*\bdevice\b", path.read_text(), re.MULTILINE):
                found.append(path)
    return found


def tests(stage: Stage) -> None:
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        raise NotTried(f"{' and '.join(missing)} missing: pip install {' '.join(missing)}")
    chosen = files()[:1] if stage.quick else files()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        # Without the options of pyproject.toml, which need further plugins.
        command = [
            sys.executable, "-m", "pytest", "-v", "-o", "addopts=", "-p", "no:cacheprovider",
            "--device", str(stage.device.type), f"--junitxml={report}", "--tb=short",
            *map(str, chosen),
        ]  # fmt: skip
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        root = ElementTree.parse(report).getroot()
    cases = list(root.iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None]
    failed += [case for case in cases if case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    stage.say(f"{len(cases)} tests in {len(chosen)} files, {skipped} skipped")
    for case in failed[:40]:
        stage.check(f"{case.get('classname')}::{case.get('name')}", False)
    stage.check("pytest ended with code 0", code == 0, f"code {code}")
    stage.check("there were tests", len(cases) > 0)


if __name__ == "__main__":
    main(tests)
