"""The programs in the client's guide run as they are written."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from processes import Server, clean_environment

ROOT = Path(__file__).parents[2]
EXAMPLES = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs/client.md").read_text(), re.MULTILINE | re.DOTALL
)
# What each of them prints at least, in their order.
SAID = ["Good morning.", "'uri': 'workspace:", "It is noon.", "token"]


def test_each_example_is_run():
    assert len(EXAMPLES) == len(SAID)


@pytest.mark.parametrize(("program", "said"), list(zip(EXAMPLES, SAID, strict=True)), ids=SAID)
def test_an_example_runs_as_it_is_written(server: Server, tmp_path: Path, program: str, said: str):
    """A reader pastes it."""
    server.start()
    shutil.copy(ROOT / "README.md", tmp_path)

    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        env=clean_environment(RESTANTE_URL=server.address),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert said in done.stdout
