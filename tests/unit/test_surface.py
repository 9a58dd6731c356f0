"""The public names and the command line's options: growing them is a decision, made here."""

from __future__ import annotations

import subprocess
import sys

import pytest
import typer

import hasten

NAMES = [
    "CheckpointError",
    "DataError",
    "DeviceInfo",
    "DeviceMismatch",
    "DeviceUnavailable",
    "HastenError",
    "Interrupted",
    "Loader",
    "NonFiniteLoss",
    "OutOfDeviceMemory",
    "Result",
    "Run",
    "Trainer",
    "UsageError",
    "device",
    "move",
    "same_device",
]

OPTIONS = {
    "devices": """
        --budget-s --json --measure
    """,
    "evaluate": """
        --batch-size --channels --classes --data-dir --device --image-size --json --mean
        --model --num-workers --precision --progress --std --trust --which
    """,
    "predict": """
        --batch-size --channels --classes --device --image-size --json --mean --model --null
        --num-workers --precision --std --top --trust --which
    """,
    "train": """
        --accumulate --augment --batch-size --batch-size-per-device --cache --cache-bytes
        --channels-last --checkpoint-every --clip-norm --compile --data-dir --device --devices
        --epochs --hang-after-s --hang-exits
        --image-size --json --keep --label-smoothing --log-every --lr --model --name --no-compile
        --no-hang-exits
        --no-normalize --no-sync-batchnorm --normalize --num-workers --optimizer --patience
        --plan --precision --progress --resume --runs --schedule --seed --strategy --sync-batchnorm
        --tensorboard --val-fraction --weight-decay
    """,
}
COMPARE_ALONE = """
    --comparisons --csv --fresh --plot --preset --repeat --sort
"""


def options(command: str) -> list[str]:
    from hasten.cli.app import app

    group = typer.main.get_command(app)
    found = group.commands[command]  # type: ignore[attr-defined]
    flags = {flag for p in found.params for flag in (*p.opts, *p.secondary_opts)}
    return sorted(flag for flag in flags if flag.startswith("--"))


def test_the_public_names_are_these() -> None:
    assert hasten.__all__ == NAMES
    assert all(getattr(hasten, name) is not None for name in NAMES)


def test_an_unknown_name_is_an_attribute_error() -> None:
    try:
        _ = hasten.no_such_thing
    except AttributeError as error:
        assert "no_such_thing" in str(error)
    else:
        raise AssertionError("no error")


@pytest.mark.parametrize("command", sorted(OPTIONS))
def test_the_options_of_a_command_are_these(command: str) -> None:
    assert options(command) == OPTIONS[command].split()


def test_compare_takes_the_options_of_train_and_these() -> None:
    assert sorted(set(options("compare")) - set(options("train"))) == COMPARE_ALONE.split()


def test_the_commands_are_these() -> None:
    from hasten.cli.app import app

    group = typer.main.get_command(app)
    expected = ["check", "compare", "devices", "evaluate", "predict", "train"]
    assert sorted(group.commands) == expected  # type: ignore[attr-defined]


def test_the_options_of_check_are_these() -> None:
    assert options("check") == [
        "--devices",
        "--explain",
        "--format",
        "--json",
        "--keep",
        "--static",
        "--steps",
        "--timeout-s",
    ]


def test_importing_hasten_imports_nothing_heavy() -> None:
    heavy = "{'rich','typer','torchmetrics','matplotlib','sklearn','PIL','jinja2','safetensors'}"
    code = f"import sys, hasten; print(sorted({heavy} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_core_imports_with_torch_and_numpy_alone() -> None:
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'rich','typer','torchmetrics','matplotlib','sklearn',"
        "'PIL','jinja2','safetensors','psutil','pynvml','simplejpeg'}:\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "import hasten\n"
        "print(hasten.Trainer, hasten.Loader, hasten.device('cpu'))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
