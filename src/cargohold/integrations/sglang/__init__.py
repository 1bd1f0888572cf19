"""Cargohold's tiers as the storage of SGLang's hierarchical cache (HiCache).

::

    sglang serve --model-path MODEL --enable-hierarchical-cache --hicache-storage-backend dynamic \\
        --hicache-storage-backend-extra-config '{"backend_name": "cargohold", "interface_v1": 1,
            "module_path": "cargohold.integrations.sglang.backend", "class_name": "CargoholdStorage",
            "tiers": [{"kind": "disk", "directory": "/var/cache/kv", "max_bytes": "200GiB"}]}'

SGLang decides what is kept and fetched, and holds it in host memory of its own; the tiers verify, encrypt, limit and evict.
Only ``backend``, ``identity`` and ``pages`` import SGLang, and nothing outside imports them: SGLang does.

    plugin    notes that weights were changed in place, from the start of a process on
    settings  options
    identity  everything that a page's bytes depend on: model, weights, options, the part of the model that a rank holds
    pages     pages of SGLang's host memory as plain bytes
    shelf     the pages of one host pool in all tiers
    backend   the class that SGLang instantiates
"""
