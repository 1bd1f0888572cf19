"""Entry point of the group ``vllm.general_plugins``: makes the connector known to vLLM by its short name."""

from __future__ import annotations

from typing import Final

NAME: Final = "CargoholdConnector"
MODULE: Final = "cargohold.integrations.vllm.connector"


def register() -> None:
    """Register the connector. vLLM calls this in each of its processes, and may call it several times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415  # vLLM is there now

    try:
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except ValueError:
        return  # an earlier call did
