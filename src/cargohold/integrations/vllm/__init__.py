"""The same connectors inside vLLM.

::

    vllm serve MODEL --kv-transfer-config '{"kv_connector": "CargoholdConnector", "kv_role": "kv_both",
                                            "kv_connector_extra_config": {"host_bytes": "8GiB"}}'

Nothing here decides what is kept or loaded: the adapter translates between vLLM's V1 connector interface and the contract in
``cargohold.protocol``. Only the modules of this package import vLLM, and nothing outside imports them: vLLM does, through the
entry point in ``plugin``.

    plugin      registers the connector's short name
    compat      the one place that imports names from vLLM, and notes what a version lacks
    probe       the tested versions, and what else this adapter relies on in vLLM
    signatures  whether vLLM calls, and wants to be called, as expected
    settings    options
    served      identity of the model whose KV is kept
    stages      which part of the model each worker holds, where they differ
    layout      vLLM's KV-cache configuration as our layout, or why it cannot be served
    regions     the paged KV's tensors as plain bytes
    blocks      vLLM's block pool as a scheduler context
    room        whether there is room for another load
    resets      follows resets of vLLM's prefix cache
    deferrals   how long requests wait for an answer
    step        vLLM's scheduler output as a step
    messages    what travels between scheduler and workers
    scheduler   scheduler side
    worker      worker side
    events      KV events
    metrics     counters for vLLM's log and its Prometheus endpoint
    report      lines for the log at start
    connector   the class that vLLM instantiates
    server      ``vllm serve`` as a child process, for demos and benchmarks
    simulation  vLLM's scheduler and this adapter in ``cargohold simulate``
"""

from typing import Final

OLDEST: Final = (0, 28)
NEWEST: Final = (0, 32)
"""The versions between which this adapter is tested. They stand here because this module alone imports nothing of vLLM."""
