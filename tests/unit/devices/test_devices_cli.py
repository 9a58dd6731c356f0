"""``hasten devices``: what it prints for people and for machines."""

from __future__ import annotations

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from hasten import devices
from hasten.cli.devices import devices as command
from hasten.devices import DeviceInfo, advising, describing
from hasten.devices.rates import MatmulRate, Rates, TransferRate

FORMATS = {"float16": "fast", "bfloat16": "fast", "float8": "fast", "tf32": "fast"}


def gpu(**named):
    fields = {
        "device": "cuda:0",
        "name": "NVIDIA H200",
        "type": "cuda",
        "index": 0,
        "memory_total_bytes": 150 * 2**30,
        "memory_free_bytes": 149 * 2**30,
        "capability": "9.0",
        "multiprocessors": 132,
        "cores": None,
        "threads": None,
        "dtypes": FORMATS,
    }
    return DeviceInfo(**{**fields, **named})


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(command)

    def invoke(*arguments):
        result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result

    return invoke


def test_the_table_shows_the_cpu(run):
    out = run().stdout
    assert "cpu" in out and torch.__version__ in out and "cores" in out and "GiB" in out


def test_json_is_one_object_and_peoples_text_goes_elsewhere(run):
    result = run("--json")
    content = json.loads(result.stdout)
    assert content["schema"] == 1 and content["hasten"]
    cpu = content["devices"][-1]
    assert {"name", "type", "index", "memory_bytes", "rates"} <= set(cpu)
    assert (cpu["type"], cpu["index"], cpu["rates"]) == ("cpu", None, None)
    assert cpu["memory_bytes"] == cpu["memory_total_bytes"] > 0
    assert content["torch"]["torch"] == str(torch.__version__)
    assert isinstance(content["advice"], list)
    assert "GiB" in result.stderr


def test_accelerators_come_first_with_what_they_are_and_what_is_wrong(run, monkeypatch):
    cpu = describing.describe()[-1]
    broken = gpu(device="cuda:1", index=1, problem="RuntimeError: it is on fire [hot]")
    monkeypatch.setattr(devices, "describe", lambda: [gpu(), broken, cpu])
    monkeypatch.setattr(devices, "advice", lambda: ["an AMD GPU is here but no driver: load it"])
    out = run().stdout
    assert out.index("cuda:0") < out.index("\ncpu ")
    assert "NVIDIA H200" in out and "capability 9.0" in out and "132 processors" in out
    assert "cuda:1 does not work: RuntimeError: it is on fire [hot]" in out
    assert "Not used: an AMD GPU is here but no driver: load it" in out


def test_rates_are_tabled_and_the_cpu_is_measured_first(run, monkeypatch):
    cpu = describing.describe()[-1]
    order = []

    def measure(device, *, cpu, budget_s):
        order.append((device, cpu.device if cpu else None, budget_s))
        rate = MatmulRate(dtype="float32", size=64, seconds=1e-3, tflop_per_s=1234.5, ratio=2.0)
        way = TransferRate(
            source="pinned",
            non_blocking=True,
            bytes=2**25,
            seconds=2e-3,
            host_seconds=1e-5,
            gb_per_s=16.8,
        )
        return Rates(
            device=device, name="x", matmul=(rate,), transfers=(way,), left_out=("all else",)
        )

    monkeypatch.setattr(devices, "describe", lambda: [gpu(), gpu(problem="broken"), cpu])
    monkeypatch.setattr(devices, "measure", measure)
    result = run("--measure", "--budget-s", "3", "--json")
    assert order == [("cpu", None, 3.0), ("cuda:0", "cpu", 3.0)]
    content = json.loads(result.stdout)
    assert content["devices"][0]["rates"]["matmul"][0]["tflop_per_s"] == 1234.5
    assert "1,234 (2×)" in result.stderr
    assert "16.8" in result.stderr and "pinned" in result.stderr
    assert "Not measured: all else" in result.stderr


def test_a_description_survives_json():
    info = gpu()
    assert DeviceInfo.from_json(json.loads(json.dumps(info.to_json()))) == info
    with pytest.raises(TypeError):
        DeviceInfo.from_json({"name": "x"})


def test_a_device_that_fails_its_trial_is_described_with_its_problem(monkeypatch):
    meta = torch.device("meta")
    monkeypatch.setattr(describing.runtime, "devices", lambda: [meta])
    found = describing.describe()
    assert [info.device for info in found] == ["meta", "cpu"]
    assert found[0].problem
    assert found[0].memory_total_bytes is None


def test_the_environment_names_driver_and_build(monkeypatch):
    driver = advising.Driver(version="580.65.06", cuda=(13, 0))
    monkeypatch.setattr(describing.hardware, "nvidia_driver", lambda: driver)
    found = describing.environment()
    assert (found.driver, found.driver_cuda) == ("580.65.06", "13.0")
    assert found.torch == str(torch.__version__)
