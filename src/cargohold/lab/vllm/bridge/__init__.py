"""The bridge: a connector written for vLLM's ``KVConnectorBase_V1`` in the embedded engine, and under ``ConnectorConformance``.

factory    which class, with which options; what cannot be carried over, and why; and scenarios for it
scheduler  its scheduler side: our calls in vLLM's terms
worker     its worker side: our paged KV as one tensor per layer, hooks in vLLM's order
"""

from cargohold.lab.vllm.bridge.factory import Bridge as Bridge
from cargohold.lab.vllm.bridge.factory import BridgeRecipe as BridgeRecipe
