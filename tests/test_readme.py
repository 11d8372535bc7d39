"""The README's examples run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_there_is_one_example_for_each_operator():
    assert [bool(re.search("ops.kda_tpu", example)) for example in EXAMPLES] == [True, False]


def test_kda_example():
    scope: dict = {}
    exec(compile(EXAMPLES[0], "README.md", "exec"), scope)  # our own file
    assert scope["output"].shape == (4, 1, 300, 64)
    assert scope["states"].shape == (1, 2, 4, 64, 64)
    assert not scope["output"][:, :, 280:].any(), "padding has to be zero"


@pytest.mark.parametrize("world_size", [1, 2])
def test_moe_example(tmp_path, world_size):
    check = "assert output.shape == (100, 512) and output.abs().sum() > 0\n"
    (tmp_path / "example.py").write_text(EXAMPLES[1] + check)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    subprocess.run([*launch, str(tmp_path / "example.py")], check=True, cwd=ROOT, timeout=120)
