"""The interface that ranks talk through is the one that leads to the first of them."""

from __future__ import annotations

import psutil

from verl.training.network import (
    address_towards,
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
    """NCCL takes a plain name for the beginning of names: `=` says that it is all of it."""
    name = interface_of("127.0.0.1")
    expected = {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
    assert interface_variables("127.0.0.1") == expected


def test_an_address_that_nobody_has_names_no_interface() -> None:
    """Nothing is set where the address cannot be told; gloo and NCCL then choose themselves."""
    assert interface_of("203.0.113.7") is None


def test_variables_of_networks_reach_all_nodes() -> None:
    """What is about networks and the hub is handed on, what is about one machine is not."""
    given = {"NCCL_DEBUG": "INFO", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "10.0.0.1", "HOME": "/h"}
    assert forwarded_variables(given) == {"NCCL_DEBUG": "INFO", "HF_HUB_OFFLINE": "1"}


def test_secrets_are_not_forwarded_but_travel_in_a_call() -> None:
    """Ray logs runtime environments; a mirror's address goes there only without a password."""
    secrets = {"HF_TOKEN": "hf_1", "HUGGING_FACE_HUB_TOKEN": "hf_2"}
    others = {"HF_HOME": "/h", "HF_SOMETHING_NEW": "x", "WANDB_API_KEY": "w", "OPENAI_API_KEY": "o"}
    mirror = {"HF_ENDPOINT": "https://ann:pw@mirror"}
    assert forwarded_variables(secrets | others | mirror) == {"HF_HOME": "/h"}
    assert secret_variables(secrets | others | mirror) == secrets | mirror
    assert forwarded_variables({"HF_ENDPOINT": "https://mirror"}) == {
        "HF_ENDPOINT": "https://mirror"
    }
