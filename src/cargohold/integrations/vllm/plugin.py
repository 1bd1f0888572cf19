"""Entry point of the group ``vllm.general_plugins``: makes the connector known to vLLM by its short name."""

from __future__ import annotations

import logging
from typing import Final

logger = logging.getLogger("vllm.cargohold")  # vLLM shows only loggers below its own name

NAME: Final = "CargoholdConnector"
MODULE: Final = "cargohold.integrations.vllm.connector"


def register() -> None:
    """Register the connector. vLLM calls this in each of its processes, and may call it several times.

    Every vLLM in this environment calls it, also one without a connector. So it must not raise, whatever vLLM is like.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415  # vLLM is there now

        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except ValueError:
        return  # an earlier call did
    except (ImportError, AttributeError, TypeError) as error:
        logger.error("this vLLM takes no connectors by name, so it does not know %s: %s", NAME, error)  # noqa: TRY400  # one line
