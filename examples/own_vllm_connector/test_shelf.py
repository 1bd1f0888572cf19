"""Holds the connector against the kit: pytest test_shelf.py"""

from cargohold.lab.conformance import ConnectorConformance
from cargohold.lab.vllm.bridge import Bridge
from cargohold.protocol import KVConnectorFactory


class TestShelf(ConnectorConformance):
    def factory(self) -> KVConnectorFactory:
        return Bridge("vllm_shelf:ShelfConnector", {"num_places": 100})
