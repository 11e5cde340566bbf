"""Every Python block of the README runs, in order, and prints what the README says."""

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_readme_blocks_print_what_they_say():
    blocks = BLOCK.findall(README.read_text(encoding="utf-8"))
    namespace = {"__name__": "readme"}
    compared = 0
    for i, (kind, code) in enumerate(blocks):
        if kind == "text":
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, f"README block {i}", "exec"), namespace)
        if i + 1 < len(blocks) and blocks[i + 1][0] == "text":
            assert out.getvalue() == blocks[i + 1][1], f"block {i}:\n{code}"
            compared += 1
    assert compared >= 8
