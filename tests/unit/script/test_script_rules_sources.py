"""What is read: notebooks, folders, broken files, ignore comments and settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hasten.errors import UsageError
from hasten.script.rules import Settings, check_file, check_paths, check_source
from hasten.script.rules.settings import from_table
from hasten.script.rules.sources import ignored_lines

BAD = "import torch\n\nmodel = torch.nn.Linear(4, 2).cuda()\n"


def test_a_comment_on_the_line_silences_the_codes_it_names() -> None:
    def codes(comment: str) -> list[str]:
        return [f.code for f in check_source(BAD.replace(".cuda()", f".cuda()  {comment}"))]

    assert codes("") == ["HST101"]
    assert codes("# hasten: ignore[HST101]") == []
    assert codes("# hasten: ignore[HST104, hst101]") == []
    assert codes("# hasten: ignore") == []
    assert codes("# hasten: ignore[HST104]") == ["HST101"]


def test_a_comment_that_names_no_code_silences_nothing() -> None:
    text = "a  # hasten: ignore[]\nb  # hasten: ignore[HST101\nc  # hasten: ignore\n"
    assert ignored_lines(text) == {3: frozenset()}


def test_settings_choose_rules_by_code_by_beginning_and_by_file(tmp_path: Path) -> None:
    script = tmp_path / "examples" / "train.py"
    script.parent.mkdir()
    script.write_text(BAD)
    table = tmp_path / "pyproject.toml"

    def codes(text: str) -> list[str]:
        table.write_text(f"[tool.hasten]\n{text}\n")
        return [f.code for f in check_file(script)]

    assert codes("") == ["HST101"]
    assert codes('ignore = ["HST101"]') == []
    assert codes('select = ["HST12"]') == []
    assert codes('select = ["HST10"]') == ["HST101"]
    assert codes('[tool.hasten.per-file-ignores]\n"examples/*" = ["HST1"]') == []
    assert codes('[tool.hasten.per-file-ignores]\n"tests/*" = ["HST1"]') == ["HST101"]
    assert [f.code for f in check_file(script, settings=Settings(ignore=("HST102",)))] == ["HST101"]


@pytest.mark.parametrize(
    "table", [{"selct": []}, {"select": "HST101"}, {"ignore": ["X1"]}, {"per-file-ignores": []}, []]
)
def test_settings_that_cannot_be_meant_are_refused_with_the_file(table: object) -> None:
    with pytest.raises(UsageError):
        from_table(table, Path("pyproject.toml"))


def test_a_notebook_is_one_program_and_findings_name_cell_and_line(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title"]},
        {
            "cell_type": "code",
            "source": [
                "%matplotlib inline\n",
                "!pip list\n",
                "import torch\n",
                "from torch import nn",
            ],
        },
        {"cell_type": "code", "source": "%%bash\nls {"},
        {
            "cell_type": "code",
            "source": "device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')\n"
            "net = nn.Linear(3, 3).to(device)\nmask = torch.arange(3)",
        },
        {"cell_type": "code", "source": "x = torch.ones(3, device=device)\ny = net(x) * mask"},
    ]
    path = tmp_path / "lesson.ipynb"
    path.write_text(json.dumps({"cells": cells, "nbformat": 4}))
    (finding,) = check_file(path)
    assert (finding.code, finding.file, finding.line) == ("HST104", f"{path}[4]", 3)
    assert "on line 2 of cell 5" in finding.message
    assert (finding.related[0].file, finding.related[0].line) == (f"{path}[5]", 2)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.py", b"import torch\nx = (1,\n", "cannot be read as Python"),
        ("a.py", b"import torch\nx = '\xff\xfe'\n", "encoding"),
        ("a.py", b"# -*- coding: nonsense -*-\n", "encoding"),
        ("a.py", b"import torch\0\n", "cannot be read"),
        ("a.ipynb", b"{", "notebook"),
        ("a.ipynb", b'{"cells": [{}]}', "notebook"),
        ("a.ipynb", b"[]", "notebook"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_finding(
    tmp_path: Path, name: str, content: bytes, says: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    (finding,) = check_file(path)
    assert (finding.code, finding.severity) == ("HST100", "error")
    assert says in finding.message
    assert "\n" not in finding.message


def test_a_syntax_error_says_where() -> None:
    (finding,) = check_source("import torch\n\nfor x in y\n    pass\n", "a.py")
    assert (finding.file, finding.line) == ("a.py", 3)


def test_files_without_torch_empty_files_and_odd_line_ends_are_fine(tmp_path: Path) -> None:
    assert check_source("print('hello')\n") == []
    assert check_source("\n") == []
    path = tmp_path / "windows.py"
    path.write_bytes(b"\xef\xbb\xbf" + BAD.replace("\n", "\r\n").encode())
    assert [(f.code, f.line) for f in check_file(path)] == [("HST101", 3)]


def test_folders_are_searched_for_files_and_notebooks_but_not_for_hidden_ones(
    tmp_path: Path,
) -> None:
    for name in ("a.py", "sub/b.py", ".hidden/c.py", "__pycache__/d.py", "venv/e.py", "f.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(BAD)
    found = check_paths([tmp_path])
    assert [Path(f.file).name for f in found] == ["a.py", "b.py"]
    with pytest.raises(UsageError, match="no file or folder"):
        check_paths([tmp_path / "none"])


def test_a_very_long_or_deep_file_is_read_without_a_crash() -> None:
    deep = "import torch\nx = " + "(" * 80 + "1" + ")" * 80 + "\n"
    assert check_source(deep) == []
    branches = "".join(f"    if a[{i}]:\n        x = x + {i}\n" for i in range(400))
    calls = "".join(
        f"def f{i}(x, a):\n    return f{i + 1}(x, a) + f{i + 1}(x, a)\n" for i in range(30)
    )
    text = f"import torch\n{calls}def f30(x, a):\n{branches}    return x\nf0(torch.ones(3), [])\n"
    assert check_source(text) == []


def test_importing_the_rules_does_not_import_libcst() -> None:
    code = "import sys, hasten.script.rules; print('libcst' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == "False"
