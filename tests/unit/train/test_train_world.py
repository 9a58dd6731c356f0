"""Who a process is among others, as torchrun or SLURM tells it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from hasten.errors import UsageError
from hasten.feed.order import Shard
from hasten.train import launch, slurm
from hasten.train import world as worlds
from hasten.train.agreement import Agreement, RankLog
from hasten.train.failing import lost_a_peer
from hasten.train.world import ALONE, ElsewhereError, Place, World

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_STEP_NODELIST": "gpu[07-09,12]",
    "SLURM_JOB_ID": "4711",
}


def test_a_process_without_a_launcher_is_alone() -> None:
    assert worlds.place({}) == Place()
    assert worlds.place({"WORLD_SIZE": "4"}) == Place()


def test_torchrun_tells_the_place() -> None:
    found = worlds.place(TORCHRUN)
    assert found == Place(rank=5, size=8, local_rank=1, local_size=4, launched=True)


def test_srun_tells_the_place_and_torchrun_under_it_goes_before() -> None:
    found = worlds.place(SRUN)
    assert found == Place(rank=3, size=5, local_rank=1, local_size=2, launched=True)
    assert worlds.place(SRUN | TORCHRUN).rank == 5


@pytest.mark.parametrize("variable", ["SLURM_STEP_NUM_TASKS"])
def test_a_batch_script_itself_is_alone(variable: str) -> None:
    batch = {name: value for name, value in SRUN.items() if name != variable}
    assert worlds.place(batch | {"SLURM_PROCID": "0"}) == Place()
    assert worlds.place(SRUN | {"SLURM_STEP_NUM_TASKS": "1"}) == Place()


@pytest.mark.parametrize(
    ("environment", "word"),
    [
        ({**TORCHRUN, "RANK": "8"}, "rank 8 of 8"),
        ({**TORCHRUN, "RANK": "x"}, "RANK is 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "not MASTER_ADDR"),
        ({k: v for k, v in SRUN.items() if k != "SLURM_LOCALID"}, "SLURM_LOCALID"),
        ({**SRUN, "SLURM_NODEID": "7"}, "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused(environment: dict[str, str], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        worlds.place(environment)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[07-09,12],login", "gpu07"),
        ("gpu12", "gpu12"),
        ("a,b", "a"),
        ("rack1-node[3,5]-ib", "rack1-node3-ib"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert slurm.first_node(nodes) == first


def test_tasks_of_srun_come_to_one_meeting_place() -> None:
    one, other = dict(SRUN), SRUN | {"SLURM_PROCID": "0", "SLURM_NODEID": "0"}
    slurm.tell_where_to_meet(one)
    slurm.tell_where_to_meet(other)
    assert one["MASTER_ADDR"] == other["MASTER_ADDR"] == "gpu07"
    assert one["MASTER_PORT"] == other["MASTER_PORT"]
    assert 20_000 <= int(one["MASTER_PORT"]) < 40_000
    given = SRUN | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
    slurm.tell_where_to_meet(given)
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("10.0.0.1", "29500")
    alone: dict[str, str] = {}
    slurm.tell_where_to_meet(alone)
    assert alone == {}


@pytest.mark.parametrize("of", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [1, 2, 3, 8, 9])
def test_slices_make_the_batch_and_none_is_empty(size: int, of: int) -> None:
    batch = list(range(size))
    bounds = [Shard(rank, of).bounds(size) for rank in range(of)]
    assert [i for start, end in bounds for i in batch[start:end]] == batch
    sizes = [end - start for start, end in bounds]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    parts = [Shard(rank, of).part(batch) for rank in range(of)]
    assert [len(part) for part in parts] == [max(1, size) for size in sizes]


def test_more_processes_than_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds.runtime, "count", lambda kind: 3)
    cuda = torch.device("cuda:0")
    with pytest.raises(UsageError, match="--devices 4, and 3 cuda devices are here"):
        launch.check(4, cuda)
    launch.check(3, cuda)
    launch.check(64, torch.device("cpu"))
    with pytest.raises(UsageError, match="at least 1"):
        launch.check(0, cuda)


def test_each_process_of_a_machine_has_a_device_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worlds.devices, "device", lambda spec: torch.device("cuda:0"))
    monkeypatch.setattr(worlds.runtime, "count", lambda kind: 4)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert worlds.device_for("auto") == torch.device("cuda:1")
    with pytest.raises(UsageError, match="cannot all use cuda:0"):
        worlds.device_for("cuda:0")
    monkeypatch.setattr(worlds.runtime, "count", lambda kind: 2)
    with pytest.raises(UsageError, match="4 processes on a machine with 2 cuda devices"):
        worlds.device_for("cuda")
    monkeypatch.setattr(worlds.runtime, "count", lambda kind: 1)
    assert worlds.device_for("cuda") == torch.device("cuda:0")


def test_one_process_agrees_with_itself() -> None:
    assert ALONE.sum([1.5]) == [1.5]
    assert ALONE.first("x") == "x"
    assert ALONE.gather(1) == [1]
    assert ALONE.by_main(lambda: 3) == 3
    assert ALONE.all(True) and not ALONE.any(False)


class Twin(World):
    """A process whose only other one says the same, but for one number."""

    def __init__(self, other: list[int]) -> None:
        super().__init__(Place(rank=0, size=2, local_rank=0, local_size=2))
        self.other = other

    def most(self, values: object) -> list[int]:
        return [max(pair) for pair in zip(values, self.other, strict=True)]  # type: ignore[call-overload]


def test_agreements_come_about_twice_a_second_by_counting_batches() -> None:
    now = 0.0
    agreement = Agreement(Twin([0, 0, 0, 0]), lambda: now)
    reached = []
    for batch in range(200):
        now += 0.01
        if agreement.due():
            reached.append(batch)
            agreement.reach(signal=0, save=False, bad=False)
    assert reached[0] == 0
    assert all(49 <= b - a <= 51 for a, b in itertools.pairwise(reached))


def test_what_is_agreed_waits_for_a_place_to_act_at() -> None:
    agreement = Agreement(Twin([15, 1, 0, 0]), lambda: 0.0)
    assert agreement.due()
    assert not agreement.reach(signal=0, save=False, bad=False).bad
    assert agreement.take() == (15, True, False)
    assert agreement.take() == (0, False, False)


def test_launchers_that_could_not_replace_a_machine_are_told_of() -> None:
    shared = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    told = worlds.advice(TORCHRUN | shared)
    assert told is not None and "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in told
    assert worlds.advice(TORCHRUN | shared | {"TORCHELASTIC_USE_AGENT_STORE": "False"}) is None
    assert worlds.advice(TORCHRUN | shared | {"TORCHELASTIC_MAX_RESTARTS": "0"}) is None
    assert worlds.advice(TORCHRUN | shared | {"LOCAL_WORLD_SIZE": "8"}) is None
    assert worlds.advice({}) is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_what_a_process_says_waits_for_its_file_and_for_a_disk_that_is_full(tmp_path: Path) -> None:
    log = RankLog(1)
    log.write("before\n")
    log.open(tmp_path)
    path = tmp_path / "ranks" / "rank-1.log"
    assert path.read_text() == "before\n"
    path.rename(tmp_path / "kept")
    path.symlink_to("/dev/full")
    log.write("while the disk is full\n")
    path.unlink()
    (tmp_path / "kept").rename(path)
    log.write("afterwards\n")
    assert path.read_text() == "before\nwhile the disk is full\nafterwards\n"
    log.shut()
    log.write("for another\n")
    log.open(tmp_path)
    assert path.read_text().endswith("for another\n")


def test_a_lost_process_is_told_from_other_failures() -> None:
    world = World(Place(rank=0, size=2, local_rank=0, local_size=2))
    lost = RuntimeError("[/x/gloo/transport/tcp/pair.cc:537] Read error: Connection reset by peer")
    assert lost_a_peer(lost)
    assert not lost_a_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(ElsewhereError, match="rank 0 lost its connection"), world.reaching():
        raise lost
    with pytest.raises(ValueError, match="other"), world.reaching():
        raise ValueError("other")


@pytest.fixture(scope="module")
def sockets_have_been_used() -> None:
    """libuv, by which PyTorch's stores speak, opens a pipe then that it keeps for good."""
    torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)


@pytest.mark.usefixtures("sockets_have_been_used")
def test_processes_started_anew_do_not_find_what_those_before_them_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torchrun's store outlives its processes: by stale addresses they looked for the dead."""
    kept = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.port)}
    for name, value in {**names, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    here = Place(rank=0, size=2, local_rank=0, local_size=2, launched=True)
    kept.set("address", "of a process that is gone")
    for count in ("1", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        fresh = worlds._fresh_store(here)
        assert not fresh.check(["address"])
        fresh.set("address", count)
        assert worlds._fresh_store(here).get("address") == count.encode()


def test_processes_that_share_cores_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.runtime, "cores", lambda: 2)
    assert launch.sharing(99, torch.device("cpu")) == "99 processes share 2 cores, and take turns"
    assert launch.sharing(2, torch.device("cpu")) == ""
    assert launch.sharing(4, torch.device("cuda")) == ""
