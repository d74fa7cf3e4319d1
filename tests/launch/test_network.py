"""Settings of the network become the variables that NCCL, gloo and torch document."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from diptych.core.records import NetworkSpec
from diptych.launch.network import environment

LOGS = Path("/run/logs")


def test_what_is_not_said_is_left_to_the_libraries():
    quiet = NetworkSpec(debug="off", flight_recorder_entries=0)
    assert environment(quiet, logs=LOGS) == {}


@pytest.mark.parametrize(
    ("settings", "variables"),
    [
        ({"interface": "ib0"}, {"NCCL_SOCKET_IFNAME": "ib0", "GLOO_SOCKET_IFNAME": "ib0"}),
        ({"infiniband": "off"}, {"NCCL_IB_DISABLE": "1"}),
        ({"infiniband": "on"}, {"NCCL_IB_DISABLE": "0"}),
        ({"infiniband_devices": "mlx5_0,mlx5_1"}, {"NCCL_IB_HCA": "mlx5_0,mlx5_1"}),
        ({"algorithm": "ring"}, {"NCCL_ALGO": "RING"}),
        ({"algorithm": "collnet_direct"}, {"NCCL_ALGO": "COLLNETDIRECT"}),
        ({"protocol": "ll128"}, {"NCCL_PROTO": "LL128"}),
        ({"peer_to_peer": "off"}, {"NCCL_P2P_DISABLE": "1"}),
        ({"debug": "info"}, {"NCCL_DEBUG": "INFO"}),
        ({"variables": {"NCCL_BUFFSIZE": "8388608"}}, {"NCCL_BUFFSIZE": "8388608"}),
        (
            {"flight_recorder_entries": 100},
            {
                "TORCH_FR_BUFFER_SIZE": "100",
                "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
                "TORCH_FR_DUMP_TEMP_FILE": "/run/logs/collectives-rank-",
                "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/run/logs/collectives-rank-",
            },
        ),
    ],
)
def test_a_setting_becomes_its_variables(settings, variables):
    quiet = {"debug": "off", "flight_recorder_entries": 0}
    assert environment(NetworkSpec(**{**quiet, **settings}), logs=LOGS) == variables


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "LD_PRELOAD", "NCCL_", "xNCCL_DEBUG"])
def test_variables_that_are_not_of_the_network_are_refused(name):
    """They would be written into the run's spec."""
    with pytest.raises(ValidationError, match="secrets, belong into the environment itself"):
        NetworkSpec(variables={name: "1"})
