"""The variables a rank sees."""

from __future__ import annotations

import pytest

from paceline.launch.rank_environment import (
    Meeting,
    RankSeat,
    rank_environment,
    shared_environment,
    threads_per_rank,
)

SEAT = RankSeat(rank=1, local_rank=1, world_size=2, local_world_size=2)
MEETING = Meeting(run_id="run-7", master_addr="127.0.0.1", master_port=29511, attempt=1, max_restarts=3)


def seen(
    inherited: dict[str, str] | None = None, *, use_cpu: bool = True, variables: dict[str, str] | None = None
) -> dict[str, str]:
    shared = shared_environment(
        inherited or {},
        variables or {},
        local_world_size=SEAT.local_world_size,
        use_cpu=use_cpu,
        single_host=True,
        run_id=MEETING.run_id,
    )
    return rank_environment(shared, SEAT, MEETING, error_file="/run/error.json")


def test_torchruns_variables() -> None:
    expected = {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_RANK": "1",
        "ROLE_NAME": "default",
        "ROLE_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511",
        "TORCHELASTIC_RESTART_COUNT": "1",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        "TORCHELASTIC_RUN_ID": "run-7",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": "/run/error.json",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    assert expected.items() <= seen().items()


def test_accelerates_variables() -> None:
    expected = {
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DYNAMO_BACKEND": "NO",
        "ACCELERATE_DYNAMO_MODE": "default",
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": "False",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "False",
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": "False",
        "ACCELERATE_USE_CPU": "true",
    }
    assert expected.items() <= seen().items()
    assert "ACCELERATE_USE_CPU" not in seen(use_cpu=False)


def test_what_the_user_set_stays() -> None:
    mine = {
        "OMP_NUM_THREADS": "5",
        "GLOO_SOCKET_IFNAME": "eth7",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "X": "y",
    }
    assert mine.items() <= seen(mine).items()


def test_a_launcher_above_does_not_shine_through() -> None:
    assert seen({"RANK": "9", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "outer"})["RANK"] == "1"


def test_cores_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.launch.rank_environment.usable_cores", lambda: 8)
    assert [threads_per_rank(ranks) for ranks in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
    assert seen()["OMP_NUM_THREADS"] == "4"


def test_options_win_over_what_was_inherited() -> None:
    mine = {"OMP_NUM_THREADS": "3", "ACCELERATE_MIXED_PRECISION": "bf16"}
    inherited = {"OMP_NUM_THREADS": "5", "ACCELERATE_MIXED_PRECISION": "fp16"}
    assert mine.items() <= seen(inherited, variables=mine).items()


def test_gloo_uses_the_network_that_the_hosts_share() -> None:
    meeting = Meeting("run-7", "10.0.0.1", 29511, attempt=0, max_restarts=0, interface="eth3")
    assert rank_environment({}, SEAT, meeting, error_file="x")["GLOO_SOCKET_IFNAME"] == "eth3"
    mine = {"GLOO_SOCKET_IFNAME": "ib0"}
    assert rank_environment(mine, SEAT, meeting, error_file="x")["GLOO_SOCKET_IFNAME"] == "ib0"


def test_records_go_where_this_run_keeps_them_unless_turned_off() -> None:
    for inherited, expected in ((None, "/run/records"), ("/of/an/outer/run", "/run/records"), ("off", "off")):
        shared = {} if inherited is None else {"PACELINE_RECORDS": inherited}
        found = rank_environment(shared, SEAT, MEETING, error_file="/run/error.json", records="/run/records")
        assert found["PACELINE_RECORDS"] == expected
