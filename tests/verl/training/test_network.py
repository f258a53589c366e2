"""Ranks communicate through the interface that leads to the first rank."""

from __future__ import annotations

import os

import psutil
import pytest

from verl.training.network import (
    address_towards,
    choose_interface,
    forwarded_variables,
    interface_of,
    interface_variables,
    secret_variables,
)


def test_loopback_leads_to_itself() -> None:
    """On this machine 127.0.0.1 is reached from 127.0.0.1, through the interface that has it."""
    assert address_towards("127.0.0.1") == "127.0.0.1"
    name = interface_of("127.0.0.1")
    assert name is not None
    assert "127.0.0.1" in [entry.address for entry in psutil.net_if_addrs()[name]]


def test_gloo_gets_a_name_and_nccl_exactly_that_name() -> None:
    """NCCL reads a plain name as a prefix of names; `=` makes it exact."""
    name = interface_of("127.0.0.1")
    expected = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    assert interface_variables("127.0.0.1") == expected


def test_the_users_interface_takes_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not set leads to the first rank."""
    monkeypatch.setattr("os.environ", {"GLOO_SOCKET_IFNAME": "mine"})
    choose_interface("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "mine"
    assert os.environ["NCCL_SOCKET_IFNAME"] == f"={interface_of('127.0.0.1')}"


def test_an_unknown_address_has_no_interface() -> None:
    """Without a known interface nothing is set; gloo and NCCL then choose one."""
    assert interface_of("203.0.113.7") is None


def test_variables_of_networks_reach_all_nodes() -> None:
    """Variables about networks and the hub are forwarded, those about one machine are not."""
    environment = {
        "NCCL_DEBUG": "INFO",
        "HF_HUB_OFFLINE": "1",
        "VLLM_HOST_IP": "10.0.0.1",
        "HOME": "/h",
    }
    assert forwarded_variables(environment) == {"NCCL_DEBUG": "INFO", "HF_HUB_OFFLINE": "1"}


def test_secrets_are_not_forwarded_but_passed_in_a_call() -> None:
    """Ray logs runtime environments, so they may hold a mirror's address without password only."""
    secrets = {"HF_TOKEN": "hf_1", "HUGGING_FACE_HUB_TOKEN": "hf_2"}
    others = {"HF_HOME": "/h", "HF_SOMETHING_NEW": "x", "WANDB_API_KEY": "w", "OPENAI_API_KEY": "o"}
    mirror = {"HF_ENDPOINT": "https://ann:pw@mirror"}
    assert forwarded_variables(secrets | others | mirror) == {"HF_HOME": "/h"}
    assert secret_variables(secrets | others | mirror) == secrets | mirror
    assert forwarded_variables({"HF_ENDPOINT": "https://mirror"}) == {
        "HF_ENDPOINT": "https://mirror"
    }
