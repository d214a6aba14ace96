"""launch/fetch_gemma.py writes no bars of progress into a pipe."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
sys.path.insert(0, {launch!r})
sys.argv[1:] = [{folder!r}]
import fetch_gemma

def convert(folder):
    from tqdm.auto import tqdm
    folder.mkdir(parents=True)
    for _ in tqdm(range(3)):
        pass

fetch_gemma.write_texts = lambda folder: None
fetch_gemma.convert = convert
fetch_gemma.main()
"""


def test_a_pipe_gets_no_bars(tmp_path):
    launch = Path(__file__).resolve().parents[2] / "launch"
    code = PROGRAM.format(launch=str(launch), folder=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" and "wrote" in done.stdout
