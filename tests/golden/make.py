"""Make the frozen results again, and compare them with results.json.

python tests/golden/make.py [--only PATTERN] [--write] [--few]

The results of a case are equal on any number of ranks, or they are not written.
"""

import argparse
import os
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from distprune.testing import preload  # noqa: E402
from golden import checkpoints, corpus  # noqa: E402

preload("distprune._public", "golden.checkpoints")


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument(
        "--only", default="*", help='names of cases, such as "checkpoint/gpt2/*"'
    )
    arguments.add_argument("--write", action="store_true", help="write what differs")
    arguments.add_argument("--few", action="store_true", help="on one number of ranks")
    chosen = arguments.parse_args()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    before = corpus.stored()
    sources, results, wrong = {}, {}, []

    def add(group: str, found: dict[str, str], start: float) -> None:
        unequal = corpus.differences(found, {case: found[case] for case in found} | results)
        wrong.extend(f"{line} on {group} than before" for line in unequal)
        results.update({case: value for case, value in found.items() if case not in results})
        changed = corpus.differences(found, before["results"])
        print(f"{group}: {len(found)} cases, {time.monotonic() - start:.1f} s", flush=True)
        print(*(f"  {line}" for line in changed[:10]), sep="\n", end="\n" * bool(changed))

    for name in checkpoints.BY_NAME:
        requests = [r for r in checkpoints.requests_of(name)
                    if fnmatch(checkpoints.case_name(name, r), chosen.only)]  # fmt: skip
        for num_ranks in checkpoints.NUM_RANKS[: 1 if chosen.few else None] if requests else ():
            start = time.monotonic()
            sources[name], found = checkpoints.results(name, requests, num_ranks)
            add(f"checkpoint {name} on {num_ranks}", found, start)
    changed = corpus.differences(results, before["results"])
    print(f"{len(results)} cases; {len(changed)} differ from results.json")
    if wrong:
        print("Not equal everywhere:", *wrong, sep="\n  ")
    elif chosen.write:
        is_all = chosen.only == "*"
        kept = {"sources": {}, "results": {}} if is_all else before
        corpus.write(kept["sources"] | sources, kept["results"] | results)
    return int(bool(wrong or (changed and not chosen.write)))


if __name__ == "__main__":
    sys.exit(main())
